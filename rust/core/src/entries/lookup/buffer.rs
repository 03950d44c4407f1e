//! A lookup buffer as callers see it.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use super::client::LookupClient;
use super::command_queue::{CommandQueue, LookupCommand, QueuedInsert, QueuedSelect};
use super::operation::{Delivery, Operation, Origin, Selected};
use super::{Items, LookupInfo, LookupQuery};
use crate::clock;
use crate::entries::TOKENS_CAP;
use crate::entries::copying::LocalInsert;
use crate::entries::items::key_of;
use crate::entries::server::Server;
use crate::entries::shared::{ChangedBy, EndSelect, Shared, SharedState};
use crate::entries::state::Entries;
use crate::error::{Error, Result};
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::Tokens;
use crate::reactor::Reactor;
use crate::session::ReactorConfig;
use crate::sync::lock;
use crate::transfer::host::spawn;
use crate::transport::Transport;
use crate::work::{Completer, Then, Work, work};

/// A lookup buffer in this process, or a client of one or more served ones: a client inserts at the first server, and
/// selects from all. Any thread may call. No call blocks, but an insert in this process copies its tensors.
#[derive(Debug)]
pub struct LookupBuffer {
    pub(super) origin: Origin,
    /// Of the server, once the buffer is served, or of the client.
    reactor: OnceLock<Reactor<Infallible>>,
    /// Held while a server is made or stopped: opening UCX takes up to a second, for which other calls do not wait.
    serving: Mutex<()>,
    /// Of a client's servers.
    addresses: Vec<String>,
}

fn identity() -> Result<Identity> {
    Identity::new(SessionKind::Lookup, "", Vec::new())
}

fn check_num_tokens(tokens: &[i64]) -> Result<()> {
    if tokens.len() > TOKENS_CAP {
        return Err(Error::Config(format!(
            "{} tokens; at most {TOKENS_CAP} can be sent",
            tokens.len()
        )));
    }
    Ok(())
}

/// A buffer in this process, and its server.
impl LookupBuffer {
    /// Makes an empty buffer for at most `capacity_bytes`. Each entry counts its tensors with their dtypes and shapes, 8 bytes
    /// for each token, and 2 KiB of bookkeeping.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            origin: Origin::Local(Arc::new(Shared::new(
                Entries::of_buffer(capacity_bytes),
                "lookup buffer",
            ))),
            reactor: OnceLock::new(),
            serving: Mutex::default(),
            addresses: Vec::new(),
        }
    }

    fn serving(&self) -> MutexGuard<'_, ()> {
        lock(&self.serving)
    }

    /// Serves other processes. With `is_checksummed`, they verify checksums of the entries that they select.
    ///
    /// # Errors
    /// `Config`: the address cannot be bound, others could reach it without a token, the buffer is served already, or it
    /// belongs to other processes. `Unavailable`: there is no usable UCX.
    pub fn serve<'a>(
        &self,
        address: &str,
        token: impl Into<Tokens<'a>>,
        transport: Transport,
        is_checksummed: bool,
    ) -> Result<()> {
        let Origin::Local(shared) = &self.origin else {
            return Err(Error::Config(
                "this buffer belongs to other processes; one in this process can be served"
                    .to_owned(),
            ));
        };
        shared.check_process()?;
        let _serving = self.serving();
        if self.reactor.get().is_some() {
            return Err(Error::Config(format!(
                "the buffer is served at {} already",
                self.address()
            )));
        }
        shared.change(ChangedBy::Caller, |_| ())?;
        let config = ReactorConfig::listening(address, token, identity()?, transport)?;
        let in_thread = Arc::clone(shared);
        let served = spawn(config, move || Server::of_buffer(in_thread, is_checksummed))?;
        shared.set_server(served.waker());
        self.reactor.get_or_init(|| served);
        Ok(())
    }
}

/// A client.
impl LookupBuffer {
    /// Connects to all servers; the work is done once all have accepted, within `timeout`. With `is_checksummed`, they verify
    /// checksums of inserted entries.
    pub fn connect(
        addresses: Vec<String>,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
        timeout: Duration,
    ) -> Result<(Self, Work<()>)> {
        if addresses.is_empty() {
            return Err(Error::Config("no address to connect to".to_owned()));
        }
        let config = ReactorConfig::connecting(token, identity()?, transport, timeout)?;
        let command_queue = Arc::new(CommandQueue::new());
        command_queue.update_info(|info| info.state = "connecting");
        let in_thread = Arc::clone(&command_queue);
        let reactor = spawn(config, move || LookupClient::new(in_thread, is_checksummed))?;
        command_queue.set_waker(reactor.waker());
        let (connected, completer) = reactor.work();
        let connect = LookupCommand::Connect {
            addresses: addresses.clone(),
            completer,
        };
        command_queue.send(connect, Then::GoOn)?;
        let client = Self {
            origin: Origin::Remote(command_queue),
            reactor: OnceLock::from(reactor),
            serving: Mutex::default(),
            addresses,
        };
        Ok((client, connected))
    }
}

/// Calls of both kinds.
impl LookupBuffer {
    /// A work; a caller that waits for one of a client runs the reactor.
    fn work<T>(&self) -> (Work<T>, Completer<T>) {
        match (&self.origin, self.reactor.get()) {
            (Origin::Remote(_), Some(reactor)) => reactor.work(),
            _ => work(),
        }
    }

    /// Inserts the tensors, which must not change before the operation ends. In this process, a copy is inserted: it is made
    /// before this returns, if there is space. Otherwise the thread that frees space makes it; the server's thread copies by
    /// slices, between its other work.
    ///
    /// # Errors
    /// `Config`: no tokens, or larger than the capacity; a client's operation ends with the latter. The operation ends with
    /// `Exhausted` at `timeout`.
    pub fn insert(
        &self,
        tokens: Vec<i64>,
        items: Items,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<()>> {
        if tokens.is_empty() {
            return Err(Error::Config(
                "the entry has no tokens under its roi: no query could select it by them"
                    .to_owned(),
            ));
        }
        let now = clock::now();
        let deadline = timeout.map(|timeout| now + timeout);
        let (inserted, completer) = self.work();
        match &self.origin {
            Origin::Local(shared) => {
                shared.check_process()?;
                shared.pool.expire(now);
                let key = key_of(&tokens);
                drop(tokens);
                let num_bytes = items.entry_bytes(key.len());
                let insert = LocalInsert::new(items, completer);
                let operation = shared.change(ChangedBy::Caller, |state| {
                    state.insert((key, num_bytes), deadline, now, insert)
                })??;
                Ok(Operation::new(inserted, operation, self.origin.clone()).expires(deadline))
            }
            Origin::Remote(queue) => {
                check_num_tokens(&tokens)?;
                let operation = queue.next_operation();
                let insert = QueuedInsert {
                    operation,
                    key: key_of(&tokens),
                    items,
                    deadline,
                    completer,
                };
                queue.send(LookupCommand::Insert(insert), then)?;
                Ok(Operation::new(inserted, operation, self.origin.clone()))
            }
        }
    }

    /// Selects an entry; the operation ends with `None` at `timeout`.
    pub fn select(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<Selected>> {
        self.begin_select(query, timeout, then, false)
    }

    /// Delivers an entry that stays in its place: of other processes it goes back as soon as its bytes are here, although this
    /// process may die before its caller has them. An entry of this process goes back when the operation is dropped.
    pub fn peek(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<Selected>> {
        self.begin_select(query, timeout, then, true)
    }

    fn begin_select(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
        then: Then,
        is_peek: bool,
    ) -> Result<Operation<Selected>> {
        query.check()?;
        let (selected, completer) = self.work();
        match &self.origin {
            Origin::Local(shared) => {
                let now = clock::now();
                let deadline = timeout.map(|timeout| now + timeout);
                let query = query.to_query();
                let end: EndSelect = Box::new(|found| {
                    let deliver = |leased| Delivery::of_local(leased).map(Arc::new);
                    completer.complete(found.map(|leased| leased.and_then(deliver)));
                });
                let select = |state: &mut SharedState| state.select(query, deadline, now, end);
                let operation = shared.change(ChangedBy::Caller, select)?;
                let operation = Operation::new(selected, operation, self.origin.clone());
                Ok(operation.withdraws_on_drop().expires(deadline))
            }
            Origin::Remote(queue) => {
                if let LookupQuery::Tokens(tokens) = &query {
                    check_num_tokens(tokens)?;
                }
                let operation = queue.next_operation();
                let select = QueuedSelect {
                    operation,
                    query,
                    timeout,
                    is_peek,
                    completer,
                };
                queue.send(LookupCommand::Select(select), then)?;
                let operation = Operation::new(selected, operation, self.origin.clone());
                Ok(operation.withdraws_on_drop())
            }
        }
    }

    /// The address of a served buffer, or the servers' addresses, separated by commas; empty for a buffer that is not served.
    pub fn address(&self) -> String {
        let served_at = self.reactor.get().and_then(Reactor::address);
        served_at.map_or_else(|| self.addresses.join(","), |at| at.to_string())
    }

    /// Counters and state.
    pub fn info(&self) -> LookupInfo {
        match &self.origin {
            Origin::Local(shared) => shared
                .look(LookupInfo::of)
                .unwrap_or_else(|_| LookupInfo::closed()),
            Origin::Remote(queue) => queue.info(),
        }
    }

    /// Closes the buffer and its sessions; operations that wait end as closed. The entries of a buffer in this process are
    /// dropped.
    pub fn close(&self) {
        match &self.origin {
            Origin::Local(shared) => {
                if shared.check_process().is_err() {
                    return;
                }
                shared.close();
                // Waits for a reactor that is being made, to stop it too.
                drop(self.serving());
            }
            Origin::Remote(queue) => queue.close(),
        }
        if let Some(reactor) = self.reactor.get() {
            reactor.stop();
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl LookupBuffer {
    /// Runs one round of a reactor without a thread.
    pub fn manual_round(&self) -> crate::reactor::manual::Round {
        let over = crate::reactor::manual::Round::Over;
        self.reactor.get().map_or(over, Reactor::round)
    }
}

#[cfg(test)]
impl LookupBuffer {
    /// Sizes of the maps and queues of a reactor without a thread.
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.reactor.get().map_or_else(Vec::new, Reactor::sizes)
    }

    /// The shared state of a buffer in this process.
    pub(in crate::entries) fn shared(&self) -> &Arc<Shared> {
        match &self.origin {
            Origin::Local(shared) => shared,
            Origin::Remote(_) => panic!("a client"),
        }
    }
}

#[cfg(test)]
mod tests;
