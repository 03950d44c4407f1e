//! The server of a lookup buffer on its reactor: passes the inserts and selects of clients to the shared state, and holds
//! the leases of entries that clients have not settled.

mod answers;
mod session;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::LookupQuery;
use super::messages::LookupMessage;
use super::shared::{BufferState, ChangedBy, ClientOperation, LookupShared, LookupWaiter};
use super::store::StoreAction;
use super::tensors::{TRANSFERS_IN_FLIGHT, Tensors};
use super::transfer::{EntryTransfer, check_operation};
use crate::clock;
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
use session::{ClientInsert, ClientSelect, ClientSession};

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
        (session, operation): ClientOperation,
        message: LookupMessage<'_>,
    ) -> Result<()> {
        match message {
            LookupMessage::Insert {
                timeout,
                tokens,
                tensors,
            } => {
                check_operation(operation)?;
                let entry = EntryTransfer::read(Reader::new(&tensors))?;
                self.insert(cx, (session, operation), after(timeout), tokens, entry)?;
            }
            LookupMessage::Select { query, timeout } => {
                check_operation(operation)?;
                self.select(cx, (session, operation), query, after(timeout))?;
            }
            LookupMessage::Consume => {
                self.client(session)?.consume(operation)?;
                self.tensors.release(cx, session, operation);
                // Counted when the client has the entry, and not any more if it returns it.
                let _ = self.change(|state| state.store.num_consumed += 1);
                LookupMessage::Consumed.send(cx.links, session, operation);
            }
            LookupMessage::Settle { is_consumed } => {
                let select = self.client(session)?.settle(operation, is_consumed)?;
                self.tensors.release(cx, session, operation);
                self.end_select(select, is_consumed);
            }
            LookupMessage::Withdraw => self.withdraw(cx, (session, operation))?,
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

    /// Cancels a select that waits or was just offered an entry, or an insert without space. Other operations end in their
    /// own way.
    fn withdraw(&mut self, cx: &mut Cx<'_>, (session, operation): ClientOperation) -> Result<()> {
        if let Some(select) = self.client(session)?.selects.remove(&operation) {
            self.tensors.release(cx, session, operation);
            self.end_select(select, false);
        } else if self.tensors.forget(cx, session, operation)
            && let Some(insert) = self.client(session)?.inserts.remove(&operation)
        {
            self.release(insert.ticket);
            let withdrawn = Error::Closed("withdrawn".to_owned());
            LookupMessage::Refused(withdrawn).send(cx.links, session, operation);
        }
        Ok(())
    }

    fn insert(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): ClientOperation,
        deadline: Option<Instant>,
        tokens: Vec<i64>,
        entry: EntryTransfer,
    ) -> Result<()> {
        self.client(session)?.check_insert(operation, &tokens)?;
        let (num_bytes, now) = (entry.entry_bytes(&tokens), clock::now());
        let insert = LookupWaiter::Client((session, operation));
        let reserved = self.change(|state| state.store.reserve(num_bytes, deadline, now, insert));
        match reserved.flatten() {
            Ok(ticket) => {
                let tokens = tokens.into();
                let insert = ClientInsert {
                    ticket,
                    tokens,
                    is_cancelled: false,
                };
                self.tensors.add(cx, session, operation, entry);
                self.client(session)?.inserts.insert(operation, insert);
            }
            Err(error) => LookupMessage::Refused(error).send(cx.links, session, operation),
        }
        Ok(())
    }

    fn select(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): ClientOperation,
        query: LookupQuery,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let client = self.client(session)?;
        match client.check_select(operation, &query) {
            Err(error @ Error::Exhausted(_)) => {
                LookupMessage::Refused(error).send(cx.links, session, operation);
                return Ok(());
            }
            checked => checked?,
        }
        let (num_tokens, now) = (query.num_tokens(), clock::now());
        let select = LookupWaiter::Client((session, operation));
        let ticket = self.change(|state| state.store.select(query, deadline, now, select))?;
        let waiting = ClientSelect::Waiting { ticket, num_tokens };
        self.client(session)?.selects.insert(operation, waiting);
        Ok(())
    }
}

impl TransferService for LookupServer {
    type Command = Infallible;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.clients.insert(session, ClientSession::default());
        self.tensors.session_up(session);
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _error: Error) {
        self.tensors.session_down(session);
        if let Some(client) = self.clients.remove(&session) {
            self.end_client(client);
        }
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
            let _ = self.change(|state| state.store.expire(clock::now()));
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
            ("client selects", of_clients(|it| it.selects.len())),
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
        for (_, client) in std::mem::take(&mut self.clients) {
            self.end_client(client);
        }
        // A returned entry may have been leased to a client that ended later. No client waits any more.
        for action in self.shared.drain_client_actions() {
            if let StoreAction::Select(_, Some((entry, _))) = action {
                self.release(entry);
            }
        }
        self.shared.end_copies();
    }
}

#[cfg(test)]
mod tests;
