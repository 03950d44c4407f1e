//! Messages of the blocks' data plane; see docs/wire-format.md.

use crate::codec::{Reader, Writer};
use crate::error::Result;
use crate::handoff::FinalBlock;
use crate::region::RemoteRegion;

/// Destination asks for blocks by message: transfer, region; payload: ids.
pub(super) const READ: u8 = 32;
/// Source sends bytes: transfer, offset in the sequence of blocks; payload: bytes.
pub(super) const DATA: u8 = 33;
/// Destination has placed bytes: transfer, number.
pub(super) const CREDIT: u8 = 34;
/// Source cannot serve a transfer: transfer; payload: reason.
pub(super) const REFUSED: u8 = 35;
/// Consumer selects blocks of a handoff: handoff, generation, first, end.
pub(super) const SELECT: u8 = 48;
/// Producer announces blocks: handoff, generation; payload: list.
pub(super) const FINAL: u8 = 49;
/// Producer has nothing more: handoff; payload: reason.
pub(super) const GONE: u8 = 50;
/// Consumer has everything: handoff.
pub(super) const DONE: u8 = 51;

/// Frame over TCP: the regions of the sender, all of them, in the order of their indices.
pub(super) const REGIONS: u8 = 1;

/// Most ids of one transfer and most blocks of one announcement.
pub(super) const BLOCKS_CAP: usize = 1 << 22;
/// Most regions of an agent.
pub(super) const REGIONS_CAP: usize = 4096;
/// Longest reason.
pub(super) const REASON_CAP: usize = 4096;

pub(super) fn regions(regions: &[RemoteRegion]) -> Vec<u8> {
    Writer::new(REGIONS)
        .list(regions, |writer, region| region.write(writer))
        .finish()
}

pub(super) fn final_blocks(blocks: &[FinalBlock]) -> Vec<u8> {
    Writer::default()
        .list(blocks, |w, block| {
            w.u16(block.region)
                .u32(block.position)
                .u32(block.block_id)
                .u64(block.checksum)
        })
        .finish()
}

pub(super) fn read_final_blocks(payload: &[u8]) -> Result<Vec<FinalBlock>> {
    let mut reader = Reader::new(payload);
    let blocks = reader.list(BLOCKS_CAP, |r| {
        Ok(FinalBlock {
            region: r.u16()?,
            position: r.u32()?,
            block_id: r.u32()?,
            checksum: r.u64()?,
        })
    })?;
    reader.end()?;
    Ok(blocks)
}

pub(super) fn reason(payload: &[u8]) -> Result<String> {
    Reader::new(payload).str(REASON_CAP)
}
