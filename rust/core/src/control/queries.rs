//! Queries from here to other control ports, until each has its reply.

use std::collections::BTreeMap;
use std::time::Instant;

use super::ControlQuery;
use super::messages::ControlMessage;
use super::service::ControlOutbox;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::work::Completer;

pub(super) struct PendingQuery {
    pub(super) session: SessionKey,
    pub(super) address: String,
    pub(super) query: ControlQuery,
    pub(super) deadline: Instant,
    pub(super) completer: Completer<String>,
}

/// By id, in the order of their calls: of two predictions of a prefill's end the later one must arrive last.
#[derive(Default)]
pub(super) struct PendingQueries {
    next_id: u64,
    pending: BTreeMap<u64, PendingQuery>,
}

impl PendingQueries {
    pub(super) fn add(&mut self, out: &mut ControlOutbox, query: PendingQuery, is_up: bool) {
        let id = self.next_id;
        self.next_id += 1;
        if is_up {
            out.send(query.session, query.message(id));
        }
        self.pending.insert(id, query);
    }

    pub(super) fn session_up(&self, out: &mut ControlOutbox, session: SessionKey) {
        let pending = self.pending.iter();
        for (&id, query) in pending.filter(|(_, query)| query.session == session) {
            out.send(session, query.message(id));
        }
    }

    pub(super) fn reply(&mut self, session: SessionKey, id: u64, json: String) {
        let is_theirs = |query: &PendingQuery| query.session == session;
        if self.pending.get(&id).is_some_and(is_theirs) {
            self.end(id, Ok(json));
        }
    }

    fn end(&mut self, id: u64, result: Result<String>) {
        if let Some(query) = self.pending.remove(&id) {
            query.completer.complete(result);
        }
    }

    fn ids(&self, is_wanted: impl Fn(&PendingQuery) -> bool) -> Vec<u64> {
        let pending = self.pending.iter();
        let wanted = pending.filter(|(_, query)| is_wanted(query));
        wanted.map(|(id, _)| *id).collect()
    }

    pub(super) fn session_down(&mut self, session: SessionKey, error: &Error) {
        for id in self.ids(|query| query.session == session) {
            self.end(id, Err(error.clone()));
        }
    }

    /// Ends queries without a reply in time, and returns the next deadline.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Instant> {
        for id in self.ids(|query| query.deadline <= now) {
            if let Some(PendingQuery {
                address, completer, ..
            }) = self.pending.remove(&id)
            {
                let text = format!("{address} did not answer in time");
                completer.complete(Err(Error::Timeout(text)));
            }
        }
        self.pending.values().map(|query| query.deadline).min()
    }
}

impl PendingQuery {
    fn message(&self, id: u64) -> ControlMessage {
        ControlMessage::Query {
            id,
            query: self.query,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::work::{Work, work};

    fn query(session: SessionKey, deadline: Instant) -> (Work<String>, PendingQuery) {
        let (replied, completer) = work();
        let query = PendingQuery {
            session,
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
        let (replied, query) = query(20, now);
        queries.add(&mut ControlOutbox::default(), query, false);
        assert_eq!(queries.expire(now), None);
        let error = replied.result().expect("an end").expect_err("no answer");
        assert_eq!(error.to_string(), "127.0.0.1:9 did not answer in time");
    }

    #[test]
    fn queries_leave_in_their_order_once_the_session_is_up() {
        let (mut queries, mut out) = (PendingQueries::default(), ControlOutbox::default());
        let later = Instant::now() + Duration::from_secs(1);
        for session in [20, 21, 20] {
            queries.add(&mut out, query(session, later).1, false);
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
        let (replied, query) = query(20, Instant::now());
        queries.add(&mut out, query, true);
        assert_eq!(out.messages.len(), 1);
        queries.reply(21, 0, "{}".to_owned());
        assert_eq!(replied.result(), None);
        queries.reply(20, 0, "{}".to_owned());
        assert_eq!(replied.result(), Some(Ok("{}".to_owned())));
    }
}
