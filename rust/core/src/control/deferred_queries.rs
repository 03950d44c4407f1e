//! Queries to this control port that have no reply yet: they wait for a handoff's prefill to end soon, or for its consumer.
//! Each round of the reactor looks at the new ones, at those of handoffs that have changed, and at those that are due.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::messages::ControlMessage;
use super::producer::{HandoffStatus, OpenHandoff, ProducerRole, UNKNOWN_HANDOFF};
use super::service::ControlOutbox;
use super::{ControlReply, Moment};
use crate::ids::{HandoffId, SessionKey};
use crate::session::fair_waitlist::{FairWaitlist, Waiter, waitlist_full};

/// Queries that may wait: bounds what peers make this engine remember.
pub(super) const DEFERRED_CAP: usize = 1024;

/// Condition for the reply to a deferred query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyCondition {
    /// The predicted end of prefill is at most `lead` away.
    PrefillEnd { lead: Duration },
    /// A consumer watches the handoff.
    Consumer,
}

#[derive(Debug)]
pub(super) struct DeferredQuery {
    pub(super) session: SessionKey,
    pub(super) id: u64,
    pub(super) handoff: HandoffId,
    pub(super) condition: ReplyCondition,
    /// Time at which the query ends if its handoff is still unknown.
    pub(super) deadline: Instant,
}

impl Waiter for DeferredQuery {
    fn session(&self) -> SessionKey {
        self.session
    }

    fn handoff(&self) -> HandoffId {
        self.handoff
    }
}

impl DeferredQuery {
    fn send_reply(&self, out: &mut ControlOutbox, moment: Moment) {
        let (id, reply) = (self.id, ControlReply::Moment(moment));
        out.send(self.session, ControlMessage::Reply { id, reply });
    }

    /// The reply, once the condition holds or never will.
    fn reply(&self, now: Instant, producer: &ProducerRole) -> Option<Moment> {
        let ended = |reason: &str| Some(Moment::Ended(reason.to_owned()));
        match producer.status(&self.handoff) {
            HandoffStatus::Open(open) => self.reply_about(open, now),
            HandoffStatus::Ended(reason) => ended(reason),
            HandoffStatus::Unknown if self.deadline <= now => ended(UNKNOWN_HANDOFF),
            HandoffStatus::Unknown | HandoffStatus::Expected => None,
        }
    }

    fn reply_about(&self, open: &OpenHandoff, now: Instant) -> Option<Moment> {
        let prefill_ends = open.prefill_ends;
        let remaining = prefill_ends.map(|at| at.saturating_duration_since(now));
        match self.condition {
            ReplyCondition::Consumer => (!open.watchers.is_empty()).then_some(Moment::Watched),
            ReplyCondition::PrefillEnd { .. } if open.finished.is_some() => {
                Some(Moment::Finished(remaining))
            }
            ReplyCondition::PrefillEnd { lead } => {
                remaining.filter(|it| *it <= lead).map(Moment::Due)
            }
        }
    }

    /// Time of the reply if nothing else happens until then.
    fn next_look(&self, producer: &ProducerRole) -> Option<Instant> {
        match (producer.status(&self.handoff), self.condition) {
            (HandoffStatus::Open(open), ReplyCondition::PrefillEnd { lead }) => {
                open.prefill_ends?.checked_sub(lead)
            }
            (HandoffStatus::Unknown, _) => Some(self.deadline),
            _ => None,
        }
    }
}

/// The deadline of each is when to look at it again, whatever happens to its handoff.
pub(super) struct DeferredQueries(FairWaitlist<DeferredQuery>);

impl Default for DeferredQueries {
    fn default() -> Self {
        Self(FairWaitlist::new(DEFERRED_CAP))
    }
}

impl DeferredQueries {
    /// Adds a query, which the next [`poll`](Self::poll) looks at.
    pub(super) fn add(&mut self, out: &mut ControlOutbox, now: Instant, query: DeferredQuery) {
        if let Some(displaced) = self.0.admit(query, Some(now)) {
            let reason = waitlist_full("subscriptions", DEFERRED_CAP);
            displaced.send_reply(out, Moment::Ended(reason));
        }
    }

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.0.sizes([
            "deferred queries",
            "sessions of deferred queries",
            "handoffs of deferred queries",
            "deadlines of deferred queries",
        ])
    }

    pub(super) fn session_down(&mut self, session: SessionKey) {
        self.0.remove_session(session);
    }

    /// Replies to queries whose condition holds, and returns when to look again.
    pub(super) fn poll(
        &mut self,
        out: &mut ControlOutbox,
        now: Instant,
        producer: &mut ProducerRole,
    ) -> Option<Instant> {
        // In the order of their admissions.
        let mut due = BTreeSet::new();
        for handoff in producer.drain_changed() {
            due.extend(self.0.of_handoff(&handoff));
        }
        due.extend(std::iter::from_fn(|| self.0.pop_expired(now)));
        for number in due {
            let Some(query) = self.0.get(number) else {
                continue;
            };
            if let Some(moment) = query.reply(now, producer) {
                query.send_reply(out, moment);
                self.0.remove(number);
            } else {
                let next_look = query.next_look(producer);
                self.0.set_deadline(number, next_look);
            }
        }
        self.0.next_deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::super::producer::tests::{opening, producer};
    use super::*;

    const ID: HandoffId = [1; 16];
    const LEAD: Duration = Duration::from_secs(2);

    fn query(now: Instant, condition: ReplyCondition) -> DeferredQuery {
        DeferredQuery {
            session: 20,
            id: 0,
            handoff: ID,
            condition,
            deadline: now + Duration::from_secs(60),
        }
    }

    fn opened() -> ProducerRole {
        let mut producer = producer();
        producer.open(&mut ControlOutbox::default(), ID, opening());
        producer
    }

    #[test]
    fn a_query_is_due_when_the_predicted_end_is_its_lead_away_and_not_before() {
        let (mut producer, begun) = (opened(), Instant::now());
        let it = query(begun, ReplyCondition::PrefillEnd { lead: LEAD });
        assert_eq!(it.next_look(&producer), None, "no prediction");
        producer.predict_end(&ID, begun + Duration::from_secs(5));
        let due = begun + Duration::from_secs(3);
        assert_eq!(it.next_look(&producer), Some(due));
        let before = due.checked_sub(Duration::from_micros(1)).unwrap();
        assert_eq!(it.reply(before, &producer), None);
        assert_eq!(it.reply(due, &producer), Some(Moment::Due(LEAD)));
        let late = begun + Duration::from_secs(9);
        let overdue = Some(Moment::Due(Duration::ZERO));
        assert_eq!(it.reply(late, &producer), overdue);
    }

    #[test]
    fn a_later_prediction_replaces_an_earlier_one() {
        let (mut producer, begun) = (opened(), Instant::now());
        let it = query(begun, ReplyCondition::PrefillEnd { lead: LEAD });
        for seconds in [5, 8, 4] {
            let ends_at = begun + Duration::from_secs(seconds);
            producer.predict_end(&ID, ends_at);
            assert_eq!(it.next_look(&producer), ends_at.checked_sub(LEAD));
        }
    }

    #[test]
    fn a_handoff_opened_again_has_no_prediction_until_one_is_made() {
        let (mut producer, now) = (opened(), Instant::now());
        producer.predict_end(&ID, now);
        producer.open(&mut ControlOutbox::default(), ID, opening());
        let it = query(now, ReplyCondition::PrefillEnd { lead: LEAD });
        assert_eq!(it.reply(now, &producer), None);
    }

    #[test]
    fn a_query_about_an_expected_handoff_has_no_deadline() {
        let (mut producer, now) = (producer(), Instant::now());
        let it = query(now, ReplyCondition::Consumer);
        let late = it.deadline + Duration::from_secs(1);
        assert_eq!(it.next_look(&producer), Some(it.deadline));
        let unknown = Moment::Ended(UNKNOWN_HANDOFF.to_owned());
        assert_eq!(it.reply(late, &producer), Some(unknown));
        producer.expect(ID);
        assert_eq!(it.next_look(&producer), None);
        assert_eq!(it.reply(late, &producer), None);
    }

    fn replies(out: &mut ControlOutbox) -> Vec<Moment> {
        let replied = out.messages.drain(..).map(|(_, message)| match message {
            ControlMessage::Reply {
                reply: ControlReply::Moment(moment),
                ..
            } => moment,
            other => panic!("{other:?}"),
        });
        replied.collect()
    }

    #[test]
    fn a_round_replies_to_new_queries_to_those_of_changed_handoffs_and_to_due_ones() {
        let (mut deferred, mut out) = (DeferredQueries::default(), ControlOutbox::default());
        let (mut producer, begun) = (producer(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let ending = query(begun, ReplyCondition::PrefillEnd { lead: LEAD });
        let deadline = ending.deadline;
        deferred.add(&mut out, begun, ending);
        let round = |deferred: &mut DeferredQueries, producer: &mut ProducerRole, now| {
            let mut out = ControlOutbox::default();
            let next = deferred.poll(&mut out, now, producer);
            (next, replies(&mut out))
        };
        let none: Vec<Moment> = Vec::new();
        let of_round = round(&mut deferred, &mut producer, begun);
        assert_eq!(of_round, (Some(deadline), none.clone()), "unknown");
        producer.expect(ID);
        let of_round = round(&mut deferred, &mut producer, deadline);
        assert_eq!(of_round, (None, none.clone()), "expected");
        producer.open(&mut out, ID, opening());
        let of_round = round(&mut deferred, &mut producer, at(0));
        assert_eq!(of_round, (None, none.clone()), "no prediction");
        producer.predict_end(&ID, at(5));
        let of_round = round(&mut deferred, &mut producer, at(0));
        assert_eq!(of_round, (Some(at(3)), none.clone()), "predicted");
        let due = vec![Moment::Due(LEAD)];
        let of_round = round(&mut deferred, &mut producer, at(3));
        assert_eq!(of_round, (None, due.clone()), "due");
        deferred.add(
            &mut out,
            at(3),
            query(begun, ReplyCondition::PrefillEnd { lead: LEAD }),
        );
        let of_round = round(&mut deferred, &mut producer, at(3));
        assert_eq!(of_round, (None, due), "asked when it was due");
        deferred.add(&mut out, at(3), query(begun, ReplyCondition::Consumer));
        assert_eq!(round(&mut deferred, &mut producer, at(3)), (None, none));
        producer.watch(&mut out, at(3), 21, ID);
        let of_round = round(&mut deferred, &mut producer, at(3));
        assert_eq!(of_round, (None, vec![Moment::Watched]));
        producer.end_handoff(&mut out, ID, "aborted");
        deferred.add(&mut out, at(3), query(begun, ReplyCondition::Consumer));
        let of_round = round(&mut deferred, &mut producer, at(3));
        assert_eq!(of_round, (None, vec![Moment::Ended("aborted".to_owned())]));
    }

    #[test]
    fn deferred_queries_are_capped_without_shutting_out_another_peer() {
        let (mut deferred, now) = (DeferredQueries::default(), Instant::now());
        let mut out = ControlOutbox::default();
        for _ in 0..=DEFERRED_CAP {
            deferred.add(&mut out, now, query(now, ReplyCondition::Consumer));
        }
        assert_eq!(deferred.0.iter().len(), DEFERRED_CAP);
        assert_eq!(out.messages.len(), 1, "one has its reply");
        let other = DeferredQuery {
            session: 21,
            ..query(now, ReplyCondition::Consumer)
        };
        deferred.add(&mut out, now, other);
        let of_other = deferred.0.iter().filter(|it| it.session == 21);
        assert_eq!(
            (of_other.count(), deferred.0.iter().len()),
            (1, DEFERRED_CAP)
        );
    }

    #[test]
    fn deferred_queries_end_with_their_session() {
        let (mut deferred, mut out) = (DeferredQueries::default(), ControlOutbox::default());
        let now = Instant::now();
        deferred.add(&mut out, now, query(now, ReplyCondition::Consumer));
        deferred.session_down(20);
        assert_eq!(deferred.0.iter().len(), 0);
    }
}
