//! Parts of messages as docs/reference/wire-*.md have them, written without the product's own encoders.

use kvpipe_core::blocks::handoff::ReadyBlock;
use kvpipe_core::control::{Opening, SequenceState};
use kvpipe_core::net::codec::Writer;

use crate::kinds::{agent, control, session};
use crate::script::{ADDRESS, KEY};

/// Of the peer's regions.
pub(crate) const BLOCK_BYTES: u64 = 1 << 10;
const HOST_MEMORY: u8 = 0;
const NUMPY: u8 = 2;

/// The frame of a message.
pub(crate) fn message(header: &[u8], payload: &[u8]) -> Vec<u8> {
    let frame = Writer::new(session::MESSAGE).bytes(header);
    frame.raw(payload).finish()
}

/// The frame of a part of a stream, with this byte at its end.
pub(crate) fn part(header: &[u8], payload: &[u8], end: u8) -> Vec<u8> {
    let frame = Writer::new(session::STREAM).u8(header.len() as u8);
    frame.raw(header).raw(payload).u8(end).finish()
}

/// The beginning of a header: its kind, and what it is about.
pub(crate) fn head(kind: u8, id: u64) -> Writer {
    Writer::new(kind).u64(id)
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    Writer::default().str(text).finish()
}

/// A message about a tensor of so many bytes goes on with what that is.
pub(crate) fn meta(writer: Writer, len: u64) -> Writer {
    let writer = writer.u8(NUMPY).str("u1");
    writer.list(&[len], |w, extent| w.u64(*extent))
}

/// A message goes on with an offer of the peer's memory.
pub(crate) fn offer(writer: Writer, len: u64, verification: u8) -> Writer {
    let writer = writer.u64(len).u64(ADDRESS);
    let writer = writer.u8(HOST_MEMORY).u8(verification);
    writer.bytes(&KEY.to_le_bytes())
}

/// A region of the peer's memory, writable.
pub(crate) fn region(writer: Writer, (id, name): (u32, &str)) -> Writer {
    let whole = writer.u32(id).str(name).u32(0).u32(1);
    let layout = whole.u64(16).u64(BLOCK_BYTES).u64(BLOCK_BYTES).u64(0);
    let memory = layout.str("cpu").u8(1).u64(ADDRESS);
    memory.bytes(&KEY.to_le_bytes())
}

/// The message with all regions of the peer.
pub(crate) fn regions(regions: &[(u32, &str)]) -> Vec<u8> {
    let message = Writer::new(agent::REGIONS).list(regions, |w, named| region(w, *named));
    message.finish()
}

pub(crate) fn block_ids(ids: &[u32]) -> Vec<u8> {
    Writer::default().list(ids, |w, id| w.u32(*id)).finish()
}

pub(crate) fn numbers(numbers: &[u64]) -> Vec<u8> {
    let list = Writer::default().list(numbers, |w, number| w.u64(*number));
    list.finish()
}

pub(crate) fn ready_blocks(blocks: &[ReadyBlock]) -> Vec<u8> {
    let list = Writer::default().list(blocks, |w, block| {
        let w = w.u32(block.region).u32(block.position);
        let w = w.u32(block.block_id);
        match block.checksum {
            Some(checksum) => w.u8(1).u64(checksum),
            None => w.u8(0),
        }
    });
    list.finish()
}

/// One message of each kind between schedulers.
pub(crate) fn control(handoff: [u8; 16], opening: &Opening, state: &SequenceState) -> Vec<Vec<u8>> {
    let of_handoff = |kind| Writer::new(kind).raw(&handoff);
    let question = |kind| head(kind, 1).raw(&handoff);
    let opened = of_handoff(control::OPENED).raw(&opening.prompt_hash);
    let opened = opened.u32(opening.num_tokens);
    let frames = [
        of_handoff(control::WATCH),
        opened
            .list(&opening.ranks, |w, rank| {
                w.str(&rank.address).raw(&rank.incarnation)
            })
            .list(&opening.stages, |w, stage| {
                w.list(stage, |w, num_layers| w.u32(*num_layers))
            })
            .str(&opening.adapter),
        of_handoff(control::FINISHED)
            .list(&state.output_ids, |w, id| w.u32(*id))
            .str(&state.finish_reason)
            .u32(state.num_cached_tokens)
            .raw(&state.sampling_hash),
        of_handoff(control::ENDED).str("aborted"),
        of_handoff(control::UNWATCH).u8(1),
        head(control::DESCRIBE, 1),
        question(control::RELEASE),
        question(control::RESULT),
        question(control::SUBSCRIBE).u64(200_000),
        question(control::WATCHED),
        question(control::PROGRESS).u64(70_000),
        head(control::CHECK, 1).str("10.0.0.1:7001"),
        head(control::REPLY, 1).u8(0).str("{}"),
    ];
    frames.map(Writer::finish).to_vec()
}
