//! One load: which of its blocks are verified, are being read, are to be read again, or are lost.

use std::collections::BTreeMap;

use super::{Load, LoadCounts, LoadFailure, LoadOutcome, ReadBatch};
use crate::handoff::ReadyBlock;

/// Most reads of a block of one region: by the session's data path, then once more as a stream.
const MAX_READS: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BlockStage {
    /// To be announced, or to be read again.
    #[default]
    Awaited,
    Reading,
    Verified,
    /// No read brought what was announced.
    Lost,
}

/// The reads of a selected block in one region.
#[derive(Debug, Clone, Copy, Default)]
struct BlockReads {
    stage: BlockStage,
    num_reads: u8,
}

/// What an ended load keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadEnding {
    /// The verified blocks.
    Kept,
    /// Nothing: the producer has withdrawn what it announced.
    Withdrawn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadPhase {
    /// The producer has not been asked for blocks.
    Created,
    Selected,
    /// All blocks are verified, and the caller knows.
    Reported,
    /// No more blocks will come.
    Ended(LoadEnding),
}

#[derive(Debug)]
pub(super) struct LoadState {
    pub(super) load: Load,
    pub(super) phase: LoadPhase,
    /// For each selected block and region: `[block][region]`.
    reads: Vec<BlockReads>,
    /// For each selected block, the number of regions in which it is verified.
    num_verified: Vec<u16>,
    /// Index of the first lost block. The blocks after it are useless without it, and no longer read.
    end: usize,
    /// Blocks to read again from the present session.
    pub(super) retries: Vec<ReadyBlock>,
    pub(super) num_reading: usize,
    pub(super) counts: LoadCounts,
    /// Why the load fails: a lost block, or its end.
    pub(super) failure: Option<String>,
}

impl LoadState {
    pub(super) fn new(load: Load) -> Self {
        let count = load.block_ids.len();
        Self {
            reads: vec![BlockReads::default(); count * usize::from(load.num_regions)],
            load,
            phase: LoadPhase::Created,
            num_verified: vec![0; count],
            end: count,
            retries: Vec::new(),
            num_reading: 0,
            counts: LoadCounts::default(),
            failure: None,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.phase, LoadPhase::Ended(_))
    }

    fn index(&self, block: &ReadyBlock) -> Option<usize> {
        Some(block.position.checked_sub(self.load.first)? as usize)
    }

    fn reads_of(&mut self, block: &ReadyBlock) -> Option<&mut BlockReads> {
        let regions = usize::from(self.load.num_regions);
        let at = self.index(block)? * regions + usize::from(block.region);
        self.reads.get_mut(at)
    }

    /// The destination of a block and whether it was read before; `None` for a block that need not be read now.
    fn begin_read(&mut self, block: &ReadyBlock) -> Option<(u32, bool)> {
        let index = self.index(block).filter(|index| *index < self.end)?;
        let local = *self.load.block_ids.get(index)?;
        let reads = self.reads_of(block)?;
        if reads.stage != BlockStage::Awaited {
            return None;
        }
        reads.stage = BlockStage::Reading;
        reads.num_reads += 1;
        Some((local, reads.num_reads > 1))
    }

    /// Begins the reads of those blocks that need one.
    pub(super) fn begin_batches(
        &mut self,
        blocks: impl Iterator<Item = ReadyBlock>,
    ) -> Vec<ReadBatch> {
        let mut begun: BTreeMap<(u16, bool), Vec<(ReadyBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some((local, is_retry)) = self.begin_read(&block) {
                let of_region = begun.entry((block.region, is_retry)).or_default();
                of_region.push((block, local));
            }
        }
        let batch = |(region, is_retry), part: &[(ReadyBlock, u32)]| {
            let (blocks, local_ids) = part.iter().copied().unzip();
            ReadBatch {
                region,
                is_retry,
                blocks,
                local_ids,
            }
        };
        let max_batch = self.load.max_batch.max(1);
        let batches: Vec<ReadBatch> = begun
            .iter()
            .flat_map(|(&key, all)| all.chunks(max_batch).map(move |part| batch(key, part)))
            .collect();
        self.num_reading += batches.len();
        batches
    }

    pub(super) fn block_verified(&mut self, block: &ReadyBlock) {
        if let Some(reads) = self.reads_of(block) {
            reads.stage = BlockStage::Verified;
        }
        if let Some(index) = self.index(block) {
            self.num_verified[index] += 1;
        }
    }

    /// A read of a block has failed: the block is read again, or lost.
    pub(super) fn block_failed(&mut self, block: &ReadyBlock, reason: impl FnOnce() -> String) {
        let (Some(index), Some(reads)) = (self.index(block), self.reads_of(block)) else {
            return;
        };
        if reads.num_reads < MAX_READS {
            reads.stage = BlockStage::Awaited;
            self.retries.push(*block);
            return;
        }
        reads.stage = BlockStage::Lost;
        self.failure.get_or_insert_with(reason);
        self.end = self.end.min(index);
    }

    fn is_verified(&self, index: usize) -> bool {
        self.num_verified[index] == self.load.num_regions
    }

    /// Whether all blocks before the first lost one are verified.
    pub(super) fn is_complete(&self) -> bool {
        let is_selected = matches!(self.phase, LoadPhase::Selected | LoadPhase::Reported);
        is_selected && (0..self.end).all(|index| self.is_verified(index))
    }

    /// Whether the outcome is known, and no read can still write into the destination.
    pub(super) fn is_over(&self) -> bool {
        let is_enough = self.load.is_committed || self.failure.is_some();
        self.num_reading == 0 && (self.has_ended() || is_enough && self.is_complete())
    }

    fn num_retried(&self) -> u64 {
        let blocks = self.reads.chunks(self.load.num_regions.max(1).into());
        let is_retried = |regions: &&[BlockReads]| regions.iter().any(|reads| reads.num_reads > 1);
        blocks.filter(is_retried).count() as u64
    }

    fn missing(&self) -> Vec<u32> {
        let is_withdrawn = self.phase == LoadPhase::Ended(LoadEnding::Withdrawn);
        (0..self.load.block_ids.len())
            .filter(|&index| is_withdrawn || !self.is_verified(index))
            .map(|index| index as u32)
            .collect()
    }

    pub(super) fn counts(&self, num_missing: usize) -> LoadCounts {
        LoadCounts {
            num_received: (self.load.block_ids.len() - num_missing) as u64,
            num_missing: num_missing as u64,
            num_retried: self.num_retried(),
            ..self.counts
        }
    }

    pub(super) fn outcome(self) -> LoadOutcome {
        let missing = self.missing();
        let counts = self.counts(missing.len());
        let failure = self.failure.map(|reason| LoadFailure { missing, reason });
        LoadOutcome { counts, failure }
    }
}
