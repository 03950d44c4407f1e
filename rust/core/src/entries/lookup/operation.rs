//! Handles of callers: an insert or a select under way, and a delivered entry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::Items;
use super::command_queue::{CommandQueue, LookupCommand};
use crate::clock;
use crate::completions::Completions;
use crate::entries::shared::{ChangedBy, Leased, Shared, SharedState};
use crate::error::Result;
use crate::work::{Then, Waited, Work};

/// The buffer of an operation, which numbers its operations. A closed buffer ignores all calls.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    Local(Arc<Shared>),
    Remote(Arc<CommandQueue>),
}

impl Origin {
    /// Cancels an insert or a select, unless it has met its other side.
    fn withdraw(&self, operation: u64) {
        match self {
            Self::Local(shared) => {
                let withdraw = |state: &mut SharedState| state.withdraw(operation, clock::now());
                let _ = shared.change(ChangedBy::Caller, withdraw);
            }
            // The servers of a closed client forget the operation when the sessions end.
            Self::Remote(queue) => {
                let _ = queue.send(LookupCommand::Withdraw(operation), Then::GoOn);
            }
        }
    }

    /// The consumer keeps a delivered entry, or the entry goes back.
    fn settle(&self, operation: u64, is_consumed: bool) {
        match self {
            Self::Local(shared) => {
                let settle =
                    |state: &mut SharedState| state.settle(operation, is_consumed, clock::now());
                let _ = shared.change(ChangedBy::Caller, settle);
            }
            // The servers of a closed client return the entry when the sessions end.
            Self::Remote(queue) => {
                queue.update_info(|info| info.num_consumed += u64::from(is_consumed));
                let settle = LookupCommand::Settle {
                    operation,
                    is_consumed,
                };
                let _ = queue.send(settle, Then::GoOn);
            }
        }
    }

    /// Ends operations whose deadline has passed. A remote buffer has a thread for that.
    fn expire(&self) {
        if let Self::Local(shared) = self {
            let expire = |state: &mut SharedState| state.entries.expire(clock::now());
            let _ = shared.change(ChangedBy::Caller, expire);
        }
    }
}

/// The result of a select: an entry, or `None` if there was none in time.
pub type Selected = Option<Arc<Delivery>>;

/// An entry that has reached its consumer. Dropped without [`consume`](Self::consume), it goes back to its old place.
#[derive(Debug)]
pub struct Delivery {
    items: Items,
    /// The server that leases the entry, and the select; `None` once the entry has been returned.
    lease: Option<(Origin, u64)>,
    is_consumed: AtomicBool,
}

impl Delivery {
    /// An entry of this process.
    pub(super) fn of_local(leased: Leased) -> Option<Self> {
        let items = leased.content.to_items()?;
        Some(Self::new(
            items,
            leased.operation,
            Origin::Local(leased.shared),
        ))
    }

    pub(super) fn new(items: Items, operation: u64, origin: Origin) -> Self {
        Self {
            items,
            lease: Some((origin, operation)),
            is_consumed: AtomicBool::new(false),
        }
    }

    /// The tensors of an entry that has stayed with its buffer.
    pub(super) fn returned(items: Items) -> Self {
        Self {
            items,
            lease: None,
            is_consumed: AtomicBool::new(false),
        }
    }

    fn settle(&self, is_consumed: bool) {
        if let Some((origin, operation)) = &self.lease {
            origin.settle(*operation, is_consumed);
        }
    }

    /// The tensors.
    pub fn items(&self) -> &Items {
        &self.items
    }

    /// Keeps the entry: the buffer forgets it.
    pub fn consume(&self) {
        if !self.is_consumed.swap(true, Ordering::AcqRel) {
            self.settle(true);
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if !*self.is_consumed.get_mut() {
            self.settle(false);
        }
    }
}

/// An insert or a select under way. Dropping a select withdraws it; an insert goes on.
#[derive(Debug)]
pub struct Operation<T> {
    work: Work<T>,
    number: u64,
    origin: Origin,
    withdraws_on_drop: bool,
    /// The deadline that the waiting thread enforces, where no other thread does.
    deadline: Option<Instant>,
}

impl<T> Operation<T> {
    pub(super) fn new(work: Work<T>, number: u64, origin: Origin) -> Self {
        Self {
            work,
            number,
            origin,
            withdraws_on_drop: false,
            deadline: None,
        }
    }

    pub(super) fn withdraws_on_drop(mut self) -> Self {
        self.withdraws_on_drop = true;
        self
    }

    pub(in crate::entries) fn expires(mut self, at: Option<Instant>) -> Self {
        self.deadline = at;
        self
    }

    /// See [`Work::is_completed`].
    pub fn is_completed(&self) -> bool {
        self.work.is_completed()
    }

    /// See [`Work::watch`].
    pub fn watch(&self, completions: &Arc<Completions>, key: u64) -> bool {
        self.work.watch(completions, key)
    }

    /// See [`Work::unwatch`].
    pub fn unwatch(&self, completions: &Arc<Completions>, key: u64) {
        self.work.unwatch(completions, key);
    }

    /// See [`Work::wait`].
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        let earliest = self.deadline.into_iter().chain(deadline).min();
        let waited = self.work.wait(earliest)?;
        if waited == Waited::TimedOut && earliest == self.deadline {
            self.origin.expire();
            // An operation that has met its other side goes on: another thread copies or delivers its entry.
            return self.work.wait(deadline);
        }
        Ok(waited)
    }

    /// See [`Work::is_settled`].
    pub fn is_settled(&self) -> bool {
        self.work.is_settled()
    }

    /// See [`Work::wait_settled`].
    pub fn wait_settled(&self, deadline: Option<Instant>) -> Result<Waited> {
        match self.wait(deadline)? {
            Waited::Done => self.work.wait_settled(deadline),
            waited => Ok(waited),
        }
    }

    /// Cancels the operation, unless it has met its other side; it then ends in its own way.
    pub fn withdraw(&self) {
        self.origin.withdraw(self.number);
    }
}

impl<T: Clone> Operation<T> {
    /// See [`Work::result`].
    pub fn result(&self) -> Option<Result<T>> {
        self.work.result()
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        if self.withdraws_on_drop && !self.work.is_completed() {
            self.withdraw();
        }
    }
}
