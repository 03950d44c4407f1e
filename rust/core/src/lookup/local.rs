//! A lookup buffer of this process, as callers see it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::copying::LocalInsert;
use super::operation::{Operation, Origin, Selected};
use super::server::LookupServer;
use super::shared::{BufferState, ChangedBy, LookupShared, Waiter};
use super::{Items, LookupInfo, LookupQuery, check_entry, entry_bytes};
use crate::error::{Error, Result};
use crate::net::address::listen_address;
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::{Reactor, default_busy_poll};
use crate::session::ReactorConfig;
use crate::session::SessionTimeouts;
use crate::transport::Transport;
use crate::work::work;

/// A lookup buffer in this process. Any thread may call; no call blocks, but an insert copies its tensors.
#[derive(Debug)]
pub struct LocalBuffer {
    pub(super) shared: Arc<LookupShared>,
    reactor: OnceLock<Reactor<Infallible>>,
    /// Held while the reactor is made or stopped: opening UCX takes up to a second, for which other calls do not wait.
    serving: Mutex<()>,
}

impl LocalBuffer {
    /// Makes an empty buffer for at most `capacity_bytes`. Each entry counts its tensors with their dtypes and shapes, 8 bytes
    /// for each token, and 2 KiB of bookkeeping.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            shared: Arc::new(LookupShared::new(capacity_bytes)),
            reactor: OnceLock::new(),
            serving: Mutex::default(),
        }
    }

    fn serving(&self) -> MutexGuard<'_, ()> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves other processes. With `is_checksummed`, they verify checksums of the entries that they select.
    ///
    /// # Errors
    /// `Config`: the address cannot be bound, others could reach it without a token, or the buffer is served already.
    /// `Unavailable`: there is no usable UCX.
    pub fn serve(
        &self,
        address: &str,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
    ) -> Result<()> {
        self.shared.check_process()?;
        let _serving = self.serving();
        if let Some(at) = self.address() {
            return Err(Error::Config(format!(
                "the buffer is served at {at} already"
            )));
        }
        self.shared.change(ChangedBy::Caller, |_| ())?;
        let address = listen_address(address, token)?;
        let config = ReactorConfig {
            listen: Some(address),
            token: token.to_vec(),
            identity: Identity::new(SessionKind::Lookup, "", Vec::new())?,
            transport: Some(transport),
            local: address.ip(),
            timeouts: SessionTimeouts::default(),
            busy_poll: default_busy_poll(),
        };
        let shared = Arc::clone(&self.shared);
        let served =
            crate::session::spawn(config, move || LookupServer::new(shared, is_checksummed))?;
        self.shared.set_server(served.waker());
        self.reactor.get_or_init(|| served);
        Ok(())
    }

    /// The address that others connect to, if the buffer is served.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.get()?.address()
    }

    fn origin(&self) -> Origin {
        Origin::Local(Arc::clone(&self.shared))
    }

    /// Inserts a copy of the tensors. If there is space, the copy is made before this returns. Otherwise the thread that
    /// frees space makes it; the server's thread copies by slices, between its other work. The tensors must not change
    /// before the operation ends.
    ///
    /// # Errors
    /// `Config`: larger than the capacity, or no tokens. The operation ends with `Exhausted` at `timeout`.
    pub fn insert(
        &self,
        tokens: Vec<i64>,
        items: Items,
        timeout: Option<Duration>,
    ) -> Result<Operation<()>> {
        check_entry(&tokens)?;
        self.shared.check_process()?;
        let now = Instant::now();
        self.shared.pool.expire(now);
        let deadline = timeout.map(|timeout| now + timeout);
        let (inserted, completer) = work();
        let num_bytes = entry_bytes(&tokens, items.0.iter().map(Arc::as_ref));
        let insert = Waiter::Local(LocalInsert::new(tokens.into(), items, completer));
        let reserve =
            |state: &mut BufferState| state.store.reserve(num_bytes, deadline, now, insert);
        let ticket = self.shared.change(ChangedBy::Caller, reserve)??;
        Ok(Operation::new(inserted, ticket, self.origin()).expires(deadline))
    }

    /// Selects an entry; the operation ends with `None` at `timeout`.
    pub fn select(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
    ) -> Result<Operation<Selected>> {
        query.check()?;
        let now = Instant::now();
        let deadline = timeout.map(|timeout| now + timeout);
        let (selected, completer) = work();
        let select = Waiter::Local(completer);
        let select = |state: &mut BufferState| state.store.select(query, deadline, now, select);
        let ticket = self.shared.change(ChangedBy::Caller, select)?;
        Ok(Operation::new(selected, ticket, self.origin())
            .withdraws_on_drop()
            .expires(deadline))
    }

    /// Counters and state.
    pub fn info(&self) -> LookupInfo {
        self.shared.info()
    }

    /// Drops all entries; operations that wait end as closed.
    pub fn close(&self) {
        if self.shared.check_process().is_err() {
            return;
        }
        self.shared.close();
        // Waits for a reactor that is being made, to stop it too.
        drop(self.serving());
        if let Some(reactor) = self.reactor.get() {
            reactor.stop();
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl LocalBuffer {
    /// Runs one round of a reactor without a thread.
    pub fn manual_round(&self) -> crate::reactor::manual::Round {
        let over = crate::reactor::manual::Round::Over;
        self.reactor.get().map_or(over, Reactor::round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lookup::tests::manual::entry;
    use crate::tensor::Meta;
    use crate::transport::MemoryPath;

    #[test]
    fn a_buffer_in_a_fork_takes_no_lock_that_another_thread_may_hold() {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let mut local = LocalBuffer::new(1 << 20);
        Arc::get_mut(&mut local.shared).unwrap().fork();
        let local = Arc::new(local);
        let _serving = local.serving();
        let (sender, ended) = std::sync::mpsc::channel();
        let child = Arc::clone(&local);
        std::thread::spawn(move || {
            let transport = Transport::Memory(MemoryPath::RemoteRead);
            let served = child.serve("127.0.0.1:0", b"token", transport, true);
            let inserted = child.insert(vec![1], entry(Meta::default(), 1), None);
            child.close();
            let _ = sender.send((served, inserted.map(drop)));
        });
        let (served, inserted) = ended.recv_timeout(TIMEOUT).expect("no call blocks");
        assert!(matches!(served, Err(Error::Closed(_))));
        assert!(matches!(inserted, Err(Error::Closed(_))));
    }
}
