//! Queries from here to other control ports, until each has its reply.

use std::collections::HashMap;
use std::time::Instant;

use super::messages::ControlMessage;
use super::service::ControlOutbox;
use super::{ControlQuery, ControlReply};
use crate::error::Error;
use crate::ids::SessionKey;
use crate::multimap::Multimap;
use crate::reactor::Timers;
use crate::work::Completer;

#[derive(Debug)]
pub(super) struct PendingQuery {
    pub(super) address: String,
    pub(super) query: ControlQuery,
    pub(super) deadline: Instant,
    pub(super) completer: Completer<ControlReply>,
}

/// The ids of a session's queries are in the order of their calls: of two predictions of a prefill's end the later one must
/// arrive last.
#[derive(Default)]
pub(super) struct PendingQueries {
    next_id: u64,
    pending: HashMap<u64, (SessionKey, PendingQuery)>,
    of_sessions: Multimap<SessionKey, u64>,
    deadlines: Timers<u64>,
}

impl PendingQueries {
    /// Adds a query over a session. It is sent now, or when the session is established.
    pub(super) fn add(
        &mut self,
        out: &mut ControlOutbox,
        session: SessionKey,
        pending: PendingQuery,
        is_up: bool,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        if is_up {
            let query = pending.query.clone();
            out.send(session, ControlMessage::Query { id, query });
        }
        self.of_sessions.insert(session, id);
        self.deadlines.set(id, pending.deadline);
        self.pending.insert(id, (session, pending));
    }

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("pending queries", self.pending.len()),
            ("sessions of pending queries", self.of_sessions.len()),
            ("deadlines of pending queries", self.deadlines.len()),
        ]
    }

    pub(super) fn session_up(&self, out: &mut ControlOutbox, session: SessionKey) {
        for &id in self.of_sessions.get(&session) {
            if let Some((_, pending)) = self.pending.get(&id) {
                let query = pending.query.clone();
                out.send(session, ControlMessage::Query { id, query });
            }
        }
    }

    pub(super) fn reply(&mut self, session: SessionKey, id: u64, reply: ControlReply) {
        let pending = self.pending.get(&id);
        if pending.is_some_and(|(other, _)| *other == session)
            && let Some(pending) = self.remove(id)
        {
            let is_reply = pending.query.is_answered_by(&reply);
            let none = || Error::protocol("a control port replies to another query");
            let replied = is_reply.then_some(reply).ok_or_else(none);
            pending.completer.complete(replied);
        }
    }

    fn remove(&mut self, id: u64) -> Option<PendingQuery> {
        let (session, pending) = self.pending.remove(&id)?;
        self.of_sessions.remove(session, &id);
        self.deadlines.cancel(id);
        Some(pending)
    }

    pub(super) fn session_down(&mut self, session: SessionKey, error: &Error) {
        for id in self.of_sessions.remove_key(&session) {
            if let Some(pending) = self.remove(id) {
                pending.completer.complete(Err(error.clone()));
            }
        }
    }

    /// Ends queries without a reply in time, and returns the next deadline.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Instant> {
        while let Some(id) = self.deadlines.pop_expired(now) {
            if let Some(pending) = self.remove(id) {
                let text = format!("{} did not answer in time", pending.address);
                pending.completer.complete(Err(Error::Timeout(text)));
            }
        }
        self.deadlines.next()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::work::{Work, work};

    fn query(deadline: Instant) -> (Work<ControlReply>, PendingQuery) {
        let (replied, completer) = work();
        let query = PendingQuery {
            address: "127.0.0.1:9".to_owned(),
            query: ControlQuery::Describe,
            deadline,
            completer,
        };
        (replied, query)
    }

    #[test]
    fn a_query_that_was_never_sent_ends_at_its_deadline_with_the_address() {
        let (mut queries, now) = (PendingQueries::default(), Instant::now());
        let (replied, query) = query(now);
        queries.add(&mut ControlOutbox::default(), 20, query, false);
        assert_eq!(queries.expire(now), None);
        let error = replied.result().expect("an end").expect_err("no answer");
        assert_eq!(error.to_string(), "127.0.0.1:9 did not answer in time");
    }

    #[test]
    fn queries_leave_in_their_order_once_the_session_is_up() {
        let (mut queries, mut out) = (PendingQueries::default(), ControlOutbox::default());
        let later = Instant::now() + Duration::from_secs(1);
        for session in [20, 21, 20] {
            queries.add(&mut out, session, query(later).1, false);
        }
        assert_eq!(out.messages, []);
        queries.session_up(&mut out, 20);
        let message = |id| {
            let query = ControlQuery::Describe;
            (20, ControlMessage::Query { id, query })
        };
        assert_eq!(out.messages, [message(0), message(2)]);
    }

    #[test]
    fn only_the_queried_session_can_reply() {
        let (mut queries, mut out) = (PendingQueries::default(), ControlOutbox::default());
        let (replied, query) = query(Instant::now());
        queries.add(&mut out, 20, query, true);
        assert_eq!(out.messages.len(), 1);
        let description = || ControlReply::Description("{}".to_owned());
        queries.reply(21, 0, description());
        assert_eq!(replied.result(), None);
        queries.reply(20, 0, description());
        assert_eq!(replied.result(), Some(Ok(description())));
    }

    #[test]
    fn a_reply_to_another_kind_of_query_is_an_error() {
        let (mut queries, mut out) = (PendingQueries::default(), ControlOutbox::default());
        let (replied, query) = query(Instant::now());
        queries.add(&mut out, 20, query, true);
        queries.reply(20, 0, ControlReply::Known(true));
        assert!(matches!(replied.result(), Some(Err(Error::Protocol(_)))));
    }

    #[test]
    fn a_query_with_its_reply_has_no_deadline_any_more() {
        let (mut queries, mut out) = (PendingQueries::default(), ControlOutbox::default());
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        for deadline in [now, later] {
            queries.add(&mut out, 20, query(deadline).1, true);
        }
        queries.reply(20, 0, ControlReply::Description(String::new()));
        assert_eq!(queries.expire(now), Some(later));
        queries.session_down(20, &Error::Closed("lost".to_owned()));
        assert_eq!(queries.expire(now), None);
        let sizes = queries.sizes();
        assert!(sizes.iter().all(|(_, size)| *size == 0), "{sizes:?}");
    }
}
