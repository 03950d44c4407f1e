//! A store as callers see it: a server in this process, and clients of servers.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::client::{Client, ClientCommand, ClientShared, Pending};
use super::values::{OpenedValue, ValuePage};
use crate::entries::disk::OpenedDisk;
use crate::entries::messages::EntryMessage;
use crate::entries::server::Server;
use crate::entries::shared::Shared;
use crate::entries::state::{Access, Entries, Query};
use crate::entries::{KEY_CAP, KEYS_CAP, RECORD_CAP, StoreInfo};
use crate::error::{Error, Result};
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::Tokens;
use crate::process::Thread;
use crate::reactor::Reactor;
use crate::session::ReactorConfig;
use crate::sync::lock;
use crate::transfer::host::spawn;
use crate::transport::Transport;
use crate::work::{Completer, Then, Work};

/// A directory that keeps values beyond memory, and after a restart.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// Made if it does not exist. One server uses it.
    pub directory: PathBuf,
    /// Limit for the bytes of all values there.
    pub capacity_bytes: u64,
}

/// A store in this process that serves others. Any thread may call.
#[derive(Debug)]
pub struct StoreServer {
    reactor: Reactor<Infallible>,
    shared: Arc<Shared>,
    /// The threads of its disk, which end after the reactor.
    disk_threads: Mutex<Vec<Thread>>,
}

impl StoreServer {
    /// Serves an empty store of at most `capacity_bytes`. Each value counts the memory of its bytes (from 4 MiB on rounded up
    /// to 2 MiB), its key and record, and 512 bytes of bookkeeping. A reservation ends `reservation` after its last call.
    /// With a quota, the values and reservations of one namespace, the first 14 bytes of a key, take so much at most. With a
    /// disk, the store begins with what is there.
    ///
    /// # Errors
    /// `Config`: the address cannot be bound, others could reach it without a token, or the disk cannot be used.
    /// `Unavailable`: there is no usable UCX.
    pub fn serve<'a>(
        address: &str,
        token: impl Into<Tokens<'a>>,
        transport: Transport,
        capacity_bytes: u64,
        quota_bytes: Option<u64>,
        reservation: Duration,
        disk: Option<DiskConfig>,
    ) -> Result<Self> {
        let config = ReactorConfig::listening(address, token, identity()?, transport)?;
        let opened = disk.map(|it| OpenedDisk::open(&it.directory, it.capacity_bytes));
        let (opened, disk) = match opened.transpose()? {
            Some((opened, disk, kept)) => (Some(opened), Some((disk, kept))),
            None => (None, None),
        };
        let entries = Entries::of_store(capacity_bytes, quota_bytes, reservation);
        let shared = Arc::new(Shared::new(entries, "store"));
        let in_thread = Arc::clone(&shared);
        let reactor = spawn(config, move || Server::of_store(in_thread, disk))?;
        let disk_threads = opened.map(|it| it.start(&reactor.waker()));
        let disk_threads = disk_threads.transpose()?.unwrap_or_default();
        Ok(Self {
            reactor,
            shared,
            disk_threads: Mutex::new(disk_threads),
        })
    }

    /// Address that clients connect to.
    pub fn address(&self) -> String {
        let served_at = self.reactor.address();
        served_at.map_or_else(String::new, |at| at.to_string())
    }

    /// Content and counters.
    ///
    /// # Errors
    /// `Closed`: the store is closed.
    pub fn stats(&self) -> Result<StoreInfo> {
        self.shared.info()
    }

    /// Ends the store and its sessions, and then saves what is in memory alone; without a disk, all values are dropped.
    pub fn close(&self) {
        self.reactor.stop();
        for thread in lock(&self.disk_threads).drain(..) {
            thread.join();
        }
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.close();
    }
}

/// A client of a store. Any thread may call; no call blocks. Operations are named by numbers, so that callers can withdraw
/// them.
#[derive(Debug)]
pub struct StoreClient {
    reactor: Reactor<ClientCommand>,
    shared: Arc<ClientShared>,
    address: String,
}

/// Connecting, and what all operations do.
impl StoreClient {
    /// Connects to a server; the work is done once it has accepted, within `timeout`.
    pub fn connect(
        address: String,
        token: &[u8],
        transport: Transport,
        timeout: Duration,
    ) -> Result<(Self, Work<()>)> {
        let config = ReactorConfig::connecting(token, identity()?, transport, timeout)?;
        let shared = Arc::new(ClientShared::default());
        let in_thread = Arc::clone(&shared);
        let reactor = spawn(config, move || Client::new(in_thread))?;
        let (connected, completer) = reactor.work();
        let connect = ClientCommand::Connect {
            address: address.clone(),
            completer,
        };
        reactor.send(connect)?;
        let client = Self {
            reactor,
            shared,
            address,
        };
        Ok((client, connected))
    }

    /// The server's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Name of the transport that carries large values.
    pub fn transport(&self) -> String {
        lock(&self.shared.transport).clone()
    }

    /// Ends the session; what is under way ends as closed.
    pub fn close(&self) {
        self.reactor.stop();
    }

    /// Ends what an operation waits for or holds: a wait, a reservation, an open value, a lease. The work is done when the
    /// server has ended it; at once if it has ended before.
    pub fn release(&self, target: u64, then: Then) -> Result<Work<()>> {
        let (work, completer) = self.reactor.work();
        let command = ClientCommand::Release { target, completer };
        self.reactor.send_and(command, then)?;
        Ok(work)
    }

    /// Asks the server; the operation's number names it for [`release`](Self::release).
    fn ask<T>(
        &self,
        message: EntryMessage<'static>,
        timeout: Option<Duration>,
        pending: impl FnOnce(Completer<T>) -> Pending,
    ) -> Result<(Work<T>, u64)> {
        let (work, completer) = self.reactor.work();
        let operation = self.shared.next_operation();
        let command = ClientCommand::Ask {
            operation,
            message,
            pending: pending(completer),
            timeout,
        };
        self.reactor.send_and(command, Then::Wait)?;
        Ok((work, operation))
    }
}

/// The operations. All of them are waited for at once.
impl StoreClient {
    /// For each key, true if it can be selected now.
    pub fn exists(&self, keys: Vec<Vec<u8>>) -> Result<Work<Vec<bool>>> {
        let keys = check_keys(keys)?;
        let exists = EntryMessage::Exists { keys };
        Ok(self.ask(exists, None, Pending::Present)?.0)
    }

    /// Reserves space; ends with the number of the reservation, or `None` where the key has a value or a reservation.
    pub fn reserve(
        &self,
        key: Vec<u8>,
        num_bytes: u64,
        ttl: Option<Duration>,
        timeout: Option<Duration>,
    ) -> Result<(Work<Option<u64>>, u64)> {
        let reserve = EntryMessage::Reserve {
            key: check_key(key)?.into(),
            num_bytes,
            ttl,
            timeout,
        };
        self.ask(reserve, timeout, |completer| Pending::Reserve {
            completer,
            num_bytes,
        })
    }

    /// Appends to a reservation. The memory must not change before the work is done.
    pub fn write(&self, reservation: u64, buffer: Buffer) -> Result<Work<()>> {
        self.send(|operation, completer| ClientCommand::Write {
            operation,
            reservation,
            buffer,
            completer,
        })
    }

    /// Makes a reserved value visible.
    pub fn commit(&self, reservation: u64, record: Vec<u8>) -> Result<Work<()>> {
        let record = check_record(record)?;
        self.send(|operation, completer| ClientCommand::Commit {
            operation,
            reservation,
            record,
            completer,
        })
    }

    /// Reserves, writes and commits; ends with whether the value was inserted. The memory must not change before the work is
    /// done.
    pub fn put(
        &self,
        key: Vec<u8>,
        buffer: Buffer,
        record: Vec<u8>,
        ttl: Option<Duration>,
    ) -> Result<Work<bool>> {
        let (key, record) = (check_key(key)?, check_record(record)?);
        self.send(|operation, completer| ClientCommand::Put {
            operation,
            key,
            ttl,
            record,
            buffer,
            completer,
        })
    }

    /// Opens a value, or waits until it is committed; `None` if there was none in time.
    pub fn select(
        &self,
        key: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<(Work<Option<Arc<OpenedValue>>>, u64)> {
        self.open(key, Access::Open, timeout)
    }

    /// As [`select`](Self::select), for this operation alone.
    pub fn take(
        &self,
        key: Vec<u8>,
        lease: Duration,
        timeout: Option<Duration>,
    ) -> Result<(Work<Option<Arc<OpenedValue>>>, u64)> {
        self.open(key, Access::Lease(Some(lease)), timeout)
    }

    fn open(
        &self,
        key: Vec<u8>,
        access: Access,
        timeout: Option<Duration>,
    ) -> Result<(Work<Option<Arc<OpenedValue>>>, u64)> {
        let query = Query::Exact(check_key(key)?.into());
        let select = EntryMessage::Select {
            query,
            access,
            timeout,
        };
        self.ask(select, timeout, Pending::Open)
    }

    /// Reads all of an open value into memory of its size.
    pub fn read(&self, value: &Arc<OpenedValue>, buffer: Buffer) -> Result<Work<()>> {
        if buffer.len() as u64 != value.num_bytes {
            return Err(Error::Config(format!(
                "a buffer of {} bytes for a value of {}",
                buffer.len(),
                value.num_bytes
            )));
        }
        let value = Arc::clone(value);
        self.send(|_, completer| ClientCommand::Read {
            value,
            buffer,
            completer,
        })
    }

    /// Extends a lease.
    pub fn renew(&self, take: u64, lease: Duration) -> Result<Work<()>> {
        let renew = EntryMessage::Renew {
            target: take,
            lease,
        };
        Ok(self.ask(renew, None, Pending::Done)?.0)
    }

    /// Deletes a leased value.
    pub fn acknowledge(&self, take: u64) -> Result<Work<()>> {
        let acknowledge = EntryMessage::Acknowledge { target: take };
        Ok(self.ask(acknowledge, None, Pending::Done)?.0)
    }

    /// Deletes values without holders; ends with their number.
    pub fn delete(&self, keys: Vec<Vec<u8>>) -> Result<Work<u64>> {
        let keys = check_keys(keys)?;
        let delete = EntryMessage::Delete { keys };
        Ok(self.ask(delete, None, Pending::Deleted)?.0)
    }

    /// Lists values whose keys begin so, from where the last page ended; 0 begins.
    pub fn list(&self, prefix: Vec<u8>, after: u64) -> Result<Work<ValuePage>> {
        if prefix.len() > KEY_CAP {
            let text = format!("a prefix of {} bytes: at most {KEY_CAP}", prefix.len());
            return Err(Error::Config(text));
        }
        let prefix = prefix.into();
        let list = EntryMessage::List { prefix, after };
        Ok(self.ask(list, None, Pending::Page)?.0)
    }

    /// Content and counters of the server.
    pub fn stats(&self) -> Result<Work<StoreInfo>> {
        Ok(self.ask(EntryMessage::Stats, None, Pending::Statistics)?.0)
    }

    fn send<T>(&self, command: impl FnOnce(u64, Completer<T>) -> ClientCommand) -> Result<Work<T>> {
        let (work, completer) = self.reactor.work();
        let command = command(self.shared.next_operation(), completer);
        self.reactor.send_and(command, Then::Wait)?;
        Ok(work)
    }
}

fn identity() -> Result<Identity> {
    Identity::new(SessionKind::Store, "", Vec::new())
}

fn check_key(key: Vec<u8>) -> Result<Vec<u8>> {
    if (1..=KEY_CAP).contains(&key.len()) {
        return Ok(key);
    }
    let len = key.len();
    Err(Error::Config(format!(
        "a key of {len} bytes: expected 1 to {KEY_CAP}"
    )))
}

fn check_keys(keys: Vec<Vec<u8>>) -> Result<Vec<std::borrow::Cow<'static, [u8]>>> {
    if keys.len() > KEYS_CAP {
        let text = format!("{} keys: at most {KEYS_CAP} at once", keys.len());
        return Err(Error::Config(text));
    }
    let checked = keys.into_iter().map(|key| Ok(check_key(key)?.into()));
    checked.collect()
}

fn check_record(record: Vec<u8>) -> Result<Vec<u8>> {
    if record.len() <= RECORD_CAP {
        return Ok(record);
    }
    let len = record.len();
    Err(Error::Config(format!(
        "a record of {len} bytes: at most {RECORD_CAP}"
    )))
}

#[cfg(any(test, feature = "fuzzing"))]
impl StoreServer {
    /// Runs one round of a reactor without a thread.
    pub fn manual_round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl StoreClient {
    /// Runs one round of a reactor without a thread.
    pub fn manual_round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }
}

#[cfg(test)]
impl StoreServer {
    /// Sizes of the maps and queues of a reactor without a thread.
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.reactor.sizes()
    }
}

#[cfg(test)]
impl StoreClient {
    /// Sizes of the maps and queues of a reactor without a thread.
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.reactor.sizes()
    }
}
