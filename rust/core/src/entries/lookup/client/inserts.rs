//! A client's inserts: those that wait to be sent, and those that the server has not answered.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::super::Items;
use super::super::command_queue::QueuedInsert;
use super::LookupClient;
use crate::earliest::Earliest;
use crate::entries::carrying::{carry, withdraw_parts};
use crate::entries::content::write_metas;
use crate::entries::items::INSERTS_IN_FLIGHT;
use crate::entries::messages::{Carried, EntryMessage};
use crate::entries::state::TOKEN_BYTES;
use crate::entries::{INLINE_CAP, TOKENS_CAP, source_id};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transfer::Cx;
use crate::work::Completer;

/// An insert that the server has not answered. The server enforces the deadline while it waits for space.
#[derive(Debug)]
pub(super) struct SentInsert {
    /// Bytes of its key.
    num_key: usize,
    completer: Completer<()>,
    /// `None` without a deadline, and once the caller knows that it is late.
    grace: Option<GracePeriod>,
    /// The deadline has passed, and the server was asked to cancel it.
    is_cancelled: bool,
}

#[derive(Debug, Default)]
pub(super) struct Inserts {
    /// They wait to be sent.
    pub(super) queue: VecDeque<QueuedInsert>,
    deadlines: Earliest,
    /// Time of the next check for late answers.
    next_look: Option<Instant>,
    pub(super) sent: HashMap<u64, SentInsert>,
}

impl Inserts {
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.at().into_iter().chain(self.next_look).min()
    }
}

const LATE: EntryMessage<'static> = EntryMessage::Cancel {
    is_withdrawn: false,
};
const WITHDRAWN: EntryMessage<'static> = EntryMessage::Cancel { is_withdrawn: true };

impl LookupClient {
    pub(super) fn insert(&mut self, cx: &mut Cx<'_>, insert: QueuedInsert) {
        if let Err(error) = self.check_usable() {
            return insert.into_completer().complete(Err(error));
        }
        self.inserts.deadlines.add(insert.deadline);
        self.inserts.queue.push_back(insert);
        self.send_inserts(cx);
    }

    /// Sends queued inserts in order to the first server, as many as it lets wait.
    fn send_inserts(&mut self, cx: &mut Cx<'_>) {
        let first = self.sessions.first().copied();
        let Some(session) = first.filter(|first| self.servers.contains(first)) else {
            return;
        };
        while let Some(insert) = self.next_insert() {
            let QueuedInsert {
                operation,
                key,
                items,
                deadline,
                completer,
            } = insert;
            match self.carry(cx, (session, operation), &items) {
                Ok((record, parts)) => {
                    let sent = SentInsert {
                        num_key: key.len(),
                        completer,
                        grace: deadline.map(|at| GracePeriod::new(cx.links.now(), at)),
                        is_cancelled: false,
                    };
                    let message = EntryMessage::Put {
                        key: (&key[..]).into(),
                        ttl: None,
                        timeout: deadline.map(|at| at.saturating_duration_since(cx.links.now())),
                        is_hashed: false,
                        record: record.into(),
                        parts,
                    };
                    message.send(cx.links, session, operation);
                    self.inserts.sent.insert(operation, sent);
                }
                Err(error) => {
                    withdraw_parts(cx, &mut self.exposed, (session, operation));
                    drop(items); // before the insert completes
                    self.end(Some(completer), Err(error));
                }
            }
        }
    }

    /// The record and the tensors as a message carries them: those that are too large are exposed until the server has answered.
    fn carry(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): (SessionKey, u64),
        items: &Items,
    ) -> Result<(Vec<u8>, Vec<Carried<'static>>)> {
        let record = write_metas(&items.metas())?;
        let mut space = INLINE_CAP;
        let mut parts = Vec::new();
        for item in &items.0 {
            let Some(buffer) = &item.buffer else { continue };
            let source = (session, source_id(operation, parts.len()));
            let exposed = &mut self.exposed;
            let part = carry(
                cx,
                exposed,
                source,
                self.integrity,
                (buffer, None),
                &mut space,
            )?;
            parts.push(part);
        }
        Ok((record, parts))
    }

    /// The first queued insert, if the server lets it wait beside those that were sent.
    fn next_insert(&mut self) -> Option<QueuedInsert> {
        let Inserts { queue, sent, .. } = &mut self.inserts;
        let num_key: usize = sent.values().map(|sent| sent.num_key).sum();
        let may_wait = sent.len() < INSERTS_IN_FLIGHT
            && num_key + queue.front()?.key.len() <= TOKENS_CAP * TOKEN_BYTES;
        may_wait.then(|| queue.pop_front()).flatten()
    }

    pub(super) fn insert_answered(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        result: Result<()>,
    ) {
        withdraw_parts(cx, &mut self.exposed, (session, operation));
        if let Some(sent) = self.inserts.sent.remove(&operation) {
            self.command_queue
                .update_info(|info| info.num_inserted += u64::from(result.is_ok()));
            let result = match result {
                // Other errors are the server's own reasons.
                Err(Error::Unavailable(_)) if sent.is_cancelled => Err(late()),
                result => result,
            };
            self.end(Some(sent.completer), result);
        }
        self.send_inserts(cx);
    }

    /// Ends queued inserts whose deadline has passed, and looks for answers that are late.
    pub(super) fn expire_inserts(&mut self, cx: &mut Cx<'_>) {
        if self.inserts.deadlines.clear_if_past(cx.links.now()) {
            let is_late =
                |insert: &QueuedInsert| insert.deadline.is_some_and(|at| at <= cx.links.now());
            let queued = std::mem::take(&mut self.inserts.queue);
            let (late, kept): (VecDeque<_>, _) = queued.into_iter().partition(is_late);
            self.inserts.queue = kept;
            for insert in &self.inserts.queue {
                self.inserts.deadlines.add(insert.deadline);
            }
            for insert in late {
                let full = too_many_wait(self.inserts.sent.len());
                self.end(Some(insert.into_completer()), Err(full));
            }
        }
        // A smaller insert may be the first now, and fit.
        self.send_inserts(cx);
        self.inserts.next_look = self.check_answers(cx);
    }

    /// Cancels inserts whose tensors are still transferred well after the deadline. Where the server does not answer that
    /// within the grace period, the insert fails unsettled: the server may still be reading. Returns when to look again.
    fn check_answers(&mut self, cx: &mut Cx<'_>) -> Option<Instant> {
        let session = *self.sessions.first()?;
        let mut next: Option<Instant> = None;
        for (operation, sent) in &mut self.inserts.sent {
            let Some(grace) = &mut sent.grace else {
                continue;
            };
            let stage = grace.look(cx.links, &[session]);
            let is_late = stage != AnswerStage::InTime && grace.is_time_to_cancel(cx.links.now());
            match stage {
                _ if is_late && !sent.is_cancelled => {
                    sent.is_cancelled = true;
                    if stage != AnswerStage::Late {
                        grace.due_from(cx.links.now());
                    }
                    LATE.send(cx.links, session, *operation);
                }
                AnswerStage::Overdue => {
                    sent.grace = None;
                    if !sent.is_cancelled {
                        sent.is_cancelled = true; // a silent server may go on later
                        LATE.send(cx.links, session, *operation);
                    }
                    sent.completer.complete_unsettled(Err(unanswered()));
                    continue;
                }
                AnswerStage::InTime | AnswerStage::Late => {}
            }
            let at = grace.next(cx.links, &[session]);
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        next
    }

    /// Forgets a queued insert, or has the server cancel one that was sent.
    pub(super) fn withdraw_insert(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let queue = &mut self.inserts.queue;
        queue.retain(|insert| insert.operation != operation);
        if self.inserts.sent.contains_key(&operation)
            && let Some(&session) = self.sessions.first()
        {
            WITHDRAWN.send(cx.links, session, operation);
        }
    }

    pub(super) fn fail_inserts(&mut self, error: &Error) {
        let queued = self
            .inserts
            .queue
            .drain(..)
            .map(QueuedInsert::into_completer);
        let sent = self.inserts.sent.drain().map(|(_, sent)| sent.completer);
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

fn late() -> Error {
    let text = "the insert was not done in time; nothing was inserted, the buffer is usable";
    Error::Timeout(text.to_owned())
}

fn unanswered() -> Error {
    let text = "the insert was not done in time, and whether it will be is not known; the tensors may still be read until the work is settled or the buffer is closed, and must not change before (dropping them is safe); the buffer is usable";
    Error::Timeout(text.to_owned())
}
