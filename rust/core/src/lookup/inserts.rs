//! A client's inserts: those that wait to be sent, and those that its server has not answered.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::messages::{INSERT, TOKENS_CAP, write_timeout, write_tokens};
use super::tensors::Tensors;
use super::transfer::seal;
use super::{INSERTS_IN_FLIGHT, Items};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Writer;
use crate::session::ReactorContext;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transport::Payload;
use crate::work::Completer;

/// An insert that has not been sent.
#[derive(Debug)]
pub(super) struct QueuedInsert {
    pub(super) operation: u64,
    pub(super) tokens: Vec<i64>,
    pub(super) items: Items,
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<()>,
}

/// One that the server has not answered. It sees to the deadline itself, as long as it is awake.
#[derive(Debug)]
struct SentInsert {
    num_tokens: usize,
    completer: Completer<()>,
    grace: Option<GracePeriod>,
}

#[derive(Debug, Default)]
pub(super) struct InsertQueue {
    queue: VecDeque<QueuedInsert>,
    deadlines: Earliest,
    sent: HashMap<u64, SentInsert>,
    /// Those that have failed, until their callers are told.
    failed: Vec<(Completer<()>, Error)>,
}

impl InsertQueue {
    pub(super) fn add(&mut self, insert: QueuedInsert) {
        self.deadlines.add(insert.deadline);
        self.queue.push_back(insert);
    }

    /// Sends the first ones, as far as the server lets many wait.
    pub(super) fn post(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        tensors: &mut Tensors,
    ) {
        while let Some(insert) = self.next() {
            match send(cx, session, tensors, &insert) {
                Ok(()) => {
                    let grace = insert.deadline.map(|at| GracePeriod::new(cx.now(), at));
                    let completer = insert.completer;
                    let sent = SentInsert {
                        num_tokens: insert.tokens.len(),
                        completer,
                        grace,
                    };
                    self.sent.insert(insert.operation, sent);
                }
                Err(error) => {
                    tensors.release(session, insert.operation);
                    self.failed.push((insert.completer, error));
                }
            }
        }
    }

    /// The first one, if the server lets it wait beside those that were sent.
    fn next(&mut self) -> Option<QueuedInsert> {
        let first = self.queue.front()?;
        let sent: usize = self.sent.values().map(|sent| sent.num_tokens).sum();
        let may_wait =
            self.sent.len() < INSERTS_IN_FLIGHT && sent + first.tokens.len() <= TOKENS_CAP;
        may_wait.then(|| self.queue.pop_front()).flatten()
    }

    /// Who has to be told of what.
    pub(super) fn take_failed(&mut self) -> Vec<(Completer<()>, Error)> {
        std::mem::take(&mut self.failed)
    }

    /// Who waits for an insert that has just been answered.
    pub(super) fn answered(&mut self, operation: u64) -> Option<Completer<()>> {
        self.sent.remove(&operation).map(|sent| sent.completer)
    }

    pub(super) fn is_sent(&self, operation: u64) -> bool {
        self.sent.contains_key(&operation)
    }

    /// Forgets one that was not sent; whether the server has to be told of one that was.
    pub(super) fn withdraw(&mut self, operation: u64) -> bool {
        self.queue.retain(|insert| insert.operation != operation);
        self.is_sent(operation)
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.sent.len()
    }

    /// Ends those that were not sent in time, and tells when to come back.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Instant> {
        if self.deadlines.take_if_past(now) {
            let is_late = |insert: &QueuedInsert| insert.deadline.is_some_and(|at| at <= now);
            let (late, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(is_late);
            for insert in late {
                self.failed
                    .push((insert.completer, crowded(self.sent.len())));
            }
            for insert in &kept {
                self.deadlines.add(insert.deadline);
            }
            self.queue = kept;
        }
        self.deadlines.at()
    }

    /// Ends the link to a server that is too late with an answer: it may be reading what was inserted. Tells when
    /// to come back.
    pub(super) fn watch(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
    ) -> Option<Instant> {
        let waits = self
            .sent
            .values_mut()
            .filter_map(|sent| sent.grace.as_mut());
        let mut next: Option<Instant> = None;
        for grace in waits {
            match grace.look(cx, &[session]) {
                AnswerStage::Over if !cx.has_failed(session) => cx.fail(session, unanswered()),
                _ => {}
            }
            let at = grace.next(cx, &[session]);
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        next
    }

    pub(super) fn fail(&mut self, error: &Error) {
        for insert in self.queue.drain(..) {
            insert.completer.complete(Err(error.clone()));
        }
        for (_, sent) in self.sent.drain() {
            sent.completer.complete(Err(error.clone()));
        }
    }
}

fn crowded(num_sent: usize) -> Error {
    Error::Exhausted(format!(
        "{num_sent} earlier inserts of this buffer wait for place, as many as may ({INSERTS_IN_FLIGHT}, with {TOKENS_CAP} tokens together); nothing was inserted, the buffer is usable"
    ))
}

fn unanswered() -> Error {
    Error::Timeout(
        "the server did not answer an insert in time; whether it was inserted is not known; the buffer is closed, connect again".to_owned(),
    )
}

fn send(
    cx: &mut ReactorContext,
    session: SessionKey,
    tensors: &mut Tensors,
    insert: &QueuedInsert,
) -> Result<()> {
    let left = insert
        .deadline
        .map(|at| at.saturating_duration_since(cx.now()));
    let writer = write_tokens(write_timeout(Writer::default(), left), &insert.tokens);
    let writer = tensors.write(cx, session, insert.operation, &insert.items, writer)?;
    let (checksum, payload) = seal(writer);
    let header = cx
        .header(session, INSERT)
        .u64(insert.operation)
        .u64(checksum);
    cx.message(session, header, Payload::Bytes(payload));
    Ok(())
}
