//! A client's inserts: those that wait to be sent, and those that the server has not answered.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::super::INSERTS_IN_FLIGHT;
use super::super::command_queue::QueuedInsert;
use super::super::messages::{LookupMessage, TOKENS_CAP};
use super::super::tensors::Tensors;
use crate::earliest::Earliest;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::work::Completer;

/// An insert that the server has not answered. While the server answers probes, it enforces the deadline.
#[derive(Debug)]
struct SentInsert {
    num_tokens: usize,
    completer: Completer<()>,
    grace: Option<GracePeriod>,
}

/// An insert that was never sent, and why.
pub(super) type FailedInsert = (Completer<()>, Error);

#[derive(Debug, Default)]
pub(super) struct InsertQueue {
    queue: VecDeque<QueuedInsert>,
    deadlines: Earliest,
    sent: HashMap<u64, SentInsert>,
}

impl InsertQueue {
    pub(super) fn add(&mut self, insert: QueuedInsert) {
        self.deadlines.add(insert.deadline);
        self.queue.push_back(insert);
    }

    /// Sends queued inserts in order, as many as the server lets wait.
    pub(super) fn send(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        tensors: &mut Tensors,
    ) -> Vec<FailedInsert> {
        let mut failed = Vec::new();
        while let Some(insert) = self.next() {
            let QueuedInsert {
                operation,
                tokens,
                items,
                deadline,
                completer,
            } = insert;
            let num_tokens = tokens.len();
            match tensors.write(cx, session, operation, &items) {
                Ok(encoded) => {
                    let message = LookupMessage::Insert {
                        timeout: deadline.map(|at| at.saturating_duration_since(cx.now())),
                        tokens,
                        tensors: encoded.into(),
                    };
                    message.send(cx, session, operation);
                    let sent = SentInsert {
                        num_tokens,
                        completer,
                        grace: deadline.map(|at| GracePeriod::new(cx.now(), at)),
                    };
                    self.sent.insert(operation, sent);
                }
                Err(error) => {
                    tensors.release(session, operation);
                    failed.push((completer, error));
                }
            }
        }
        failed
    }

    /// The first queued insert, if the server lets it wait beside those that were sent.
    fn next(&mut self) -> Option<QueuedInsert> {
        let first = self.queue.front()?;
        let sent: usize = self.sent.values().map(|sent| sent.num_tokens).sum();
        let may_wait =
            self.sent.len() < INSERTS_IN_FLIGHT && sent + first.tokens.len() <= TOKENS_CAP;
        may_wait.then(|| self.queue.pop_front()).flatten()
    }

    /// The completer of an insert that the server has answered.
    pub(super) fn answered(&mut self, operation: u64) -> Option<Completer<()>> {
        self.sent.remove(&operation).map(|sent| sent.completer)
    }

    pub(super) fn is_sent(&self, operation: u64) -> bool {
        self.sent.contains_key(&operation)
    }

    /// Forgets a queued insert; true for one that was sent, which the server has to cancel.
    pub(super) fn withdraw(&mut self, operation: u64) -> bool {
        self.queue.retain(|insert| insert.operation != operation);
        self.is_sent(operation)
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.sent.len()
    }

    /// Removes queued inserts whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<FailedInsert> {
        if !self.deadlines.take_if_past(now) {
            return Vec::new();
        }
        let is_late = |insert: &QueuedInsert| insert.deadline.is_some_and(|at| at <= now);
        let (late, queued): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(is_late);
        for insert in &queued {
            self.deadlines.add(insert.deadline);
        }
        self.queue = queued;
        let num_sent = self.sent.len();
        late.into_iter()
            .map(|insert| (insert.completer, too_many_wait(num_sent)))
            .collect()
    }

    /// The next deadline of a queued insert.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.at()
    }

    /// Fails the session of a server whose answer is late, because it may still read what was inserted. Returns when to look
    /// again.
    pub(super) fn check_answers(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
    ) -> Option<Instant> {
        let sent = self.sent.values_mut();
        let mut next: Option<Instant> = None;
        for grace in sent.filter_map(|sent| sent.grace.as_mut()) {
            if grace.look(cx, &[session]) == AnswerStage::Over && !cx.has_failed(session) {
                cx.fail(session, unanswered());
            }
            let at = grace.next(cx, &[session]);
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        next
    }

    pub(super) fn fail_all(&mut self, error: &Error) {
        let queued = self.queue.drain(..).map(|insert| insert.completer);
        let sent = self.sent.drain().map(|(_, sent)| sent.completer);
        for completer in queued.chain(sent) {
            completer.complete(Err(error.clone()));
        }
    }
}

fn too_many_wait(num_sent: usize) -> Error {
    Error::Exhausted(format!(
        "{num_sent} earlier inserts of this buffer wait for place, as many as may ({INSERTS_IN_FLIGHT}, with {TOKENS_CAP} tokens together); nothing was inserted, the buffer is usable"
    ))
}

fn unanswered() -> Error {
    Error::Timeout(
        "the server did not answer an insert in time; whether it was inserted is not known; the buffer is closed, connect again".to_owned(),
    )
}
