//! What is leased here: handoffs that were opened, who watches them, and when they end.

use std::time::Instant;

use super::messages::ControlMessage;
use super::service::{ControlService, LeasedHandoff, PENDING_CAP, PendingWatch};
use super::{ControlEvent, Opening, SequenceState};
use crate::ids::{HandoffId, SessionKey};
use crate::reactor::ReactorContext;
use crate::session::fair_waitlist::waitlist_full;

impl ControlService {
    pub(super) fn open(&mut self, cx: &mut ReactorContext, handoff: HandoffId, opening: Opening) {
        self.expected.remove(&handoff);
        if let Some(reason) = self.ended.get(&handoff) {
            // Released or withdrawn before it was opened.
            return self.events.push(ControlEvent::Released {
                handoff,
                reason: reason.clone(),
            });
        }
        // Opened again, in a new epoch, it keeps those who watch it.
        let watchers = self.leased.remove(&handoff).map(|leased| leased.watchers);
        let watchers = watchers.unwrap_or_default();
        for &session in &watchers {
            let opening = opening.clone();
            Self::say(cx, session, &ControlMessage::Opened { handoff, opening });
        }
        let leased = LeasedHandoff {
            opening,
            state: None,
            ends_at: None,
            lease_ends: None,
            watchers,
            is_abandoned: false,
        };
        self.leased.insert(handoff, leased);
        for watch in self.pending.remove_if(|watch| watch.handoff == handoff) {
            self.watch_here(cx, watch.session, handoff);
        }
    }

    pub(super) fn finish(
        &mut self,
        cx: &mut ReactorContext,
        handoff: HandoffId,
        state: SequenceState,
    ) {
        let lease_ends = cx.now + self.timeouts.lease;
        let Some(leased) = self.leased.get_mut(&handoff) else {
            let reason = self
                .ended
                .get(&handoff)
                .map_or("it was never opened", String::as_str)
                .to_owned();
            return self.events.push(ControlEvent::Released { handoff, reason });
        };
        leased.lease_ends = Some(lease_ends);
        for &session in &leased.watchers {
            Self::say(
                cx,
                session,
                &ControlMessage::Finished {
                    handoff,
                    state: state.clone(),
                },
            );
        }
        leased.state = Some(state);
        if leased.is_abandoned {
            self.release(cx, handoff, "its consumer is gone");
        }
    }

    /// Ends a leased handoff and tells whoever watches it. `None`: it was not leased.
    pub(super) fn end(
        &mut self,
        cx: &mut ReactorContext,
        handoff: HandoffId,
        reason: &str,
    ) -> Option<LeasedHandoff> {
        self.expected.remove(&handoff);
        self.ended.insert(handoff, reason.to_owned());
        let leased = self.leased.remove(&handoff);
        let waiting = self.pending.remove_if(|watch| watch.handoff == handoff);
        let mut told: Vec<SessionKey> = waiting.iter().map(|watch| watch.session).collect();
        told.extend(leased.iter().flat_map(|leased| &leased.watchers));
        for session in told {
            let reason = reason.to_owned();
            Self::say(cx, session, &ControlMessage::Ended { handoff, reason });
        }
        leased
    }

    /// Ends a leased handoff from outside: the scheduler is told to free its blocks.
    pub(super) fn release(
        &mut self,
        cx: &mut ReactorContext,
        handoff: HandoffId,
        reason: &str,
    ) -> bool {
        let was_lent = self.end(cx, handoff, reason).is_some();
        if was_lent {
            self.events.push(ControlEvent::Released {
                handoff,
                reason: reason.to_owned(),
            });
        }
        was_lent
    }

    pub(super) fn watch_here(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        handoff: HandoffId,
    ) {
        if let Some(leased) = self.leased.get_mut(&handoff) {
            leased.watchers.insert(session);
            leased.is_abandoned = false;
            Self::say(
                cx,
                session,
                &ControlMessage::Opened {
                    handoff,
                    opening: leased.opening.clone(),
                },
            );
            if let Some(state) = leased.state.clone() {
                Self::say(cx, session, &ControlMessage::Finished { handoff, state });
            }
        } else if let Some(reason) = self.ended.get(&handoff) {
            Self::say(
                cx,
                session,
                &ControlMessage::Ended {
                    handoff,
                    reason: reason.clone(),
                },
            );
        } else if self.is_pending(session, handoff) {
            // Said again, it waits no longer, and takes no more of the room of others.
        } else {
            self.admit(cx, session, handoff);
        }
    }

    fn admit(&mut self, cx: &mut ReactorContext, session: SessionKey, handoff: HandoffId) {
        let watch = PendingWatch {
            handoff,
            session,
            until: cx.now + self.timeouts.open,
        };
        if let Some(PendingWatch {
            handoff, session, ..
        }) = self.pending.admit(watch)
        {
            let reason = waitlist_full("watches of handoffs that are not open", PENDING_CAP);
            Self::say(cx, session, &ControlMessage::Ended { handoff, reason });
        }
    }

    fn is_pending(&self, session: SessionKey, handoff: HandoffId) -> bool {
        let mut pending = self.pending.iter();
        pending.any(|watch| watch.is_of(session, handoff))
    }

    pub(super) fn unwatch_here(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        handoff: HandoffId,
        is_acknowledged: bool,
    ) {
        let given_up = self
            .pending
            .remove_if(|watch| watch.is_of(session, handoff));
        let waits = self.pending.iter().any(|watch| watch.handoff == handoff);
        if !given_up.is_empty() && !is_acknowledged && !waits {
            // Nobody is left to read it: once opened, it is given back at once.
            self.ended
                .insert(handoff, "its consumer gave up".to_owned());
        }
        let Some(leased) = self
            .leased
            .get_mut(&handoff)
            .filter(|leased| leased.watchers.contains(&session))
        else {
            return;
        };
        leased.watchers.remove(&session);
        if is_acknowledged {
            // Its workers have told ours, if no message was lost; this frees the blocks in any case.
            self.release(cx, handoff, "its consumer acknowledged it");
        } else {
            self.abandon(cx, handoff, "its consumer gave up");
        }
    }

    pub(super) fn abandon(&mut self, cx: &mut ReactorContext, handoff: HandoffId, reason: &str) {
        let Some(leased) = self
            .leased
            .get_mut(&handoff)
            .filter(|leased| leased.watchers.is_empty())
        else {
            return;
        };
        if leased.state.is_some() {
            self.release(cx, handoff, reason);
        } else {
            leased.is_abandoned = true;
        }
    }

    pub(super) fn expire_leases(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let now = cx.now;
        let is_late = |leased: &LeasedHandoff| {
            leased.watchers.is_empty() && leased.lease_ends.is_some_and(|at| at <= now)
        };
        let late: Vec<HandoffId> = self
            .leased
            .iter()
            .filter(|(_, leased)| is_late(leased))
            .map(|(id, _)| *id)
            .collect();
        for handoff in late {
            self.release(cx, handoff, "its lease ended before a consumer came");
        }
        self.leased
            .values()
            .filter(|leased| leased.watchers.is_empty())
            .filter_map(|leased| leased.lease_ends)
            .min()
    }

    pub(super) fn expire_pending(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let (now, expected) = (cx.now, &self.expected);
        let is_late =
            |watch: &PendingWatch| watch.until <= now && !expected.contains(&watch.handoff);
        for PendingWatch {
            handoff, session, ..
        } in self.pending.remove_if(is_late)
        {
            let reason = "the handoff is not known to its producer".to_owned();
            Self::say(cx, session, &ControlMessage::Ended { handoff, reason });
        }
        let unknown = |watch: &&PendingWatch| !expected.contains(&watch.handoff);
        let pending = self.pending.iter().filter(unknown);
        pending.map(|watch| watch.until).min()
    }
}
