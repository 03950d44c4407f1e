//! Seeds of an agent.

use kvpipe_core::blocks::handoff::{self, ReadyBlock};
use kvpipe_core::checksum;
use kvpipe_core::net::codec::Writer;

use super::{aborted_stream, broken, goodbye, in_pieces, send, stream};
use crate::agent::{ANOTHER, HANDOFFS, IS_COMMITTED, KV, WITH_TAG, user};
use crate::kinds::{agent as kind, transfer};
use crate::script::{NO_CHECKSUMS, REMOTE_READ, SERVER, Script, VALIDATES};
use crate::wire::{BLOCK_BYTES, block_ids, head, numbers, ready_blocks, regions, text};

/// A script after the exchange of regions.
fn connected(flags: u8) -> Script {
    Script::new(flags).bare(&regions(&[(0, KV), (1, ANOTHER)]))
}

/// Blocks of the peer, all zeros.
fn blocks(count: usize) -> Vec<u8> {
    vec![0; count * BLOCK_BYTES as usize]
}

/// The blocks of a read in three parts, with those of the next one between them.
fn stream_in_parts(script: Script) -> Script {
    let header = head(transfer::DATA, 1).u64(0).finish();
    let script = script.part(&header, &[0; 24]);
    let script = stream(script, 2, 3);
    let header = head(transfer::DATA, 1).u64(24).finish();
    let script = script.large_part(&header, 2, 0);
    let header = head(transfer::DATA, 1).u64(24 + (2 << 10)).finish();
    script.part(&header, &[0; 1000])
}

fn checksums(script: Script, transfer: u64) -> Script {
    let header = head(transfer::CHECKSUMS, transfer).u64(0).finish();
    script.message(&header, &numbers(&[checksum::of(&blocks(1)); 3]))
}

fn refuse(script: Script, kind: u8) -> Script {
    script.message(&head(kind, 1).finish(), &text("ended"))
}

fn of_handoff(kind: u8, index: usize) -> Writer {
    Writer::new(kind).raw(&HANDOFFS[index])
}

pub(super) fn ready_block(region: u32, position: u32) -> ReadyBlock {
    ReadyBlock {
        region,
        position,
        block_id: 3,
        checksum: Some(handoff::checksum(
            &HANDOFFS[1],
            0,
            region,
            position,
            blocks(1)[..].into(),
        )),
    }
}

pub(super) fn agent() -> Vec<Vec<u8>> {
    let released = Writer::new(kind::RELEASED).u32(0).finish();
    let closing = connected(REMOTE_READ).user(user::READ, 3);
    let closing = closing.user(user::CLOSE_REGION, 0).bare(&released);
    let closed = connected(REMOTE_READ).bare(&regions(&[(1, ANOTHER)]));
    let rest = vec![closing, closed, connected(0).leave()];
    let scripts = [
        reads(),
        served_reads(),
        writes(),
        notifications(),
        handoffs(),
        rest,
    ];
    scripts.into_iter().flatten().map(goodbye).collect()
}

pub(super) fn broken_off() -> Vec<Vec<u8>> {
    broken(|| connected(0).user(user::READ, 3))
}

fn reads() -> Vec<Script> {
    let reading = |flags| {
        let script = connected(flags).user(user::READ, 3);
        script.user(user::READ, WITH_TAG | 3)
    };
    vec![
        reading(REMOTE_READ | NO_CHECKSUMS),
        checksums(checksums(reading(REMOTE_READ), 1), 2),
        stream(reading(0), 1, 3),
        in_pieces(reading(0), 100, |script| stream(script, 1, 3)),
        stream_in_parts(reading(0)),
        aborted_stream(reading(0), 1, 3),
        // Of another attempt, which has no place here.
        aborted_stream(connected(0).user(user::READ, 3), 1 << 56 | 1, 3),
        refuse(reading(0), transfer::REFUSED),
    ]
}

fn served_reads() -> Vec<Script> {
    // The bytes, the bytes with checksums, the checksums only.
    let read = |flags, wanted| {
        let header = head(transfer::READ, 1).u64(0).u8(wanted).finish();
        connected(flags).message(&header, &block_ids(&[0, 2, 4]))
    };
    let credit = head(transfer::CREDIT, 1).u64(64).finish();
    vec![
        read(0, 0).message(&credit, &[]),
        send(read(0, 0), transfer::CANCEL, 1),
        send(read(REMOTE_READ, 2), transfer::CANCEL, 1),
        read(0, 1),
        read(REMOTE_READ, 2),
    ]
}

fn writes() -> Vec<Script> {
    let writing = |flags| {
        let script = connected(flags).user(user::WRITE, 3);
        script.user(user::WRITE, WITH_TAG | 3)
    };
    let offer = |flags, tag: Option<&[u8]>| {
        let header = head(kind::OFFER, 1).u32(1).u32(0).u8(1);
        let header = match tag {
            Some(_) => header.u8(1).u64(0),
            None => header.u8(0),
        };
        let ids = block_ids(&[0, 2, 4]);
        let payload = Writer::default().raw(&ids).raw(&ids);
        let payload = payload.bytes(tag.unwrap_or_default());
        connected(flags).message(&header.finish(), &payload.finish())
    };
    vec![
        send(writing(REMOTE_READ), kind::ACCEPTED, 1),
        refuse(writing(0), kind::CORRUPT),
        refuse(writing(REMOTE_READ | SERVER), kind::DECLINED),
        checksums(offer(REMOTE_READ, Some(b"tag")), 1).user(user::DRAIN, 0),
        send(offer(0, Some(b"tag")), kind::WITHDRAW, 1),
        send(
            send(offer(0, None), kind::WITHDRAW, 1),
            transfer::CANCELLED,
            1,
        ),
        stream(offer(0, None), 1, 3),
    ]
}

fn notifications() -> Vec<Script> {
    let notified = connected(0).message(&head(kind::NOTIFY, 0).finish(), b"tag");
    let drained = notified.user(user::DRAIN, 0).user(user::NOTIFY, 3);
    let noted = head(kind::NOTED, 1).u64(1).finish();
    vec![
        drained.message(&noted, &[]),
        send(connected(0), kind::VOID, 0),
    ]
}

fn handoffs() -> Vec<Script> {
    let select = of_handoff(kind::SELECT, 0).u64(300_000_000).finish();
    // One part: positions 0 to 5 of two regions.
    let parts = Writer::default().u32(1).u32(0).u32(5);
    let parts = parts.list(&[0, 1], |writer, region| writer.u32(*region));
    let parts = parts.finish();
    // Of its slices, which have the next ids.
    let halves = Writer::default().u32(1).u32(0).u32(5);
    let halves = halves.list(&[2, 5], |writer, region| writer.u32(*region));
    let halves = halves.finish();
    let divide = |count| Writer::new(kind::DIVIDE).u32(count).finish();
    let acknowledge = of_handoff(kind::ACK, 0).finish();
    let ended = of_handoff(kind::HANDOFF_ENDED, 1).finish();
    let loading = |flags| {
        let announcement = of_handoff(kind::BLOCKS_READY, 1).u64(0).finish();
        let blocks = ready_blocks(&[0, 1].map(|region| ready_block(region, 0)));
        let script = connected(flags).user(user::LOAD, IS_COMMITTED | 1);
        script.message(&announcement, &blocks)
    };
    let validating = |kind| {
        let announcement = of_handoff(kind::BLOCKS_READY, 1).u64(0).finish();
        let without_checksum = |region| ReadyBlock {
            checksum: None,
            ..ready_block(region, 0)
        };
        let blocks = ready_blocks(&[0, 1].map(without_checksum));
        let script = connected(REMOTE_READ | SERVER).user(user::LOAD, IS_COMMITTED | 1);
        let script = script.message(&announcement, &blocks);
        // One of them is the question's number.
        (0..16).fold(script, |script, question| {
            script.message(&of_handoff(kind, 1).u64(question).finish(), &[])
        })
    };
    let validated = |epoch| {
        let question = of_handoff(kind::VALIDATE, 0).u64(epoch).u64(1).finish();
        let script = connected(REMOTE_READ | VALIDATES).user(user::MARK_READY, 5);
        let script = script.message(&select, &parts).message(&question, &[]);
        script.user(user::END, 0).message(&question, &[])
    };
    let ready_then_selected = connected(REMOTE_READ).user(user::MARK_READY, 5);
    let selected_then_ready = connected(REMOTE_READ).message(&select, &parts);
    let selected_then_ready = selected_then_ready.user(user::MARK_READY, 5);
    let withdrawn = connected(REMOTE_READ).user(user::LOAD, 1);
    let withdrawn = withdrawn.message(&ended, &text("ended"));
    vec![
        ready_then_selected
            .message(&select, &parts)
            .message(&acknowledge, &[]),
        selected_then_ready.user(user::END, 0),
        loading(REMOTE_READ | SERVER),
        stream(loading(SERVER), 1, 1),
        withdrawn.user(user::COMMIT, 0).user(user::CANCEL, 0),
        validating(kind::VALID),
        validating(kind::INVALID),
        validated(0),
        validated(1),
        connected(REMOTE_READ)
            .user(user::MARK_READY, 5)
            .bare(&divide(2))
            .message(&select, &halves),
        connected(0).bare(&divide(3)).bare(&divide(257)),
    ]
}
