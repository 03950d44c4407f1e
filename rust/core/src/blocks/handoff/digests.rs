//! Digests that GPUs compute for handoffs: of blocks that are ready, before they are announced, and of blocks that have come,
//! before they count. The latter are computed as the blocks are copied where a kernel copies them. Of the launches that only
//! compute digests a few are under way at a time. The bytes do not change meanwhile, or the handoff ends.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use kvpipe_ucx::{Chunks, DeviceBlock, Digests, MemoryKind};

use super::announcements::ReadyAnnouncement;
use super::batches::ArrivedBatch;
use super::service::HandoffService;
use crate::checksum::{RunningChecksum, Shift};
use crate::ids::{HandoffId, RegionId};
use crate::transfer::Cx;
use crate::transfer::region::Layout;
use crate::transport::Memory;

/// Launches under way at once. Each has page-locked memory.
const IN_FLIGHT: usize = 4;

/// Work that goes on once its digests are known.
pub(super) enum Digested {
    Announcement(ReadyAnnouncement),
    Batch(ArrivedBatch),
}

impl Digested {
    /// The regions that are in use until it goes on; those of a batch are in use by its read.
    fn regions(&self) -> Vec<RegionId> {
        match self {
            Self::Announcement(ready) => ready.regions.clone(),
            Self::Batch(_) => Vec::new(),
        }
    }
}

/// A launch under way.
struct Running {
    digests: Digests,
    regions: Vec<RegionId>,
    /// None if its handoff has ended.
    digested: Option<Digested>,
}

/// Digests that are being computed or wait for their turn.
#[derive(Default)]
pub(super) struct DigestQueue {
    next_number: u64,
    /// By the numbers of the launches.
    running: HashMap<u64, Running>,
    waiting: VecDeque<(Vec<DeviceBlock>, Digested)>,
    /// Over the bytes of a block, or of its chunks, by their number.
    shifts: HashMap<u64, Shift>,
}

impl DigestQueue {
    /// True if more would only wait.
    pub(super) fn is_full(&self) -> bool {
        self.running.len() >= IN_FLIGHT
    }

    /// Announces no block of a handoff that waits for its digest.
    pub(super) fn forget(&mut self, handoff: &HandoffId) {
        let is_of = |digested: &Digested| match digested {
            Digested::Announcement(ready) => ready.is_of(handoff),
            Digested::Batch(_) => false,
        };
        self.waiting.retain(|(_, digested)| !is_of(digested));
        for running in self.running.values_mut() {
            running.digested.take_if(|digested| is_of(digested));
        }
    }

    /// Number of launches that run or wait.
    pub(super) fn len(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Number of lengths of blocks.
    #[cfg(test)]
    pub(super) fn num_shifts(&self) -> usize {
        self.shifts.len()
    }

    /// The checksum of a block at a place, from the digest of its bytes. Their number is one for which
    /// [`HandoffService::digest`] or [`HandoffService::join_digests`] was called.
    pub(super) fn checksum(
        &self,
        mut place: RunningChecksum,
        block_bytes: u64,
        digest: u64,
    ) -> Option<u64> {
        place.add_digest(self.shifts.get(&block_bytes)?, digest);
        Some(place.get())
    }
}

impl HandoffService {
    /// Has the digests of blocks of one GPU computed, at most [`Digests::BLOCKS_CAP`]; `digested` goes on then.
    pub(super) fn digest(&mut self, cx: &mut Cx<'_>, blocks: Vec<DeviceBlock>, digested: Digested) {
        self.need_shifts(blocks.iter().map(|block| block.len as u64));
        self.digests.waiting.push_back((blocks, digested));
        self.begin_waiting(cx);
    }

    /// The digests of blocks of one length from those of their [chunks](Chunks::digested).
    pub(super) fn join_digests(&mut self, block_bytes: u64, chunks: &[u64]) -> Option<Vec<u64>> {
        let chunk = Chunks::DIGESTED_BYTES as u64;
        let last = last_chunk(block_bytes);
        self.need_shifts([chunk, last, block_bytes].into_iter());
        let shifts = &self.digests.shifts;
        let (over_chunk, over_last) = (shifts.get(&chunk)?, shifts.get(&last)?);
        let num_chunks = Chunks::digested(block_bytes as usize).num_of(block_bytes as usize);
        let join = |of_block: &[u64]| {
            let last = of_block.len().saturating_sub(1);
            let (whole, last) = of_block.split_at(last);
            let join = |sum: u64, chunk: &u64| over_chunk.join(sum, *chunk);
            let whole = whole.iter().fold(0, join);
            last.iter()
                .fold(whole, |sum, last| over_last.join(sum, *last))
        };
        Some(chunks.chunks(num_chunks.max(1)).map(join).collect())
    }

    /// Makes the shifts over so many bytes that are missing. Others that no region needs any more are forgotten then.
    fn need_shifts(&mut self, lens: impl Iterator<Item = u64>) {
        let needed: BTreeSet<u64> = lens.collect();
        if needed
            .iter()
            .all(|len| self.digests.shifts.contains_key(len))
        {
            return;
        }
        let regions = &self.agent.regions;
        let is_used = |len: &u64| {
            let mut blocks = regions.values().map(|it| it.layout.block_bytes);
            let chunk = Chunks::DIGESTED_BYTES as u64;
            blocks.any(|block| [block, last_chunk(block), chunk].contains(len))
        };
        let is_idle = self.digests.len() == 0;
        let shifts = &mut self.digests.shifts;
        shifts.retain(|len, _| !is_idle || needed.contains(len) || is_used(len));
        for len in needed {
            shifts.entry(len).or_insert_with(|| Shift::over(len));
        }
    }

    /// Begins launches while there are fewer than may run. One that cannot begin ends at once.
    fn begin_waiting(&mut self, cx: &mut Cx<'_>) {
        while !self.digests.is_full()
            && let Some((blocks, digested)) = self.digests.waiting.pop_front()
        {
            self.begin_digests(cx, blocks, digested);
        }
    }

    fn begin_digests(&mut self, cx: &mut Cx<'_>, blocks: Vec<DeviceBlock>, digested: Digested) {
        let number = self.digests.next_number;
        self.digests.next_number += 1;
        let shared = Arc::clone(&self.shared);
        let on_digested = Box::new(move || shared.digested(number));
        match Digests::begin(blocks, on_digested) {
            Ok(digests) => {
                let regions = digested.regions();
                for region in &regions {
                    self.agent.use_begins(*region);
                }
                let running = Running {
                    digests,
                    regions,
                    digested: Some(digested),
                };
                self.digests.running.insert(number, running);
            }
            Err(error) => self.go_on(cx, digested, Err(error.to_string())),
        }
    }

    /// The digests of a launch are known, or will not be.
    pub(super) fn digested(&mut self, cx: &mut Cx<'_>, number: u64) {
        let Some(running) = self.digests.running.remove(&number) else {
            return;
        };
        let outcome = running.digests.get();
        let outcome = outcome.map(|it| it.map_err(|error| error.to_string()));
        if let Some(digested) = self.launch_ends(running) {
            let unknown = || Err("the GPU computes them yet".to_owned());
            self.go_on(cx, digested, outcome.unwrap_or_else(unknown));
        }
        self.begin_waiting(cx);
    }

    /// A launch has ended, or is waited for here. Returns what goes on now.
    fn launch_ends(&mut self, running: Running) -> Option<Digested> {
        drop(running.digests);
        for region in running.regions {
            self.agent.use_ends(region);
        }
        running.digested
    }

    fn go_on(&mut self, cx: &mut Cx<'_>, digested: Digested, outcome: Result<Vec<u64>, String>) {
        let outcome = outcome.map_err(|error| format!("no digests of blocks on the GPU: {error}"));
        match digested {
            Digested::Announcement(ready) => self.announcement_digested(cx, ready, outcome),
            Digested::Batch(arrived) => self.batch_digested(cx, &arrived, outcome),
        }
    }

    /// Waits for the launches under way, and ends what waits for digests.
    pub(super) fn end_digests(&mut self, cx: &mut Cx<'_>, reason: &str) {
        let mut ended = Vec::new();
        for running in std::mem::take(&mut self.digests.running).into_values() {
            ended.extend(self.launch_ends(running));
        }
        let waiting = std::mem::take(&mut self.digests.waiting);
        ended.extend(waiting.into_iter().map(|(_, digested)| digested));
        for digested in ended {
            self.go_on(cx, digested, Err(reason.to_owned()));
        }
    }
}

/// Length of the last chunk of a block.
fn last_chunk(block_bytes: u64) -> u64 {
    let chunk = Chunks::DIGESTED_BYTES as u64;
    match block_bytes % chunk {
        0 => chunk.min(block_bytes),
        rest => rest,
    }
}

/// True if a GPU has the memory, so that it computes the digests there.
pub(super) fn is_on_device(memory: &Memory) -> bool {
    matches!(memory.buffer().kind(), MemoryKind::Cuda { .. })
}

/// A block of a GPU's memory.
pub(super) fn device_block(memory: &Memory, layout: &Layout, id: u32) -> Option<DeviceBlock> {
    Some(DeviceBlock {
        buffer: memory.buffer().clone(),
        offset: layout.offset(id).ok()? as usize,
        len: layout.block_bytes as usize,
    })
}
