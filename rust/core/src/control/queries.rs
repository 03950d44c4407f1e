//! Queries from here to other control ports, until each has its reply.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Instant;

use super::ControlQuery;
use super::messages::ControlMessage;
use super::service::ControlOutbox;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::work::Completer;

#[derive(Debug)]
pub(super) struct PendingQuery {
    pub(super) address: String,
    pub(super) query: ControlQuery,
    pub(super) deadline: Instant,
    pub(super) completer: Completer<String>,
}

/// By id, in the order of their calls: of two predictions of a prefill's end the later one must arrive last.
#[derive(Default)]
pub(super) struct PendingQueries {
    next_id: u64,
    pending: BTreeMap<u64, (SessionKey, PendingQuery)>,
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
        let (id, query) = (self.next_id, pending.query);
        self.next_id += 1;
        if is_up {
            out.send(session, ControlMessage::Query { id, query });
        }
        self.pending.insert(id, (session, pending));
    }

    /// How many have no reply.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn session_up(&self, out: &mut ControlOutbox, session: SessionKey) {
        for (&id, (other, pending)) in &self.pending {
            if *other == session {
                let query = pending.query;
                out.send(session, ControlMessage::Query { id, query });
            }
        }
    }

    pub(super) fn reply(&mut self, session: SessionKey, id: u64, json: String) {
        if let Entry::Occupied(entry) = self.pending.entry(id)
            && entry.get().0 == session
        {
            let (_, pending) = entry.remove();
            pending.completer.complete(Ok(json));
        }
    }

    fn remove_if(
        &mut self,
        is_over: impl Fn(SessionKey, &PendingQuery) -> bool,
    ) -> Vec<PendingQuery> {
        let pending = self.pending.iter();
        let over = pending.filter(|(_, (session, pending))| is_over(*session, pending));
        let ids: Vec<u64> = over.map(|(id, _)| *id).collect();
        let removed = ids.iter().filter_map(|id| self.pending.remove(id));
        removed.map(|(_, pending)| pending).collect()
    }

    pub(super) fn session_down(&mut self, session: SessionKey, error: &Error) {
        for pending in self.remove_if(|other, _| other == session) {
            pending.completer.complete(Err(error.clone()));
        }
    }

    /// Ends queries without a reply in time, and returns the next deadline.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Instant> {
        for pending in self.remove_if(|_, pending| pending.deadline <= now) {
            let text = format!("{} did not answer in time", pending.address);
            pending.completer.complete(Err(Error::Timeout(text)));
        }
        let pending = self.pending.values();
        pending.map(|(_, pending)| pending.deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::work::{Work, work};

    fn query(deadline: Instant) -> (Work<String>, PendingQuery) {
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
        queries.reply(21, 0, "{}".to_owned());
        assert_eq!(replied.result(), None);
        queries.reply(20, 0, "{}".to_owned());
        assert_eq!(replied.result(), Some(Ok("{}".to_owned())));
    }
}
