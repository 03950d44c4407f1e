//! Commands of a client's callers, and the state that they share with its reactor.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::super::values::OpenedValue;
use super::Pending;
use crate::entries::messages::EntryMessage;
use crate::work::Completer;

/// Requests of callers.
#[derive(Debug)]
pub(in super::super) enum ClientCommand {
    Connect {
        address: String,
        completer: Completer<()>,
    },
    /// A question whose answer completes it; with a timeout, the server answers in that time.
    Ask {
        operation: u64,
        message: EntryMessage<'static>,
        pending: Pending,
        timeout: Option<Duration>,
    },
    Put {
        operation: u64,
        key: Vec<u8>,
        ttl: Option<Duration>,
        record: Vec<u8>,
        buffer: Buffer,
        completer: Completer<bool>,
    },
    Write {
        operation: u64,
        reservation: u64,
        buffer: Buffer,
        completer: Completer<()>,
    },
    Commit {
        operation: u64,
        reservation: u64,
        record: Vec<u8>,
        completer: Completer<()>,
    },
    Read {
        value: Arc<OpenedValue>,
        buffer: Buffer,
        completer: Completer<()>,
    },
    /// Ends what an operation waits for or holds.
    Release {
        target: u64,
        completer: Completer<()>,
    },
}

/// State that callers share with the reactor.
#[derive(Debug, Default)]
pub(in super::super) struct ClientShared {
    /// Transport of the bytes, for people.
    pub(in super::super) transport: Mutex<String>,
    last_operation: AtomicU64,
}

impl ClientShared {
    /// A new number for an operation.
    pub(in super::super) fn next_operation(&self) -> u64 {
        self.last_operation.fetch_add(1, Ordering::Relaxed) + 1
    }
}
