//! The producer of handoffs as a pure state machine: which blocks are ready, which consumers selected them, and what to
//! send to each.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::time::Instant;

use super::ReadyBlock;
use super::messages::{HandoffMessage, SelectedPart};
use super::ready::ReadyRange;
use crate::ids::{Epoch, HandoffId, RecentHandoffs, RegionId, SessionKey};
use crate::multimap::Multimap;
use crate::session::Links;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Selections that may wait for unknown handoffs: bounds what peers make this worker remember.
const PENDING_CAP: usize = 1024;
/// Most blocks of one announcement. A late selection asks for all blocks in all regions, which may be millions.
const ANNOUNCED_CAP: usize = 16 << 10;

/// A message to a consumer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) session: SessionKey,
    pub(super) handoff: HandoffId,
    pub(super) message: HandoffMessage,
}

pub(super) fn send_all(links: &mut Links, messages: Vec<Outgoing>) {
    for outgoing in messages {
        outgoing
            .message
            .send(links, outgoing.session, &outgoing.handoff);
    }
}

/// A consumer's request for blocks of a handoff.
#[derive(Debug, Clone)]
pub(super) struct BlockSelection {
    pub(super) session: SessionKey,
    pub(super) handoff: HandoffId,
    pub(super) positions: SelectedPositions,
    /// By when the first block has to be ready.
    pub(super) deadline: Instant,
}

impl Waiter for BlockSelection {
    fn session(&self) -> SessionKey {
        self.session
    }

    fn handoff(&self) -> HandoffId {
        self.handoff
    }
}

/// The positions that a consumer has selected in each of the producer's regions.
#[derive(Debug, Clone, Default)]
pub(super) struct SelectedPositions(HashMap<RegionId, Range<u32>>);

impl SelectedPositions {
    /// Of regions that this agent does not have, nothing can be announced, and nothing is kept.
    pub(super) fn of(parts: &[SelectedPart], is_open: impl Fn(&RegionId) -> bool) -> Self {
        let ranges = parts.iter().flat_map(|part| {
            let regions = part.regions.iter().filter(|region| is_open(region));
            regions.map(|region| (*region, part.first..part.end))
        });
        Self(ranges.collect())
    }

    /// Those of the blocks that are selected. Blocks of one region follow each other, so that regions of others, as the
    /// slices of other ranks, are skipped at once.
    fn of_ready<'b>(
        &'b self,
        blocks: &'b [ReadyBlock],
    ) -> impl Iterator<Item = ReadyBlock> + use<'b> {
        let by_region = blocks.chunk_by(|a, b| a.region == b.region);
        let selected =
            by_region.filter_map(|blocks| Some((blocks, self.0.get(&blocks[0].region)?)));
        selected.flat_map(|(blocks, positions)| {
            let blocks = blocks.iter().copied();
            blocks.filter(|block| positions.contains(&block.position))
        })
    }
}

impl BlockSelection {
    /// Announces those of the blocks that are selected.
    fn announce<'b>(
        &'b self,
        epoch: Epoch,
        blocks: &'b [ReadyBlock],
    ) -> impl Iterator<Item = Outgoing> + use<'b> {
        let mut selected = self.positions.of_ready(blocks);
        std::iter::from_fn(move || {
            let blocks: Vec<ReadyBlock> = selected.by_ref().take(ANNOUNCED_CAP).collect();
            if blocks.is_empty() {
                return None;
            }
            Some(self.message(HandoffMessage::BlocksReady { epoch, blocks }))
        })
    }

    fn end(&self, reason: &str) -> Outgoing {
        let reason = reason.to_owned();
        self.message(HandoffMessage::Ended { reason })
    }

    fn message(&self, message: HandoffMessage) -> Outgoing {
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
    /// The ready handoffs of which each session has selected blocks.
    selected: Multimap<SessionKey, HandoffId>,
    /// The epoch of the next handoff that becomes ready.
    next_epoch: Epoch,
    /// Selections of unknown handoffs.
    pending: FairWaitlist<BlockSelection>,
    /// Reasons for the ends of handoffs, to answer late selections at once.
    ended: RecentHandoffs<String>,
}

impl Default for Producer {
    fn default() -> Self {
        Self {
            ready: HashMap::new(),
            selected: Multimap::default(),
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

    /// True if blocks of a handoff may be read now, and have been since this epoch began.
    pub(super) fn is_granted(&self, handoff: &HandoffId, epoch: Epoch) -> bool {
        let ready = self.ready.get(handoff);
        ready.is_some_and(|ready| ready.epoch == epoch)
    }

    /// The handoffs whose blocks may be read now, and since when.
    pub(super) fn granted(&self) -> impl Iterator<Item = (&HandoffId, Epoch)> {
        let ready = self.ready.iter();
        ready.map(|(handoff, ready)| (handoff, ready.epoch))
    }

    /// The blocks that are ready in each of these regions, of all handoffs.
    pub(super) fn ready_in(
        &self,
        regions: impl Iterator<Item = RegionId>,
    ) -> HashMap<RegionId, Vec<ReadyRange>> {
        let mut found: HashMap<RegionId, Vec<ReadyRange>> =
            regions.map(|region| (region, Vec::new())).collect();
        for (&handoff, ready) in &self.ready {
            for block in &ready.blocks {
                let Some(ranges) = found.get_mut(&block.region) else {
                    continue;
                };
                match ranges.last_mut() {
                    Some(last) if last.is_followed_by(&handoff, block.position) => {
                        last.block_ids.push(block.block_id);
                    }
                    _ => ranges.push(ReadyRange {
                        handoff,
                        first: block.position,
                        block_ids: vec![block.block_id],
                    }),
                }
            }
        }
        found
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
                let selections = self.pending.remove_handoff(&handoff);
                for selection in &selections {
                    self.selected.insert(selection.session, handoff);
                }
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
        if let Some(ready) = self.ready.get_mut(&selection.handoff) {
            let session = selection.session;
            ready.selections.retain(|other| other.session != session);
            self.selected.insert(session, selection.handoff);
            let messages = selection.announce(ready.epoch, &ready.blocks).collect();
            ready.selections.push(selection);
            return messages;
        }
        let earlier = self.pending.find(selection.session, &selection.handoff);
        earlier.and_then(|earlier| self.pending.remove(earlier));
        let deadline = Some(selection.deadline);
        let displaced = self.pending.admit(selection, deadline).into_iter();
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
        let mut selections = self.remove_ready(&handoff);
        selections.extend(self.pending.remove_handoff(&handoff));
        let ends = selections.iter().map(|selection| selection.end(reason));
        ends.collect()
    }

    /// Receives a consumer's acknowledgement. The first one of a handoff with ready blocks ends it, and returns what other
    /// consumers are told.
    pub(super) fn acknowledge(
        &mut self,
        session: SessionKey,
        handoff: HandoffId,
    ) -> Option<Vec<Outgoing>> {
        let ready = self.ready.get(&handoff)?;
        let mut selections = ready.selections.iter();
        selections.find(|selection| selection.session == session)?;
        let messages = self.end_handoff(handoff, "its consumer acknowledged it");
        let others = messages.into_iter();
        Some(others.filter(|it| it.session != session).collect())
    }

    /// Removes a handoff, and returns the sessions that have selected its blocks.
    fn remove_ready(&mut self, handoff: &HandoffId) -> Vec<BlockSelection> {
        let ready = self.ready.remove(handoff);
        let selections = ready.map_or_else(Vec::new, |ready| ready.selections);
        for selection in &selections {
            self.selected.remove(selection.session, handoff);
        }
        selections
    }

    /// Forgets the selections of a lost session.
    pub(super) fn session_down(&mut self, session: SessionKey) {
        for handoff in self.selected.remove_key(&session) {
            if let Some(ready) = self.ready.get_mut(&handoff) {
                ready.selections.retain(|other| other.session != session);
            }
        }
        self.pending.remove_session(session);
    }

    /// Refuses selections whose first block was not ready in time.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Outgoing> {
        let mut ended = Vec::new();
        while let Some(expired) = self.pending.pop_expired(now) {
            let selection = self.pending.remove(expired);
            ended.extend(selection.map(|it| it.end("the handoff is not known here")));
        }
        ended
    }

    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        self.pending.next_deadline()
    }

    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let selections = self.ready.values().map(|ready| ready.selections.len());
        let mut sizes = vec![
            ("ready handoffs", self.ready.len()),
            ("selections", selections.sum()),
            ("sessions that select", self.selected.len()),
            ("ended handoffs", self.ended.len()),
        ];
        sizes.extend(self.pending.sizes([
            "pending selections",
            "sessions of pending selections",
            "handoffs of pending selections",
            "deadlines of pending selections",
        ]));
        sizes
    }

    /// Number of handoffs of which blocks are ready.
    pub(super) fn num_leased(&self) -> usize {
        self.ready.len()
    }
}

#[cfg(test)]
mod tests;
