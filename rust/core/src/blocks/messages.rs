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

/// What a peer says in [`REGIONS`].
pub(super) struct RemoteRegions(pub(super) Vec<RemoteRegion>);

impl RemoteRegions {
    /// Reads what follows the type.
    pub(super) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let regions = reader.list(REGIONS_CAP, RemoteRegion::read)?;
        reader.end()?;
        Ok(Self(regions))
    }
}

pub(super) fn ids(ids: &[u32]) -> Vec<u8> {
    Writer::default().list(ids, |w, id| w.u32(*id)).finish()
}

pub(super) fn read_ids(payload: &[u8]) -> Result<Vec<u32>> {
    let mut reader = Reader::new(payload);
    let ids = reader.list(BLOCKS_CAP, Reader::u32)?;
    reader.end()?;
    Ok(ids)
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
    let mut reader = Reader::new(payload);
    let reason = reader.str(REASON_CAP)?;
    reader.end()?;
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_back(numbers: Vec<(u16, u32, u32, u64)>) {
            let blocks: Vec<FinalBlock> = numbers
                .iter()
                .map(|&(region, position, block_id, checksum)| FinalBlock { region, position, block_id, checksum })
                .collect();
            prop_assert_eq!(read_final_blocks(&final_blocks(&blocks)).unwrap(), blocks);
            let numbers: Vec<u32> = numbers.iter().map(|numbers| numbers.1).collect();
            prop_assert_eq!(read_ids(&ids(&numbers)).unwrap(), numbers);
        }

        #[test]
        fn any_payload_gives_a_value_or_an_error(payload: Vec<u8>) {
            let _ = read_final_blocks(&payload);
            let _ = read_ids(&payload);
            let _ = reason(&payload);
            let _ = RemoteRegions::read(Reader::new(&payload));
        }

        #[test]
        fn a_cut_payload_is_an_error(cut in 1usize..18) {
            let block = FinalBlock { region: 1, position: 2, block_id: 3, checksum: 4 };
            let whole = final_blocks(&[block]);
            prop_assert!(read_final_blocks(&whole[..whole.len() - cut]).is_err());
        }
    }
}
