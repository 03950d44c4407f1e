//! A lookup buffer as its threads share it: the store behind one lock. Each caller does its own work, and the server's
//! thread that of its clients. Bytes are copied and operations completed without the lock.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::copying::LocalInsert;
use super::operation::{Delivery, Origin, Selected};
use super::store::{Store, StoreAction, Ticket};
use super::{Items, LookupInfo};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::process::Process;
use crate::reactor::Waker;
use crate::sync::lock;
use crate::transport::Pool;
use crate::work::Completer;

/// Bytes that the server's thread copies in one slice: about 2 ms for memory that was never used.
const COPY_SLICE: usize = 4 << 20;

/// An operation of a client: its session and the client's number.
pub(super) type ClientOperation = (SessionKey, u64);

/// A waiter for an insert or a select: a caller in this process, or a client of the server.
#[derive(Debug)]
pub(super) enum LookupWaiter<L> {
    Local(L),
    Client(ClientOperation),
}

/// Calls of the server's thread alone.
pub(super) type ClientAction = StoreAction<Items, ClientOperation, ClientOperation>;

/// Calls of the thread that has changed the store.
type LocalAction = StoreAction<Items, LocalInsert, Completer<Selected>>;

/// The thread that changes the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChangedBy {
    /// A thread that may copy at once.
    Caller,
    /// The server's thread, which has heartbeats to send and other clients to serve.
    Server,
}

/// State under the lock.
#[derive(Debug)]
pub(super) struct BufferState {
    pub(super) store: Store<Items, LookupWaiter<LocalInsert>, LookupWaiter<Completer<Selected>>>,
    /// Until the server's thread drains them.
    client_actions: VecDeque<ClientAction>,
    /// Inserts of this process to which the server's thread has given space. It copies the first one by slices.
    granted: VecDeque<(Ticket, LocalInsert)>,
}

impl BufferState {
    /// Sizes of its queues, and of those of the store.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![("granted inserts", self.granted.len())];
        sizes.extend(self.store.sizes());
        sizes
    }

    /// Divides the store's actions: returns those for the thread that has changed it, and keeps the others for the server's.
    fn drain_actions(&mut self, by: ChangedBy) -> Vec<LocalAction> {
        let mut local = Vec::new();
        while let Some(action) = self.store.next_action() {
            match action {
                StoreAction::Insert(LookupWaiter::Client(client), granted) => {
                    let action = StoreAction::Insert(client, granted);
                    self.client_actions.push_back(action);
                }
                StoreAction::Select(LookupWaiter::Client(client), found) => {
                    let action = StoreAction::Select(client, found);
                    self.client_actions.push_back(action);
                }
                StoreAction::Insert(LookupWaiter::Local(insert), Ok(ticket))
                    if by == ChangedBy::Server =>
                {
                    self.granted.push_back((ticket, insert));
                }
                StoreAction::Insert(LookupWaiter::Local(insert), granted) => {
                    local.push(StoreAction::Insert(insert, granted));
                }
                StoreAction::Select(LookupWaiter::Local(completer), found) => {
                    local.push(StoreAction::Select(completer, found));
                }
            }
        }
        local
    }

    /// Ends an operation of this process that has not met its other side, and whose insert is not being copied: its
    /// completer is dropped, which completes it as closed.
    pub(super) fn withdraw(&mut self, ticket: Ticket) {
        let is_it = |(granted, insert): &(Ticket, LocalInsert)| {
            *granted == ticket && !insert.is_being_copied()
        };
        if let Some(at) = self.granted.iter().position(is_it) {
            self.granted.remove(at);
            self.store.release(ticket);
        } else {
            self.store.cancel(ticket);
        }
    }
}

#[derive(Debug)]
pub(super) struct LookupShared {
    state: Mutex<BufferState>,
    /// Wakes the server, if there is one.
    server: OnceLock<Waker>,
    /// Memory of consumed entries. Without a server, each insert releases what was idle for long.
    pub(super) pool: Pool<Buffer>,
    process: Process,
}

fn closed() -> Error {
    Error::Closed("the lookup buffer is closed".to_owned())
}

impl LookupShared {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        let state = BufferState {
            store: Store::new(capacity_bytes),
            client_actions: VecDeque::new(),
            granted: VecDeque::new(),
        };
        Self {
            state: Mutex::new(state),
            server: OnceLock::new(),
            pool: Pool::default(),
            process: Process::this(),
        }
    }

    /// Makes the buffer look as in the child of a fork.
    #[cfg(test)]
    pub(super) fn fork(&mut self) {
        self.process = Process::another();
    }

    /// In the child of a fork, another thread may hold the lock for ever.
    pub(super) fn check_process(&self) -> Result<()> {
        self.process.check()
    }

    fn lock(&self) -> Result<MutexGuard<'_, BufferState>> {
        self.check_process()?;
        Ok(lock(&self.state))
    }

    /// Changes the state, then does what follows.
    ///
    /// # Errors
    /// `Closed`: the buffer is closed, or the process is the child of a fork.
    pub(super) fn change<R>(
        self: &Arc<Self>,
        by: ChangedBy,
        change: impl FnOnce(&mut BufferState) -> R,
    ) -> Result<R> {
        let mut stack = Vec::new();
        let changed = self.begin_change(by, &mut stack, change);
        self.run(stack);
        changed
    }

    /// Changes the state, and puts what follows on the stack: the first action on top.
    fn begin_change<R>(
        &self,
        by: ChangedBy,
        stack: &mut Vec<LocalAction>,
        change: impl FnOnce(&mut BufferState) -> R,
    ) -> Result<R> {
        let mut state = self.lock()?;
        if state.store.is_closed() {
            return Err(closed());
        }
        let changed = change(&mut state);
        stack.extend(state.drain_actions(by).into_iter().rev());
        // The server goes on by itself with the insert that it copies.
        let waiting = state.granted.back();
        let needs_server = !state.client_actions.is_empty()
            || waiting.is_some_and(|(_, insert)| !insert.is_being_copied());
        drop(state);
        if let Some(server) = self.server.get().filter(|_| needs_server) {
            server.wake();
        }
        Ok(changed)
    }

    fn run(self: &Arc<Self>, mut stack: Vec<LocalAction>) {
        while let Some(action) = stack.pop() {
            match action {
                StoreAction::Insert(mut insert, Ok(ticket)) => {
                    let copied = loop {
                        match insert.advance(&self.pool, usize::MAX) {
                            Ok(false) => {}
                            ended => break ended.map(|_| ()),
                        }
                    };
                    self.end_copy(ChangedBy::Caller, &mut stack, (ticket, insert), copied);
                }
                StoreAction::Insert(insert, Err(full)) => insert.fail(full),
                StoreAction::Select(completer, found) => {
                    let origin = || Origin::Local(Arc::clone(self));
                    let delivery =
                        found.map(|(entry, items)| Arc::new(Delivery::new(items, entry, origin())));
                    completer.complete(Ok(delivery));
                }
            }
        }
    }

    /// Makes a copied insert visible, or frees its space.
    fn end_copy(
        &self,
        by: ChangedBy,
        stack: &mut Vec<LocalAction>,
        (ticket, insert): (Ticket, LocalInsert),
        copied: Result<()>,
    ) {
        let LocalInsert {
            tokens,
            items,
            completer,
            ..
        } = insert;
        let ended = match copied {
            Ok(()) => {
                self.begin_change(by, stack, |state| state.store.commit(ticket, tokens, items))
            }
            Err(error) => {
                // Before the insert completes, its caller's memory is released.
                drop(items);
                let released = self.begin_change(by, stack, |state| state.store.release(ticket));
                released.and(Err(error))
            }
        };
        completer.complete(ended);
    }

    /// On the server's thread: copies a slice of an insert of this process, if one waits for its copy. True if there was one.
    pub(super) fn run_copy_slice(self: &Arc<Self>) -> bool {
        let Some((ticket, mut insert)) = self.next_granted() else {
            return false;
        };
        match insert.advance(&self.pool, COPY_SLICE) {
            Ok(false) => {
                if let Ok(mut state) = self.lock() {
                    state.granted.push_front((ticket, insert));
                }
            }
            ended => {
                let (mut stack, copied) = (Vec::new(), ended.map(|_| ()));
                self.end_copy(ChangedBy::Server, &mut stack, (ticket, insert), copied);
                self.run(stack);
            }
        }
        true
    }

    /// The next insert for the server's thread to copy.
    fn next_granted(&self) -> Option<(Ticket, LocalInsert)> {
        self.lock().ok()?.granted.pop_front()
    }

    /// Ends the inserts of this process that wait for a copy by the server's thread, which has ended.
    pub(super) fn end_copies(self: &Arc<Self>) {
        let mut stack = Vec::new();
        while let Some(insert) = self.next_granted() {
            let ended = Err(Error::Closed("the buffer's server has ended".to_owned()));
            self.end_copy(ChangedBy::Caller, &mut stack, insert, ended);
        }
        self.run(stack);
    }

    /// Names the server, to wake it when there is work for its thread.
    pub(super) fn set_server(&self, server: Waker) {
        let _ = self.server.set(server);
    }

    pub(super) fn info(&self) -> LookupInfo {
        self.lock()
            .map_or_else(|_| LookupInfo::closed(), |state| state.store.info())
    }

    /// Actions of the server for its clients.
    pub(super) fn drain_client_actions(&self) -> VecDeque<ClientAction> {
        self.lock()
            .map(|mut state| std::mem::take(&mut state.client_actions))
            .unwrap_or_default()
    }

    /// The next deadline of the store.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock().ok()?.store.next_deadline()
    }

    /// Drops all entries; operations that wait end as closed.
    pub(super) fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        state.client_actions.clear();
        let granted = std::mem::take(&mut state.granted);
        let (inserts, selects) = state.store.close();
        drop(state);
        for insert in inserts {
            if let LookupWaiter::Local(insert) = insert {
                insert.fail(closed());
            }
        }
        for (_, insert) in granted {
            insert.fail(closed());
        }
        for select in selects {
            if let LookupWaiter::Local(completer) = select {
                completer.complete(Err(closed()));
            }
        }
    }
}
