//! The buffer itself: the store behind one lock. Whoever calls does the work, the server's thread for its clients; bytes
//! are copied and callers woken outside of the lock. The server's thread copies by slices, between its rounds.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::copying::EntryCopy;
use super::operation::{Delivery, Origin, Selected};
use super::state::{BufferState, By, Effect, LocalInsert, Waiting};
use super::store::{StoreAction, Ticket};
use super::{Items, LookupInfo, LookupQuery};
use crate::error::{Error, Result};
use crate::process::Process;
use crate::reactor::Waker;
use crate::transport::Pool;
use crate::work::Completer;

/// What the server's thread copies in one go: of memory that is not used yet, about 2 ms.
const SLICE: usize = 4 << 20;

/// The state that callers, deliveries and the server's thread share.
pub(super) struct LookupShared {
    state: Mutex<BufferState>,
    waker: OnceLock<Waker>,
    /// Memory of entries that were let go. Without a thread, it is given back with the next insert.
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
            waker: OnceLock::new(),
            pool: Pool::default(),
            process: Process::this(),
        }
    }

    /// As a fork has it.
    #[cfg(test)]
    pub(super) fn fork(&mut self) {
        self.process = Process::another();
    }

    /// In a fork nothing is to be looked at.
    pub(super) fn check_process(&self) -> Result<()> {
        self.process.check()
    }

    fn lock(&self) -> Result<MutexGuard<'_, BufferState>> {
        self.check_process()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the state, then does what follows from it.
    fn update<R>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut BufferState) -> Result<R>,
    ) -> Result<R> {
        self.update_by(By::Caller, change)
    }

    fn update_by<R>(
        self: &Arc<Self>,
        by: By,
        change: impl FnOnce(&mut BufferState) -> Result<R>,
    ) -> Result<R> {
        let mut effects = Vec::new();
        let result = self.change(by, &mut effects, change);
        self.carry_out_all(effects);
        result
    }

    fn change<R>(
        &self,
        by: By,
        effects: &mut Vec<Effect>,
        change: impl FnOnce(&mut BufferState) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Err(closed());
        }
        let result = change(&mut state);
        // The last one is carried out first.
        effects.extend(state.effects(by).into_iter().rev());
        let needs_server = state.needs_server();
        drop(state);
        if let Some(waker) = self.waker.get().filter(|_| needs_server) {
            waker.wake();
        }
        result
    }

    fn carry_out_all(self: &Arc<Self>, mut effects: Vec<Effect>) {
        while let Some(effect) = effects.pop() {
            self.carry_out(effect, &mut effects);
        }
    }

    fn carry_out(self: &Arc<Self>, effect: Effect, effects: &mut Vec<Effect>) {
        match effect {
            Effect::Copy(mut copying) => {
                let ended = loop {
                    match copying.advance(&self.pool, usize::MAX) {
                        Ok(false) => {}
                        ended => break ended,
                    }
                };
                self.copied(By::Caller, effects, copying, ended);
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

    /// Makes an insert of this process visible, or gives up its place.
    fn copied(&self, by: By, effects: &mut Vec<Effect>, copying: EntryCopy, ended: Result<bool>) {
        let EntryCopy { ticket, insert, .. } = copying;
        let LocalInsert {
            tokens,
            items,
            completer,
        } = insert;
        // The caller's memory is let go before it is told.
        let copied = ended.map(|_| items);
        let ended = self.change(by, effects, |state| match copied {
            Ok(items) => {
                state.commit(ticket, tokens, items);
                Ok(())
            }
            Err(error) => {
                state.store.abandon(ticket);
                Err(error)
            }
        });
        completer.complete(ended);
    }

    /// On the server's thread: goes on with the copies of inserts of this process whose place it has made, by a slice;
    /// whether there was one.
    pub(super) fn copy_on(self: &Arc<Self>, copying: &mut Option<EntryCopy>) -> bool {
        let next = || self.lock().ok()?.next_granted();
        let Some(mut under_way) = copying.take().or_else(next) else {
            return false;
        };
        match under_way.advance(&self.pool, SLICE) {
            Ok(false) => *copying = Some(under_way),
            ended => {
                let mut effects = Vec::new();
                self.copied(By::Server, &mut effects, under_way, ended);
                self.carry_out_all(effects);
            }
        }
        true
    }

    /// Ends the inserts of this process that wait for a copy by the server's thread, which has ended.
    pub(super) fn end_copies(self: &Arc<Self>, mut copying: Option<EntryCopy>) {
        let mut effects = Vec::new();
        let next = || self.lock().ok()?.next_granted();
        while let Some(waiting) = copying.take().or_else(next) {
            let ended = Err(Error::Closed("the buffer's server has ended".to_owned()));
            self.copied(By::Caller, &mut effects, waiting, ended);
        }
        self.carry_out_all(effects);
    }

    /// Whom to wake when there is something to do for clients.
    pub(super) fn serve(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// A closed buffer is an error.
    pub(super) fn check_open(self: &Arc<Self>) -> Result<()> {
        self.update(|_| Ok(()))
    }

    /// Begins an insert of this process.
    pub(super) fn insert_here(
        self: &Arc<Self>,
        tokens: Arc<[i64]>,
        items: Items,
        deadline: Option<Instant>,
        completer: Completer<()>,
    ) -> Result<Ticket> {
        self.check_process()?;
        self.pool.expire(Instant::now());
        self.update(|state| {
            let num_bytes = items.entry_bytes(&tokens);
            let ticket = state.store.reserve(num_bytes, deadline, Instant::now())?;
            let insert = LocalInsert {
                tokens,
                items,
                completer,
            };
            state.waiting.insert(ticket, Waiting::Insert(insert));
            Ok(ticket)
        })
    }

    /// Begins a select of this process.
    pub(super) fn select_here(
        self: &Arc<Self>,
        query: LookupQuery,
        deadline: Option<Instant>,
        completer: Completer<Selected>,
    ) -> Result<Ticket> {
        self.update(|state| {
            let ticket = state.store.select(query, deadline, Instant::now());
            state.waiting.insert(ticket, Waiting::Select(completer));
            Ok(ticket)
        })
    }

    /// Counters and state.
    pub(super) fn info(&self) -> LookupInfo {
        let Ok(state) = self.lock() else {
            return LookupInfo {
                state: "closed",
                ..LookupInfo::default()
            };
        };
        state.info()
    }

    /// Asks for the place of an entry of a client.
    pub(super) fn reserve(
        self: &Arc<Self>,
        num_bytes: u64,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        let reserve =
            |state: &mut BufferState| state.store.reserve(num_bytes, deadline, Instant::now());
        self.update_by(By::Server, reserve)
    }

    /// Makes an entry visible.
    pub(super) fn commit(
        self: &Arc<Self>,
        ticket: Ticket,
        tokens: Arc<[i64]>,
        items: Items,
    ) -> Result<()> {
        self.update_by(By::Server, |state| {
            state.commit(ticket, tokens, items);
            Ok(())
        })
    }

    /// Begins a select of a client.
    pub(super) fn select(
        self: &Arc<Self>,
        query: LookupQuery,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        let select =
            |state: &mut BufferState| Ok(state.store.select(query, deadline, Instant::now()));
        self.update_by(By::Server, select)
    }

    /// Ends a client's select that waits, or its insert that is not committed.
    pub(super) fn forget(self: &Arc<Self>, ticket: Ticket) {
        let _ = self.update_by(By::Server, |state| {
            state.forget(ticket);
            Ok(())
        });
    }

    /// A client has an entry whole, and it is his.
    pub(super) fn acknowledge(&self) {
        if let Ok(mut state) = self.lock() {
            state.num_consumed += 1;
        }
    }

    /// What a client acknowledged is dropped, or goes back because nobody looked at it.
    pub(super) fn conclude(self: &Arc<Self>, entry: Ticket, is_consumed: bool) {
        let _ = self.update_by(By::Server, |state| {
            state.num_consumed -= 1;
            state.settle(entry, is_consumed);
            Ok(())
        });
    }

    /// A client did not get the entry that it was delivered.
    pub(super) fn put_back(self: &Arc<Self>, entry: Ticket) {
        let _ = self.update_by(By::Server, |state| {
            state.settle(entry, false);
            Ok(())
        });
    }

    /// Ends what has waited for too long, in the server's process too.
    pub(super) fn expire(self: &Arc<Self>) {
        let _ = self.update_by(By::Server, |state| {
            state.store.expire(Instant::now());
            Ok(())
        });
    }

    /// What there is to do for clients.
    pub(super) fn take_mail(&self) -> VecDeque<StoreAction<Items>> {
        self.lock()
            .map(|mut state| std::mem::take(&mut state.outbox))
            .unwrap_or_default()
    }

    /// When [`expire`](Self::expire) has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock().ok()?.store.next_deadline()
    }

    /// The error of an insert that found no place.
    pub(super) fn full(&self, num_bytes: u64) -> Error {
        self.lock()
            .map_or_else(|error| error, |state| state.full(num_bytes))
    }

    /// Drops all entries; what waits ends as closed.
    pub(super) fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        let waiting = state.close();
        drop(state);
        for waiting in waiting {
            waiting.end(closed());
        }
    }
}

/// The trait for an `Arc`, because what follows may have to deliver, which needs one.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<LookupShared>);

/// A buffer that is closed has nothing to withdraw, settle or expire: those errors are no news.
impl Origin for Handle {
    fn withdraw(&self, ticket: Ticket) {
        let _ = self.0.update(|state| {
            state.withdraw(ticket);
            Ok(())
        });
    }

    fn settle(&self, entry: Ticket, is_consumed: bool) {
        let _ = self.0.update(|state| {
            state.settle(entry, is_consumed);
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
