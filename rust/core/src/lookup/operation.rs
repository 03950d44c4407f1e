//! What callers hold: an insert or a select under way, and an entry that was delivered but not looked at.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::Items;
use super::store::Ticket;
use crate::error::Result;
use crate::work::{Waited, Work};

/// Where an operation was begun. Any thread may call.
pub(crate) trait Origin: Send + Sync + std::fmt::Debug {
    /// Gives up an insert or a select that has not met its other side.
    fn withdraw(&self, ticket: Ticket);
    /// A delivered entry was taken, or nobody has looked at it and it goes back.
    fn settle(&self, entry: Ticket, is_consumed: bool);
    /// Ends what has waited for too long.
    fn expire(&self);
}

/// How a select ended: with an entry, or with nothing in time.
pub type Selected = Option<Arc<Delivery>>;

/// An entry that has reached its consumer. Dropped without [`consume`](Self::consume), it goes back to its old place.
#[derive(Debug)]
pub struct Delivery {
    items: Items,
    entry: Ticket,
    origin: Arc<dyn Origin>,
    is_consumed: AtomicBool,
}

impl Delivery {
    pub(super) fn new(items: Items, entry: Ticket, origin: Arc<dyn Origin>) -> Self {
        Self {
            items,
            entry,
            origin,
            is_consumed: AtomicBool::new(false),
        }
    }

    /// The tensors.
    pub fn items(&self) -> &Items {
        &self.items
    }

    /// Makes the tensors the caller's, and the buffer forget them.
    pub fn consume(&self) {
        if !self.is_consumed.swap(true, Ordering::AcqRel) {
            self.origin.settle(self.entry, true);
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if !*self.is_consumed.get_mut() {
            self.origin.settle(self.entry, false);
        }
    }
}

/// An insert or a select under way. A select that is dropped is withdrawn; an insert goes on.
#[derive(Debug)]
pub struct Operation<T> {
    work: Work<T>,
    ticket: Ticket,
    origin: Arc<dyn Origin>,
    is_select: bool,
    /// When it ends by itself, where no thread sees to that.
    expires: Option<Instant>,
}

impl<T> Operation<T> {
    pub(super) fn insert(work: Work<T>, ticket: Ticket, origin: Arc<dyn Origin>) -> Self {
        Self::new(work, ticket, origin, false)
    }

    pub(super) fn select(work: Work<T>, ticket: Ticket, origin: Arc<dyn Origin>) -> Self {
        Self::new(work, ticket, origin, true)
    }

    fn new(work: Work<T>, ticket: Ticket, origin: Arc<dyn Origin>, is_select: bool) -> Self {
        Self {
            work,
            ticket,
            origin,
            is_select,
            expires: None,
        }
    }

    pub(super) fn expires(mut self, at: Option<Instant>) -> Self {
        self.expires = at;
        self
    }

    /// As of [`Work`].
    pub fn is_completed(&self) -> bool {
        self.work.is_completed()
    }

    /// As of [`Work`].
    pub fn event_fd(&self) -> Result<RawFd> {
        self.work.event_fd()
    }

    /// As of [`Work`].
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        let earliest = self.expires.into_iter().chain(deadline).min();
        let waited = self.work.wait(earliest)?;
        if waited == Waited::TimedOut && earliest == self.expires {
            self.origin.expire();
            // What has met its other side does not end by that: another thread copies or delivers it, and tells of the end.
            return self.work.wait(deadline);
        }
        Ok(waited)
    }

    /// Gives it up, unless it has met its other side; it then ends as that goes.
    pub fn withdraw(&self) {
        self.origin.withdraw(self.ticket);
    }
}

impl<T: Clone> Operation<T> {
    /// As of [`Work`].
    pub fn result(&self) -> Option<Result<T>> {
        self.work.result()
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        if self.is_select && !self.work.is_completed() {
            self.withdraw();
        }
    }
}
