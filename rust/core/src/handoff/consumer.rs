//! The receiving side: what has been announced, what is being read, what has arrived whole.

use std::collections::{BTreeMap, HashMap};

use super::{FinalBlock, HandoffId};
use crate::error::{Error, Result};

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
    /// What is read, and its checksums.
    pub blocks: Vec<FinalBlock>,
    /// Destination ids, in the same order.
    pub local_ids: Vec<u32>,
}

/// How a load ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is here and proved.
    Loaded {
        /// Bytes that were moved.
        num_bytes: u64,
    },
    /// Something is missing.
    Failed {
        /// Indices into `block_ids` of the blocks that are not here whole.
        missing: Vec<u32>,
        /// Why.
        reason: String,
    },
}

#[derive(Debug)]
struct State {
    load: Load,
    /// For each wanted block and region (`[block][region]`), whether it was announced.
    announced: Vec<bool>,
    /// For each wanted block, the regions in which it has arrived.
    arrived: Vec<u16>,
    num_reading: usize,
    num_bytes: u64,
    is_selected: bool,
    failure: Option<String>,
}

impl State {
    /// Where a block goes, when it is wanted and comes for the first time.
    fn want(&mut self, block: &FinalBlock) -> Option<u32> {
        let index = block.position.checked_sub(self.load.first)? as usize;
        let local = *self.load.block_ids.get(index)?;
        let at = index * usize::from(self.load.num_regions) + usize::from(block.region);
        let is_new = !std::mem::replace(self.announced.get_mut(at)?, true);
        is_new.then_some(local)
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
        let count = load.block_ids.len();
        let state = State {
            announced: vec![false; count * usize::from(load.num_regions)],
            load,
            arrived: vec![0; count],
            num_reading: 0,
            num_bytes: 0,
            is_selected: false,
            failure: None,
        };
        self.loads.insert(handoff, state);
        Ok(())
    }

    /// What the producer is now asked for: the first position, and the one after the last.
    pub fn select(&mut self, handoff: &HandoffId) -> Option<(u32, u32)> {
        let state = self.loads.get_mut(handoff)?;
        state.is_selected = true;
        let load = &state.load;
        let end = load.first.saturating_add(load.block_ids.len() as u32);
        Some((load.first, end))
    }

    /// The generation of a load.
    pub fn generation(&self, handoff: &HandoffId) -> Option<u32> {
        Some(self.loads.get(handoff)?.load.generation)
    }

    /// The producer says that blocks are final; what to read now, region by region.
    ///
    /// Blocks that are not wanted, or were announced before, are passed over: they may answer an earlier select of the
    /// same handoff.
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
        if state.failure.is_some() || state.load.generation != generation {
            return Ok(Vec::new());
        }
        let num_regions = state.load.num_regions;
        if let Some(block) = blocks.iter().find(|block| block.region >= num_regions) {
            return Err(Error::protocol(format_args!(
                "a block of region {} of {num_regions} was announced",
                block.region
            )));
        }
        let mut wanted: BTreeMap<u16, Vec<(FinalBlock, u32)>> = BTreeMap::new();
        for block in blocks {
            if let Some(local) = state.want(block) {
                wanted
                    .entry(block.region)
                    .or_default()
                    .push((*block, local));
            }
        }
        let batch = |region, part: &[(FinalBlock, u32)]| {
            let (blocks, local_ids) = part.iter().copied().unzip();
            Batch {
                region,
                blocks,
                local_ids,
            }
        };
        let batches: Vec<Batch> = wanted
            .iter()
            .flat_map(|(&region, of_region)| {
                let parts = of_region.chunks(state.load.max_batch.max(1));
                parts.map(move |part| batch(region, part))
            })
            .collect();
        state.num_reading += batches.len();
        Ok(batches)
    }

    /// A read has ended. `whole` tells for each of its blocks whether it is here with the right checksum.
    pub fn read(&mut self, handoff: &HandoffId, batch: &Batch, whole: &[bool], num_bytes: u64) {
        let Some(state) = self.loads.get_mut(handoff) else {
            return;
        };
        state.num_reading -= 1;
        state.num_bytes += num_bytes;
        for (block, is_whole) in batch.blocks.iter().zip(whole) {
            let index = (block.position - state.load.first) as usize;
            if *is_whole {
                state.arrived[index] += 1;
            } else {
                let text = format!(
                    "block {} of region {} differs from its checksum",
                    block.position, block.region
                );
                state.failure.get_or_insert(text);
            }
        }
    }

    /// A read has ended without its data.
    pub fn read_failed(&mut self, handoff: &HandoffId, reason: &str) {
        if let Some(state) = self.loads.get_mut(handoff) {
            state.num_reading -= 1;
            state.failure.get_or_insert(reason.to_owned());
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
            state.failure.get_or_insert(reason.to_owned());
        }
    }

    /// How the load ended, once: only after the last read that could still write into its blocks.
    pub fn take_outcome(&mut self, handoff: &HandoffId) -> Option<Outcome> {
        let state = self.loads.get(handoff)?;
        if state.num_reading > 0 {
            return None;
        }
        let is_whole = |count: &u16| *count == state.load.num_regions;
        let is_complete = state.is_selected && state.arrived.iter().all(is_whole);
        if state.failure.is_none() && !(is_complete && state.load.is_committed) {
            return None;
        }
        let state = self.loads.remove(handoff)?;
        let Some(reason) = state.failure else {
            return Some(Outcome::Loaded {
                num_bytes: state.num_bytes,
            });
        };
        let missing = |(index, count): (usize, &u16)| {
            (*count != state.load.num_regions).then_some(index as u32)
        };
        let missing = state
            .arrived
            .iter()
            .enumerate()
            .filter_map(missing)
            .collect();
        Some(Outcome::Failed { missing, reason })
    }

    /// Handoffs under way.
    pub fn handoffs(&self) -> Vec<HandoffId> {
        self.loads.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = [7; 16];

    fn consumer(is_committed: bool) -> Consumer {
        let mut consumer = Consumer::default();
        let load = Load {
            generation: 3,
            max_batch: 2,
            first: 2,
            block_ids: vec![50, 51],
            num_regions: 2,
            is_committed,
        };
        consumer.begin(ID, load).unwrap();
        assert_eq!(consumer.select(&ID), Some((2, 4)));
        consumer
    }

    fn block(region: u16, position: u32) -> FinalBlock {
        FinalBlock {
            region,
            position,
            block_id: 9,
            checksum: 1,
        }
    }

    fn all() -> Vec<FinalBlock> {
        vec![block(0, 2), block(0, 3), block(1, 2), block(1, 3)]
    }

    fn read_all(consumer: &mut Consumer, whole: bool) {
        for batch in consumer.announced(&ID, 3, &all()).unwrap() {
            consumer.read(&ID, &batch, &[whole, true], 10);
        }
    }

    #[test]
    fn all_blocks_and_the_sequence_state_end_a_load_once() {
        let mut consumer = consumer(false);
        read_all(&mut consumer, true);
        assert_eq!(consumer.take_outcome(&ID), None);
        consumer.commit(&ID);
        assert_eq!(
            consumer.take_outcome(&ID),
            Some(Outcome::Loaded { num_bytes: 20 })
        );
        assert_eq!(consumer.take_outcome(&ID), None);
    }

    #[test]
    fn a_failed_load_ends_after_its_last_read() {
        let mut consumer = consumer(true);
        let batches = consumer.announced(&ID, 3, &all()).unwrap();
        consumer.read(&ID, &batches[0], &[true, true], 10);
        consumer.fail(&ID, "lost");
        assert_eq!(consumer.take_outcome(&ID), None);
        consumer.read_failed(&ID, "late");
        let outcome = consumer.take_outcome(&ID);
        assert_eq!(
            outcome,
            Some(Outcome::Failed {
                missing: vec![0, 1],
                reason: "lost".to_owned()
            })
        );
    }

    #[test]
    fn a_corrupt_block_is_missing_and_the_others_are_not() {
        let mut consumer = consumer(true);
        read_all(&mut consumer, false);
        let Some(Outcome::Failed { missing, reason }) = consumer.take_outcome(&ID) else {
            panic!()
        };
        assert_eq!(missing, [0]);
        assert!(reason.contains("checksum"), "{reason}");
    }

    #[test]
    fn blocks_of_another_generation_are_not_read() {
        assert_eq!(consumer(true).announced(&ID, 2, &all()).unwrap(), []);
    }

    #[test]
    fn blocks_that_were_not_asked_for_are_not_read() {
        let blocks = [block(0, 4), block(0, 1), block(0, 3)];
        let batches = consumer(true).announced(&ID, 3, &blocks).unwrap();
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].blocks, [block(0, 3)]);
        assert_eq!(batches[0].local_ids, [51]);
    }

    #[test]
    fn many_blocks_are_read_in_batches_of_bounded_size() {
        let mut consumer = Consumer::default();
        let load = Load {
            generation: 0,
            max_batch: 2,
            first: 0,
            block_ids: (0..5).collect(),
            num_regions: 1,
            is_committed: true,
        };
        consumer.begin(ID, load).unwrap();
        consumer.select(&ID);
        let blocks: Vec<FinalBlock> = (0..5).map(|position| block(0, position)).collect();
        let batches = consumer.announced(&ID, 0, &blocks).unwrap();
        assert_eq!(
            batches
                .iter()
                .map(|batch| &batch.local_ids[..])
                .collect::<Vec<_>>(),
            [&[0, 1][..], &[2, 3], &[4]]
        );
        for batch in &batches {
            assert_eq!(consumer.take_outcome(&ID), None);
            consumer.read(&ID, batch, &vec![true; batch.blocks.len()], 1);
        }
        let outcome = consumer.take_outcome(&ID);
        assert_eq!(outcome, Some(Outcome::Loaded { num_bytes: 3 }));
    }

    #[test]
    fn a_region_that_is_not_there_is_an_error() {
        assert!(consumer(true).announced(&ID, 3, &[block(2, 2)]).is_err());
    }

    #[test]
    fn a_block_announced_twice_is_read_once() {
        let mut consumer = consumer(true);
        consumer.announced(&ID, 3, &all()).unwrap();
        assert_eq!(consumer.announced(&ID, 3, &[block(0, 2)]).unwrap(), []);
    }

    #[test]
    fn a_block_announced_twice_in_one_region_does_not_stand_for_another_region() {
        let mut consumer = consumer(true);
        let twice = [block(0, 2), block(0, 2), block(0, 3), block(0, 3)];
        for batch in consumer.announced(&ID, 3, &twice).unwrap() {
            let whole = vec![true; batch.blocks.len()];
            consumer.read(&ID, &batch, &whole, 10);
        }
        assert_eq!(consumer.take_outcome(&ID), None);
    }

    #[test]
    fn a_load_of_nothing_ends_only_after_its_select() {
        let mut consumer = Consumer::default();
        let load = Load {
            generation: 0,
            max_batch: 2,
            first: 0,
            block_ids: vec![],
            num_regions: 1,
            is_committed: true,
        };
        consumer.begin(ID, load).unwrap();
        assert_eq!(consumer.take_outcome(&ID), None);
        consumer.select(&ID);
        assert_eq!(
            consumer.take_outcome(&ID),
            Some(Outcome::Loaded { num_bytes: 0 })
        );
    }
}
