//! A load of a handoff at its consumer, as a pure state machine: which blocks were announced, which to read, which are
//! verified, are to be read again, or are lost, and how the load ended.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::ReadyBlock;
use super::load_request::{LoadCounts, LoadFailure, LoadPart, LoadRequest};
use super::messages::SelectedPart;
use super::validation::Validation;
use crate::error::FailureCause;
use crate::ids::{Epoch, RegionId};

/// Most reads of a block of one region: by the session's data path, then once more as a stream.
const MAX_READS: u8 = 2;

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

/// Outcome of a load.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LoadOutcome {
    pub(super) counts: LoadCounts,
    /// `None`: all blocks are verified.
    pub(super) failure: Option<LoadFailure>,
}

/// Reason for which nothing of an announcement can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It has blocks of a region that the producer did not have when the load selected.
    Region(RegionId),
    /// The load has blocks of an earlier epoch: the producer has ended the handoff since, and granted it again.
    Epoch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BlockStage {
    /// To be announced, or to be read again.
    #[default]
    Awaited,
    Reading,
    /// It is here and matches its checksum, if it has one.
    Verified,
    /// No read brought the announced block.
    Lost,
}

/// The reads of a selected block in one region.
#[derive(Debug, Clone, Copy, Default)]
struct BlockReads {
    stage: BlockStage,
    num_reads: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadPhase {
    /// The producer has not been asked for blocks.
    Created,
    Selected,
    /// All blocks are verified, and the caller knows.
    Reported,
    /// No more blocks will come. The verified ones count.
    Ended,
    /// No more blocks will come, and none counts: the producer has withdrawn what it announced.
    Withdrawn,
}

/// The blocks of one part of a load, in the regions of the part.
#[derive(Debug)]
struct PartReads {
    /// Position of the first selected block.
    first: u32,
    /// Destination of each selected block.
    block_ids: Vec<u32>,
    /// The places of its regions, in each of which each block must arrive.
    places: Range<usize>,
    /// For each selected block and region: `[block][region]`.
    reads: Vec<BlockReads>,
    /// For each selected block, the number of regions in which it is verified.
    num_verified: Vec<usize>,
    /// Index of the first block that is of no use any more: no read brought it, or one before it, or one of another part.
    /// Those from it on are no longer read.
    end: usize,
}

impl PartReads {
    fn new(part: &LoadPart, places: Range<usize>) -> Self {
        let count = part.block_ids.len();
        Self {
            first: part.first,
            block_ids: part.block_ids.clone(),
            reads: vec![BlockReads::default(); count * places.len()],
            places,
            num_verified: vec![0; count],
            end: count,
        }
    }

    fn index(&self, block: &ReadyBlock) -> Option<usize> {
        Some(block.position.checked_sub(self.first)? as usize)
    }

    fn reads_of(&mut self, place: usize, index: usize) -> Option<&mut BlockReads> {
        let at = index * self.places.len() + place - self.places.start;
        self.reads.get_mut(at)
    }

    fn of_blocks(&self) -> impl Iterator<Item = &[BlockReads]> {
        self.reads.chunks(self.places.len().max(1))
    }

    fn is_verified(&self, index: usize) -> bool {
        self.num_verified[index] == self.places.len()
    }

    fn is_complete(&self) -> bool {
        (0..self.end).all(|index| self.is_verified(index))
    }

    fn lacks_some_of(&self, place: usize) -> bool {
        let region = place - self.places.start;
        let mut blocks = self.of_blocks().take(self.end);
        blocks.any(|regions| regions[region].stage != BlockStage::Verified)
    }

    fn num_retried(&self) -> usize {
        let is_retried = |regions: &&[BlockReads]| regions.iter().any(|reads| reads.num_reads > 1);
        self.of_blocks().filter(is_retried).count()
    }
}

/// A load.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) request: LoadRequest,
    /// Our regions (layers), part by part. A region's place is its index here.
    regions: Vec<RegionId>,
    parts: Vec<PartReads>,
    /// The producer's regions with the places of ours of the same name, by ascending id.
    places: Vec<(RegionId, usize)>,
    /// Most blocks of one batch; the checksums of a batch are verified in one slice.
    max_batch: usize,
    phase: LoadPhase,
    /// The producer's grant of the blocks, as the first announcement names it.
    pub(super) epoch: Option<Epoch>,
    /// Blocks to read again from the present session.
    retries: Vec<ReadyBlock>,
    num_reading: usize,
    /// True if blocks without checksums count.
    pub(super) validation: Validation,
    counts: LoadCounts,
    /// Reason for the failure of the load: a lost block, or its end.
    failure: Option<(FailureCause, String)>,
}

impl Load {
    /// `regions` are those of each part of the request.
    pub(super) fn new(
        request: LoadRequest,
        regions: impl IntoIterator<Item = Vec<RegionId>>,
        max_batch: usize,
    ) -> Self {
        let mut all = Vec::new();
        let mut parts = Vec::new();
        for (part, regions) in request.parts.iter().zip(regions) {
            let first = all.len();
            all.extend(regions);
            parts.push(PartReads::new(part, first..all.len()));
        }
        Self {
            request,
            regions: all,
            parts,
            places: Vec::new(),
            max_batch,
            phase: LoadPhase::Created,
            epoch: None,
            retries: Vec::new(),
            num_reading: 0,
            validation: Validation::default(),
            counts: LoadCounts::default(),
            failure: None,
        }
    }

    /// The regions into which it loads.
    pub(super) fn regions(&self) -> &[RegionId] {
        &self.regions
    }

    /// The blocks to select at the producer. `theirs` are its regions, in the order of [`regions`](Self::regions). Retries
    /// of an earlier session are void, because the new session announces their blocks again.
    pub(super) fn select(&mut self, theirs: &[RegionId]) -> Vec<SelectedPart> {
        self.places = theirs.iter().copied().zip(0..self.regions.len()).collect();
        self.places.sort_unstable();
        if self.phase == LoadPhase::Created {
            self.phase = LoadPhase::Selected;
        }
        self.retries.clear();
        let selected = |part: &PartReads| SelectedPart {
            first: part.first,
            end: part.first.saturating_add(part.block_ids.len() as u32),
            regions: theirs[part.places.clone()].to_vec(),
        };
        self.parts.iter().map(selected).collect()
    }

    /// Receives an announcement, and returns what to read now, region by region.
    ///
    /// Blocks that were not selected, are verified, or are being read are skipped: the announcement may answer an earlier
    /// selection. So is all of an ended load.
    ///
    /// # Errors
    /// The load cannot go on, see [`Unreadable`]. Nothing is read.
    pub(super) fn blocks_announced(
        &mut self,
        epoch: Epoch,
        blocks: &[ReadyBlock],
    ) -> Result<Vec<ReadBatch>, Unreadable> {
        if self.has_ended() {
            return Ok(Vec::new());
        }
        if *self.epoch.get_or_insert(epoch) != epoch {
            return Err(Unreadable::Epoch);
        }
        let is_unknown = |block: &&ReadyBlock| self.place(block.region).is_none();
        if let Some(block) = blocks.iter().find(is_unknown) {
            return Err(Unreadable::Region(block.region));
        }
        Ok(self.begin_batches(epoch, blocks.iter().copied()))
    }

    /// Batches to read once more from the present session, by another data path.
    pub(super) fn next_retries(&mut self) -> Vec<ReadBatch> {
        let Some(epoch) = self.epoch.filter(|_| !self.has_ended()) else {
            return Vec::new();
        };
        let retries = std::mem::take(&mut self.retries);
        self.begin_batches(epoch, retries.into_iter())
    }

    /// A read has ended with its data. `verified` says for each of its blocks whether the checksum matches.
    pub(super) fn read_completed(&mut self, batch: &ReadBatch, verified: &[bool], num_bytes: u64) {
        self.num_reading -= 1;
        self.counts.num_bytes += num_bytes;
        let with_checksums = batch.blocks.iter().filter(|block| block.checksum.is_some());
        let num_compared = with_checksums.count() as u64;
        self.counts.num_compared += num_compared;
        self.validation
            .arrived(verified.len() as u64 - num_compared);
        for (block, is_verified) in batch.blocks.iter().zip(verified) {
            if *is_verified {
                self.block_verified(batch.place, block);
                continue;
            }
            self.counts.num_corrupt += 1;
            let (position, region) = (block.position, block.region);
            self.block_failed(batch.place, block, || {
                let reason =
                    format!("block {position} of region {region} differs from its checksum");
                (FailureCause::Corrupt, reason)
            });
        }
    }

    /// A read has ended without its data.
    pub(super) fn read_failed(&mut self, batch: &ReadBatch, reason: &str) {
        self.num_reading -= 1;
        for block in &batch.blocks {
            self.block_failed(batch.place, block, || {
                (FailureCause::Other, reason.to_owned())
            });
        }
    }

    /// Sets [`LoadCounts::backlog`] when no announced block is on its way any more; only the first time counts.
    pub(super) fn caught_up(&mut self, after: Duration) {
        if self.num_reading == 0 && self.counts.backlog.is_zero() {
            self.counts.backlog = after;
        }
    }

    /// Ends the load: no more blocks will come. Verified blocks count.
    pub(super) fn fail(&mut self, cause: FailureCause, reason: &str) {
        self.failure.get_or_insert((cause, reason.to_owned()));
        if !self.has_ended() {
            self.phase = LoadPhase::Ended;
        }
    }

    /// The producer has withdrawn what it announced: no block counts.
    pub(super) fn withdraw(&mut self) {
        self.phase = LoadPhase::Withdrawn;
    }

    /// True if no block counts.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.phase == LoadPhase::Withdrawn
    }

    /// True if no more blocks will come.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.phase, LoadPhase::Ended | LoadPhase::Withdrawn)
    }

    /// A region of ours that lacks blocks although the producer's, of which they were to come, is not open any more.
    pub(super) fn lacked_region(&self, is_open: impl Fn(&RegionId) -> bool) -> Option<RegionId> {
        let mut closed = self.places.iter().filter(|(theirs, _)| !is_open(theirs));
        let is_lacking = |place: usize| {
            self.part_of(place)
                .is_some_and(|it| it.lacks_some_of(place))
        };
        let (_, place) = closed.find(|(_, place)| is_lacking(*place))?;
        Some(self.regions[*place])
    }

    /// True if a read may still write into the load's blocks.
    pub(super) fn is_reading(&self) -> bool {
        self.num_reading > 0
    }

    /// True if all blocks before the first lost one are verified, and only the sequence state may be missing.
    pub(super) fn is_complete(&self) -> bool {
        let is_selected = matches!(self.phase, LoadPhase::Selected | LoadPhase::Reported);
        is_selected && self.parts.iter().all(PartReads::is_complete)
    }

    /// Reports once that all blocks are verified and no read can write into them any more. A failed load is never
    /// reported.
    pub(super) fn next_verified(&mut self) -> Option<LoadCounts> {
        let may_report = self.phase == LoadPhase::Selected && self.failure.is_none();
        if !may_report || self.is_reading() || self.needs_validation() || !self.is_complete() {
            return None;
        }
        self.phase = LoadPhase::Reported;
        Some(self.counts(0))
    }

    /// Outcome of the load, once it is over: no read can still write into its blocks.
    pub(super) fn outcome(&self) -> Option<LoadOutcome> {
        let is_enough = self.request.is_committed || self.failure.is_some();
        if self.is_reading()
            || self.needs_validation()
            || !(self.has_ended() || is_enough && self.is_complete())
        {
            return None;
        }
        let missing = self.missing();
        let counts = self.counts(missing.len());
        let failure = self.failure.clone();
        let failure = failure.map(|(cause, reason)| LoadFailure {
            missing,
            reason,
            cause,
        });
        Some(LoadOutcome { counts, failure })
    }

    /// The place of a region of the producer.
    fn place(&self, theirs: RegionId) -> Option<usize> {
        let at = self.places.binary_search_by_key(&theirs, |(id, _)| *id);
        Some(self.places[at.ok()?].1)
    }

    fn part_of(&self, place: usize) -> Option<&PartReads> {
        self.parts.iter().find(|part| part.places.contains(&place))
    }

    fn part_mut(&mut self, place: usize) -> Option<&mut PartReads> {
        let mut parts = self.parts.iter_mut();
        parts.find(|part| part.places.contains(&place))
    }

    /// The destination of a block and whether it was read before; `None` for a block that need not be read now.
    fn begin_read(&mut self, place: usize, block: &ReadyBlock) -> Option<(u32, bool)> {
        let part = self.part_mut(place)?;
        let index = part.index(block).filter(|index| *index < part.end)?;
        let local = *part.block_ids.get(index)?;
        let reads = part.reads_of(place, index)?;
        if reads.stage != BlockStage::Awaited {
            return None;
        }
        reads.stage = BlockStage::Reading;
        reads.num_reads += 1;
        Some((local, reads.num_reads > 1))
    }

    /// Begins the reads of those blocks that need one.
    fn begin_batches(
        &mut self,
        epoch: Epoch,
        blocks: impl Iterator<Item = ReadyBlock>,
    ) -> Vec<ReadBatch> {
        let mut begun: BTreeMap<(usize, bool), Vec<(ReadyBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some(place) = self.place(block.region)
                && let Some((local, is_retry)) = self.begin_read(place, &block)
            {
                let of_region = begun.entry((place, is_retry)).or_default();
                of_region.push((block, local));
            }
        }
        let mut batches = Vec::new();
        for ((place, is_retry), all) in begun {
            for part in all.chunks(self.max_batch) {
                let (blocks, local_ids) = part.iter().copied().unzip();
                batches.push(ReadBatch {
                    region: self.regions[place],
                    place,
                    epoch,
                    is_retry,
                    blocks,
                    local_ids,
                });
            }
        }
        self.num_reading += batches.len();
        batches
    }

    fn block_verified(&mut self, place: usize, block: &ReadyBlock) {
        if let Some(part) = self.part_mut(place)
            && let Some(index) = part.index(block)
            && let Some(reads) = part.reads_of(place, index)
        {
            reads.stage = BlockStage::Verified;
            part.num_verified[index] += 1;
        }
    }

    /// A read of a block has failed: the block is read again, or lost.
    fn block_failed(
        &mut self,
        place: usize,
        block: &ReadyBlock,
        failure: impl FnOnce() -> (FailureCause, String),
    ) {
        let Some(part) = self.part_mut(place) else {
            return;
        };
        let Some(index) = part.index(block) else {
            return;
        };
        let Some(reads) = part.reads_of(place, index) else {
            return;
        };
        if reads.num_reads < MAX_READS {
            reads.stage = BlockStage::Awaited;
            self.retries.push(*block);
            return;
        }
        reads.stage = BlockStage::Lost;
        part.end = part.end.min(index);
        self.failure.get_or_insert_with(failure);
        if self.parts.len() > 1 {
            self.parts.iter_mut().for_each(|part| part.end = 0);
        }
    }

    fn num_retried(&self) -> u64 {
        self.parts
            .iter()
            .map(|part| part.num_retried() as u64)
            .sum()
    }

    /// Whether each block is verified, part by part.
    fn verified(&self) -> impl Iterator<Item = bool> {
        let blocks = |part: &'_ PartReads| 0..part.num_verified.len();
        let parts = self.parts.iter();
        parts.flat_map(move |part| blocks(part).map(|index| part.is_verified(index)))
    }

    fn missing(&self) -> Vec<u32> {
        let is_missing = |is_verified: bool| self.is_withdrawn() || !is_verified;
        let blocks = self.verified().enumerate();
        blocks
            .filter(|(_, is_verified)| is_missing(*is_verified))
            .map(|(index, _)| index as u32)
            .collect()
    }

    fn counts(&self, num_missing: usize) -> LoadCounts {
        LoadCounts {
            num_received: (self.verified().count() - num_missing) as u64,
            num_missing: num_missing as u64,
            num_retried: self.num_retried(),
            num_validated: self.validation.num_validated(),
            ..self.counts
        }
    }
}
