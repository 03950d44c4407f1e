//! The producer's side: which blocks are ready, who has selected them, and what is to be told to whom.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{HandoffId, ReadyBlock};
use crate::ids::RecentHandoffs;
use crate::ids::SessionKey;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Selects that may wait for handoffs that are not known yet.
const PENDING_CAP: usize = 1024;
/// Most blocks of one announcement: a select that comes late is told of all blocks in all regions, which may be millions.
const ANNOUNCED_CAP: usize = 16 << 10;

/// What the producer has to tell a consumer.
#[derive(Debug, PartialEq, Eq)]
pub enum ProducerAction {
    /// These blocks may be read.
    Announce {
        /// To whom.
        session: SessionKey,
        /// Of which handoff.
        handoff: HandoffId,
        /// In which epoch.
        epoch: u32,
        /// The blocks.
        blocks: Vec<ReadyBlock>,
    },
    /// Nothing more will come.
    End {
        /// To whom.
        session: SessionKey,
        /// Of which handoff.
        handoff: HandoffId,
        /// Why.
        reason: String,
    },
}

/// A consumer's wish: the blocks from a position to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSelection {
    /// Who asks.
    pub session: SessionKey,
    /// The first position it does not have.
    pub first: u32,
    /// The position after the last.
    pub end: u32,
}

#[derive(Debug, Default)]
struct ReadyHandoff {
    epoch: u32,
    blocks: Vec<ReadyBlock>,
    selects: Vec<BlockSelection>,
}

/// A select of a handoff that is not known, and until when it waits.
type PendingSelection = (HandoffId, BlockSelection, Instant);

impl Waiter for PendingSelection {
    fn session(&self) -> SessionKey {
        self.1.session
    }
}

/// All handoffs that this worker lends.
#[derive(Debug)]
pub struct Producer {
    leased: HashMap<HandoffId, ReadyHandoff>,
    pending: FairWaitlist<PendingSelection>,
    /// Why handoffs have ended, so that a late select is answered at once.
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
    /// More blocks of a handoff are ready. A new epoch voids everything announced before.
    pub fn mark_ready(
        &mut self,
        handoff: HandoffId,
        epoch: u32,
        blocks: &[ReadyBlock],
    ) -> Vec<ProducerAction> {
        if self.ended.get(&handoff).is_some() {
            return Vec::new();
        }
        let leased = self.leased.entry(handoff).or_default();
        if leased.epoch != epoch {
            leased.epoch = epoch;
            leased.blocks.clear();
        }
        leased.blocks.extend_from_slice(blocks);
        let mut actions: Vec<ProducerAction> = leased
            .selects
            .iter()
            .flat_map(|select| announce(select, handoff, epoch, blocks))
            .collect();
        for (_, select, until) in self.pending.remove_if(|(id, ..)| *id == handoff) {
            actions.extend(self.select(select, handoff, until));
        }
        actions
    }

    /// A consumer selects blocks. An unknown handoff may still be opened, until `until`.
    pub fn select(
        &mut self,
        select: BlockSelection,
        handoff: HandoffId,
        until: Instant,
    ) -> Vec<ProducerAction> {
        let gone = |reason: &str| {
            vec![ProducerAction::End {
                session: select.session,
                handoff,
                reason: reason.to_owned(),
            }]
        };
        if let Some(reason) = self.ended.get(&handoff) {
            return gone(reason);
        }
        if let Some(leased) = self.leased.get_mut(&handoff) {
            // A consumer that tries again has given up what it asked for before.
            leased
                .selects
                .retain(|other| other.session != select.session);
            leased.selects.push(select);
            return announce(&select, handoff, leased.epoch, &leased.blocks).collect();
        }
        self.pending
            .remove_if(|(id, other, _)| (*id, other.session) == (handoff, select.session));
        self.admit((handoff, select, until))
    }

    fn admit(&mut self, one: PendingSelection) -> Vec<ProducerAction> {
        let gone = |(handoff, select, _): PendingSelection| ProducerAction::End {
            session: select.session,
            handoff,
            reason: waitlist_full("selects of handoffs that are not open", PENDING_CAP),
        };
        self.pending.admit(one).map(gone).into_iter().collect()
    }

    /// Forgets a handoff: its blocks may change from now on.
    pub fn end_handoff(&mut self, handoff: HandoffId, reason: &str) -> Vec<ProducerAction> {
        if self.ended.get(&handoff).is_none() {
            self.ended.insert(handoff, reason.to_owned());
        }
        let selects = self
            .leased
            .remove(&handoff)
            .map(|leased| leased.selects)
            .unwrap_or_default();
        let pending = self.pending.remove_if(|(id, ..)| *id == handoff);
        let pending = pending.into_iter().map(|(_, select, _)| select);
        let told = selects.into_iter().chain(pending);
        told.map(|select| ProducerAction::End {
            session: select.session,
            handoff,
            reason: reason.to_owned(),
        })
        .collect()
    }

    /// A consumer has everything; whether this is the first time that it says so of a handoff that is leased.
    pub fn acknowledge(&mut self, session: SessionKey, handoff: HandoffId) -> bool {
        let has_selected = self.leased.get(&handoff).is_some_and(|leased| {
            leased
                .selects
                .iter()
                .any(|select| select.session == session)
        });
        if has_selected {
            self.leased.remove(&handoff);
            self.end_handoff(handoff, "it has been taken");
        }
        has_selected
    }

    /// A consumer is gone.
    pub fn session_down(&mut self, session: SessionKey) {
        for leased in self.leased.values_mut() {
            leased.selects.retain(|select| select.session != session);
        }
        self.pending
            .remove_if(|(_, select, _)| select.session == session);
    }

    /// Refuses selects whose handoff was not opened in time, and tells when to come back.
    pub fn expire(&mut self, now: Instant) -> (Vec<ProducerAction>, Option<Instant>) {
        let expired = self.pending.remove_if(|(_, _, until)| *until <= now);
        let gone = |(handoff, select, _): PendingSelection| ProducerAction::End {
            session: select.session,
            handoff,
            reason: "the handoff is not known here".to_owned(),
        };
        (
            expired.into_iter().map(gone).collect(),
            self.pending.iter().map(|(_, _, until)| *until).min(),
        )
    }

    /// Number of handoffs that are leased.
    pub fn num_leased(&self) -> usize {
        self.leased.len()
    }
}

/// How long a select waits for the first ready block. It comes after the scheduler has opened the handoff, whose end
/// this side is told of; prefill may compute for a long time.
pub const FIRST_BLOCK_TIMEOUT: Duration = Duration::from_secs(300);

fn announce(
    select: &BlockSelection,
    handoff: HandoffId,
    epoch: u32,
    blocks: &[ReadyBlock],
) -> impl Iterator<Item = ProducerAction> {
    let BlockSelection {
        session,
        first,
        end,
    } = *select;
    let mut wanted = blocks
        .iter()
        .filter(move |block| (first..end).contains(&block.position));
    std::iter::from_fn(move || {
        let blocks: Vec<ReadyBlock> = wanted.by_ref().take(ANNOUNCED_CAP).copied().collect();
        (!blocks.is_empty()).then_some(ProducerAction::Announce {
            session,
            handoff,
            epoch,
            blocks,
        })
    })
}

#[cfg(test)]
mod tests;
