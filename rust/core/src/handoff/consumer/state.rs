//! One load: which of its blocks are here, are being read, are to be read again, or are lost.

use std::collections::BTreeMap;

use super::{Load, LoadCounts, LoadFailure, LoadOutcome, ReadBatch};
use crate::handoff::ReadyBlock;

/// How often a block of one region is read at most: by the session's data path, then once more by messages.
const MAX_READS: u8 = 2;

/// A wanted block in one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BlockStage {
    /// To be announced, or to be read again.
    #[default]
    Awaited,
    Reading,
    Verified,
    /// No read of it has brought what was announced.
    Lost,
}

#[derive(Debug, Clone, Copy, Default)]
struct BlockRead {
    stage: BlockStage,
    num_reads: u8,
}

/// What counts of a load of which nothing more will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadEnding {
    /// What is here and verified.
    Kept,
    /// Nothing: the producer has taken back what it had announced.
    Withdrawn,
}

#[derive(Debug)]
pub(super) struct LoadState {
    pub(super) load: Load,
    /// For each wanted block and region: `[block][region]`.
    block_reads: Vec<BlockRead>,
    /// For each wanted block, the regions in which it is verified.
    num_verified: Vec<u16>,
    /// Blocks from here on are not wanted any more: the one at this index is lost, and without it they are of no use.
    end: usize,
    /// Blocks of the session that is there whose read has failed.
    pub(super) retries: Vec<ReadyBlock>,
    pub(super) num_reading: usize,
    pub(super) counts: LoadCounts,
    pub(super) is_selected: bool,
    /// Whether it has been told that every block is here.
    pub(super) is_reported: bool,
    /// Why something is lost.
    pub(super) reason: Option<String>,
    /// Once nothing more will come.
    pub(super) ended: Option<LoadEnding>,
}

impl LoadState {
    pub(super) fn new(load: Load) -> Self {
        let count = load.block_ids.len();
        Self {
            block_reads: vec![BlockRead::default(); count * usize::from(load.num_regions)],
            load,
            num_verified: vec![0; count],
            end: count,
            retries: Vec::new(),
            num_reading: 0,
            counts: LoadCounts::default(),
            is_selected: false,
            is_reported: false,
            reason: None,
            ended: None,
        }
    }

    fn index(&self, block: &ReadyBlock) -> Option<usize> {
        Some(block.position.checked_sub(self.load.first)? as usize)
    }

    fn block_read(&mut self, block: &ReadyBlock) -> Option<&mut BlockRead> {
        let regions = usize::from(self.load.num_regions);
        let at = self.index(block)? * regions + usize::from(block.region);
        self.block_reads.get_mut(at)
    }

    /// Where a block goes, when it is wanted and not being read, and whether it was read before.
    fn begin_read(&mut self, block: &ReadyBlock) -> Option<(u32, bool)> {
        let index = self.index(block).filter(|index| *index < self.end)?;
        let local = *self.load.block_ids.get(index)?;
        let block_read = self.block_read(block)?;
        if block_read.stage != BlockStage::Awaited {
            return None;
        }
        block_read.stage = BlockStage::Reading;
        block_read.num_reads += 1;
        Some((local, block_read.num_reads > 1))
    }

    /// Batches of those that are wanted.
    pub(super) fn batches(&mut self, blocks: impl Iterator<Item = ReadyBlock>) -> Vec<ReadBatch> {
        let mut wanted: BTreeMap<(u16, bool), Vec<(ReadyBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some((local, is_retry)) = self.begin_read(&block) {
                let of_region = wanted.entry((block.region, is_retry)).or_default();
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
        let batches: Vec<ReadBatch> = wanted
            .iter()
            .flat_map(|(&key, all)| all.chunks(max_batch).map(move |part| batch(key, part)))
            .collect();
        self.num_reading += batches.len();
        batches
    }

    pub(super) fn block_verified(&mut self, block: &ReadyBlock) {
        if let Some(block_read) = self.block_read(block) {
            block_read.stage = BlockStage::Verified;
        }
        if let Some(index) = self.index(block) {
            self.num_verified[index] += 1;
        }
    }

    /// A read of a block has failed: it is read again, or lost.
    pub(super) fn read_missed(&mut self, block: &ReadyBlock, reason: impl FnOnce() -> String) {
        let (Some(index), Some(block_read)) = (self.index(block), self.block_read(block)) else {
            return;
        };
        if block_read.num_reads < MAX_READS {
            block_read.stage = BlockStage::Awaited;
            self.retries.push(*block);
            return;
        }
        block_read.stage = BlockStage::Lost;
        self.reason.get_or_insert_with(reason);
        self.end = self.end.min(index);
    }

    fn is_verified(&self, index: usize) -> bool {
        self.num_verified[index] == self.load.num_regions
    }

    /// Whether all that is still wanted is here.
    pub(super) fn is_complete(&self) -> bool {
        self.is_selected && (0..self.end).all(|index| self.is_verified(index))
    }

    pub(super) fn has_ended(&self) -> bool {
        let is_enough = self.load.is_committed || self.reason.is_some();
        self.num_reading == 0 && (self.ended.is_some() || is_enough && self.is_complete())
    }

    fn num_retried(&self) -> u64 {
        let blocks = self.block_reads.chunks(self.load.num_regions.max(1).into());
        let is_retried = |block_reads: &&[BlockRead]| {
            block_reads
                .iter()
                .any(|block_read| block_read.num_reads > 1)
        };
        blocks.filter(is_retried).count() as u64
    }

    fn missing(&self) -> Vec<u32> {
        let is_withdrawn = self.ended == Some(LoadEnding::Withdrawn);
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
        let failure = self.reason.map(|reason| LoadFailure { missing, reason });
        LoadOutcome { counts, failure }
    }
}
