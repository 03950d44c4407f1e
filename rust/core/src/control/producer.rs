//! The producer's half of the control plane: the handoffs that are open here, the consumers that watch them, and when their leases
//! end. A pure state machine: its messages and events go to a [`ControlOutbox`].

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::service::ControlOutbox;
use super::{ControlEvent, ControlTimeouts, HandoffUpdate, Opening, SequenceState};
use crate::ids::{HandoffId, RecentHandoffs, SessionKey};
use crate::multimap::Multimap;
use crate::reactor::Timers;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Watches that may wait for unknown handoffs: bounds what peers make this engine remember.
pub(super) const PENDING_WATCHES_CAP: usize = 1024;
/// Tells a peer that its watch or query waited for an unknown handoff until the open time-out.
pub(super) const UNKNOWN_HANDOFF: &str = "the handoff is not known to its producer";

const CONSUMER_LOST: &str = "its consumer is gone";
const CONSUMER_GAVE_UP: &str = "its consumer gave up";

/// State that decode needs besides the blocks, and the lease of the blocks.
#[derive(Debug)]
pub(super) struct FinishedPrefill {
    state: SequenceState,
    /// End of the lease, unless a consumer watches.
    lease_ends: Instant,
}

#[derive(Debug)]
pub(super) struct OpenHandoff {
    pub(super) opening: Opening,
    /// `None` while prefill is under way.
    pub(super) finished: Option<FinishedPrefill>,
    /// The last prediction of the end of prefill.
    pub(super) prefill_ends: Option<Instant>,
    pub(super) watchers: HashSet<SessionKey>,
    /// True if it has had a watcher: once the last one has left, the blocks are released when prefill has finished.
    was_watched: bool,
}

impl OpenHandoff {
    /// End of the lease; `None` before prefill has finished, and while a consumer watches.
    fn lease_ends(&self) -> Option<Instant> {
        let finished = self.finished.as_ref()?;
        self.watchers.is_empty().then_some(finished.lease_ends)
    }
}

/// A watch of an unknown handoff.
#[derive(Debug)]
pub(super) struct PendingWatch {
    pub(super) handoff: HandoffId,
    pub(super) session: SessionKey,
}

impl PendingWatch {
    fn end(self, out: &mut ControlOutbox, reason: String) {
        out.update(self.session, self.handoff, HandoffUpdate::Ended(reason));
    }
}

impl Waiter for PendingWatch {
    fn session(&self) -> SessionKey {
        self.session
    }

    fn handoff(&self) -> HandoffId {
        self.handoff
    }
}

/// Status of a handoff at its producer.
pub(super) enum HandoffStatus<'p> {
    Open(&'p OpenHandoff),
    Ended(&'p str),
    /// Its request has arrived, and is not scheduled yet.
    Expected,
    Unknown,
}

pub(super) struct ProducerRole {
    lease: Duration,
    open_timeout: Duration,
    open: HashMap<HandoffId, OpenHandoff>,
    /// Ends of leases, for the handoffs that have one.
    leases: Timers<HandoffId>,
    /// The open handoffs that each session watches.
    watched: Multimap<SessionKey, HandoffId>,
    /// Reasons for the ends of handoffs.
    ended: RecentHandoffs<String>,
    /// Handoffs whose watches and queries wait without a deadline.
    expected: HashSet<HandoffId>,
    pending: FairWaitlist<PendingWatch>,
    /// Handoffs whose status has changed since the deferred queries were last compared with it.
    changed: Vec<HandoffId>,
}

impl ProducerRole {
    pub(super) fn new(timeouts: &ControlTimeouts) -> Self {
        Self {
            lease: timeouts.lease,
            open_timeout: timeouts.open,
            open: HashMap::new(),
            leases: Timers::default(),
            watched: Multimap::default(),
            ended: RecentHandoffs::default(),
            expected: HashSet::new(),
            pending: FairWaitlist::new(PENDING_WATCHES_CAP),
            changed: Vec::new(),
        }
    }

    pub(super) fn status(&self, handoff: &HandoffId) -> HandoffStatus<'_> {
        if let Some(open) = self.open.get(handoff) {
            return HandoffStatus::Open(open);
        }
        if let Some(reason) = self.ended.get(handoff) {
            return HandoffStatus::Ended(reason);
        }
        if self.expected.contains(handoff) {
            return HandoffStatus::Expected;
        }
        HandoffStatus::Unknown
    }

    /// The handoffs whose status may have changed since the last call.
    pub(super) fn drain_changed(&mut self) -> impl Iterator<Item = HandoffId> {
        self.changed.drain(..)
    }

    pub(super) fn expect(&mut self, handoff: HandoffId) {
        self.changed.push(handoff);
        self.expected.insert(handoff);
        for watch in self.pending.of_handoff(&handoff) {
            self.pending.set_deadline(watch, None);
        }
    }

    /// Opens a handoff whose request is scheduled. A handoff that is opened again keeps its watchers.
    pub(super) fn open(&mut self, out: &mut ControlOutbox, handoff: HandoffId, opening: Opening) {
        self.changed.push(handoff);
        self.expected.remove(&handoff);
        if let Some(reason) = self.ended.get(&handoff) {
            let reason = reason.clone();
            return out.events.push(ControlEvent::Released { handoff, reason });
        }
        self.leases.cancel(handoff);
        let before = self.open.remove(&handoff);
        let mut watchers = before.map_or_else(HashSet::new, |open| open.watchers);
        let pending = self.pending.remove_handoff(&handoff);
        watchers.extend(pending.iter().map(|watch| watch.session));
        for &session in &watchers {
            self.watched.insert(session, handoff);
            out.update(session, handoff, HandoffUpdate::Opened(opening.clone()));
        }
        let open = OpenHandoff {
            opening,
            finished: None,
            prefill_ends: None,
            was_watched: !watchers.is_empty(),
            watchers,
        };
        self.open.insert(handoff, open);
    }

    /// Notes when prefill is predicted to end; false unless it is under way.
    pub(super) fn predict_end(&mut self, handoff: &HandoffId, ends_at: Instant) -> bool {
        self.changed.push(*handoff);
        let open = self.open.get_mut(handoff);
        let prefilling = open.filter(|open| open.finished.is_none());
        prefilling
            .map(|open| open.prefill_ends = Some(ends_at))
            .is_some()
    }

    pub(super) fn finish(
        &mut self,
        out: &mut ControlOutbox,
        now: Instant,
        handoff: HandoffId,
        state: SequenceState,
    ) {
        let Some(open) = self.open.get_mut(&handoff) else {
            let ended = self.ended.get(&handoff).map(String::as_str);
            let reason = ended.unwrap_or("it was never opened").to_owned();
            return out.events.push(ControlEvent::Released { handoff, reason });
        };
        for &session in &open.watchers {
            out.update(session, handoff, HandoffUpdate::Finished(state.clone()));
        }
        self.changed.push(handoff);
        let lease_ends = now + self.lease;
        open.finished = Some(FinishedPrefill { state, lease_ends });
        if open.watchers.is_empty() {
            self.leases.set(handoff, lease_ends);
        }
        if open.was_watched {
            self.release_unwatched(out, handoff, CONSUMER_LOST);
        }
    }

    /// Ends a handoff and tells its watchers; true if it was open.
    pub(super) fn end_handoff(
        &mut self,
        out: &mut ControlOutbox,
        handoff: HandoffId,
        reason: &str,
    ) -> bool {
        self.changed.push(handoff);
        self.expected.remove(&handoff);
        self.ended.insert(handoff, reason.to_owned());
        for watch in self.pending.remove_handoff(&handoff) {
            watch.end(out, reason.to_owned());
        }
        let Some(open) = self.open.remove(&handoff) else {
            return false;
        };
        self.leases.cancel(handoff);
        for session in open.watchers {
            self.watched.remove(session, &handoff);
            out.update(session, handoff, HandoffUpdate::Ended(reason.to_owned()));
        }
        true
    }

    /// Ends a handoff and tells the scheduler role, which has vLLM free its blocks; false if it was not open.
    pub(super) fn release(
        &mut self,
        out: &mut ControlOutbox,
        handoff: HandoffId,
        reason: &str,
    ) -> bool {
        let was_open = self.end_handoff(out, handoff, reason);
        if was_open {
            let reason = reason.to_owned();
            out.events.push(ControlEvent::Released { handoff, reason });
        }
        was_open
    }

    /// A consumer watches a handoff.
    pub(super) fn watch(
        &mut self,
        out: &mut ControlOutbox,
        now: Instant,
        session: SessionKey,
        handoff: HandoffId,
    ) {
        if let Some(open) = self.open.get_mut(&handoff) {
            self.changed.push(handoff);
            self.leases.cancel(handoff);
            self.watched.insert(session, handoff);
            open.watchers.insert(session);
            open.was_watched = true;
            let opening = open.opening.clone();
            out.update(session, handoff, HandoffUpdate::Opened(opening));
            if let Some(finished) = &open.finished {
                let state = finished.state.clone();
                out.update(session, handoff, HandoffUpdate::Finished(state));
            }
        } else if let Some(reason) = self.ended.get(&handoff) {
            out.update(session, handoff, HandoffUpdate::Ended(reason.clone()));
        } else if self.pending.find(session, &handoff).is_none() {
            // A repeated watch neither waits longer nor takes another place.
            let watch = PendingWatch { handoff, session };
            let is_unknown = !self.expected.contains(&handoff);
            let deadline = is_unknown.then(|| now + self.open_timeout);
            let displaced = self.pending.admit(watch, deadline);
            if let Some(displaced) = displaced {
                let what = "watches of handoffs that are not open";
                displaced.end(out, waitlist_full(what, PENDING_WATCHES_CAP));
            }
        }
    }

    /// A consumer ends its watch: it has acknowledged the blocks, or given them up.
    pub(super) fn unwatch(
        &mut self,
        out: &mut ControlOutbox,
        session: SessionKey,
        handoff: HandoffId,
        is_acknowledged: bool,
    ) {
        let given_up = self.pending.find(session, &handoff);
        let given_up = given_up.and_then(|watch| self.pending.remove(watch));
        let has_others = !self.pending.of_handoff(&handoff).is_empty();
        if given_up.is_some() && !is_acknowledged && !has_others {
            // No consumer is left: the scheduler gets the blocks back as soon as it opens the handoff.
            self.changed.push(handoff);
            self.ended.insert(handoff, CONSUMER_GAVE_UP.to_owned());
        }
        let open = self.open.get_mut(&handoff);
        if !open.is_some_and(|open| open.watchers.remove(&session)) {
            return;
        }
        self.watched.remove(session, &handoff);
        if is_acknowledged {
            // The consumer's workers acknowledge to ours too; this ends the handoff even if such a message is lost.
            self.release(out, handoff, "its consumer acknowledged it");
        } else {
            self.release_unwatched(out, handoff, CONSUMER_GAVE_UP);
        }
    }

    /// Releases a handoff without watchers, unless prefill is under way.
    fn release_unwatched(&mut self, out: &mut ControlOutbox, handoff: HandoffId, reason: &str) {
        let open = self.open.get(&handoff);
        if open.and_then(OpenHandoff::lease_ends).is_some() {
            self.release(out, handoff, reason);
        }
    }

    pub(super) fn session_down(&mut self, out: &mut ControlOutbox, session: SessionKey) {
        self.pending.remove_session(session);
        for handoff in self.watched.remove_key(&session) {
            if let Some(open) = self.open.get_mut(&handoff) {
                open.watchers.remove(&session);
            }
            self.release_unwatched(out, handoff, CONSUMER_LOST);
        }
    }

    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("open handoffs", self.open.len()),
            ("leases", self.leases.len()),
            ("sessions that watch", self.watched.len()),
            ("closed handoffs", self.ended.len()),
            ("expected handoffs", self.expected.len()),
            ("changed handoffs", self.changed.len()),
        ];
        sizes.extend(self.pending.sizes([
            "pending watches",
            "sessions of pending watches",
            "handoffs of pending watches",
            "deadlines of pending watches",
        ]));
        sizes
    }

    /// Ends leases and pending watches that are over, and returns the next deadline.
    pub(super) fn expire(&mut self, out: &mut ControlOutbox, now: Instant) -> Option<Instant> {
        while let Some(handoff) = self.leases.pop_expired(now) {
            self.release(out, handoff, "its lease ended before a consumer came");
        }
        while let Some(expired) = self.pending.pop_expired(now) {
            if let Some(watch) = self.pending.remove(expired) {
                watch.end(out, UNKNOWN_HANDOFF.to_owned());
            }
        }
        let deadlines = [self.pending.next_deadline(), self.leases.next()];
        deadlines.into_iter().flatten().min()
    }
}

#[cfg(test)]
pub(super) mod tests;
