//! UCX's in-memory twin for reactors of one process: reads are copies, and the rules are UCX's own. A
//! posted operation ends with exactly one `Done`. Closing an endpoint by force ends its operations with errors, and nothing
//! is written for them afterwards. The other side's end is reported as `EndpointFailed`.
//!
//! `progress` does one read a call, so that operations are under way for a while; the last one first, because UCX promises
//! no order. It is stricter than CMA: memory that is deregistered cannot be read. Between GPUs the CUDA driver copies, by the
//! kernels that copy a peer's memory.

mod regions;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvpipe_ucx::{Buffer, EndpointId, EndpointProgress, Event, Lane, Piece, Status};

use super::{FOREIGN, Memory, MemoryPath, RemoteKey, UcxResult};
use crate::error::{Error, Result};
use crate::sync::{clear, eventfd, lock, signal, wait};

pub(super) use regions::{MemoryKey, TwinMemory};

/// The name of the transport.
const NAME: &str = "memory";

/// Limit of the wait for copies when a worker ends, as of UCX's workers.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The workers of this process, by number.
static PORTS: Mutex<BTreeMap<u32, Arc<Port>>> = Mutex::new(BTreeMap::new());
/// The number of the next worker.
static NEXT_PORT: AtomicU32 = AtomicU32::new(1);

/// A number that identifies this process, also among other machines and after a fork.
fn process() -> Result<u32> {
    static RANDOM: OnceLock<u32> = OnceLock::new();
    let failed = |error| Error::Exhausted(format!("no random number: {error}"));
    let fresh = getrandom::u32().map_err(failed)?;
    Ok(RANDOM.get_or_init(|| fresh) ^ std::process::id())
}

const fn status(code: i32) -> Status {
    Status { code, call: NAME }
}

// UCX's codes: UCX's texts explain them.
const INVALID_PARAM: Status = status(-5);
const CANCELED: Status = status(-16);
const OUT_OF_RANGE: Status = status(-19);
const UNREACHABLE: Status = status(-6);
const NOT_CONNECTED: Status = status(-24);
const RESET_BY_PEER: Status = status(-25);

/// The part of a worker that other threads use.
#[derive(Debug)]
struct Port {
    inbox: Mutex<PortInbox>,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct PortInbox {
    /// Tokens of copies that have ended, and whether they went well.
    copied: Vec<(u64, bool)>,
    /// Endpoints of this worker whose other side has ended.
    ended: Vec<EndpointId>,
    /// The endpoints to this worker, with the workers that own them.
    connected: BTreeMap<EndpointId, u32>,
}

impl Port {
    fn push_copied(&self, token: u64, is_copied: bool) {
        lock(&self.inbox).copied.push((token, is_copied));
        signal(&self.wake);
    }

    fn push_ended(&self, endpoint: EndpointId) {
        lock(&self.inbox).ended.push(endpoint);
        // After the push, see `arm`.
        signal(&self.wake);
    }
}

/// The port of a worker that has not ended.
fn port(number: u32) -> Option<Arc<Port>> {
    lock(&PORTS).get(&number).cloned()
}

/// A read that has not been done.
#[derive(Debug)]
struct PendingGet {
    endpoint: EndpointId,
    local: Buffer,
    piece: Piece,
    key: MemoryKey,
    token: u64,
}

/// A copy that a GPU does.
#[derive(Debug)]
struct RunningCopy {
    endpoint: EndpointId,
    /// Source and destination, which it needs until it has ended.
    _memory: (Buffer, Buffer),
}

impl PendingGet {
    fn run(&self) -> UcxResult<()> {
        let source = self.key.find().ok_or(INVALID_PARAM)?;
        let is_written = self.copy(&source).is_some_and(|it| it);
        is_written.then_some(()).ok_or(OUT_OF_RANGE)
    }

    /// True if the piece was written; none if it is not of the source.
    fn copy(&self, source: &Buffer) -> Option<bool> {
        let piece = self.piece;
        let start = piece.from.checked_sub(source.address() as u64)?;
        let start = usize::try_from(start).ok()?;
        if let Some(bytes) = source.bytes(start, piece.len) {
            return Some(self.local.copy_from(piece.to, bytes));
        }
        let copied = source.to_vec(start, piece.len)?;
        Some(self.local.write(piece.to, &copied))
    }
}

/// The twin of a UCX worker. One thread uses it, but for its port.
#[derive(Debug)]
pub(crate) struct MemoryWorker {
    process: u32,
    number: u32,
    port: Arc<Port>,
    data_path: MemoryPath,
    /// The workers at the other sides; none once they have ended.
    endpoints: RefCell<BTreeMap<EndpointId, Option<u32>>>,
    /// Reads of all endpoints that have ended.
    ended: Cell<u64>,
    gets: RefCell<Vec<PendingGet>>,
    /// By their tokens.
    copies: RefCell<BTreeMap<u64, RunningCopy>>,
    /// Endpoints that are closed when their copies have ended.
    closing: RefCell<BTreeSet<EndpointId>>,
    events: RefCell<VecDeque<Event>>,
}

impl MemoryWorker {
    pub(super) fn new(data_path: MemoryPath) -> Result<Self> {
        let process = process()?;
        let port = Arc::new(Port {
            inbox: Mutex::default(),
            wake: eventfd()?,
        });
        let number = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
        lock(&PORTS).insert(number, Arc::clone(&port));
        Ok(Self {
            process,
            number,
            port,
            data_path,
            endpoints: RefCell::default(),
            ended: Cell::new(0),
            gets: RefCell::default(),
            copies: RefCell::default(),
            closing: RefCell::default(),
            events: RefCell::default(),
        })
    }

    /// Shorter than any address of UCX, so that UCX refuses it.
    pub(super) fn address(&self) -> Vec<u8> {
        [self.process.to_le_bytes(), self.number.to_le_bytes()].concat()
    }

    /// As with UCX, an event reports a worker that has ended: it may have ended in order.
    pub(super) fn connect(&self, address: &[u8]) -> UcxResult<EndpointId> {
        let number = self.number_of(address).ok_or(UNREACHABLE)?;
        let endpoint = EndpointId::unique();
        self.endpoints.borrow_mut().insert(endpoint, Some(number));
        // A worker is no port any more when it tells those that have connected of its end.
        let ports = lock(&PORTS);
        match ports.get(&number) {
            Some(peer) => {
                lock(&peer.inbox).connected.insert(endpoint, self.number);
            }
            None => self.fail(endpoint),
        }
        Ok(endpoint)
    }

    /// The number of a worker that is or was in this process.
    fn number_of(&self, address: &[u8]) -> Option<u32> {
        let (process, number) = address.split_first_chunk::<4>()?;
        let number = u32::from_le_bytes(number.try_into().ok()?);
        let is_known = (1..NEXT_PORT.load(Ordering::Relaxed)).contains(&number);
        (u32::from_le_bytes(*process) == self.process && is_known).then_some(number)
    }

    pub(super) fn lanes(&self) -> Vec<Lane> {
        vec![Lane {
            transport: NAME.to_owned(),
            device: NAME.to_owned(),
            is_rma: self.data_path == MemoryPath::RemoteRead,
            domain: None,
            remote_domain: None,
        }]
    }

    pub(super) fn close(&self, endpoint: EndpointId) {
        let Some(peer) = self.endpoints.borrow_mut().remove(&endpoint) else {
            return;
        };
        if let Some(peer) = peer.and_then(port) {
            lock(&peer.inbox).connected.remove(&endpoint);
        }
        self.end_gets(endpoint, CANCELED);
        self.closing.borrow_mut().insert(endpoint);
        self.report_closed(endpoint);
    }

    /// Reports that an endpoint is closed, if it is to be, and no copy may write for it any more.
    fn report_closed(&self, endpoint: EndpointId) {
        let copies = self.copies.borrow();
        let is_used = copies.values().any(|copy| copy.endpoint == endpoint);
        if !is_used && self.closing.borrow_mut().remove(&endpoint) {
            self.report(Event::Closed { endpoint });
        }
    }

    /// The other side of an endpoint that can be used.
    fn peer(&self, endpoint: EndpointId) -> UcxResult<Arc<Port>> {
        match self.endpoints.borrow().get(&endpoint) {
            None => Err(NOT_CONNECTED),
            Some(peer) => peer.and_then(port).ok_or(RESET_BY_PEER),
        }
    }

    pub(super) fn flush(&self, endpoint: EndpointId, token: u64) -> UcxResult<()> {
        self.peer(endpoint)?;
        let result = Ok(());
        self.report(Event::Done { token, result });
        Ok(())
    }

    pub(super) fn progress_of(&self, endpoint: EndpointId) -> Option<EndpointProgress> {
        self.endpoints.borrow().get(&endpoint)?;
        let gets = self.gets.borrow();
        Some(EndpointProgress {
            in_flight: gets.iter().filter(|get| get.endpoint == endpoint).count(),
            ended: self.ended.get(),
        })
    }

    pub(super) fn get(&self, endpoint: EndpointId, get: super::Get<'_>) -> UcxResult<()> {
        let piece = Piece {
            to: get.offset,
            from: get.remote,
            len: get.len,
        };
        let (local, key) = self.ends(endpoint, get.local, get.key)?;
        let end = piece.to.checked_add(piece.len);
        if end.is_none_or(|end| end > local.len()) {
            return Err(OUT_OF_RANGE);
        }
        self.gets.borrow_mut().push(PendingGet {
            endpoint,
            local,
            piece,
            key,
            token: get.token,
        });
        Ok(())
    }

    /// As UCX, it refuses memory that is not on a GPU.
    #[expect(unsafe_code, reason = "a kernel copies")]
    pub(super) fn copy(&self, endpoint: EndpointId, copy: super::DeviceCopy<'_>) -> UcxResult<()> {
        let (local, key) = self.ends(endpoint, copy.local, copy.key)?;
        let source = key.find().ok_or(INVALID_PARAM)?;
        let (port, token) = (Arc::clone(&self.port), copy.token);
        let on_copied = Box::new(move |is_copied| port.push_copied(token, is_copied));
        // SAFETY: the running copy keeps both buffers; destinations that overlap would harm their own bytes only.
        let begun = unsafe {
            kvpipe_ucx::copy_between(&source, &local, copy.pieces, copy.report, on_copied)
        };
        begun.map_err(|error| {
            tracing::debug!(%error, "cuda.not_launched");
            INVALID_PARAM
        })?;
        let running = RunningCopy {
            endpoint,
            _memory: (source, local),
        };
        self.copies.borrow_mut().insert(token, running);
        Ok(())
    }

    /// The memory of an operation on an endpoint that can be used, and the key of the peer's.
    fn ends(
        &self,
        endpoint: EndpointId,
        local: &Memory,
        key: &RemoteKey,
    ) -> UcxResult<(Buffer, MemoryKey)> {
        self.peer(endpoint)?;
        match (local, key) {
            (Memory::Twin(local), RemoteKey::Twin(key)) => Ok((local.buffer().clone(), *key)),
            _ => Err(FOREIGN),
        }
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.port.wake.as_fd()
    }

    pub(super) fn arm(&self) -> bool {
        let inbox = lock(&self.port.inbox);
        let is_idle = inbox.ended.is_empty()
            && inbox.copied.is_empty()
            && self.gets.borrow().is_empty()
            && self.events.borrow().is_empty();
        if is_idle {
            // An event that is queued from here on is signalled after that: no wake-up is lost.
            clear(&self.port.wake);
        }
        is_idle
    }

    pub(super) fn progress(&self) -> u32 {
        let ended = std::mem::take(&mut lock(&self.port.inbox).ended);
        let mut num_done = ended.len() as u32;
        for endpoint in ended {
            self.fail(endpoint);
        }
        num_done += self.finish_copies();
        let get = self.gets.borrow_mut().pop();
        if let Some(get) = get {
            let (token, result) = (get.token, get.run());
            self.ended.set(self.ended.get() + 1);
            self.report(Event::Done { token, result });
            num_done += 1;
        }
        num_done
    }

    /// Reports the copies that have ended, and returns their number. A copy of a closed endpoint ends with an error.
    fn finish_copies(&self) -> u32 {
        let copied = std::mem::take(&mut lock(&self.port.inbox).copied);
        let num_ended = copied.len() as u32;
        for (token, is_copied) in copied {
            let Some(copy) = self.copies.borrow_mut().remove(&token) else {
                continue;
            };
            let result = match self.peer(copy.endpoint) {
                Ok(_) if is_copied => Ok(()),
                Ok(_) => Err(OUT_OF_RANGE),
                Err(NOT_CONNECTED) => Err(CANCELED),
                Err(lost) => Err(lost),
            };
            self.report(Event::Done { token, result });
            self.report_closed(copy.endpoint);
        }
        num_ended
    }

    pub(super) fn next_event(&self) -> Option<Event> {
        self.events.borrow_mut().pop_front()
    }

    pub(super) fn outstanding(&self) -> usize {
        self.gets.borrow().len() + self.copies.borrow().len()
    }

    fn report(&self, event: Event) {
        self.events.borrow_mut().push_back(event);
    }

    /// The worker at the other side of an endpoint has ended.
    fn fail(&self, endpoint: EndpointId) {
        match self.endpoints.borrow_mut().get_mut(&endpoint) {
            Some(peer) => *peer = None,
            None => return,
        }
        self.end_gets(endpoint, RESET_BY_PEER);
        self.report(Event::EndpointFailed {
            endpoint,
            status: RESET_BY_PEER,
        });
    }

    fn end_gets(&self, endpoint: EndpointId, status: Status) {
        self.gets.borrow_mut().retain(|get| {
            let is_over = get.endpoint == endpoint;
            if is_over {
                let (token, result) = (get.token, Err(status));
                self.report(Event::Done { token, result });
            }
            !is_over
        });
    }
}

impl Drop for MemoryWorker {
    fn drop(&mut self) {
        // Memory that a GPU still writes stays valid.
        let deadline = Instant::now() + DROP_TIMEOUT;
        while !self.copies.get_mut().is_empty() && Instant::now() < deadline {
            wait(&self.port.wake, deadline);
            clear(&self.port.wake);
            self.finish_copies();
        }
        let copies = std::mem::take(self.copies.get_mut());
        if !copies.is_empty() {
            tracing::error!(copies = copies.len(), "memory.leaked");
            std::mem::forget(copies);
        }
        lock(&PORTS).remove(&self.number);
        let connected = std::mem::take(&mut lock(&self.port.inbox).connected);
        for (endpoint, owner) in connected {
            if let Some(owner) = port(owner) {
                owner.push_ended(endpoint);
            }
        }
        let endpoints: Vec<_> = self.endpoints.get_mut().keys().copied().collect();
        for endpoint in endpoints {
            self.close(endpoint);
        }
    }
}

#[cfg(test)]
mod tests;
