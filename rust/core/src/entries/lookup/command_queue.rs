//! Commands of a client's callers to its reactor, in the order of their calls, and what the callers may see of the client.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::operation::Selected;
use super::{Items, LookupInfo, LookupQuery};
use crate::entries::state::Key;
use crate::error::{Error, Result};
use crate::process::Process;
use crate::reactor::Waker;
use crate::sync::lock;
use crate::work::{Completer, Then};

/// An insert that waits to be sent.
#[derive(Debug)]
pub(super) struct QueuedInsert {
    pub(super) operation: u64,
    pub(super) key: Key,
    pub(super) items: Items,
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<()>,
}

impl QueuedInsert {
    /// Ends the insert; its caller's memory is released before.
    pub(super) fn into_completer(self) -> Completer<()> {
        self.completer
    }
}

/// A select to be sent.
#[derive(Debug)]
pub(super) struct QueuedSelect {
    pub(super) operation: u64,
    pub(super) query: LookupQuery,
    pub(super) timeout: Option<Duration>,
    /// True if the entry stays with its server.
    pub(super) is_peek: bool,
    pub(super) completer: Completer<Selected>,
}

#[derive(Debug)]
pub(super) enum LookupCommand {
    Connect {
        addresses: Vec<String>,
        completer: Completer<()>,
    },
    Insert(QueuedInsert),
    Select(QueuedSelect),
    Withdraw(u64),
    Settle {
        operation: u64,
        is_consumed: bool,
    },
}

#[derive(Debug, Default)]
struct QueueState {
    commands: VecDeque<LookupCommand>,
    info: LookupInfo,
    is_closed: bool,
}

/// Deliveries keep it alive, and send commands when they are dropped.
#[derive(Debug)]
pub(super) struct CommandQueue {
    state: Mutex<QueueState>,
    waker: OnceLock<Waker>,
    next_operation: AtomicU64,
    process: Process,
}

impl CommandQueue {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            waker: OnceLock::new(),
            next_operation: AtomicU64::new(0),
            process: Process::this(),
        }
    }

    /// Names the reactor to wake from now on.
    pub(super) fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// A new number for an operation.
    pub(super) fn next_operation(&self) -> u64 {
        self.next_operation.fetch_add(1, Ordering::Relaxed)
    }

    fn lock(&self) -> Result<MutexGuard<'_, QueueState>> {
        self.process.check()?;
        Ok(lock(&self.state))
    }

    pub(super) fn send(&self, command: LookupCommand, then: Then) -> Result<()> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Err(Error::Closed("the lookup buffer is closed".to_owned()));
        }
        state.commands.push_back(command);
        drop(state);
        if let Some(waker) = self.waker.get()
            && then == Then::GoOn
        {
            waker.wake();
        }
        Ok(())
    }

    pub(super) fn drain(&self) -> VecDeque<LookupCommand> {
        self.lock()
            .map(|mut state| std::mem::take(&mut state.commands))
            .unwrap_or_default()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        lock(&self.state).commands.len()
    }

    /// Refuses commands from now on; operations in the queue end as closed.
    pub(super) fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        state.is_closed = true;
        state.info.state = "closed";
        let commands = std::mem::take(&mut state.commands);
        drop(state);
        drop(commands);
    }

    pub(super) fn update_info(&self, change: impl FnOnce(&mut LookupInfo)) {
        if let Ok(mut state) = self.lock() {
            change(&mut state.info);
        }
    }

    pub(super) fn info(&self) -> LookupInfo {
        self.lock()
            .map_or_else(|_| LookupInfo::closed(), |state| state.info.clone())
    }
}
