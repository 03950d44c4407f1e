//! Who is to be told once of a handoff here: that its prefill ends soon, or that a consumer has come. Whatever changes
//! a handoff says nothing of it: each round of the reactor ends with a look at those who wait.

use std::time::{Duration, Instant};

use super::messages::Message;
use super::service::{PARKED_CAP, Schedulers};
use crate::handoff::HandoffId;
use crate::reactor::{ReactorContext, SessionKey};
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// What a subscription waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// That the predicted end of the prefill is no further away than this.
    End { lead: Duration },
    /// That somebody watches it.
    Consumer,
}

/// A question that is answered later.
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) handoff: HandoffId,
    pub(super) session: SessionKey,
    /// Of the question.
    pub(super) id: u64,
    pub(super) awaited: Awaited,
    /// When it ends if the handoff is not known by then.
    pub(super) until: Instant,
}

impl Waiter for Subscription {
    fn session(&self) -> SessionKey {
        self.session
    }
}

/// How a subscription ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// Prefill is predicted to end after this time.
    Due(Duration),
    /// What was left of it by the prediction, if there was one.
    Finished(Option<Duration>),
    Watched,
    Ended(String),
}

impl Moment {
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

impl Schedulers {
    pub(super) fn subscribe_here(&mut self, cx: &mut ReactorContext, subscription: Subscription) {
        if let Some(refused) = self.subscriptions.admit(subscription) {
            let reason = waitlist_full("subscriptions", PARKED_CAP);
            tell(cx, &refused, &Moment::Ended(reason));
        }
    }

    /// Producer: a prefill is predicted to end then; whether it is under way.
    pub(super) fn progress(&mut self, handoff: &HandoffId, ends_at: Instant) -> bool {
        let open = self.leased.get_mut(handoff).filter(|it| it.state.is_none());
        open.map(|leased| leased.ends_at = Some(ends_at)).is_some()
    }

    pub(super) fn expire_subscriptions(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let mut waitlist =
            std::mem::replace(&mut self.subscriptions, FairWaitlist::new(PARKED_CAP));
        waitlist.remove_if(|it| {
            let moment = self.moment(it, cx.now);
            moment.map(|moment| tell(cx, it, &moment)).is_some()
        });
        self.subscriptions = waitlist;
        let waiting = self.subscriptions.iter();
        waiting.filter_map(|it| self.look_again_at(it)).min()
    }

    /// What is to be said to a subscriber, once there is something.
    pub(super) fn moment(&self, it: &Subscription, now: Instant) -> Option<Moment> {
        let Some(leased) = self.leased.get(&it.handoff) else {
            return self.moment_of_what_is_not_lent(it, now);
        };
        match it.awaited {
            Awaited::Consumer => (!leased.watchers.is_empty()).then_some(Moment::Watched),
            Awaited::End { .. } if leased.state.is_some() => Some(Moment::Finished(
                leased.ends_at.map(|end| end.saturating_duration_since(now)),
            )),
            Awaited::End { lead } => {
                let remaining = leased.ends_at?.saturating_duration_since(now);
                (remaining <= lead).then_some(Moment::Due(remaining))
            }
        }
    }

    fn moment_of_what_is_not_lent(&self, it: &Subscription, now: Instant) -> Option<Moment> {
        if let Some(reason) = self.ended.get(&it.handoff) {
            return Some(Moment::Ended(reason.clone()));
        }
        let is_late = it.until <= now && !self.expected.contains(&it.handoff);
        is_late.then(|| Moment::Ended("the handoff is not known to its producer".to_owned()))
    }

    /// When there is something to say to a subscriber if nothing happens until then.
    pub(super) fn look_again_at(&self, it: &Subscription) -> Option<Instant> {
        match (self.leased.get(&it.handoff), it.awaited) {
            (Some(leased), Awaited::End { lead }) => leased.ends_at?.checked_sub(lead),
            (Some(_), Awaited::Consumer) => None,
            (None, _) => (!self.expected.contains(&it.handoff)).then_some(it.until),
        }
    }
}

fn tell(cx: &mut ReactorContext, subscription: &Subscription, moment: &Moment) {
    let answer = Message::Answer {
        id: subscription.id,
        json: moment.to_json(),
    };
    Schedulers::say(cx, subscription.session, &answer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_any_characters_stays_json() {
        assert_eq!(quoted("a \"b\"\\\n\u{1}é"), r#""a \"b\"\\\u000a\u0001é""#);
    }
}
