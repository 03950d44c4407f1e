//! Where a client's callers hand in what they want, in the order of their calls, and deliveries say what became of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::inserts::QueuedInsert;
use super::operation::{Origin, Selected};
use super::store::Ticket;
use super::{LookupInfo, LookupQuery};
use crate::error::{Error, Result};
use crate::process::Process;
use crate::reactor::Waker;
use crate::work::{Completer, Then};

#[derive(Debug)]
pub(super) enum LookupCommand {
    Connect {
        addresses: Vec<String>,
        completer: Completer<()>,
    },
    Insert(QueuedInsert),
    Select {
        operation: u64,
        query: LookupQuery,
        timeout: Option<Duration>,
        completer: Completer<Selected>,
    },
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

    /// Whom to wake from now on.
    pub(super) fn open(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// A number for an operation; it is never used again.
    pub(super) fn operation(&self) -> u64 {
        self.next_operation.fetch_add(1, Ordering::Relaxed)
    }

    fn lock(&self) -> Result<MutexGuard<'_, QueueState>> {
        self.process.check()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn send(&self, command: LookupCommand) -> Result<()> {
        self.hand(command, Then::GoOn)
    }

    pub(super) fn hand(&self, command: LookupCommand, then: Then) -> Result<()> {
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

    pub(super) fn take(&self) -> VecDeque<LookupCommand> {
        self.lock()
            .map(|mut state| std::mem::take(&mut state.commands))
            .unwrap_or_default()
    }

    /// What is handed in from now on is refused; what was, ends as closed.
    pub(super) fn close(&self) {
        let Ok(mut state) = self.lock() else { return };
        state.is_closed = true;
        state.info.state = "closed";
        let commands = std::mem::take(&mut state.commands);
        drop(state);
        drop(commands);
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut LookupInfo)) {
        if let Ok(mut state) = self.lock() {
            change(&mut state.info);
        }
    }

    pub(super) fn info(&self) -> LookupInfo {
        let closed = |_| LookupInfo {
            state: "closed",
            ..LookupInfo::default()
        };
        self.lock().map_or_else(closed, |state| state.info.clone())
    }
}

/// Of a closed buffer nothing is withdrawn or settled: its servers see to that when its sessions end.
impl Origin for CommandQueue {
    fn withdraw(&self, ticket: Ticket) {
        let _ = self.send(LookupCommand::Withdraw(ticket));
    }

    fn settle(&self, entry: Ticket, is_consumed: bool) {
        self.count(|info| info.num_consumed += u64::from(is_consumed));
        let operation = entry;
        let _ = self.send(LookupCommand::Settle {
            operation,
            is_consumed,
        });
    }

    fn expire(&self) {}
}
