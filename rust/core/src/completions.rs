//! Completed works, for an asyncio loop: one descriptor wakes it for any number of works.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, Weak};

use crate::error::Result;
use crate::sync::{clear, eventfd, lock, signal};

/// The works of a loop that have completed, by the keys under which the loop watches them.
#[derive(Debug)]
pub struct Completions {
    /// Readable while there are keys to drain.
    ready: OwnedFd,
    keys: Mutex<Vec<u64>>,
}

impl Completions {
    /// # Errors
    /// `Exhausted`: the system gives no descriptor.
    pub fn new() -> Result<Self> {
        Ok(Self {
            ready: eventfd()?,
            keys: Mutex::default(),
        })
    }

    /// Removes and returns the keys of works that have completed.
    pub fn drain(&self) -> Vec<u64> {
        let mut keys = lock(&self.keys);
        clear(&self.ready);
        std::mem::take(&mut keys)
    }

    fn push(&self, key: u64) {
        let mut keys = lock(&self.keys);
        if keys.is_empty() {
            signal(&self.ready);
        }
        keys.push(key);
    }
}

/// Readable while there are keys to drain.
impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// A loop that watches a work. The work does not keep the completions of a loop that has ended.
#[derive(Debug)]
pub(crate) struct Watcher {
    pub(crate) completions: Weak<Completions>,
    pub(crate) key: u64,
}

impl Watcher {
    /// Queues the key of the completed work, which wakes the loop.
    pub(crate) fn notify(self) {
        if let Some(completions) = self.completions.upgrade() {
            completions.push(self.key);
        }
    }
}
