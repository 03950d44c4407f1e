//! The producer of handoffs as a pure state machine: which blocks are ready, which consumers selected them, and what to
//! send to each.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use super::ReadyBlock;
use super::messages::HandoffMessage;
use crate::ids::{HandoffId, RecentHandoffs, SessionKey};
use crate::session::ReactorContext;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Selections that may wait for unknown handoffs: bounds what peers make this worker remember.
const PENDING_CAP: usize = 1024;
/// Most blocks of one announcement. A late selection asks for all blocks in all regions, which may be millions.
const ANNOUNCED_CAP: usize = 16 << 10;
/// How long a selection waits for the first ready block. The scheduler has opened the handoff before, and reports its
/// end to this worker; prefill itself may compute for minutes.
const FIRST_BLOCK_TIMEOUT: Duration = Duration::from_secs(300);

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
}

impl BlockSelection {
    /// Announces those of the blocks that are selected.
    fn announce(
        self,
        epoch: u32,
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
    epoch: u32,
    blocks: Vec<ReadyBlock>,
    selections: Vec<BlockSelection>,
}

/// A selection of an unknown handoff.
#[derive(Debug)]
struct PendingSelection {
    selection: BlockSelection,
    deadline: Instant,
}

impl Waiter for PendingSelection {
    fn session(&self) -> SessionKey {
        self.selection.session
    }
}

/// All handoffs that this worker produces.
#[derive(Debug)]
pub(super) struct Producer {
    leased: HashMap<HandoffId, ReadyHandoff>,
    pending: FairWaitlist<PendingSelection>,
    /// Why handoffs ended, to answer late selections at once.
    ended: RecentHandoffs<String>,
}

impl Default for Producer {
    fn default() -> Self {
        Self {
            leased: HashMap::new(),
            pending: FairWaitlist::new(PENDING_CAP),
            ended: RecentHandoffs::default(),
        }
    }
}

impl Producer {
    /// Adds ready blocks to a handoff. A new epoch voids all earlier announcements.
    pub(super) fn mark_ready(
        &mut self,
        handoff: HandoffId,
        epoch: u32,
        blocks: &[ReadyBlock],
    ) -> Vec<Outgoing> {
        if self.ended.get(&handoff).is_some() {
            return Vec::new();
        }
        let leased = match self.leased.entry(handoff) {
            Entry::Occupied(leased) => leased.into_mut(),
            Entry::Vacant(unknown) => {
                let pending = self
                    .pending
                    .remove_if(|one| one.selection.handoff == handoff);
                unknown.insert(ReadyHandoff {
                    epoch,
                    blocks: Vec::new(),
                    selections: pending.into_iter().map(|one| one.selection).collect(),
                })
            }
        };
        if leased.epoch != epoch {
            leased.epoch = epoch;
            leased.blocks.clear();
        }
        leased.blocks.extend_from_slice(blocks);
        let selections = leased.selections.iter();
        selections
            .flat_map(|selection| selection.announce(epoch, blocks))
            .collect()
    }

    /// Receives a selection. One of an unknown handoff waits for its first ready block.
    pub(super) fn select(&mut self, selection: BlockSelection, now: Instant) -> Vec<Outgoing> {
        let BlockSelection {
            session, handoff, ..
        } = selection;
        if let Some(reason) = self.ended.get(&handoff) {
            return vec![selection.end(reason)];
        }
        if let Some(leased) = self.leased.get_mut(&handoff) {
            // A consumer that selects again has given up its earlier selection.
            leased.selections.retain(|other| other.session != session);
            leased.selections.push(selection);
            return selection.announce(leased.epoch, &leased.blocks).collect();
        }
        self.pending.remove_if(|other| {
            (other.selection.handoff, other.selection.session) == (handoff, session)
        });
        let displaced = self.pending.admit(PendingSelection {
            selection,
            deadline: now + FIRST_BLOCK_TIMEOUT,
        });
        let reason = || waitlist_full("selects of handoffs that are not open", PENDING_CAP);
        let ended = displaced.map(|displaced| displaced.selection.end(&reason()));
        ended.into_iter().collect()
    }

    /// Ends a handoff: its blocks may change from now on.
    pub(super) fn end_handoff(&mut self, handoff: HandoffId, reason: &str) -> Vec<Outgoing> {
        if self.ended.get(&handoff).is_none() {
            self.ended.insert(handoff, reason.to_owned());
        }
        let leased = self.leased.remove(&handoff);
        let pending = self
            .pending
            .remove_if(|one| one.selection.handoff == handoff);
        let pending = pending.into_iter().map(|one| one.selection);
        let selections = leased.into_iter().flat_map(|leased| leased.selections);
        selections
            .chain(pending)
            .map(|selection| selection.end(reason))
            .collect()
    }

    /// Receives a consumer's acknowledgement. The first one of a leased handoff ends it, and returns true.
    pub(super) fn acknowledge(&mut self, session: SessionKey, handoff: HandoffId) -> bool {
        let Entry::Occupied(leased) = self.leased.entry(handoff) else {
            return false;
        };
        let mut selections = leased.get().selections.iter();
        let has_selected = selections.any(|selection| selection.session == session);
        if has_selected {
            leased.remove();
            self.ended
                .insert(handoff, "its consumer acknowledged it".to_owned());
        }
        has_selected
    }

    /// Forgets the selections of a lost session.
    pub(super) fn session_down(&mut self, session: SessionKey) {
        for leased in self.leased.values_mut() {
            leased.selections.retain(|other| other.session != session);
        }
        self.pending
            .remove_if(|other| other.selection.session == session);
    }

    /// Refuses selections whose first block was not ready in time, and returns the next deadline.
    pub(super) fn expire(&mut self, now: Instant) -> (Vec<Outgoing>, Option<Instant>) {
        let expired = self.pending.remove_if(|one| one.deadline <= now);
        let reason = "the handoff is not known here";
        let ended = expired.iter().map(|one| one.selection.end(reason));
        let next = self.pending.iter().map(|one| one.deadline).min();
        (ended.collect(), next)
    }

    /// Number of handoffs that are leased.
    pub(super) fn num_leased(&self) -> usize {
        self.leased.len()
    }
}

#[cfg(test)]
mod tests;
