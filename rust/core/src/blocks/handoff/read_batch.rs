//! A read that the consumer wants.

use super::ReadyBlock;
use crate::ids::{Epoch, RegionId};

/// Blocks of one region to read now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadBatch {
    /// Our region, into which they are read.
    pub(super) region: RegionId,
    /// The place of that region among those of the load.
    pub(super) place: usize,
    /// The epoch in which they were announced.
    pub(super) epoch: Epoch,
    /// True if an earlier read of these blocks failed.
    pub(super) is_retry: bool,
    /// The blocks at the producer, with their checksums.
    pub(super) blocks: Vec<ReadyBlock>,
    /// Destination ids, in the same order.
    pub(super) local_ids: Vec<u32>,
}

impl ReadBatch {
    /// The producer's region.
    pub(super) fn remote_region(&self) -> RegionId {
        self.blocks[0].region
    }

    /// True if each block has a checksum to compare with.
    pub(super) fn has_checksums(&self) -> bool {
        self.blocks.iter().all(|block| block.checksum.is_some())
    }
}
