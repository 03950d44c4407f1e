//! One load: which of its blocks are here, are being read, are to be asked for again, or are lost.

use std::collections::BTreeMap;

use super::{Batch, Counts, Failure, Load, Outcome};
use crate::handoff::ReadyBlock;

/// How often a block of one region is read at most: by the session's data path, then once more by messages.
const READS: u8 = 2;

/// A wanted block in one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    /// To be announced, or to be asked for again.
    #[default]
    Awaited,
    Reading,
    Here,
    /// No read of it has brought what was announced.
    Lost,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    stage: Stage,
    num_reads: u8,
}

/// What counts of a load of which nothing more will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// What is here and verified.
    Kept,
    /// Nothing: the producer has taken back what it had announced.
    Withdrawn,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) load: Load,
    /// For each wanted block and region: `[block][region]`.
    cells: Vec<Cell>,
    /// For each wanted block, the regions in which it has arrived.
    arrived: Vec<u16>,
    /// Blocks from here on are not wanted any more: the one at this index is lost, and without it they are of no use.
    end: usize,
    /// Blocks of the session that is there whose read has failed.
    pub(super) again: Vec<ReadyBlock>,
    pub(super) num_reading: usize,
    pub(super) counts: Counts,
    pub(super) is_selected: bool,
    /// Whether it has been told that every block is here.
    pub(super) is_told: bool,
    /// Why something is lost.
    pub(super) reason: Option<String>,
    /// Once nothing more will come.
    pub(super) ended: Option<Ending>,
}

impl State {
    pub(super) fn new(load: Load) -> Self {
        let count = load.block_ids.len();
        Self {
            cells: vec![Cell::default(); count * usize::from(load.num_regions)],
            load,
            arrived: vec![0; count],
            end: count,
            again: Vec::new(),
            num_reading: 0,
            counts: Counts::default(),
            is_selected: false,
            is_told: false,
            reason: None,
            ended: None,
        }
    }

    fn index(&self, block: &ReadyBlock) -> Option<usize> {
        Some(block.position.checked_sub(self.load.first)? as usize)
    }

    fn cell(&mut self, block: &ReadyBlock) -> Option<&mut Cell> {
        let regions = usize::from(self.load.num_regions);
        let at = self.index(block)? * regions + usize::from(block.region);
        self.cells.get_mut(at)
    }

    /// Where a block goes, when it is wanted and not being read, and whether it was read before.
    fn want(&mut self, block: &ReadyBlock) -> Option<(u32, bool)> {
        let index = self.index(block).filter(|index| *index < self.end)?;
        let local = *self.load.block_ids.get(index)?;
        let cell = self.cell(block)?;
        if cell.stage != Stage::Awaited {
            return None;
        }
        cell.stage = Stage::Reading;
        cell.num_reads += 1;
        Some((local, cell.num_reads > 1))
    }

    /// Batches of those that are wanted.
    pub(super) fn batches(&mut self, blocks: impl Iterator<Item = ReadyBlock>) -> Vec<Batch> {
        let mut wanted: BTreeMap<(u16, bool), Vec<(ReadyBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some((local, is_again)) = self.want(&block) {
                let of_region = wanted.entry((block.region, is_again)).or_default();
                of_region.push((block, local));
            }
        }
        let batch = |(region, is_again), part: &[(ReadyBlock, u32)]| {
            let (blocks, local_ids) = part.iter().copied().unzip();
            Batch {
                region,
                is_again,
                blocks,
                local_ids,
            }
        };
        let max_batch = self.load.max_batch.max(1);
        let batches: Vec<Batch> = wanted
            .iter()
            .flat_map(|(&key, all)| all.chunks(max_batch).map(move |part| batch(key, part)))
            .collect();
        self.num_reading += batches.len();
        batches
    }

    pub(super) fn arrive(&mut self, block: &ReadyBlock) {
        if let Some(cell) = self.cell(block) {
            cell.stage = Stage::Here;
        }
        if let Some(index) = self.index(block) {
            self.arrived[index] += 1;
        }
    }

    /// A read of a block has failed: it is wanted again, or lost.
    pub(super) fn miss(&mut self, block: &ReadyBlock, reason: impl FnOnce() -> String) {
        let (Some(index), Some(cell)) = (self.index(block), self.cell(block)) else {
            return;
        };
        if cell.num_reads < READS {
            cell.stage = Stage::Awaited;
            self.again.push(*block);
            return;
        }
        cell.stage = Stage::Lost;
        self.reason.get_or_insert_with(reason);
        self.end = self.end.min(index);
    }

    fn is_verified(&self, index: usize) -> bool {
        self.arrived[index] == self.load.num_regions
    }

    /// Whether all that is still wanted is here.
    pub(super) fn is_complete(&self) -> bool {
        self.is_selected && (0..self.end).all(|index| self.is_verified(index))
    }

    pub(super) fn is_over(&self) -> bool {
        let is_enough = self.load.is_committed || self.reason.is_some();
        self.num_reading == 0 && (self.ended.is_some() || is_enough && self.is_complete())
    }

    fn num_retried(&self) -> u64 {
        let blocks = self.cells.chunks(self.load.num_regions.max(1).into());
        let is_retried = |cells: &&[Cell]| cells.iter().any(|cell| cell.num_reads > 1);
        blocks.filter(is_retried).count() as u64
    }

    fn missing(&self) -> Vec<u32> {
        let is_withdrawn = self.ended == Some(Ending::Withdrawn);
        (0..self.load.block_ids.len())
            .filter(|&index| is_withdrawn || !self.is_verified(index))
            .map(|index| index as u32)
            .collect()
    }

    pub(super) fn counts(&self, num_missing: usize) -> Counts {
        Counts {
            num_received: (self.load.block_ids.len() - num_missing) as u64,
            num_missing: num_missing as u64,
            num_retried: self.num_retried(),
            ..self.counts
        }
    }

    pub(super) fn outcome(self) -> Outcome {
        let missing = self.missing();
        let counts = self.counts(missing.len());
        let failure = self.reason.map(|reason| Failure { missing, reason });
        Outcome { counts, failure }
    }
}
