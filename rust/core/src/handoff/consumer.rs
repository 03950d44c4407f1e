//! The receiving side: what has been announced, what is being read, what has been verified, what is read again.

mod state;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::Duration;

use self::state::{LoadEnding, LoadState};
use super::{HandoffId, ReadyBlock};
use crate::error::{Error, Result};

/// Where the blocks of a request go.
#[derive(Debug, Clone)]
pub struct Load {
    /// The epoch that the producer's scheduler named.
    pub epoch: u32,
    /// Most blocks of one batch: their checksums are compared in one go.
    pub max_batch: usize,
    /// Position of the first block that is wanted.
    pub first: u32,
    /// Destination ids, one for each position from `first` on.
    pub block_ids: Vec<u32>,
    /// Number of regions (layers) in which each block must arrive.
    pub num_regions: u16,
    /// Whether the sequence state is here: the load ends when all blocks are too.
    pub is_committed: bool,
}

/// Blocks of one region that can be read now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadBatch {
    /// The region on both sides.
    pub region: u16,
    /// Whether a read of them has failed before.
    pub is_retry: bool,
    /// What is read, and its checksums.
    pub blocks: Vec<ReadyBlock>,
    /// Destination ids, in the same order.
    pub local_ids: Vec<u32>,
}

/// What a load has come to, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Bytes that were moved.
    pub num_bytes: u64,
    /// Blocks of the request that are here whole, in every region.
    pub num_received: u64,
    /// Blocks that are not.
    pub num_missing: u64,
    /// Blocks of which a region was read again.
    pub num_retried: u64,
    /// Comparisons with the producer's checksums, one for each block and region that was read.
    pub num_compared: u64,
    /// Those that differed.
    pub num_corrupt: u64,
    /// From the first word of what is ready until all that had been told of was here: what comes later comes while
    /// prefill computes.
    pub backlog: Duration,
}

/// A load of which every block is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifiedLoad {
    /// In numbers.
    pub counts: LoadCounts,
    /// Whether the sequence state is here too, which ends it.
    pub is_committed: bool,
}

/// How a load ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOutcome {
    /// In numbers.
    pub counts: LoadCounts,
    /// What is missing, unless everything is here and verified.
    pub failure: Option<LoadFailure>,
}

/// What is missing of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// Indices into `block_ids` of the blocks that are not here whole.
    pub missing: Vec<u32>,
    /// Why.
    pub reason: String,
}

/// All loads of this worker.
#[derive(Debug, Default)]
pub struct Consumer {
    loads: HashMap<HandoffId, LoadState>,
}

impl Consumer {
    /// Begins a load.
    ///
    /// # Errors
    /// The handoff is being loaded already.
    pub fn begin(&mut self, handoff: HandoffId, load: Load) -> Result<()> {
        if self.loads.contains_key(&handoff) {
            return Err(Error::Config(
                "this handoff is being loaded already".to_owned(),
            ));
        }
        self.loads.insert(handoff, LoadState::new(load));
        Ok(())
    }

    /// What the producer is now asked for: the first position, and the one after the last. Of a session before, it is
    /// not asked for anything any more.
    pub fn select(&mut self, handoff: &HandoffId) -> Option<(u32, u32)> {
        let state = self.loads.get_mut(handoff)?;
        state.is_selected = true;
        state.retries.clear();
        let load = &state.load;
        let end = load.first.saturating_add(load.block_ids.len() as u32);
        Some((load.first, end))
    }

    /// The epoch of a load.
    pub fn epoch(&self, handoff: &HandoffId) -> Option<u32> {
        Some(self.loads.get(handoff)?.load.epoch)
    }

    /// Whether every block is here, and only the sequence state is not.
    pub fn has_all(&self, handoff: &HandoffId) -> bool {
        self.loads.get(handoff).is_some_and(LoadState::is_complete)
    }

    /// What a load has come to when every block is here and nothing can write into them any more; told once, and not of
    /// one that has failed.
    pub fn next_verified(&mut self, handoff: &HandoffId) -> Option<VerifiedLoad> {
        let state = self.loads.get_mut(handoff)?;
        let is_proper = state.reason.is_none() && state.ended.is_none() && !state.is_reported;
        if !is_proper || state.num_reading > 0 || !state.is_complete() {
            return None;
        }
        state.is_reported = true;
        Some(VerifiedLoad {
            counts: state.counts(0),
            is_committed: state.load.is_committed,
        })
    }

    /// Whether a read may still write into a load's blocks.
    pub fn is_reading(&self, handoff: &HandoffId) -> bool {
        let state = self.loads.get(handoff);
        state.is_some_and(|state| state.num_reading > 0)
    }

    /// The producer says that blocks are ready; what to read now, region by region.
    ///
    /// Blocks that are not wanted, are here, or are being read, are passed over: they may answer an earlier select of
    /// the same handoff.
    ///
    /// # Errors
    /// A region that this side does not have.
    pub fn blocks_announced(
        &mut self,
        handoff: &HandoffId,
        epoch: u32,
        blocks: &[ReadyBlock],
    ) -> Result<Vec<ReadBatch>> {
        // Of a load that has ended meanwhile, or of another epoch: nothing to do, not even an error.
        let Some(state) = self.loads.get_mut(handoff) else {
            return Ok(Vec::new());
        };
        if state.ended.is_some() || state.load.epoch != epoch {
            return Ok(Vec::new());
        }
        let num_regions = state.load.num_regions;
        if let Some(block) = blocks.iter().find(|block| block.region >= num_regions) {
            return Err(Error::protocol(format_args!(
                "a block of region {} of {num_regions} was announced",
                block.region
            )));
        }
        Ok(state.batches(blocks.iter().copied()))
    }

    /// What to read once more, by another data path, from the session that is there.
    pub fn next_retries(&mut self, handoff: &HandoffId) -> Vec<ReadBatch> {
        let state = self.loads.get_mut(handoff);
        let Some(state) = state.filter(|state| state.ended.is_none()) else {
            return Vec::new();
        };
        let retries = std::mem::take(&mut state.retries);
        state.batches(retries.into_iter())
    }

    /// A read has ended. `whole` tells for each of its blocks whether it is here with the right checksum.
    pub fn read_completed(
        &mut self,
        handoff: &HandoffId,
        batch: &ReadBatch,
        verified: &[bool],
        num_bytes: u64,
    ) {
        let Some(state) = self.loads.get_mut(handoff) else {
            return;
        };
        state.num_reading -= 1;
        state.counts.num_bytes += num_bytes;
        state.counts.num_compared += verified.len() as u64;
        for (block, is_verified) in batch.blocks.iter().zip(verified) {
            if *is_verified {
                state.block_verified(block);
                continue;
            }
            state.counts.num_corrupt += 1;
            let (position, region) = (block.position, block.region);
            state.read_missed(block, || {
                format!("block {position} of region {region} differs from its checksum")
            });
        }
    }

    /// A read has ended without its data.
    pub fn read_failed(&mut self, handoff: &HandoffId, batch: &ReadBatch, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.num_reading -= 1;
            for block in &batch.blocks {
                state.read_missed(block, || reason.to_owned());
            }
        }
    }

    /// Nothing that was announced is on its way any more; counts the first time.
    pub fn caught_up(&mut self, handoff: &HandoffId, after: Duration) {
        if let Some(state) = self.loads.get_mut(handoff)
            && state.num_reading == 0
            && state.counts.backlog.is_zero()
        {
            state.counts.backlog = after;
        }
    }

    /// The sequence state is here.
    pub fn commit(&mut self, handoff: &HandoffId) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.load.is_committed = true;
        }
    }

    /// Nothing more will come.
    pub fn fail(&mut self, handoff: &HandoffId, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.reason.get_or_insert(reason.to_owned());
            state.ended.get_or_insert(LoadEnding::Kept);
        }
    }

    /// Nothing more will come, and what has come may not be used: the producer says that it does not stand any more.
    pub fn withdraw(&mut self, handoff: &HandoffId) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.ended = Some(LoadEnding::Withdrawn);
        }
    }

    /// How the load ended, once: only after the last read that could still write into its blocks.
    pub fn next_outcome(&mut self, handoff: &HandoffId) -> Option<LoadOutcome> {
        self.loads.get(handoff).filter(|state| state.has_ended())?;
        Some(self.loads.remove(handoff)?.outcome())
    }

    /// Handoffs under way.
    pub fn handoffs(&self) -> Vec<HandoffId> {
        self.loads.keys().copied().collect()
    }
}
