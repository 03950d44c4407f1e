//! The producer of handoffs as a pure state machine: which blocks are ready, which consumers selected them, and what to
//! send to each.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use super::ReadyBlock;
use super::messages::HandoffMessage;
use crate::ids::{Epoch, HandoffId, RecentHandoffs, SessionKey};
use crate::session::ReactorContext;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Selections that may wait for unknown handoffs: bounds what peers make this worker remember.
const PENDING_CAP: usize = 1024;
/// Most blocks of one announcement. A late selection asks for all blocks in all regions, which may be millions.
const ANNOUNCED_CAP: usize = 16 << 10;
/// How long a selection waits for the first ready block. The scheduler has opened the handoff before, and reports its
/// end to this worker; prefill itself may compute for minutes.
pub(super) const FIRST_BLOCK_TIMEOUT: Duration = Duration::from_secs(300);

/// A message to a consumer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) session: SessionKey,
    pub(super) handoff: HandoffId,
    pub(super) message: HandoffMessage,
}

pub(super) fn send_all(cx: &mut ReactorContext, messages: Vec<Outgoing>) {
    for outgoing in messages {
        outgoing
            .message
            .send(cx, outgoing.session, &outgoing.handoff);
    }
}

/// A consumer's request for the blocks of a handoff from one position to another.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockSelection {
    pub(super) session: SessionKey,
    pub(super) handoff: HandoffId,
    /// The first position that the consumer lacks.
    pub(super) first: u32,
    /// The position after the last.
    pub(super) end: u32,
    /// By when the first block has to be ready.
    pub(super) deadline: Instant,
}

impl Waiter for BlockSelection {
    fn session(&self) -> SessionKey {
        self.session
    }
}

impl BlockSelection {
    /// Announces those of the blocks that are selected.
    fn announce(
        self,
        epoch: Epoch,
        blocks: &[ReadyBlock],
    ) -> impl Iterator<Item = Outgoing> + use<'_> {
        let positions = self.first..self.end;
        let mut selected = blocks
            .iter()
            .filter(move |block| positions.contains(&block.position));
        std::iter::from_fn(move || {
            let blocks: Vec<ReadyBlock> = selected.by_ref().take(ANNOUNCED_CAP).copied().collect();
            if blocks.is_empty() {
                return None;
            }
            Some(self.message(HandoffMessage::BlocksReady { epoch, blocks }))
        })
    }

    fn end(self, reason: &str) -> Outgoing {
        let reason = reason.to_owned();
        self.message(HandoffMessage::Ended { reason })
    }

    fn message(self, message: HandoffMessage) -> Outgoing {
        Outgoing {
            session: self.session,
            handoff: self.handoff,
            message,
        }
    }
}

/// A handoff of which some blocks are ready.
#[derive(Debug)]
struct ReadyHandoff {
    epoch: Epoch,
    blocks: Vec<ReadyBlock>,
    selections: Vec<BlockSelection>,
}

/// All handoffs that this worker produces.
#[derive(Debug)]
pub(super) struct Producer {
    ready: HashMap<HandoffId, ReadyHandoff>,
    /// The epoch of the next handoff that becomes ready.
    next_epoch: Epoch,
    /// Selections of unknown handoffs.
    pending: FairWaitlist<BlockSelection>,
    /// Why handoffs ended, to answer late selections at once.
    ended: RecentHandoffs<String>,
}

impl Default for Producer {
    fn default() -> Self {
        Self {
            ready: HashMap::new(),
            next_epoch: 0,
            pending: FairWaitlist::new(PENDING_CAP),
            ended: RecentHandoffs::default(),
        }
    }
}

impl Producer {
    /// The epoch in which blocks of a handoff become ready now.
    pub(super) fn epoch(&self, handoff: &HandoffId) -> Epoch {
        let ready = self.ready.get(handoff);
        ready.map_or(self.next_epoch, |ready| ready.epoch)
    }

    /// Whether blocks of a handoff may be read now, and have been since this epoch began.
    pub(super) fn is_granted(&self, handoff: &HandoffId, epoch: Epoch) -> bool {
        let ready = self.ready.get(handoff);
        ready.is_some_and(|ready| ready.epoch == epoch)
    }

    /// Adds ready blocks to a handoff, in its [`epoch`](Self::epoch). The first ones begin a new one.
    pub(super) fn mark_ready(
        &mut self,
        handoff: HandoffId,
        blocks: &[ReadyBlock],
    ) -> Vec<Outgoing> {
        if self.ended.get(&handoff).is_some() {
            return Vec::new();
        }
        let ready = match self.ready.entry(handoff) {
            Entry::Occupied(ready) => ready.into_mut(),
            Entry::Vacant(unknown) => {
                let selections = self.pending.remove_if(|other| other.handoff == handoff);
                let epoch = self.next_epoch;
                self.next_epoch += 1;
                unknown.insert(ReadyHandoff {
                    epoch,
                    blocks: Vec::new(),
                    selections,
                })
            }
        };
        ready.blocks.extend_from_slice(blocks);
        let selections = ready.selections.iter();
        selections
            .flat_map(|selection| selection.announce(ready.epoch, blocks))
            .collect()
    }

    /// Receives a selection. One of an unknown handoff waits for its first ready block.
    pub(super) fn select(&mut self, selection: BlockSelection) -> Vec<Outgoing> {
        if let Some(reason) = self.ended.get(&selection.handoff) {
            return vec![selection.end(reason)];
        }
        // A consumer that selects again has given up its earlier selection.
        let is_earlier = |other: &BlockSelection| {
            (other.handoff, other.session) == (selection.handoff, selection.session)
        };
        if let Some(ready) = self.ready.get_mut(&selection.handoff) {
            ready.selections.retain(|other| !is_earlier(other));
            ready.selections.push(selection);
            return selection.announce(ready.epoch, &ready.blocks).collect();
        }
        self.pending.remove_if(is_earlier);
        let displaced = self.pending.admit(selection).into_iter();
        let reason = || waitlist_full("selects of handoffs that are not open", PENDING_CAP);
        displaced
            .map(|selection| selection.end(&reason()))
            .collect()
    }

    /// Ends a handoff: its blocks may change from now on.
    pub(super) fn end_handoff(&mut self, handoff: HandoffId, reason: &str) -> Vec<Outgoing> {
        if self.ended.get(&handoff).is_none() {
            self.ended.insert(handoff, reason.to_owned());
        }
        let ready = self.ready.remove(&handoff);
        let mut selections = ready.map_or_else(Vec::new, |ready| ready.selections);
        selections.extend(self.pending.remove_if(|other| other.handoff == handoff));
        let ends = selections.iter().map(|selection| selection.end(reason));
        ends.collect()
    }

    /// Receives a consumer's acknowledgement. The first one of a handoff with ready blocks ends it, and returns true.
    pub(super) fn acknowledge(&mut self, session: SessionKey, handoff: HandoffId) -> bool {
        let Entry::Occupied(ready) = self.ready.entry(handoff) else {
            return false;
        };
        let mut selections = ready.get().selections.iter();
        let has_selected = selections.any(|selection| selection.session == session);
        if has_selected {
            ready.remove();
            self.ended
                .insert(handoff, "its consumer acknowledged it".to_owned());
        }
        has_selected
    }

    /// Forgets the selections of a lost session.
    pub(super) fn session_down(&mut self, session: SessionKey) {
        for ready in self.ready.values_mut() {
            ready.selections.retain(|other| other.session != session);
        }
        self.pending.remove_if(|other| other.session == session);
    }

    /// Refuses selections whose first block was not ready in time, and returns the next deadline.
    pub(super) fn expire(&mut self, now: Instant) -> (Vec<Outgoing>, Option<Instant>) {
        let expired = self.pending.remove_if(|pending| pending.deadline <= now);
        let reason = "the handoff is not known here";
        let ended = expired.iter().map(|selection| selection.end(reason));
        let next = self.pending.iter().map(|pending| pending.deadline).min();
        (ended.collect(), next)
    }

    /// What its maps and queues hold.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let selections = self.ready.values().map(|ready| ready.selections.len());
        vec![
            ("ready handoffs", self.ready.len()),
            ("selections", selections.sum()),
            ("pending selections", self.pending.iter().len()),
            (
                "sessions of pending selections",
                self.pending.num_sessions(),
            ),
            ("ended handoffs", self.ended.len()),
        ]
    }

    /// Number of handoffs of which blocks are ready.
    pub(super) fn num_leased(&self) -> usize {
        self.ready.len()
    }
}

#[cfg(test)]
mod tests;
