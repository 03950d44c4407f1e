//! Entries as threads share them, behind one lock. Each caller of a lookup buffer in this process does its own work, and the
//! server's thread that of its clients. Bytes are copied and operations completed without the lock.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::content::Content;
use super::copying::LocalInsert;
use super::info::StoreInfo;
use super::state::{Access, Entries, EntryAction, Holder, Key, Query};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::process::Process;
use crate::reactor::Waker;
use crate::sync::lock;
use crate::transport::Pool;

/// Bytes that the server's thread copies in one slice: about 2 ms for memory that was never used.
const COPY_SLICE: usize = 4 << 20;

/// The session of the callers in this process, which no reactor gives to a peer.
const LOCAL: SessionKey = SessionKey::MAX;

/// An entry that a select of this process leases.
pub(super) struct Leased {
    pub(super) shared: Arc<Shared>,
    /// The select.
    pub(super) operation: u64,
    pub(super) content: Arc<Content>,
}

/// Ends a select of this process: with an entry, or with `None` if there was none in time.
pub(super) type EndSelect = Box<dyn FnOnce(Result<Option<Leased>>) + Send>;

/// An operation of this process.
enum LocalOperation {
    Insert(LocalInsert),
    Select(EndSelect),
}

/// Work of the thread that has changed the entries.
enum LocalAction {
    /// The insert of this operation has its space.
    Copy(u64, LocalInsert),
    /// The insert is refused.
    Refuse(LocalInsert, Error),
    /// The select of this operation has an entry, or there was none in time.
    Deliver(EndSelect, Option<(u64, Arc<Content>)>),
}

/// The thread that changes the entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChangedBy {
    /// A thread that may copy at once.
    Caller,
    /// The server's thread, which has heartbeats to send and other clients to serve.
    Server,
}

/// State under the lock.
pub(super) struct SharedState {
    pub(super) entries: Entries<Arc<Content>>,
    /// Operations of this process that wait.
    waiting: HashMap<u64, LocalOperation>,
    last_operation: u64,
    /// Until the server's thread drains them.
    client_actions: VecDeque<EntryAction<Arc<Content>>>,
    /// Inserts of this process to which the server's thread has given space. It copies the first one by slices.
    granted: VecDeque<(u64, LocalInsert)>,
    pub(super) is_closed: bool,
}

/// Operations of this process.
impl SharedState {
    fn begin(&mut self, operation: LocalOperation) -> Holder {
        self.last_operation += 1;
        self.waiting.insert(self.last_operation, operation);
        (LOCAL, self.last_operation)
    }

    /// Begins an insert under a new number.
    ///
    /// # Errors
    /// `Config`: the entry is larger than the capacity.
    pub(super) fn insert(
        &mut self,
        (key, num_bytes): (Key, u64),
        deadline: Option<Instant>,
        now: Instant,
        insert: LocalInsert,
    ) -> Result<u64> {
        self.entries.check_size(num_bytes)?;
        let holder = self.begin(LocalOperation::Insert(insert));
        self.entries.reserve(holder, key, num_bytes, deadline, now);
        Ok(holder.1)
    }

    /// Begins a select under a new number.
    pub(super) fn select(
        &mut self,
        query: Query<Key>,
        deadline: Option<Instant>,
        now: Instant,
        end: EndSelect,
    ) -> u64 {
        let holder = self.begin(LocalOperation::Select(end));
        let access = Access::Lease(None);
        self.entries.select(holder, query, access, deadline, now);
        holder.1
    }

    /// Ends an operation that has not met its other side, and whose insert is not being copied: its completer is dropped,
    /// which completes it as closed.
    pub(super) fn withdraw(&mut self, operation: u64, now: Instant) {
        let is_it = |(granted, insert): &(u64, LocalInsert)| {
            *granted == operation && !insert.is_being_copied()
        };
        if let Some(at) = self.granted.iter().position(is_it) {
            self.granted.remove(at);
            self.release(operation, now);
        } else if self.waiting.remove(&operation).is_some() {
            self.release(operation, now);
        }
    }

    fn release(&mut self, operation: u64, now: Instant) {
        self.entries.release((LOCAL, operation), now);
    }

    /// The consumer keeps the entry of a select, or it goes back.
    pub(super) fn settle(&mut self, operation: u64, is_consumed: bool, now: Instant) {
        if is_consumed {
            let _ = self.entries.acknowledge((LOCAL, operation), now);
        } else {
            self.release(operation, now);
        }
    }
}

impl SharedState {
    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("waiting local operations", self.waiting.len()),
            ("granted inserts", self.granted.len()),
        ];
        sizes.extend(self.entries.sizes());
        sizes
    }

    /// Divides the actions: returns those for the thread that has changed the entries, and keeps the others for the
    /// server's.
    fn drain_actions(&mut self, by: ChangedBy) -> Vec<LocalAction> {
        let mut local = Vec::new();
        while let Some(action) = self.entries.next_action() {
            match action.holder() {
                Some((LOCAL, operation)) => local.extend(self.local_action(by, operation, action)),
                _ => self.client_actions.push_back(action),
            }
        }
        local
    }

    fn local_action(
        &mut self,
        by: ChangedBy,
        operation: u64,
        action: EntryAction<Arc<Content>>,
    ) -> Option<LocalAction> {
        match (self.waiting.remove(&operation)?, action) {
            (LocalOperation::Insert(insert), EntryAction::Reserved(_)) => match by {
                ChangedBy::Caller => return Some(LocalAction::Copy(operation, insert)),
                ChangedBy::Server => self.granted.push_back((operation, insert)),
            },
            (LocalOperation::Insert(insert), EntryAction::Refused(_, error)) => {
                return Some(LocalAction::Refuse(insert, error));
            }
            (LocalOperation::Select(end), EntryAction::Offered(_, content)) => {
                return Some(LocalAction::Deliver(end, Some((operation, content))));
            }
            (LocalOperation::Select(end), EntryAction::Nothing(_)) => {
                return Some(LocalAction::Deliver(end, None));
            }
            // Entries of a buffer have neither other ends nor a disk.
            (_, _) => {}
        }
        None
    }
}

/// Entries behind one lock.
pub(super) struct Shared {
    state: Mutex<SharedState>,
    /// Wakes the server, if there is one.
    server: OnceLock<Waker>,
    /// Memory of consumed entries. Without a server, each insert releases what was idle for long.
    pub(super) pool: Pool<Buffer>,
    process: Process,
    name: &'static str,
}

impl Shared {
    /// Shares entries; `name` is that of their face in errors.
    pub(super) fn new(entries: Entries<Arc<Content>>, name: &'static str) -> Self {
        let state = SharedState {
            entries,
            waiting: HashMap::new(),
            last_operation: 0,
            client_actions: VecDeque::new(),
            granted: VecDeque::new(),
            is_closed: false,
        };
        Self {
            state: Mutex::new(state),
            server: OnceLock::new(),
            pool: Pool::default(),
            process: Process::this(),
            name,
        }
    }

    fn closed(&self) -> Error {
        Error::Closed(format!("the {} is closed", self.name))
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

    fn lock(&self) -> Result<MutexGuard<'_, SharedState>> {
        self.check_process()?;
        Ok(self.lock_here())
    }

    /// For threads that a forked child does not have.
    fn lock_here(&self) -> MutexGuard<'_, SharedState> {
        lock(&self.state)
    }

    /// Changes the state, then does what follows.
    ///
    /// # Errors
    /// `Closed`: the buffer is closed, or the process is the child of a fork.
    pub(super) fn change<R>(
        self: &Arc<Self>,
        by: ChangedBy,
        change: impl FnOnce(&mut SharedState) -> R,
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
        change: impl FnOnce(&mut SharedState) -> R,
    ) -> Result<R> {
        let mut state = match by {
            ChangedBy::Caller => self.lock()?,
            ChangedBy::Server => self.lock_here(),
        };
        if state.is_closed {
            return Err(self.closed());
        }
        let changed = change(&mut state);
        stack.extend(state.drain_actions(by).into_iter().rev());
        // The server drains what follows from its own changes, and goes on by itself with the insert that it copies.
        let waiting = state.granted.back();
        let is_for_server = by == ChangedBy::Caller && !state.client_actions.is_empty();
        let needs_server =
            is_for_server || waiting.is_some_and(|(_, insert)| !insert.is_being_copied());
        drop(state);
        if let Some(server) = self.server.get().filter(|_| needs_server) {
            server.wake();
        }
        Ok(changed)
    }

    fn run(self: &Arc<Self>, mut stack: Vec<LocalAction>) {
        while let Some(action) = stack.pop() {
            match action {
                LocalAction::Copy(operation, mut insert) => {
                    let copied = loop {
                        match insert.advance(&self.pool, usize::MAX) {
                            Ok(false) => {}
                            ended => break ended.map(|_| ()),
                        }
                    };
                    self.end_copy(ChangedBy::Caller, &mut stack, (operation, insert), copied);
                }
                LocalAction::Refuse(insert, error) => insert.fail(error),
                LocalAction::Deliver(end, found) => {
                    end(Ok(found.map(|(operation, content)| Leased {
                        shared: Arc::clone(self),
                        operation,
                        content,
                    })));
                }
            }
        }
    }

    /// Makes a copied insert visible, or frees its space.
    fn end_copy(
        &self,
        by: ChangedBy,
        stack: &mut Vec<LocalAction>,
        (operation, insert): (u64, LocalInsert),
        copied: Result<()>,
    ) {
        let LocalInsert {
            items, completer, ..
        } = insert;
        let (holder, now) = ((LOCAL, operation), crate::clock::now());
        let ended = match copied {
            Ok(()) => {
                let content = Content::of_items(&items);
                let num_bytes = content.num_bytes();
                let content = (Arc::new(content), num_bytes, 0);
                self.begin_change(by, stack, |state| {
                    state.entries.commit(holder, content, None, now);
                })
            }
            Err(error) => {
                // Before the insert completes, its caller's memory is released.
                drop(items);
                let released =
                    self.begin_change(by, stack, |state| state.entries.release(holder, now));
                released.and(Err(error))
            }
        };
        completer.complete(ended);
    }

    /// On the server's thread: copies a slice of an insert of this process, if one waits for its copy. True if there was one.
    pub(super) fn run_copy_slice(self: &Arc<Self>) -> bool {
        let Some((operation, mut insert)) = self.next_granted() else {
            return false;
        };
        match insert.advance(&self.pool, COPY_SLICE) {
            Ok(false) => {
                let mut state = self.lock_here();
                state.granted.push_front((operation, insert));
            }
            ended => {
                let (mut stack, copied) = (Vec::new(), ended.map(|_| ()));
                self.end_copy(ChangedBy::Server, &mut stack, (operation, insert), copied);
                self.run(stack);
            }
        }
        true
    }

    /// The next insert for the server's thread to copy.
    fn next_granted(&self) -> Option<(u64, LocalInsert)> {
        self.lock_here().granted.pop_front()
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

    /// Looks at the state, also at that of closed entries.
    ///
    /// # Errors
    /// `Closed`: the process is the child of a fork.
    pub(super) fn look<R>(&self, look: impl FnOnce(&SharedState) -> R) -> Result<R> {
        self.lock().map(|state| look(&state))
    }

    /// Counters of a store.
    ///
    /// # Errors
    /// `Closed`: the store is closed.
    pub(super) fn info(&self) -> Result<StoreInfo> {
        let state = self.lock()?;
        if state.is_closed {
            return Err(self.closed());
        }
        Ok(state.entries.info())
    }

    /// Actions of the server for its clients and its disk.
    pub(super) fn drain_client_actions(&self) -> VecDeque<EntryAction<Arc<Content>>> {
        std::mem::take(&mut self.lock_here().client_actions)
    }

    /// The next deadline of an operation.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock_here().entries.next_deadline()
    }

    /// Drops all entries; operations that wait end as closed.
    pub(super) fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        state.is_closed = true;
        state.client_actions.clear();
        state.entries.clear();
        let granted = std::mem::take(&mut state.granted);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for (_, insert) in granted {
            insert.fail(self.closed());
        }
        for operation in waiting.into_values() {
            match operation {
                LocalOperation::Insert(insert) => insert.fail(self.closed()),
                LocalOperation::Select(end) => end(Err(self.closed())),
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
