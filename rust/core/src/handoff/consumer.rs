//! The receiving side: what has been announced, what is being read, what has arrived whole, what is asked for again.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{FinalBlock, HandoffId};
use crate::error::{Error, Result};

/// How often a block of one region is read at most: by the session's road, then once more by messages.
const READS: u8 = 2;

/// Where the blocks of a request go.
#[derive(Debug, Clone)]
pub struct Load {
    /// The generation that the producer's scheduler named.
    pub generation: u32,
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
pub struct Batch {
    /// The region on both sides.
    pub region: u16,
    /// Whether a read of them has failed before.
    pub is_again: bool,
    /// What is read, and its checksums.
    pub blocks: Vec<FinalBlock>,
    /// Destination ids, in the same order.
    pub local_ids: Vec<u32>,
}

/// What a load has come to, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that were moved.
    pub num_bytes: u64,
    /// Blocks of the request that are here whole, in every region.
    pub num_received: u64,
    /// Blocks that are not.
    pub num_missing: u64,
    /// Blocks of which a region was asked for again.
    pub num_retried: u64,
    /// Comparisons with the producer's checksums, one for each block and region that was read.
    pub num_compared: u64,
    /// Those that differed.
    pub num_corrupt: u64,
    /// From the first word of what is final until all that had been told of was here: what comes later comes while
    /// prefill computes.
    pub backlog: Duration,
}

/// A load of which every block is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whole {
    /// In numbers.
    pub counts: Counts,
    /// Whether the sequence state is here too, which ends it.
    pub is_committed: bool,
}

/// How a load ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// In numbers.
    pub counts: Counts,
    /// What is missing, unless everything is here and proved.
    pub failure: Option<Failure>,
}

/// What is missing of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Indices into `block_ids` of the blocks that are not here whole.
    pub missing: Vec<u32>,
    /// Why.
    pub reason: String,
}

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
enum Ending {
    /// What is here and proved.
    Kept,
    /// Nothing: the producer has taken back what it had announced.
    Withdrawn,
}

#[derive(Debug)]
struct State {
    load: Load,
    /// For each wanted block and region: `[block][region]`.
    cells: Vec<Cell>,
    /// For each wanted block, the regions in which it has arrived.
    arrived: Vec<u16>,
    /// Blocks from here on are not wanted any more: the one at this index is lost, and without it they are of no use.
    end: usize,
    /// Blocks of the session that is there whose read has failed.
    again: Vec<FinalBlock>,
    num_reading: usize,
    counts: Counts,
    is_selected: bool,
    /// Whether it has been told that every block is here.
    is_told: bool,
    /// Why something is lost.
    reason: Option<String>,
    /// Once nothing more will come.
    ended: Option<Ending>,
}

impl State {
    fn new(load: Load) -> Self {
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

    fn index(&self, block: &FinalBlock) -> Option<usize> {
        Some(block.position.checked_sub(self.load.first)? as usize)
    }

    fn cell(&mut self, block: &FinalBlock) -> Option<&mut Cell> {
        let regions = usize::from(self.load.num_regions);
        let at = self.index(block)? * regions + usize::from(block.region);
        self.cells.get_mut(at)
    }

    /// Where a block goes, when it is wanted and not being read, and whether it was read before.
    fn want(&mut self, block: &FinalBlock) -> Option<(u32, bool)> {
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
    fn batches(&mut self, blocks: impl Iterator<Item = FinalBlock>) -> Vec<Batch> {
        let mut wanted: BTreeMap<(u16, bool), Vec<(FinalBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some((local, is_again)) = self.want(&block) {
                let of_region = wanted.entry((block.region, is_again)).or_default();
                of_region.push((block, local));
            }
        }
        let batch = |(region, is_again), part: &[(FinalBlock, u32)]| {
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

    fn arrive(&mut self, block: &FinalBlock) {
        if let Some(cell) = self.cell(block) {
            cell.stage = Stage::Here;
        }
        if let Some(index) = self.index(block) {
            self.arrived[index] += 1;
        }
    }

    /// A read of a block has failed: it is wanted again, or lost.
    fn miss(&mut self, block: &FinalBlock, reason: impl FnOnce() -> String) {
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

    fn is_whole(&self, index: usize) -> bool {
        self.arrived[index] == self.load.num_regions
    }

    /// Whether all that is still wanted is here.
    fn is_complete(&self) -> bool {
        self.is_selected && (0..self.end).all(|index| self.is_whole(index))
    }

    fn is_over(&self) -> bool {
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
            .filter(|&index| is_withdrawn || !self.is_whole(index))
            .map(|index| index as u32)
            .collect()
    }

    fn counts(&self, num_missing: usize) -> Counts {
        Counts {
            num_received: (self.load.block_ids.len() - num_missing) as u64,
            num_missing: num_missing as u64,
            num_retried: self.num_retried(),
            ..self.counts
        }
    }

    fn outcome(self) -> Outcome {
        let missing = self.missing();
        let counts = self.counts(missing.len());
        let failure = self.reason.map(|reason| Failure { missing, reason });
        Outcome { counts, failure }
    }
}

/// All loads of this worker.
#[derive(Debug, Default)]
pub struct Consumer {
    loads: HashMap<HandoffId, State>,
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
        self.loads.insert(handoff, State::new(load));
        Ok(())
    }

    /// What the producer is now asked for: the first position, and the one after the last. Of a session before, it is
    /// not asked for anything any more.
    pub fn select(&mut self, handoff: &HandoffId) -> Option<(u32, u32)> {
        let state = self.loads.get_mut(handoff)?;
        state.is_selected = true;
        state.again.clear();
        let load = &state.load;
        let end = load.first.saturating_add(load.block_ids.len() as u32);
        Some((load.first, end))
    }

    /// The generation of a load.
    pub fn generation(&self, handoff: &HandoffId) -> Option<u32> {
        Some(self.loads.get(handoff)?.load.generation)
    }

    /// Whether every block is here, and only the sequence state is not.
    pub fn has_all(&self, handoff: &HandoffId) -> bool {
        self.loads.get(handoff).is_some_and(State::is_complete)
    }

    /// What a load has come to when every block is here and nothing can write into them any more; told once, and not of
    /// one that has failed.
    pub fn take_whole(&mut self, handoff: &HandoffId) -> Option<Whole> {
        let state = self.loads.get_mut(handoff)?;
        let is_proper = state.reason.is_none() && state.ended.is_none() && !state.is_told;
        if !is_proper || state.num_reading > 0 || !state.is_complete() {
            return None;
        }
        state.is_told = true;
        Some(Whole {
            counts: state.counts(0),
            is_committed: state.load.is_committed,
        })
    }

    /// Whether a read may still write into a load's blocks.
    pub fn is_reading(&self, handoff: &HandoffId) -> bool {
        let state = self.loads.get(handoff);
        state.is_some_and(|state| state.num_reading > 0)
    }

    /// The producer says that blocks are final; what to read now, region by region.
    ///
    /// Blocks that are not wanted, are here, or are being read, are passed over: they may answer an earlier select of
    /// the same handoff.
    ///
    /// # Errors
    /// A region that this side does not have.
    pub fn announced(
        &mut self,
        handoff: &HandoffId,
        generation: u32,
        blocks: &[FinalBlock],
    ) -> Result<Vec<Batch>> {
        // Of a load that has ended meanwhile, or of another generation: nothing to do, not even an error.
        let Some(state) = self.loads.get_mut(handoff) else {
            return Ok(Vec::new());
        };
        if state.ended.is_some() || state.load.generation != generation {
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

    /// What to read once more, by another road, from the session that is there.
    pub fn again(&mut self, handoff: &HandoffId) -> Vec<Batch> {
        let state = self.loads.get_mut(handoff);
        let Some(state) = state.filter(|state| state.ended.is_none()) else {
            return Vec::new();
        };
        let again = std::mem::take(&mut state.again);
        state.batches(again.into_iter())
    }

    /// A read has ended. `whole` tells for each of its blocks whether it is here with the right checksum.
    pub fn read(&mut self, handoff: &HandoffId, batch: &Batch, whole: &[bool], num_bytes: u64) {
        let Some(state) = self.loads.get_mut(handoff) else {
            return;
        };
        state.num_reading -= 1;
        state.counts.num_bytes += num_bytes;
        state.counts.num_compared += whole.len() as u64;
        for (block, is_whole) in batch.blocks.iter().zip(whole) {
            if *is_whole {
                state.arrive(block);
                continue;
            }
            state.counts.num_corrupt += 1;
            let (position, region) = (block.position, block.region);
            state.miss(block, || {
                format!("block {position} of region {region} differs from its checksum")
            });
        }
    }

    /// A read has ended without its data.
    pub fn read_failed(&mut self, handoff: &HandoffId, batch: &Batch, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.num_reading -= 1;
            for block in &batch.blocks {
                state.miss(block, || reason.to_owned());
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
            state.ended.get_or_insert(Ending::Kept);
        }
    }

    /// Nothing more will come, and what has come may not be used: the producer says that it does not stand any more.
    pub fn withdraw(&mut self, handoff: &HandoffId) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.ended = Some(Ending::Withdrawn);
        }
    }

    /// How the load ended, once: only after the last read that could still write into its blocks.
    pub fn take_outcome(&mut self, handoff: &HandoffId) -> Option<Outcome> {
        self.loads.get(handoff).filter(|state| state.is_over())?;
        Some(self.loads.remove(handoff)?.outcome())
    }

    /// Handoffs under way.
    pub fn handoffs(&self) -> Vec<HandoffId> {
        self.loads.keys().copied().collect()
    }
}
