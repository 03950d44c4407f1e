//! The buffer itself: the store behind one lock. Whoever calls does the work, the server's thread for its clients; bytes
//! are copied and callers woken outside of the lock.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvpipe_ucx::Search;

use super::operation::{Delivery, Operation, Origin, Selected};
use super::server::Server;
use super::store::{Action, Store, Ticket};
use super::{Items, LookupInfo, Query, check_entry, check_process};
use crate::error::{Error, Result};
use crate::identity::{Identity, Service};
use crate::link::Timing;
use crate::node::{Node, NodeConfig, Waker, default_busy_poll};
use crate::pipe::listen_address;
use crate::work::{Completer, work};

/// Who waits in this process.
enum Waiting {
    Insert {
        tokens: Vec<i64>,
        items: Items,
        completer: Completer<()>,
    },
    Select(Completer<Selected>),
}

struct State {
    store: Store<Items>,
    capacity_bytes: u64,
    waiting: HashMap<Ticket, Waiting>,
    /// Actions for others' clients, until the server's thread fetches them.
    outbox: VecDeque<Action<Items>>,
    num_inserted: u64,
    num_taken: u64,
    is_closed: bool,
}

/// What is done without the lock.
enum Effect {
    Copy {
        ticket: Ticket,
        tokens: Vec<i64>,
        items: Items,
        completer: Completer<()>,
    },
    Inserted(Completer<()>, Result<()>),
    Selected(Completer<Selected>, Result<Option<(Ticket, Items)>>),
}

/// The state that callers, deliveries and the server's thread share.
pub(super) struct Shared {
    state: Mutex<State>,
    waker: OnceLock<Waker>,
    process: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

fn closed() -> Error {
    Error::Closed("the lookup buffer is closed".to_owned())
}

impl State {
    /// Sorts the store's actions by who does them.
    fn effects(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        while let Some(action) = self.store.next_action() {
            match self.effect(action) {
                Ok(effect) => effects.push(effect),
                Err(action) => self.outbox.push_back(action),
            }
        }
        effects
    }

    fn effect(&mut self, action: Action<Items>) -> std::result::Result<Effect, Action<Items>> {
        let (Action::Grant(ticket)
        | Action::Full(ticket)
        | Action::Nothing(ticket)
        | Action::Deliver { select: ticket, .. }) = &action;
        let Some(waiting) = self.waiting.remove(ticket) else {
            return Err(action);
        };
        Ok(match (waiting, action) {
            (
                Waiting::Insert {
                    tokens,
                    items,
                    completer,
                },
                Action::Grant(ticket),
            ) => Effect::Copy {
                ticket,
                tokens,
                items,
                completer,
            },
            (
                Waiting::Insert {
                    completer, items, ..
                },
                _,
            ) => Effect::Inserted(completer, Err(self.full(items.num_bytes()))),
            (Waiting::Select(completer), Action::Deliver { entry, content, .. }) => {
                Effect::Selected(completer, Ok(Some((entry, content))))
            }
            (Waiting::Select(completer), _) => Effect::Selected(completer, Ok(None)),
        })
    }

    fn commit(&mut self, ticket: Ticket, tokens: Vec<i64>, items: Items) {
        self.num_inserted += 1;
        self.store.commit(ticket, tokens.into(), items);
    }

    /// Forgets who waits, who then ends as closed.
    fn withdraw(&mut self, ticket: Ticket) {
        if self.waiting.remove(&ticket).is_some() {
            self.forget(ticket);
        }
    }

    fn forget(&mut self, ticket: Ticket) {
        if !self.store.cancel(ticket) {
            self.store.abandon(ticket);
        }
    }

    fn settle(&mut self, entry: Ticket, is_taken: bool) {
        if is_taken {
            self.num_taken += 1;
            self.store.drop_entry(entry);
        } else {
            self.store.put_back(entry);
        }
    }

    fn full(&self, num_bytes: u64) -> Error {
        Error::Exhausted(format!(
            "no place for {num_bytes} bytes in time: {} of {} are taken; nothing was inserted, the buffer is usable",
            self.store.counts().num_bytes,
            self.capacity_bytes
        ))
    }
}

impl Shared {
    fn new(capacity_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                store: Store::new(capacity_bytes),
                capacity_bytes,
                waiting: HashMap::new(),
                outbox: VecDeque::new(),
                num_inserted: 0,
                num_taken: 0,
                is_closed: false,
            }),
            waker: OnceLock::new(),
            process: std::process::id(),
        }
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        check_process(self.process)?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the state, then does what follows from it.
    fn update<R>(self: &Arc<Self>, change: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        let mut effects = Vec::new();
        let result = self.change(&mut effects, change);
        while let Some(effect) = effects.pop() {
            self.carry_out(effect, &mut effects);
        }
        result
    }

    fn change<R>(
        &self,
        effects: &mut Vec<Effect>,
        change: impl FnOnce(&mut State) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Err(closed());
        }
        let result = change(&mut state);
        // The last one is carried out first.
        effects.extend(state.effects().into_iter().rev());
        let has_mail = !state.outbox.is_empty();
        drop(state);
        if let Some(waker) = self.waker.get().filter(|_| has_mail) {
            waker.wake();
        }
        result
    }

    fn carry_out(self: &Arc<Self>, effect: Effect, effects: &mut Vec<Effect>) {
        match effect {
            Effect::Copy {
                ticket,
                tokens,
                items,
                completer,
            } => {
                let copied = items.copy();
                // The caller's memory is let go before it is told.
                drop(items);
                let ended = self.change(effects, |state| match copied {
                    Ok(copied) => {
                        state.commit(ticket, tokens, copied);
                        Ok(())
                    }
                    Err(error) => {
                        state.store.abandon(ticket);
                        Err(error)
                    }
                });
                completer.complete(ended);
            }
            Effect::Inserted(completer, ended) => completer.complete(ended),
            Effect::Selected(completer, ended) => {
                let deliver = |(entry, items)| {
                    let origin = Arc::new(Handle(Arc::clone(self)));
                    Arc::new(Delivery::new(items, entry, origin))
                };
                completer.complete(ended.map(|found| found.map(deliver)));
            }
        }
    }

    /// Asks for the place of an entry of a client.
    pub(super) fn reserve(
        self: &Arc<Self>,
        num_bytes: u64,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        self.update(|state| state.store.reserve(num_bytes, deadline, Instant::now()))
    }

    /// Makes an entry visible.
    pub(super) fn commit(
        self: &Arc<Self>,
        ticket: Ticket,
        tokens: Vec<i64>,
        items: Items,
    ) -> Result<()> {
        self.update(|state| {
            state.commit(ticket, tokens, items);
            Ok(())
        })
    }

    /// Begins a select of a client.
    pub(super) fn select(
        self: &Arc<Self>,
        query: Query,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        self.update(|state| Ok(state.store.select(query, deadline, Instant::now())))
    }

    /// Ends a client's select that waits, or its insert that is not committed.
    pub(super) fn forget(self: &Arc<Self>, ticket: Ticket) {
        let _ = self.update(|state| {
            state.forget(ticket);
            Ok(())
        });
    }

    /// A client has an entry whole, and it is his.
    pub(super) fn acknowledge(&self) {
        if let Ok(mut state) = self.lock() {
            state.num_taken += 1;
        }
    }

    /// What a client acknowledged is dropped, or goes back because nobody looked at it.
    pub(super) fn conclude(self: &Arc<Self>, entry: Ticket, is_taken: bool) {
        let _ = self.update(|state| {
            state.num_taken -= 1;
            state.settle(entry, is_taken);
            Ok(())
        });
    }

    /// What there is to do for clients.
    pub(super) fn take_mail(&self) -> VecDeque<Action<Items>> {
        self.lock()
            .map(|mut state| std::mem::take(&mut state.outbox))
            .unwrap_or_default()
    }

    /// When [`expire`](Origin::expire) has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock().ok()?.store.next_deadline()
    }

    /// The error of an insert that found no place.
    pub(super) fn full(&self, num_bytes: u64) -> Error {
        self.lock()
            .map_or_else(|error| error, |state| state.full(num_bytes))
    }

    fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        state.outbox.clear();
        state.store = Store::new(0);
        drop(state);
        for waiting in waiting.into_values() {
            match waiting {
                Waiting::Insert { completer, .. } => completer.complete(Err(closed())),
                Waiting::Select(completer) => completer.complete(Err(closed())),
            }
        }
    }
}

/// The trait for an `Arc`, because what follows may have to deliver, which needs one.
#[derive(Debug)]
struct Handle(Arc<Shared>);

/// A buffer that is closed has nothing to withdraw, settle or expire: those errors are no news.
impl Origin for Handle {
    fn withdraw(&self, ticket: Ticket) {
        let _ = self.0.update(|state| {
            state.withdraw(ticket);
            Ok(())
        });
    }

    fn settle(&self, entry: Ticket, is_taken: bool) {
        let _ = self.0.update(|state| {
            state.settle(entry, is_taken);
            Ok(())
        });
    }

    fn expire(&self) {
        let _ = self.0.update(|state| {
            state.store.expire(Instant::now());
            Ok(())
        });
    }
}

/// A lookup buffer in this process. Any thread may call; nothing waits but the copy of an insert.
#[derive(Debug)]
pub struct Local {
    shared: Arc<Shared>,
    node: Mutex<Option<Node<Infallible>>>,
}

impl Local {
    /// Makes an empty buffer for entries of at most `capacity_bytes` together.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            shared: Arc::new(Shared::new(capacity_bytes)),
            node: Mutex::default(),
        }
    }

    fn node(&self) -> MutexGuard<'_, Option<Node<Infallible>>> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets other processes connect.
    ///
    /// # Errors
    /// `Config`: the address cannot be bound, others could reach it without a token, or the buffer is served already.
    /// `Unavailable`: there is no usable UCX.
    pub fn serve(&self, address: &str, token: &[u8], ucx: Search) -> Result<()> {
        let mut node = self.node();
        if let Some(at) = node.as_ref().and_then(Node::address) {
            return Err(Error::Config(format!(
                "the buffer is served at {at} already"
            )));
        }
        // A closed buffer is not served.
        self.shared.update(|_| Ok(()))?;
        let address = listen_address(address, token)?;
        let config = NodeConfig {
            listen: Some(address),
            token: token.to_vec(),
            identity: Identity::new(Service::Lookup, "", Vec::new())?,
            ucx: Some(ucx),
            local: address.ip(),
            timing: Timing::default(),
            busy_poll: default_busy_poll(),
        };
        let (shared, origin) = (Arc::clone(&self.shared), self.origin());
        let served = Node::spawn(config, move || Server::new(shared, origin))?;
        let _ = self.shared.waker.set(served.waker());
        *node = Some(served);
        Ok(())
    }

    /// Where others connect, if it is served.
    pub fn address(&self) -> Option<SocketAddr> {
        self.node().as_ref()?.address()
    }

    fn origin(&self) -> Arc<dyn Origin> {
        Arc::new(Handle(Arc::clone(&self.shared)))
    }

    /// Inserts a copy of the tensors. The copy is made before this returns if there is place; else by whoever makes
    /// place, and until the end of the operation the tensors must not be changed.
    ///
    /// # Errors
    /// `Config`: larger than the capacity, or no tokens. The operation ends with `Exhausted` at `timeout`.
    pub fn insert(
        &self,
        tokens: Vec<i64>,
        items: Items,
        timeout: Option<Duration>,
    ) -> Result<Operation<()>> {
        check_entry(&tokens)?;
        let now = Instant::now();
        let deadline = timeout.map(|timeout| now + timeout);
        let (inserted, completer) = work();
        let ticket = self.shared.update(|state| {
            let ticket = state.store.reserve(items.num_bytes(), deadline, now)?;
            let waiting = Waiting::Insert {
                tokens,
                items,
                completer,
            };
            state.waiting.insert(ticket, waiting);
            Ok(ticket)
        })?;
        Ok(Operation::insert(inserted, ticket, self.origin()).expires(deadline))
    }

    /// Takes an entry; ends with `None` at `timeout`.
    pub fn select(&self, query: Query, timeout: Option<Duration>) -> Result<Operation<Selected>> {
        query.check()?;
        let now = Instant::now();
        let deadline = timeout.map(|timeout| now + timeout);
        let (selected, completer) = work();
        let ticket = self.shared.update(|state| {
            let ticket = state.store.select(query, deadline, now);
            state.waiting.insert(ticket, Waiting::Select(completer));
            Ok(ticket)
        })?;
        Ok(Operation::select(selected, ticket, self.origin()).expires(deadline))
    }

    /// Counters and state.
    pub fn info(&self) -> LookupInfo {
        let Ok(state) = self.shared.lock() else {
            return LookupInfo {
                state: "closed",
                ..LookupInfo::default()
            };
        };
        let counts = state.store.counts();
        LookupInfo {
            state: if state.is_closed { "closed" } else { "open" },
            num_inserted: state.num_inserted,
            num_taken: state.num_taken,
            num_waiting: counts.num_waiting_inserts + counts.num_waiting_selects,
            num_entries: Some(counts.num_entries),
            num_leased: Some(counts.num_leased),
            num_bytes: Some(counts.num_bytes),
            capacity_bytes: Some(state.capacity_bytes),
            transport: String::new(),
        }
    }

    /// Drops all entries; what waits ends as closed.
    pub fn close(&self) {
        self.shared.close();
        if let Some(node) = self.node().as_ref() {
            node.stop();
        }
    }
}
