//! The consumer of handoffs as a pure state machine: which blocks were announced, which to read, which are verified, and
//! how each load ended.

mod state;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::Duration;

use self::state::{LoadEnding, LoadPhase, LoadState};
use super::ReadyBlock;
use crate::error::{Error, Result};
use crate::ids::HandoffId;

/// The destination of a handoff's blocks.
#[derive(Debug, Clone)]
pub struct Load {
    /// The epoch that the producer's scheduler named.
    pub epoch: u32,
    /// Most blocks of one batch; the checksums of a batch are verified in one slice.
    pub max_batch: usize,
    /// Position of the first selected block.
    pub first: u32,
    /// Destination ids, one for each position from `first` on.
    pub block_ids: Vec<u32>,
    /// Number of regions (layers) in which each block must arrive.
    pub num_regions: u16,
    /// Whether the sequence state is here: the load then ends with its last block.
    pub is_committed: bool,
}

/// Blocks of one region to read now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadBatch {
    /// The region on both sides.
    pub region: u16,
    /// Whether an earlier read of these blocks failed.
    pub is_retry: bool,
    /// The blocks at the producer, with their checksums.
    pub blocks: Vec<ReadyBlock>,
    /// Destination ids, in the same order.
    pub local_ids: Vec<u32>,
}

/// Counters of a load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Bytes that were read.
    pub num_bytes: u64,
    /// Blocks that are verified in every region.
    pub num_received: u64,
    /// Blocks that are not.
    pub num_missing: u64,
    /// Blocks that were read again in some region.
    pub num_retried: u64,
    /// Comparisons with the producer's checksums, one for each block and region that was read.
    pub num_compared: u64,
    /// Comparisons that differed.
    pub num_corrupt: u64,
    /// Time from the first announcement until everything announced so far was here. What comes later overlaps with
    /// prefill.
    pub backlog: Duration,
}

/// A load whose blocks are all verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifiedLoad {
    /// Its counters.
    pub counts: LoadCounts,
    /// Whether the sequence state is here too, which ends the load.
    pub is_committed: bool,
}

/// How a load ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOutcome {
    /// Its counters.
    pub counts: LoadCounts,
    /// What is missing, unless all blocks are verified.
    pub failure: Option<LoadFailure>,
}

/// Why a load failed, and what it lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// Indices into `block_ids` of the blocks that are not verified.
    pub missing: Vec<u32>,
    /// The first failure.
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
    /// `Config`: the handoff is being loaded already.
    pub fn begin(&mut self, handoff: HandoffId, load: Load) -> Result<()> {
        if self.loads.contains_key(&handoff) {
            return Err(Error::Config(
                "this handoff is being loaded already".to_owned(),
            ));
        }
        self.loads.insert(handoff, LoadState::new(load));
        Ok(())
    }

    /// The positions to select at the producer: the first, and the one after the last. Retries of an earlier session are
    /// void, because the new session announces their blocks again.
    pub fn select(&mut self, handoff: &HandoffId) -> Option<(u32, u32)> {
        let state = self.loads.get_mut(handoff)?;
        if state.phase == LoadPhase::Created {
            state.phase = LoadPhase::Selected;
        }
        state.retries.clear();
        let load = &state.load;
        let end = load.first.saturating_add(load.block_ids.len() as u32);
        Some((load.first, end))
    }

    /// The epoch of a load.
    pub fn epoch(&self, handoff: &HandoffId) -> Option<u32> {
        Some(self.loads.get(handoff)?.load.epoch)
    }

    /// Whether all blocks are verified, and only the sequence state is missing.
    pub fn has_all(&self, handoff: &HandoffId) -> bool {
        self.loads.get(handoff).is_some_and(LoadState::is_complete)
    }

    /// Reports once that all blocks of a load are verified and no read can write into them any more. A failed load is
    /// never reported.
    pub fn next_verified(&mut self, handoff: &HandoffId) -> Option<VerifiedLoad> {
        let state = self.loads.get_mut(handoff)?;
        let may_report = state.phase == LoadPhase::Selected && state.failure.is_none();
        if !may_report || state.num_reading > 0 || !state.is_complete() {
            return None;
        }
        state.phase = LoadPhase::Reported;
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

    /// Receives an announcement, and returns what to read now, region by region.
    ///
    /// Blocks that were not selected, are verified, or are being read are skipped: the announcement may answer an earlier
    /// selection. So is all of an ended load, or of another epoch.
    ///
    /// # Errors
    /// `Protocol`: a region that this side does not have.
    pub fn blocks_announced(
        &mut self,
        handoff: &HandoffId,
        epoch: u32,
        blocks: &[ReadyBlock],
    ) -> Result<Vec<ReadBatch>> {
        let Some(state) = self.loads.get_mut(handoff) else {
            return Ok(Vec::new());
        };
        if state.has_ended() || state.load.epoch != epoch {
            return Ok(Vec::new());
        }
        let num_regions = state.load.num_regions;
        if let Some(block) = blocks.iter().find(|block| block.region >= num_regions) {
            return Err(Error::protocol(format_args!(
                "a block of region {} of {num_regions} was announced",
                block.region
            )));
        }
        Ok(state.begin_batches(blocks.iter().copied()))
    }

    /// What to read once more from the present session, by another data path.
    pub fn next_retries(&mut self, handoff: &HandoffId) -> Vec<ReadBatch> {
        let state = self.loads.get_mut(handoff);
        let Some(state) = state.filter(|state| !state.has_ended()) else {
            return Vec::new();
        };
        let retries = std::mem::take(&mut state.retries);
        state.begin_batches(retries.into_iter())
    }

    /// A read has ended with its data. `verified` says for each of its blocks whether the checksum matches.
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
            state.block_failed(block, || {
                format!("block {position} of region {region} differs from its checksum")
            });
        }
    }

    /// A read has ended without its data.
    pub fn read_failed(&mut self, handoff: &HandoffId, batch: &ReadBatch, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.num_reading -= 1;
            for block in &batch.blocks {
                state.block_failed(block, || reason.to_owned());
            }
        }
    }

    /// Sets [`LoadCounts::backlog`] when no announced block is on its way any more; only the first time counts.
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

    /// Ends a load: no more blocks will come. Verified blocks count.
    pub fn fail(&mut self, handoff: &HandoffId, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.failure.get_or_insert(reason.to_owned());
            if !state.has_ended() {
                state.phase = LoadPhase::Ended(LoadEnding::Kept);
            }
        }
    }

    /// Ends a load whose producer has withdrawn what it announced. No block counts.
    pub fn withdraw(&mut self, handoff: &HandoffId) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.phase = LoadPhase::Ended(LoadEnding::Withdrawn);
        }
    }

    /// Returns once how the load ended: only after the last read that could still write into its blocks.
    pub fn next_outcome(&mut self, handoff: &HandoffId) -> Option<LoadOutcome> {
        self.loads.get(handoff).filter(|state| state.is_over())?;
        Some(self.loads.remove(handoff)?.outcome())
    }

    /// All handoffs that are being loaded.
    pub fn handoffs(&self) -> Vec<HandoffId> {
        self.loads.keys().copied().collect()
    }
}
