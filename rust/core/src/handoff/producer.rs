//! The lending side: which blocks are final, who has selected them, and what is to be told to whom.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{FinalBlock, HandoffId};
use crate::fair::{admit, crowded};
use crate::node::LinkId;
use crate::recent::Recent;

/// Selects that may wait for handoffs that are not known yet.
const PARKED_CAP: usize = 1024;

/// What the producer has to tell a consumer.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// These blocks may be read.
    Announce {
        /// To whom.
        link: LinkId,
        /// Of which handoff.
        handoff: HandoffId,
        /// In which generation.
        generation: u32,
        /// The blocks.
        blocks: Vec<FinalBlock>,
    },
    /// Nothing more will come.
    Gone {
        /// To whom.
        link: LinkId,
        /// Of which handoff.
        handoff: HandoffId,
        /// Why.
        reason: String,
    },
}

/// A consumer's wish: the blocks from a position to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Select {
    /// Who asks.
    pub link: LinkId,
    /// The first position it does not have.
    pub first: u32,
    /// The position after the last.
    pub end: u32,
}

#[derive(Debug, Default)]
struct Lent {
    generation: u32,
    blocks: Vec<FinalBlock>,
    selects: Vec<Select>,
}

/// A select of a handoff that is not known, and until when it waits.
type Parked = (HandoffId, Select, Instant);

/// All handoffs that this worker lends.
#[derive(Debug, Default)]
pub struct Producer {
    lent: HashMap<HandoffId, Lent>,
    parked: Vec<Parked>,
    /// Why handoffs have ended, so that a late select is answered at once.
    ended: Recent<String>,
}

impl Producer {
    /// More blocks of a handoff are final. A new generation voids everything announced before.
    pub fn finalize(
        &mut self,
        handoff: HandoffId,
        generation: u32,
        blocks: &[FinalBlock],
    ) -> Vec<Action> {
        if self.ended.get(&handoff).is_some() {
            return Vec::new();
        }
        let lent = self.lent.entry(handoff).or_default();
        if lent.generation != generation {
            lent.generation = generation;
            lent.blocks.clear();
        }
        lent.blocks.extend_from_slice(blocks);
        let mut actions: Vec<Action> = lent
            .selects
            .iter()
            .filter_map(|select| announce(select, handoff, generation, blocks))
            .collect();
        let parked = std::mem::take(&mut self.parked);
        for (id, select, until) in parked {
            if id == handoff {
                actions.extend(self.select(select, handoff, until));
            } else {
                self.parked.push((id, select, until));
            }
        }
        actions
    }

    /// A consumer selects blocks. An unknown handoff may still be opened, until `until`.
    pub fn select(&mut self, select: Select, handoff: HandoffId, until: Instant) -> Vec<Action> {
        let gone = |reason: &str| {
            vec![Action::Gone {
                link: select.link,
                handoff,
                reason: reason.to_owned(),
            }]
        };
        if let Some(reason) = self.ended.get(&handoff) {
            return gone(reason);
        }
        if let Some(lent) = self.lent.get_mut(&handoff) {
            // A consumer that tries again has given up what it asked for before.
            lent.selects.retain(|other| other.link != select.link);
            lent.selects.push(select);
            return announce(&select, handoff, lent.generation, &lent.blocks)
                .into_iter()
                .collect();
        }
        self.parked
            .retain(|(id, other, _)| (*id, other.link) != (handoff, select.link));
        self.park((handoff, select, until))
    }

    fn park(&mut self, one: Parked) -> Vec<Action> {
        let refused = admit(&mut self.parked, PARKED_CAP, one, |(_, select, _)| {
            select.link
        });
        let gone = |(handoff, select, _): Parked| Action::Gone {
            link: select.link,
            handoff,
            reason: crowded("selects of handoffs that are not open", PARKED_CAP),
        };
        refused.map(gone).into_iter().collect()
    }

    /// Forgets a handoff: its blocks may change from now on.
    pub fn end(&mut self, handoff: HandoffId, reason: &str) -> Vec<Action> {
        if self.ended.get(&handoff).is_none() {
            self.ended.insert(handoff, reason.to_owned());
        }
        let selects = self
            .lent
            .remove(&handoff)
            .map(|lent| lent.selects)
            .unwrap_or_default();
        let parked = self
            .parked
            .iter()
            .filter(|(id, ..)| *id == handoff)
            .map(|(_, select, _)| *select);
        let told: Vec<Select> = selects.into_iter().chain(parked).collect();
        self.parked.retain(|(id, ..)| *id != handoff);
        told.into_iter()
            .map(|select| Action::Gone {
                link: select.link,
                handoff,
                reason: reason.to_owned(),
            })
            .collect()
    }

    /// A consumer has everything; whether this is the first time that it says so of a handoff that is lent.
    pub fn done(&mut self, link: LinkId, handoff: HandoffId) -> bool {
        let has_selected = self
            .lent
            .get(&handoff)
            .is_some_and(|lent| lent.selects.iter().any(|select| select.link == link));
        if has_selected {
            self.lent.remove(&handoff);
            self.end(handoff, "it has been taken");
        }
        has_selected
    }

    /// A consumer is gone.
    pub fn link_down(&mut self, link: LinkId) {
        for lent in self.lent.values_mut() {
            lent.selects.retain(|select| select.link != link);
        }
        self.parked.retain(|(_, select, _)| select.link != link);
    }

    /// Refuses selects whose handoff was not opened in time, and tells when to come back.
    pub fn expire(&mut self, now: Instant) -> (Vec<Action>, Option<Instant>) {
        let late = |(_, _, until): &Parked| *until <= now;
        if !self.parked.iter().any(late) {
            return (Vec::new(), self.parked.iter().map(|(_, _, at)| *at).min());
        }
        let (expired, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.parked).into_iter().partition(late);
        self.parked = kept;
        let gone = |(handoff, select, _): Parked| Action::Gone {
            link: select.link,
            handoff,
            reason: "the handoff is not known here".to_owned(),
        };
        (
            expired.into_iter().map(gone).collect(),
            self.parked.iter().map(|(_, _, until)| *until).min(),
        )
    }

    /// Number of handoffs that are lent.
    pub fn num_lent(&self) -> usize {
        self.lent.len()
    }
}

/// How long a select waits for the first final block. It comes after the scheduler has opened the handoff, whose end
/// this side is told of; prefill may compute for a long time.
pub const OPEN_TIMEOUT: Duration = Duration::from_secs(300);

fn announce(
    select: &Select,
    handoff: HandoffId,
    generation: u32,
    blocks: &[FinalBlock],
) -> Option<Action> {
    let wanted = |block: &&FinalBlock| (select.first..select.end).contains(&block.position);
    let blocks: Vec<FinalBlock> = blocks.iter().filter(wanted).copied().collect();
    (!blocks.is_empty()).then_some(Action::Announce {
        link: select.link,
        handoff,
        generation,
        blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = [7; 16];

    fn block(position: u32) -> FinalBlock {
        in_layer(0, position)
    }

    fn in_layer(region: u16, position: u32) -> FinalBlock {
        FinalBlock {
            region,
            position,
            block_id: position + 100,
            checksum: 0,
        }
    }

    fn select(link: LinkId, first: u32, end: u32) -> Select {
        Select { link, first, end }
    }

    fn positions(actions: &[Action]) -> Vec<u32> {
        let of = |action: &Action| match action {
            Action::Announce { blocks, .. } => blocks.iter().map(|block| block.position).collect(),
            Action::Gone { .. } => vec![],
        };
        actions.iter().flat_map(of).collect()
    }

    fn layers(actions: &[Action]) -> Vec<u16> {
        let of = |action: &Action| match action {
            Action::Announce { blocks, .. } => blocks.iter().map(|block| block.region).collect(),
            Action::Gone { .. } => vec![],
        };
        actions.iter().flat_map(of).collect()
    }

    #[test]
    fn a_select_gets_what_is_final_and_then_the_rest_as_it_comes() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.finalize(ID, 0, &[block(0), block(1)]);
        assert_eq!(
            positions(&producer.select(select(20, 1, 3), ID, later)),
            [1]
        );
        assert_eq!(
            positions(&producer.finalize(ID, 0, &[block(2), block(3)])),
            [2]
        );
    }

    #[test]
    fn what_becomes_final_at_once_in_several_layers_is_one_announcement() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.select(select(20, 0, 2), ID, later);
        let both: Vec<FinalBlock> = (0..3)
            .flat_map(|region| [in_layer(region, 0), in_layer(region, 1)])
            .collect();
        let actions = producer.finalize(ID, 0, &both);
        assert!(
            matches!(&actions[..], [Action::Announce { blocks, .. }] if *blocks == both),
            "{actions:?}"
        );
    }

    #[test]
    fn each_layer_is_told_once_to_who_has_selected_and_all_to_who_comes_later() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.finalize(ID, 0, &[in_layer(0, 0)]);
        assert_eq!(layers(&producer.select(select(20, 0, 1), ID, later)), [0]);
        assert_eq!(layers(&producer.finalize(ID, 0, &[in_layer(1, 0)])), [1]);
        assert_eq!(
            layers(&producer.select(select(21, 0, 1), ID, later)),
            [0, 1]
        );
        let actions = producer.finalize(ID, 0, &[in_layer(2, 0)]);
        assert_eq!(layers(&actions), [2, 2]);
    }

    #[test]
    fn a_handoff_that_ends_between_two_layers_is_announced_no_further() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.select(select(20, 0, 1), ID, later);
        producer.finalize(ID, 0, &[in_layer(0, 0)]);
        producer.end(ID, "preempted");
        assert_eq!(producer.finalize(ID, 0, &[in_layer(1, 0)]), []);
        assert_eq!(layers(&producer.select(select(21, 0, 1), ID, later)), []);
    }

    #[test]
    fn a_select_before_the_handoff_waits_for_it() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        assert!(producer.select(select(20, 0, 9), ID, later).is_empty());
        assert_eq!(positions(&producer.finalize(ID, 0, &[block(0)])), [0]);
    }

    #[test]
    fn a_select_of_a_handoff_that_never_comes_is_refused_at_its_deadline() {
        let (mut producer, now) = (Producer::default(), Instant::now());
        producer.select(select(20, 0, 9), ID, now + OPEN_TIMEOUT);
        assert_eq!(producer.expire(now), (vec![], Some(now + OPEN_TIMEOUT)));
        let (actions, _) = producer.expire(now + OPEN_TIMEOUT);
        assert!(
            matches!(&actions[..], [Action::Gone { link: 20, .. }]),
            "{actions:?}"
        );
    }

    #[test]
    fn a_consumer_that_selects_what_nobody_opens_shuts_out_no_other() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        for n in 0..=PARKED_CAP as u128 {
            producer.select(select(20, 0, 1), n.to_le_bytes(), later);
        }
        let told = producer.select(select(21, 0, 1), ID, later);
        assert!(
            matches!(&told[..], [Action::Gone { link: 20, .. }]),
            "{told:?}"
        );
        let actions = producer.finalize(ID, 0, &[block(0)]);
        assert!(
            matches!(&actions[..], [Action::Announce { link: 21, .. }]),
            "{actions:?}"
        );
    }

    #[test]
    fn done_counts_once_and_only_from_a_consumer_that_selected() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.finalize(ID, 0, &[block(0)]);
        assert!(!producer.done(20, ID));
        producer.select(select(20, 0, 1), ID, later);
        assert!(producer.done(20, ID));
        assert!(!producer.done(20, ID));
        assert_eq!(producer.num_lent(), 0);
    }

    #[test]
    fn a_consumer_that_selects_again_is_told_of_each_block_once() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.select(select(20, 0, 2), ID, later);
        producer.select(select(20, 0, 2), ID, later);
        assert_eq!(positions(&producer.finalize(ID, 0, &[block(0)])), [0]);
        producer.select(select(20, 1, 2), ID, later);
        assert_eq!(positions(&producer.finalize(ID, 0, &[block(1)])), [1]);
    }

    #[test]
    fn an_ended_handoff_is_refused_and_never_comes_back() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.finalize(ID, 0, &[block(0)]);
        producer.select(select(20, 0, 1), ID, later);
        let actions = producer.end(ID, "aborted");
        assert_eq!(
            actions,
            [Action::Gone {
                link: 20,
                handoff: ID,
                reason: "aborted".to_owned()
            }]
        );
        producer.finalize(ID, 0, &[block(1)]);
        assert_eq!(producer.num_lent(), 0);
        let actions = producer.select(select(21, 0, 1), ID, later);
        assert!(
            matches!(&actions[..], [Action::Gone { link: 21, .. }]),
            "{actions:?}"
        );
    }

    #[test]
    fn a_new_generation_voids_the_blocks_of_the_old() {
        let (mut producer, later) = (Producer::default(), Instant::now() + OPEN_TIMEOUT);
        producer.finalize(ID, 0, &[block(0), block(1)]);
        producer.finalize(ID, 1, &[block(0)]);
        assert_eq!(
            positions(&producer.select(select(20, 0, 9), ID, later)),
            [0]
        );
    }
}
