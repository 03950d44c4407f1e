//! A lookup buffer as its threads share it: the state behind one lock. Each caller does its own work, and the server's
//! thread that of its clients. Bytes are copied and operations completed without the lock.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::copying::EntryCopy;
use super::operation::{Delivery, Origin, Selected};
use super::state::{
    BufferState, ChangedBy, ClientAction, ClientOperation, FollowUp, Inserter, LocalInsert,
    Selector,
};
use super::store::Ticket;
use super::{Items, LookupInfo, LookupQuery};
use crate::error::{Error, Result};
use crate::process::Process;
use crate::reactor::Waker;
use crate::transport::Pool;
use crate::work::Completer;

/// What the server's thread copies in one slice: about 2 ms for memory that was never used.
const COPY_SLICE: usize = 4 << 20;

pub(super) struct LookupShared {
    state: Mutex<BufferState>,
    /// Wakes the server, if there is one.
    server: OnceLock<Waker>,
    /// Memory of consumed entries. Without a server, each insert releases what was idle for long.
    pool: Pool<Buffer>,
    process: Process,
}

impl std::fmt::Debug for LookupShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LookupShared").finish_non_exhaustive()
    }
}

fn closed() -> Error {
    Error::Closed("the lookup buffer is closed".to_owned())
}

impl LookupShared {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            state: Mutex::new(BufferState::new(capacity_bytes)),
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

    pub(super) fn check_open(self: &Arc<Self>) -> Result<()> {
        self.change(ChangedBy::Caller, |_| ())
    }

    fn lock(&self) -> Result<MutexGuard<'_, BufferState>> {
        self.check_process()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
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

    /// Changes the state, and puts what follows on the stack: the first follow-up on top.
    fn begin_change<R>(
        &self,
        by: ChangedBy,
        stack: &mut Vec<FollowUp>,
        change: impl FnOnce(&mut BufferState) -> R,
    ) -> Result<R> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Err(closed());
        }
        let changed = change(&mut state);
        stack.extend(state.follow_ups(by).into_iter().rev());
        let needs_server = state.needs_server();
        drop(state);
        if let Some(server) = self.server.get().filter(|_| needs_server) {
            server.wake();
        }
        Ok(changed)
    }

    fn run(self: &Arc<Self>, mut stack: Vec<FollowUp>) {
        while let Some(follow_up) = stack.pop() {
            match follow_up {
                FollowUp::Copy(mut copy) => {
                    let copied = loop {
                        match copy.advance(&self.pool, usize::MAX) {
                            Ok(false) => {}
                            ended => break ended.map(|_| ()),
                        }
                    };
                    self.end_copy(ChangedBy::Caller, &mut stack, copy, copied);
                }
                FollowUp::Refuse(completer, error) => completer.complete(Err(error)),
                FollowUp::Deliver(completer, entry, items) => {
                    let origin = Origin::Local(Arc::clone(self));
                    let delivery = Delivery::new(items, entry, origin);
                    completer.complete(Ok(Some(Arc::new(delivery))));
                }
                FollowUp::Miss(completer) => completer.complete(Ok(None)),
            }
        }
    }

    /// Makes a copied insert visible, or frees its space.
    fn end_copy(
        &self,
        by: ChangedBy,
        stack: &mut Vec<FollowUp>,
        copy: EntryCopy,
        copied: Result<()>,
    ) {
        let EntryCopy { ticket, insert, .. } = copy;
        let LocalInsert {
            tokens,
            items,
            completer,
        } = insert;
        let ended = match copied {
            Ok(()) => self.begin_change(by, stack, |state| state.commit(ticket, tokens, items)),
            Err(error) => {
                // Before the insert completes, its caller's memory is released.
                drop(items);
                let abandoned = self.begin_change(by, stack, |state| state.store.abandon(ticket));
                abandoned.and(Err(error))
            }
        };
        completer.complete(ended);
    }

    /// On the server's thread: copies a slice of an insert of this process, if one waits for its copy. True if there was one.
    pub(super) fn run_copy_slice(self: &Arc<Self>, copying: &mut Option<EntryCopy>) -> bool {
        let Some(mut copy) = copying.take().or_else(|| self.next_granted()) else {
            return false;
        };
        match copy.advance(&self.pool, COPY_SLICE) {
            Ok(false) => *copying = Some(copy),
            ended => {
                let (mut stack, copied) = (Vec::new(), ended.map(|_| ()));
                self.end_copy(ChangedBy::Server, &mut stack, copy, copied);
                self.run(stack);
            }
        }
        true
    }

    fn next_granted(&self) -> Option<EntryCopy> {
        self.lock().ok()?.next_granted()
    }

    /// Ends the inserts of this process that wait for a copy by the server's thread, which has ended.
    pub(super) fn end_copies(self: &Arc<Self>, mut copying: Option<EntryCopy>) {
        let mut stack = Vec::new();
        while let Some(copy) = copying.take().or_else(|| self.next_granted()) {
            let ended = Err(Error::Closed("the buffer's server has ended".to_owned()));
            self.end_copy(ChangedBy::Caller, &mut stack, copy, ended);
        }
        self.run(stack);
    }

    /// Names the server, to wake it when there is work for its thread.
    pub(super) fn set_server(&self, server: Waker) {
        let _ = self.server.set(server);
    }

    /// Begins an insert of this process.
    pub(super) fn insert(
        self: &Arc<Self>,
        tokens: Arc<[i64]>,
        items: Items,
        deadline: Option<Instant>,
        completer: Completer<()>,
    ) -> Result<Ticket> {
        self.check_process()?;
        let now = Instant::now();
        self.pool.expire(now);
        let num_bytes = items.entry_bytes(&tokens);
        let insert = Inserter::Local(LocalInsert {
            tokens,
            items,
            completer,
        });
        let reserved = self.change(ChangedBy::Caller, |state| {
            state.store.reserve(num_bytes, deadline, now, insert)
        });
        reserved.flatten()
    }

    /// Begins a select of this process.
    pub(super) fn select(
        self: &Arc<Self>,
        query: LookupQuery,
        deadline: Option<Instant>,
        completer: Completer<Selected>,
    ) -> Result<Ticket> {
        let select = Selector::Local(completer);
        self.change(ChangedBy::Caller, |state| {
            state.store.select(query, deadline, Instant::now(), select)
        })
    }

    pub(super) fn info(&self) -> LookupInfo {
        let closed = |_| LookupInfo {
            state: "closed",
            ..LookupInfo::default()
        };
        self.lock().map_or_else(closed, |state| state.info())
    }

    /// What the server has to do for its clients.
    pub(super) fn drain_client_actions(&self) -> VecDeque<(ClientOperation, ClientAction)> {
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
        let (inserts, selects) = state.close();
        drop(state);
        for completer in inserts {
            completer.complete(Err(closed()));
        }
        for completer in selects {
            completer.complete(Err(closed()));
        }
    }
}
