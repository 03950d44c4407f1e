//! Blocks that have become ready, region by region, on their way to their checksums: what waits is joined, so that
//! regions that come faster than they are checksummed cost one announcement and not one each.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{HandoffId, RegionId};
use crate::transfer::message::BLOCKS_CAP;

/// # Errors
/// Positions do not fit 32 bits, or there are too many blocks.
pub(super) fn check_positions(first: u32, len: usize) -> Result<()> {
    let end = u32::try_from(len)
        .ok()
        .and_then(|len| first.checked_add(len));
    if end.is_none() || len > BLOCKS_CAP {
        return Err(Error::Config(format!(
            "{len} blocks from position {first} on: at most {BLOCKS_CAP} are possible, and positions have 32 bits"
        )));
    }
    Ok(())
}

/// Blocks of a handoff that will not change any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyRange {
    /// The handoff.
    pub handoff: HandoffId,
    /// The position of the first of them.
    pub first: u32,
    /// Their ids, one a position.
    pub block_ids: Vec<u32>,
}

impl ReadyRange {
    /// True if a block at this position comes next.
    pub(super) fn is_followed_by(&self, handoff: &HandoffId, position: u32) -> bool {
        let next = u64::from(self.first) + self.block_ids.len() as u64;
        self.handoff == *handoff && u64::from(position) == next
    }
}

/// Blocks that one step makes ready, in each region at a time of its own. Clones are the same step.
#[derive(Debug, Clone)]
pub struct ReadyBlocks(Arc<[ReadyRange]>);

impl ReadyBlocks {
    /// # Errors
    /// Positions do not fit 32 bits, or there are too many blocks.
    pub fn new(ready: Vec<ReadyRange>) -> Result<Self> {
        for part in &ready {
            check_positions(part.first, part.block_ids.len())?;
        }
        Ok(Self(ready.into()))
    }

    /// The handoffs of the step.
    pub(super) fn handoffs(&self) -> impl Iterator<Item = HandoffId> {
        self.0.iter().map(|part| part.handoff)
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A step in regions that wait.
#[derive(Debug)]
struct Waiting {
    ready: ReadyBlocks,
    regions: Vec<RegionId>,
    /// The ready blocks that are left.
    left: VecDeque<usize>,
    /// Number of block ids of the first of `left` that are announced already.
    num_behind: usize,
    has_begun: bool,
}

impl Waiting {
    fn new(ready: ReadyBlocks, regions: Vec<RegionId>) -> Self {
        let left = (0..ready.0.len()).collect();
        Self {
            ready,
            regions,
            left,
            num_behind: 0,
            has_begun: false,
        }
    }

    /// The next blocks of a handoff, at most so many.
    fn slice(&mut self, num_blocks: usize) -> Option<ReadyRange> {
        let part = self.ready.0.get(*self.left.front()?)?;
        self.has_begun = true;
        let from = self.num_behind;
        let to = part.block_ids.len().min(from + num_blocks);
        self.num_behind = to;
        if to == part.block_ids.len() {
            self.left.pop_front();
            self.num_behind = 0;
        }
        Some(ReadyRange {
            handoff: part.handoff,
            first: part.first + from as u32,
            block_ids: part.block_ids[from..to].to_vec(),
        })
    }

    fn forget(&mut self, handoff: &HandoffId) {
        let ready = &self.ready.0;
        let is_of = |index: &usize| ready[*index].handoff == *handoff;
        if self.left.front().is_some_and(is_of) {
            self.num_behind = 0;
        }
        self.left.retain(|index| !is_of(index));
    }
}

/// All that waits, in the order in which it became ready.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue(VecDeque<Waiting>);

impl ReadyQueue {
    /// Steps that wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A step is ready in more regions.
    pub(super) fn push(&mut self, ready: ReadyBlocks, regions: Vec<RegionId>) {
        match self.0.back_mut() {
            Some(last) if last.ready.is(&ready) && !last.has_begun => {
                last.regions.extend(regions);
            }
            _ => self.0.push_back(Waiting::new(ready, regions)),
        }
    }

    /// Blocks that were taken are the next ones again.
    pub(super) fn push_again(&mut self, part: ReadyRange, regions: Vec<RegionId>) {
        let again = Waiting::new(ReadyBlocks([part].into()), regions);
        self.0.push_front(again);
    }

    /// The next blocks of one handoff, and the regions in which they are ready. `num_blocks` says for regions how many
    /// blocks are enough.
    pub(super) fn slice(
        &mut self,
        num_blocks: impl FnOnce(&[RegionId]) -> usize,
    ) -> Option<(ReadyRange, Vec<RegionId>)> {
        while self.0.front()?.left.is_empty() {
            self.0.pop_front();
        }
        let first = self.0.front_mut()?;
        let part = first.slice(num_blocks(&first.regions))?;
        let regions = first.regions.clone();
        if first.left.is_empty() {
            self.0.pop_front();
        }
        Some((part, regions))
    }

    /// Drops all blocks of a handoff.
    pub(super) fn forget(&mut self, handoff: &HandoffId) {
        for waiting in &mut self.0 {
            waiting.forget(handoff);
        }
        self.0.retain(|waiting| !waiting.left.is_empty());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: HandoffId = [1; 16];
    const B: HandoffId = [2; 16];

    fn part(handoff: HandoffId, first: u32, block_ids: &[u32]) -> ReadyRange {
        ReadyRange {
            handoff,
            first,
            block_ids: block_ids.to_vec(),
        }
    }

    fn ready(parts: &[ReadyRange]) -> ReadyBlocks {
        ReadyBlocks::new(parts.to_vec()).unwrap()
    }

    /// All that is left, in slices of two blocks.
    fn drain(queue: &mut ReadyQueue) -> Vec<(ReadyRange, Vec<RegionId>)> {
        std::iter::from_fn(|| queue.slice(|_| 2)).collect()
    }

    #[test]
    fn regions_of_a_step_that_wait_are_one() {
        let (step, mut queue) = (ready(&[part(A, 3, &[7, 8])]), ReadyQueue::default());
        for region in 0..3 {
            queue.push(step.clone(), vec![region]);
        }
        assert_eq!(drain(&mut queue), [(part(A, 3, &[7, 8]), vec![0, 1, 2])]);
    }

    #[test]
    fn a_region_that_comes_while_others_are_summed_gets_all_blocks_behind_them() {
        let step = ready(&[part(A, 0, &[5, 6, 7]), part(B, 4, &[9])]);
        let mut queue = ReadyQueue::default();
        queue.push(step.clone(), vec![0]);
        assert_eq!(queue.slice(|_| 2), Some((part(A, 0, &[5, 6]), vec![0])));
        queue.push(step.clone(), vec![1]);
        queue.push(step, vec![2]);
        assert_eq!(
            drain(&mut queue),
            [
                (part(A, 2, &[7]), vec![0]),
                (part(B, 4, &[9]), vec![0]),
                (part(A, 0, &[5, 6]), vec![1, 2]),
                (part(A, 2, &[7]), vec![1, 2]),
                (part(B, 4, &[9]), vec![1, 2]),
            ]
        );
        assert!(queue.is_empty());
    }

    #[test]
    fn steps_are_not_joined_although_they_are_alike() {
        let mut queue = ReadyQueue::default();
        queue.push(ready(&[part(A, 0, &[5])]), vec![0]);
        queue.push(ready(&[part(A, 0, &[5])]), vec![1]);
        assert_eq!(drain(&mut queue).len(), 2);
    }

    #[test]
    fn a_handoff_that_ends_leaves_the_others_of_its_step() {
        let step = ready(&[part(A, 0, &[5, 6, 7]), part(B, 4, &[9, 8, 7])]);
        let mut queue = ReadyQueue::default();
        queue.push(step.clone(), vec![0]);
        queue.slice(|_| 2);
        queue.push(step, vec![1]);
        queue.forget(&A);
        let of_b = |region| {
            [
                (part(B, 4, &[9, 8]), vec![region]),
                (part(B, 6, &[7]), vec![region]),
            ]
        };
        assert_eq!(drain(&mut queue), [of_b(0), of_b(1)].concat());
    }

    #[test]
    fn a_handoff_that_ends_alone_leaves_nothing() {
        let mut queue = ReadyQueue::default();
        queue.push(ready(&[part(A, 0, &[5])]), vec![0]);
        queue.forget(&A);
        assert!(queue.is_empty());
        assert_eq!(drain(&mut queue), []);
    }

    #[test]
    fn blocks_that_were_taken_come_again_before_the_rest_of_their_step() {
        let mut queue = ReadyQueue::default();
        queue.push(ready(&[part(A, 0, &[5, 6, 7])]), vec![0]);
        let (taken, regions) = queue.slice(|_| 2).unwrap();
        queue.push_again(taken, regions);
        let slices: Vec<_> = std::iter::from_fn(|| queue.slice(|_| 1)).collect();
        let expected = [(0, 5), (1, 6), (2, 7)].map(|(first, id)| (part(A, first, &[id]), vec![0]));
        assert_eq!(slices, expected);
    }

    #[test]
    fn a_step_without_blocks_is_taken_too() {
        let mut queue = ReadyQueue::default();
        queue.push(ready(&[part(A, 0, &[])]), vec![0]);
        assert_eq!(drain(&mut queue), [(part(A, 0, &[]), vec![0])]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_step_of_nothing_is_not_in_the_way() {
        let mut queue = ReadyQueue::default();
        queue.push(ready(&[]), vec![0]);
        queue.push(ready(&[part(A, 0, &[5])]), vec![0]);
        assert_eq!(drain(&mut queue), [(part(A, 0, &[5]), vec![0])]);
    }
}
