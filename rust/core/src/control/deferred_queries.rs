//! Who is to be told once of a handoff here: that its prefill ends soon, or that a consumer has come. Whatever changes
//! a handoff says nothing of it: each round of the reactor ends with a look at those who wait.

use std::time::{Duration, Instant};

use super::messages::ControlMessage;
use super::service::{ControlService, PENDING_CAP};
use crate::ids::{HandoffId, SessionKey};
use crate::reactor::ReactorContext;
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// What a deferred query waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    /// That the predicted end of the prefill is no further away than this.
    End { lead: Duration },
    /// That somebody watches it.
    Consumer,
}

/// A query that is answered later.
#[derive(Debug)]
pub(super) struct DeferredQuery {
    pub(super) handoff: HandoffId,
    pub(super) session: SessionKey,
    /// Of the query.
    pub(super) id: u64,
    pub(super) condition: Condition,
    /// When it ends if the handoff is not known by then.
    pub(super) until: Instant,
}

impl Waiter for DeferredQuery {
    fn session(&self) -> SessionKey {
        self.session
    }
}

/// How a deferred query ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DeferredReply {
    /// Prefill is predicted to end after this time.
    Due(Duration),
    /// What was left of it by the prediction, if there was one.
    Finished(Option<Duration>),
    Watched,
    Ended(String),
}

impl DeferredReply {
    fn to_json(&self) -> String {
        match self {
            Self::Due(remaining) => {
                let remaining = remaining.as_secs_f64();
                format!(r#"{{"moment": "due", "remaining_s": {remaining}}}"#)
            }
            Self::Finished(None) => r#"{"moment": "finished"}"#.to_owned(),
            Self::Finished(Some(remaining)) => {
                let remaining = remaining.as_secs_f64();
                format!(r#"{{"moment": "finished", "remaining_s": {remaining}}}"#)
            }
            Self::Watched => r#"{"moment": "watched"}"#.to_owned(),
            Self::Ended(reason) => {
                let reason = quoted(reason);
                format!(r#"{{"moment": "ended", "reason": {reason}}}"#)
            }
        }
    }
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let quoted = text.chars().map(|char| match char {
        '"' | '\\' => format!("\\{char}"),
        '\0'..='\x1f' => format!("\\u{:04x}", u32::from(char)),
        _ => char.to_string(),
    });
    format!("\"{}\"", quoted.collect::<String>())
}

impl ControlService {
    pub(super) fn subscribe_here(&mut self, cx: &mut ReactorContext, deferred: DeferredQuery) {
        if let Some(refused) = self.deferred_queries.admit(deferred) {
            let reason = waitlist_full("deferred_queries", PENDING_CAP);
            tell(cx, &refused, &DeferredReply::Ended(reason));
        }
    }

    /// Producer: a prefill is predicted to end then; whether it is under way.
    pub(super) fn progress(&mut self, handoff: &HandoffId, ends_at: Instant) -> bool {
        let open = self.leased.get_mut(handoff).filter(|it| it.state.is_none());
        open.map(|leased| leased.ends_at = Some(ends_at)).is_some()
    }

    pub(super) fn expire_deferred(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let mut waitlist =
            std::mem::replace(&mut self.deferred_queries, FairWaitlist::new(PENDING_CAP));
        waitlist.remove_if(|it| {
            let moment = self.moment(it, cx.now);
            moment.map(|moment| tell(cx, it, &moment)).is_some()
        });
        self.deferred_queries = waitlist;
        let waiting = self.deferred_queries.iter();
        waiting.filter_map(|it| self.look_again_at(it)).min()
    }

    /// What is to be said to a subscriber, once there is something.
    pub(super) fn moment(&self, it: &DeferredQuery, now: Instant) -> Option<DeferredReply> {
        let Some(leased) = self.leased.get(&it.handoff) else {
            return self.moment_of_what_is_not_lent(it, now);
        };
        match it.condition {
            Condition::Consumer => (!leased.watchers.is_empty()).then_some(DeferredReply::Watched),
            Condition::End { .. } if leased.state.is_some() => Some(DeferredReply::Finished(
                leased.ends_at.map(|end| end.saturating_duration_since(now)),
            )),
            Condition::End { lead } => {
                let remaining = leased.ends_at?.saturating_duration_since(now);
                (remaining <= lead).then_some(DeferredReply::Due(remaining))
            }
        }
    }

    fn moment_of_what_is_not_lent(
        &self,
        it: &DeferredQuery,
        now: Instant,
    ) -> Option<DeferredReply> {
        if let Some(reason) = self.ended.get(&it.handoff) {
            return Some(DeferredReply::Ended(reason.clone()));
        }
        let is_late = it.until <= now && !self.expected.contains(&it.handoff);
        is_late.then(|| DeferredReply::Ended("the handoff is not known to its producer".to_owned()))
    }

    /// When there is something to say to a subscriber if nothing happens until then.
    pub(super) fn look_again_at(&self, it: &DeferredQuery) -> Option<Instant> {
        match (self.leased.get(&it.handoff), it.condition) {
            (Some(leased), Condition::End { lead }) => leased.ends_at?.checked_sub(lead),
            (Some(_), Condition::Consumer) => None,
            (None, _) => (!self.expected.contains(&it.handoff)).then_some(it.until),
        }
    }
}

fn tell(cx: &mut ReactorContext, deferred: &DeferredQuery, moment: &DeferredReply) {
    let answer = ControlMessage::Reply {
        id: deferred.id,
        json: moment.to_json(),
    };
    ControlService::say(cx, deferred.session, &answer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_any_characters_stays_json() {
        assert_eq!(quoted("a \"b\"\\\n\u{1}é"), r#""a \"b\"\\\u000a\u0001é""#);
    }
}
