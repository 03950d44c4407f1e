//! The server of a lookup buffer on its reactor: passes the inserts and selects of clients to the shared state, and holds
//! the leases of entries that clients have not settled.

mod answers;
mod session;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::LookupMessage;
use super::shared::{BufferState, ChangedBy, LookupShared};
use super::tensors::{TRANSFERS_IN_FLIGHT, Tensors};
use super::transfer::{EntryTransfer, check_operation};
use super::{LookupQuery, SELECT_TOKENS_CAP, key_of};
use crate::clock;
use crate::entries::state::{Access, Holder, TOKEN_BYTES};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use answers::late;
use session::{ClientInsert, ClientSession};

pub(super) struct LookupServer {
    shared: Arc<LookupShared>,
    clients: HashMap<SessionKey, ClientSession>,
    tensors: Tensors,
}

fn after(timeout: Option<Duration>) -> Option<Instant> {
    clock::now().checked_add(timeout?)
}

impl LookupServer {
    pub(super) fn new(shared: Arc<LookupShared>, is_checksummed: bool) -> Self {
        Self {
            shared,
            clients: HashMap::new(),
            tensors: Tensors::new(is_checksummed),
        }
    }

    fn client(&mut self, session: SessionKey) -> Result<&mut ClientSession> {
        let unknown = || Error::protocol("a message of a client that is not connected");
        self.clients.get_mut(&session).ok_or_else(unknown)
    }

    fn change<R>(&self, change: impl FnOnce(&mut BufferState) -> R) -> Result<R> {
        self.shared.change(ChangedBy::Server, change)
    }

    fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        message: LookupMessage<'_>,
    ) -> Result<()> {
        let holder = (session, operation);
        match message {
            LookupMessage::Insert {
                timeout,
                tokens,
                tensors,
            } => {
                check_operation(operation)?;
                let entry = EntryTransfer::read(Reader::new(&tensors))?;
                self.insert(cx, holder, after(timeout), &tokens, entry)?;
            }
            LookupMessage::Select { query, timeout } => {
                check_operation(operation)?;
                self.select(cx, holder, &query, after(timeout))?;
            }
            LookupMessage::Consume => {
                // Counted when the client has the entry, and not any more if it returns it.
                let consumed = self.change(|state| match state.entries.is_consumed(holder) {
                    Some(false) => state.entries.consume(holder),
                    _ => Err(no_lease(operation)),
                });
                Self::check(consumed)?;
                self.tensors.release(cx, session, operation);
                LookupMessage::Consumed.send(cx.links, session, operation);
            }
            LookupMessage::Settle { is_consumed } => {
                let now = clock::now();
                let settled = self.change(|state| match state.entries.is_consumed(holder) {
                    Some(true) if is_consumed => state.entries.acknowledge(holder, now).map(drop),
                    Some(_) if !is_consumed => {
                        state.entries.release(holder, now);
                        Ok(())
                    }
                    _ => Err(no_lease(operation)),
                });
                Self::check(settled)?;
                self.tensors.release(cx, session, operation);
            }
            LookupMessage::Withdraw => self.withdraw(cx, holder)?,
            LookupMessage::Cancel => {
                // One that waits for space has its own deadline here, and is refused for the lack of it.
                if let Some(insert) = self.client(session)?.inserts.get_mut(&operation) {
                    insert.is_cancelled = true;
                }
                self.tensors.cancel(cx, session, operation, &late());
                self.commit_arrived(cx);
            }
            other => {
                let text = format_args!("message {} to a lookup buffer", other.kind());
                return Err(Error::protocol(text));
            }
        }
        Ok(())
    }

    /// The outcome of a change; a buffer that its own process has closed has no operations any more.
    fn check(changed: Result<Result<()>>) -> Result<()> {
        changed.unwrap_or(Ok(()))
    }

    /// Cancels a select that waits or was just offered an entry, or an insert without space. Other operations end in their
    /// own way.
    fn withdraw(&mut self, cx: &mut Cx<'_>, (session, operation): Holder) -> Result<()> {
        if !self.client(session)?.inserts.contains_key(&operation) {
            let (holder, now) = ((session, operation), clock::now());
            self.tensors.release(cx, session, operation);
            let _ = self.change(|state| state.entries.release(holder, now));
        } else if self.tensors.forget(cx, session, operation) {
            self.end_insert((session, operation));
            let withdrawn = Error::Closed("withdrawn".to_owned());
            LookupMessage::Refused(withdrawn).send(cx.links, session, operation);
        }
        Ok(())
    }

    fn insert(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        deadline: Option<Instant>,
        tokens: &[i64],
        entry: EntryTransfer,
    ) -> Result<()> {
        self.client(session)?
            .check_insert(operation, tokens.len())?;
        let (holder, now) = ((session, operation), clock::now());
        let (key, num_bytes) = (key_of(tokens), entry.entry_bytes(tokens.len()));
        let reserved = self.change(|state| {
            state.entries.check_new(holder)?;
            (state.entries).reserve(holder, &key, num_bytes, deadline, now);
            Ok(())
        });
        match reserved.flatten() {
            Ok(()) => {
                let insert = ClientInsert {
                    num_tokens: tokens.len(),
                    is_cancelled: false,
                };
                self.tensors.add(cx, session, operation, entry);
                self.client(session)?.inserts.insert(operation, insert);
            }
            Err(error @ Error::Protocol(_)) => return Err(error),
            Err(error) => LookupMessage::Refused(error).send(cx.links, session, operation),
        }
        Ok(())
    }

    fn select(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        query: &LookupQuery,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let (holder, now) = ((session, operation), clock::now());
        let selected = self.change(|state| {
            let entries = &mut state.entries;
            entries.check_new(holder)?;
            check_tokens(entries.num_waiting_bytes(session), query.num_tokens())?;
            let access = Access::Lease(None);
            entries.select(holder, &query.to_query(), access, deadline, now);
            Ok(())
        });
        match selected? {
            Err(error @ Error::Exhausted(_)) => {
                LookupMessage::Refused(error).send(cx.links, session, operation);
                Ok(())
            }
            checked => checked,
        }
    }
}

/// # Errors
/// `Exhausted`: the queries of a client that wait would have too many tokens.
fn check_tokens(num_waiting_bytes: usize, num_more: usize) -> Result<()> {
    let num_waiting = num_waiting_bytes / TOKEN_BYTES;
    if num_waiting + num_more <= SELECT_TOKENS_CAP {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "selects of this client with {num_waiting} tokens wait, {num_more} more cannot: at most {SELECT_TOKENS_CAP} together; let some end first, or ask with fewer tokens"
    )))
}

fn no_lease(operation: u64) -> Error {
    Error::protocol(format_args!("select {operation} has no lease"))
}

impl TransferService for LookupServer {
    type Command = Infallible;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.clients.insert(session, ClientSession::default());
        let _ = self.change(|state| state.entries.session_up(session));
        self.tensors.session_up(session);
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _error: Error) {
        self.tensors.session_down(session);
        self.clients.remove(&session);
        let _ = self.change(|state| state.entries.session_down(session, clock::now()));
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let operation = header.u64()?;
        match LookupMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, (session, operation), message),
            Err(error @ Error::Corrupt(_)) => {
                LookupMessage::Refused(error).send(cx.links, session, operation);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        self.tensors.exposed.requested(request)
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        self.tensors.transferred(cx, completion);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        self.commit_arrived(cx);
        self.answer_clients(cx);
    }

    fn run_slice(&mut self, _cx: &mut Cx<'_>) -> bool {
        self.shared.run_copy_slice()
    }

    fn expire(&mut self, cx: &mut Cx<'_>) {
        let deadline = self.shared.next_deadline();
        if deadline.is_some_and(|at| at <= cx.links.now()) {
            let _ = self.change(|state| state.entries.expire(clock::now()));
        }
    }

    fn next_deadline(&mut self, links: &Links) -> Option<Instant> {
        let idle = self.shared.pool.expire(links.now());
        idle.into_iter().chain(self.shared.next_deadline()).min()
    }

    /// [`drop`](Drop::drop) ends what clients hold: the buffer stays usable in its own process.
    fn stop(&mut self, _cx: &mut Cx<'_>) {}

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_clients = |size: fn(&ClientSession) -> usize| self.clients.values().map(size).sum();
        let mut sizes = vec![
            ("clients", self.clients.len()),
            ("client inserts", of_clients(|it| it.inserts.len())),
            ("pooled buffers", self.shared.pool.len()),
        ];
        sizes.extend(self.change(|state| state.sizes()).unwrap_or_default());
        sizes.extend(self.tensors.sizes());
        sizes
    }
}

/// Runs when the reactor panics too: the buffer itself is still usable then.
impl Drop for LookupServer {
    fn drop(&mut self) {
        let now = clock::now();
        for session in self.clients.keys() {
            let _ = self.change(|state| state.entries.session_down(*session, now));
        }
        self.shared.drain_client_actions();
        self.shared.end_copies();
    }
}

#[cfg(test)]
mod tests;
