//! Seeds of the decoders.

use kvpipe_core::blocks::Metadata;
use kvpipe_core::blocks::handoff::ReadyBlock;
use kvpipe_core::checksum;
use kvpipe_core::fuzzing::DECODERS;
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;

use super::agent::ready_block;
use crate::agent::KV;
use crate::control::{HANDOFFS, opening, sequence_state};
use crate::kinds::{agent, entries, transfer};
use crate::wire::{
    self, block_ids, head, meta, numbers, offer, ready_blocks, region, regions, text,
};

fn identity() -> Vec<u8> {
    let identity = Writer::new(SessionKind::Agent as u8)
        .raw(&[1; 16])
        .str("engine");
    let fingerprint = identity.list(&[("dtype", "bfloat16")], |w, (field, value)| {
        w.str(field).str(value)
    });
    let canary = fingerprint.bytes(&[]).str("host").u8(1);
    canary.u32(7).u64(1 << 40).bytes(&[4]).u64(6).finish()
}

/// The index of the decoder, then bytes that it accepts.
pub(super) fn decoders() -> Vec<Vec<u8>> {
    let ids = block_ids(&[1, 2]);
    let header = Writer::default().u64(1).u32(1).u32(0);
    let header = header.u8(1).u8(1).u64(0).finish();
    let offered = Writer::default().bytes(&header);
    let offered = offered.raw(&ids).raw(&ids).bytes(b"tag").finish();
    let message = |header: Writer, payload: &[u8]| {
        let header = Writer::default().bytes(&header.finish());
        header.raw(payload).finish()
    };
    let read = message(head(transfer::READ, 1).u64(0).u8(2), &ids);
    let checksums = message(head(transfer::CHECKSUMS, 1).u64(0), &numbers(&[1]));
    let ready = Writer::new(agent::BLOCKS_READY).raw(&HANDOFFS[1]).u64(0);
    let ready = message(ready, &ready_blocks(&[ready_block(0, 1)]));
    let without_checksum = ReadyBlock {
        checksum: None,
        ..ready_block(0, 1)
    };
    let validated = Writer::new(agent::BLOCKS_READY).raw(&HANDOFFS[1]).u64(0);
    let validated = message(validated, &ready_blocks(&[without_checksum]));
    let of_handoff = |kind| Writer::new(kind).raw(&HANDOFFS[1]).u64(1);
    let validate = message(of_handoff(agent::VALIDATE).u64(2), &[]);
    let metadata = Metadata {
        address: "127.0.0.1:4000".to_owned(),
        incarnation: [1; 16],
    };
    let offer = || offer(Writer::default(), 40 << 10, 1);
    let single = [
        ("identity", identity()),
        ("encryption", Writer::new(1).u8(1).str("host").finish()),
        ("meta", meta(Writer::default(), 3).finish()),
        ("buffer", offer().finish()),
        ("region", region(Writer::default(), (0, KV)).finish()),
        ("regions", regions(&[(0, KV)])[1..].to_vec()),
        ("offered_blocks", offered),
        ("transfer", read),
        ("transfer", checksums),
        ("transfer", message(head(transfer::CANCEL, 1), &[])),
        ("transfer", message(head(transfer::CANCELLED, 1), &[])),
        ("handoff", ready),
        ("handoff", validated),
        ("handoff", validate),
        ("handoff", message(of_handoff(agent::VALID), &[])),
        ("handoff", message(of_handoff(agent::INVALID), &[])),
        ("reason", text("a reason")),
        ("metadata", metadata.to_bytes()),
        ("refusal", Writer::new(2).str("no place").finish()),
        ("buffer_checksums", offer().bytes(&numbers(&[1])).finish()),
    ];
    let single = single.into_iter().chain(entry_messages());
    let control = wire::control(HANDOFFS[0], &opening(), &sequence_state());
    let control = control.into_iter().map(|frame| ("control", frame));
    let all = single.chain(control);
    all.map(|(name, bytes)| [&[index(name)], &bytes[..]].concat())
        .collect()
}

/// Messages of entries, of each shape.
fn entry_messages() -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    let message = |header: &[u8], payload: &[u8]| {
        let message = Writer::default().bytes(header).raw(payload);
        ("entries", message.finish())
    };
    let keys = Writer::default().list(&[b"a", b"b"], |w, key| w.bytes(*key));
    let select = Writer::new(0).bytes(b"key").u8(0).u64(1);
    let take = Writer::new(2).bytes(&[0; 16]).u8(1).u64(u64::MAX).u64(1);
    let list = Writer::default().bytes(b"k").u64(7);
    let present = Writer::default().u32(3).u8(5);
    let page = Writer::default().u64(9).u32(1).bytes(b"key").u64(4).u8(1);
    let renew = Writer::new(entries::RENEW).u64(3).u64(1_000_000);
    let sealed = |kind: u8, payload: Vec<u8>| {
        let header = Writer::new(kind).u64(checksum::of(&payload)).finish();
        message(&header, &payload)
    };
    let inline = Writer::default().u64(1).u8(0).bytes(b"abc").finish();
    let offered = Writer::default().u8(1).u64(1).bytes(b"record").u32(1);
    let offered = offer(offered.u8(1), 40 << 10, 0);
    let put = Writer::default().bytes(b"key").u64(1).u64(2).u8(1);
    let put = put.bytes(b"record").u32(1).u8(0).bytes(b"abc");
    [
        message(&[entries::EXISTS], &keys.finish()),
        message(&[entries::SELECT], &select.finish()),
        message(&[entries::SELECT], &take.finish()),
        message(&[entries::CANCEL, 1], &[]),
        message(&[entries::LIST], &list.finish()),
        message(&[entries::PRESENT], &present.finish()),
        message(&[entries::PAGE], &page.finish()),
        message(&[entries::STATISTICS], &[0; 24 * 8]),
        message(&renew.finish(), &[]),
        message(&[entries::REFUSED], &Writer::new(4).str("late").finish()),
        sealed(entries::WRITE, inline),
        sealed(entries::OFFER, offered.finish()),
        sealed(entries::PUT, put.finish()),
    ]
    .into_iter()
}

fn index(name: &str) -> u8 {
    let index = DECODERS.iter().position(|(decoder, _)| *decoder == name);
    index.expect("a decoder") as u8
}
