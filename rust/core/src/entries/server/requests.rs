//! Requests of clients.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::super::messages::{EntryMessage, Page};
use super::super::shared::SharedState;
use super::super::state::{Access, Holder, Query, TOKEN_BYTES};
use super::arrival::Arrival;
use super::{Face, Server};
use crate::clock;
use crate::error::{Error, Result};
use crate::transfer::Cx;

/// Tokens of all selects of one client that wait: 128 MiB.
const SELECT_TOKENS_CAP: usize = 1 << 24;

fn after(timeout: Option<Duration>) -> Option<Instant> {
    clock::now().checked_add(timeout?)
}

impl Server {
    pub(super) fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        message: EntryMessage<'_>,
    ) -> Result<()> {
        let (session, operation) = holder;
        match (self.face, message) {
            (
                _,
                EntryMessage::Put {
                    key,
                    ttl,
                    timeout,
                    is_hashed,
                    record,
                    parts,
                },
            ) => {
                if self.face == Face::Store && timeout != Some(Duration::ZERO) {
                    return Err(Error::protocol("a put of a value that waits for space"));
                }
                let arrival = Arrival::of_put(operation, (ttl, is_hashed), record, parts);
                self.put(cx, holder, &key, (arrival, after(timeout)))
            }
            (
                _,
                EntryMessage::Select {
                    query,
                    access,
                    timeout,
                },
            ) => self.select(cx, holder, (query, access), after(timeout)),
            (_, EntryMessage::Release { target }) => {
                self.end(cx, (session, target));
                // At a lookup buffer nothing waits for the answer, which would cost its client a wake.
                if self.face == Face::Store {
                    EntryMessage::Done.send(cx.links, session, operation);
                }
                Ok(())
            }
            (_, EntryMessage::Acknowledge { target }) => self.acknowledge(cx, holder, target),
            (Face::LookupBuffer, EntryMessage::Consume) => self.consume(cx, holder),
            (Face::LookupBuffer, EntryMessage::Cancel { is_withdrawn }) => {
                self.cancel(cx, holder, is_withdrawn);
                Ok(())
            }
            (Face::Store, message) => self.receive_about_value(cx, holder, message),
            (Face::LookupBuffer, message) => Err(unexpected(&message)),
        }
    }

    /// Requests that only a store has.
    fn receive_about_value(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        message: EntryMessage<'_>,
    ) -> Result<()> {
        let (session, operation) = holder;
        match message {
            EntryMessage::Exists { keys } => {
                let exists = |state: &mut SharedState| {
                    let exists = |key: &Cow<'_, [u8]>| state.entries.exists(key);
                    keys.iter().map(exists).collect()
                };
                EntryMessage::Present(self.change(exists)?).send(cx.links, session, operation);
            }
            EntryMessage::Reserve {
                key,
                num_bytes,
                ttl,
                timeout,
            } => {
                let arrival = Arrival::of_reservation(num_bytes, ttl);
                self.reserve(cx, holder, &key, (arrival, after(timeout)))?;
            }
            EntryMessage::Write { reservation, bytes } => {
                self.write(cx, (session, reservation), operation, bytes)?;
            }
            EntryMessage::Commit {
                reservation,
                checksum,
                record,
            } => {
                let commit = (operation, checksum, record);
                self.begin_commit(cx, (session, reservation), commit)?;
            }
            EntryMessage::Checksum(checksum) => self.set_checksum(cx, holder, checksum),
            EntryMessage::Renew { target, lease } => {
                let (target, now) = ((session, target), clock::now());
                let renew = |state: &mut SharedState| state.entries.renew(target, lease, now);
                answer(cx, holder, self.change(renew)?);
            }
            EntryMessage::Corrupt { target } => {
                let corrupt = |state: &mut SharedState| state.entries.corrupt((session, target));
                let refusal = self.change(corrupt)?.err().unwrap_or_else(changed);
                EntryMessage::Refused(refusal).send(cx.links, session, operation);
            }
            EntryMessage::Delete { keys } => {
                let (keys, now) = (keys.iter().map(|key| &key[..]), clock::now());
                let delete = |state: &mut SharedState| state.entries.delete(keys, now);
                let (num_deleted, is_on_disk) = self.change(delete)?;
                let answer = EntryMessage::Deleted(num_deleted);
                self.answer_erased(cx, holder, answer, is_on_disk);
            }
            EntryMessage::List { prefix, after } => {
                let list = |state: &mut SharedState| state.entries.list(&prefix, after);
                let (values, next) = self.change(list)?;
                EntryMessage::Page(Page { values, next }).send(cx.links, session, operation);
            }
            EntryMessage::Stats => {
                let info = self.shared.info()?;
                EntryMessage::Statistics(info).send(cx.links, session, operation);
            }
            other => return Err(unexpected(&other)),
        }
        Ok(())
    }

    fn select(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        (query, access): (Query<Cow<'_, [u8]>>, Access),
        deadline: Option<Instant>,
    ) -> Result<()> {
        let is_possible = match (self.face, &query, access) {
            (Face::Store, Query::Exact(_), Access::Open | Access::Lease(Some(_))) => true,
            (Face::LookupBuffer, query, access) => {
                !matches!(query, Query::Exact(_)) && access == Access::Lease(None)
            }
            _ => false,
        };
        if !is_possible {
            let text = "a select that this server does not answer";
            return Err(Error::protocol(text));
        }
        let (query, now) = (query.into_kept(), clock::now());
        let select = |state: &mut SharedState| {
            let entries = &mut state.entries;
            entries.check_new(holder)?;
            check_waiting(entries.num_waiting_bytes(holder.0), query.num_bytes())?;
            entries.select(holder, query, access, deadline, now);
            Ok(())
        };
        self.admit(cx, holder, select)
    }

    /// Ends an operation of a client. An insert whose bytes are being read keeps its space until the reads have ended.
    fn end(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let arrival = self.arrivals.get(&holder);
        let is_read = arrival.is_some_and(|arrival| arrival.transfer.is_some());
        if is_read && self.face == Face::LookupBuffer {
            self.cancel(cx, holder, false);
        } else {
            self.release(cx, holder);
        }
    }

    /// Begins an operation that holds something; one too many is refused.
    ///
    /// # Errors
    /// `Protocol`: the operation has begun before.
    pub(super) fn admit(
        &self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        begin: impl FnOnce(&mut SharedState) -> Result<()>,
    ) -> Result<()> {
        match self.change(begin)? {
            Err(full @ Error::Exhausted(_)) => {
                EntryMessage::Refused(full).send(cx.links, session, operation);
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn acknowledge(&mut self, cx: &mut Cx<'_>, holder: Holder, target: u64) -> Result<()> {
        let (target, now) = ((holder.0, target), clock::now());
        let acknowledge = |state: &mut SharedState| state.entries.acknowledge(target, now);
        let acknowledged = self.change(acknowledge)?;
        if acknowledged.is_ok() {
            self.withdraw_parts(cx, target);
            if self.face == Face::LookupBuffer {
                return Ok(());
            }
        }
        let is_on_disk = acknowledged == Ok(true);
        let answer = acknowledged.map_or_else(EntryMessage::Refused, |_| EntryMessage::Done);
        self.answer_erased(cx, holder, answer, is_on_disk);
        Ok(())
    }

    /// A client has all of an entry: it counts as consumed, unless the client gives it back.
    fn consume(&mut self, cx: &mut Cx<'_>, holder: Holder) -> Result<()> {
        let consumed = self.change(|state| state.entries.consume(holder))?;
        self.withdraw_parts(cx, holder);
        answer(cx, holder, consumed);
        Ok(())
    }
}

/// # Errors
/// `Exhausted`: the queries of a client that wait would have too many tokens.
fn check_waiting(num_waiting_bytes: usize, num_more_bytes: usize) -> Result<()> {
    let (num_waiting, num_more) = (
        num_waiting_bytes / TOKEN_BYTES,
        num_more_bytes / TOKEN_BYTES,
    );
    if num_waiting + num_more <= SELECT_TOKENS_CAP {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "selects of this client with {num_waiting} tokens wait, {num_more} more cannot: at most {SELECT_TOKENS_CAP} together; let some end first, or ask with fewer tokens"
    )))
}

fn answer(cx: &mut Cx<'_>, (session, operation): Holder, outcome: Result<()>) {
    let message = outcome.map_or_else(EntryMessage::Refused, |()| EntryMessage::Done);
    message.send(cx.links, session, operation);
}

fn changed() -> Error {
    let text =
        "the value differs from the checksum that it was committed with; the store has deleted it";
    Error::Corrupt(text.to_owned())
}

fn unexpected(message: &EntryMessage<'_>) -> Error {
    Error::protocol(format_args!("message {} to this server", message.kind()))
}
