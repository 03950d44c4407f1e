//! UCX's twin for reactors of one process: messages are handed over, reads are copies, and the rules are UCX's own. An
//! operation that was posted ends with exactly one `Done`; closing an endpoint by force ends those under way with
//! errors, and nothing is written for them afterwards; the other side's end is reported as `EndpointFailed`.
//!
//! Reads are done in `progress`, one a call and not as they are posted, so that there are operations under way; the
//! last first, as no order is promised.
//! Stricter than CMA: memory that is not registered any more cannot be read.

mod regions;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use kvpipe_ucx::{AmData, Buffer, EndpointId, Event, Lane, Status};
use rustix::event::EventfdFlags;

use super::{Answer, FOREIGN, Memory, MemoryPath, Payload, RemoteKey};
use crate::error::{Error, Result};

pub(super) use regions::{Key, Registered};

/// What the transport is called wherever its name is shown.
const NAME: &str = "memory";

/// The workers of this process, by number.
static PORTS: Mutex<BTreeMap<u32, Arc<Port>>> = Mutex::new(BTreeMap::new());
/// The number of the next worker.
static NEXT_PORT: AtomicU32 = AtomicU32::new(1);

/// A number that another process, also on another machine or after a fork, hardly has.
fn process() -> Result<u32> {
    static RANDOM: OnceLock<u32> = OnceLock::new();
    let failed = |error| Error::Exhausted(format!("no random number: {error}"));
    let fresh = getrandom::u32().map_err(failed)?;
    Ok(RANDOM.get_or_init(|| fresh) ^ std::process::id())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const fn status(code: i32) -> Status {
    Status { code, call: NAME }
}

// Spelled as UCX's codes, whose texts then explain them.
const INVALID_PARAM: Status = status(-5);
const CANCELED: Status = status(-16);
const OUT_OF_RANGE: Status = status(-19);
const NOT_CONNECTED: Status = status(-24);
const RESET_BY_PEER: Status = status(-25);

/// What other threads reach of a worker.
#[derive(Debug)]
struct Port {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Inbox {
    arrived: VecDeque<Arrived>,
    /// Who has an endpoint to this worker, and which.
    connected: Vec<(Weak<Port>, EndpointId)>,
    has_ended: bool,
}

#[derive(Debug)]
enum Arrived {
    Message { header: Vec<u8>, body: Vec<u8> },
    PeerEnded(EndpointId),
}

impl Port {
    /// Hands something over, unless the worker has ended.
    fn push(&self, arrived: Arrived) -> Answer<()> {
        {
            let mut inbox = lock(&self.inbox);
            if inbox.has_ended {
                return Err(RESET_BY_PEER);
            }
            inbox.arrived.push_back(arrived);
        }
        // After the push and never before, see `arm`. Fails only when the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        Ok(())
    }

    /// Remembers who is to be told of this worker's end; false when that was before.
    fn admit(&self, port: &Arc<Self>, endpoint: EndpointId) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.connected.push((Arc::downgrade(port), endpoint));
        !inbox.has_ended
    }

    fn dismiss(&self, endpoint: EndpointId) {
        lock(&self.inbox)
            .connected
            .retain(|(_, other)| *other != endpoint);
    }
}

/// A read that has not been done.
#[derive(Debug)]
struct Get {
    endpoint: EndpointId,
    local: Buffer,
    offset: usize,
    len: usize,
    remote: u64,
    key: Key,
    token: u64,
}

impl Get {
    fn run(&self) -> Answer<()> {
        let source = self.key.find().ok_or(INVALID_PARAM)?;
        let start = self.remote.checked_sub(source.address() as u64);
        let start = start.and_then(|start| usize::try_from(start).ok());
        let bytes = start.and_then(|start| source.bytes(start, self.len));
        let is_written = bytes.is_some_and(|bytes| self.local.write(self.offset, bytes));
        is_written.then_some(()).ok_or(OUT_OF_RANGE)
    }
}

/// The twin of a UCX worker; of one thread, but for its port.
#[derive(Debug)]
pub(crate) struct Worker {
    process: u32,
    number: u32,
    port: Arc<Port>,
    data_path: MemoryPath,
    /// The other sides, as long as they live.
    endpoints: RefCell<BTreeMap<EndpointId, Option<Arc<Port>>>>,
    gets: RefCell<Vec<Get>>,
    events: RefCell<VecDeque<Event>>,
}

impl Worker {
    pub(super) fn new(data_path: MemoryPath) -> Result<Self> {
        let process = process()?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::Exhausted(format!("no eventfd: {error}")))?;
        let port = Arc::new(Port {
            inbox: Mutex::default(),
            wake,
        });
        let number = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
        lock(&PORTS).insert(number, Arc::clone(&port));
        Ok(Self {
            process,
            number,
            port,
            data_path,
            endpoints: RefCell::default(),
            gets: RefCell::default(),
            events: RefCell::default(),
        })
    }

    /// Shorter than any address of UCX, which therefore refuses it.
    pub(super) fn address(&self) -> Vec<u8> {
        [self.process.to_le_bytes(), self.number.to_le_bytes()].concat()
    }

    /// As with UCX, a worker that has ended is reported as failed and not here: it may have ended in order.
    pub(super) fn connect(&self, address: &[u8]) -> Result<EndpointId> {
        let number = self.number_of(address).ok_or_else(|| {
            let text = "the peer does not use the memory of this process: both ends need the same transport";
            Error::Connect(text.to_owned())
        })?;
        let endpoint = EndpointId::unique();
        let peer = lock(&PORTS).get(&number).cloned();
        let peer = peer.filter(|peer| peer.admit(&self.port, endpoint));
        let has_ended = peer.is_none();
        self.endpoints.borrow_mut().insert(endpoint, peer);
        if has_ended {
            self.fail(endpoint);
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
            is_am: true,
            domain: None,
            remote_domain: None,
        }]
    }

    pub(super) fn close(&self, endpoint: EndpointId) {
        let Some(peer) = self.endpoints.borrow_mut().remove(&endpoint) else {
            return;
        };
        if let Some(peer) = peer {
            peer.dismiss(endpoint);
        }
        self.end_gets(endpoint, CANCELED);
        self.report(Event::Closed { endpoint });
    }

    /// The other side of an endpoint that can be used.
    fn peer(&self, endpoint: EndpointId) -> Answer<Arc<Port>> {
        match self.endpoints.borrow().get(&endpoint) {
            None => Err(NOT_CONNECTED),
            Some(None) => Err(RESET_BY_PEER),
            Some(Some(peer)) => Ok(Arc::clone(peer)),
        }
    }

    pub(super) fn am_send(
        &self,
        endpoint: EndpointId,
        header: Vec<u8>,
        payload: Payload,
        token: u64,
    ) -> Answer<()> {
        let peer = self.peer(endpoint)?;
        let body = bytes(payload)?;
        peer.push(Arrived::Message { header, body })?;
        let result = Ok(());
        self.report(Event::Done { token, result });
        Ok(())
    }

    pub(super) fn get(&self, endpoint: EndpointId, get: super::Get<'_>) -> Answer<()> {
        self.peer(endpoint)?;
        let (Memory::Twin(local), RemoteKey::Twin(key)) = (get.local, get.key) else {
            return Err(FOREIGN);
        };
        local
            .buffer()
            .bytes(get.offset, get.len)
            .ok_or(OUT_OF_RANGE)?;
        self.gets.borrow_mut().push(Get {
            endpoint,
            local: local.buffer().clone(),
            offset: get.offset,
            len: get.len,
            remote: get.remote,
            key: *key,
            token: get.token,
        });
        Ok(())
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.port.wake.as_fd()
    }

    pub(super) fn arm(&self) -> bool {
        let inbox = lock(&self.port.inbox);
        let is_idle = inbox.arrived.is_empty()
            && self.gets.borrow().is_empty()
            && self.events.borrow().is_empty();
        if is_idle {
            // Whoever hands something over from here on signals after that: no wake-up is lost.
            let _ = rustix::io::read(&self.port.wake, &mut [0; 8]);
        }
        is_idle
    }

    pub(super) fn progress(&self) -> u32 {
        let arrived = std::mem::take(&mut lock(&self.port.inbox).arrived);
        let mut num_done = arrived.len() as u32;
        for arrived in arrived {
            match arrived {
                Arrived::Message { header, body } => self.report(Event::Message {
                    header,
                    data: AmData::Bytes(body),
                }),
                Arrived::PeerEnded(endpoint) => self.fail(endpoint),
            }
        }
        let get = self.gets.borrow_mut().pop();
        if let Some(get) = get {
            let (token, result) = (get.token, get.run());
            self.report(Event::Done { token, result });
            num_done += 1;
        }
        num_done
    }

    pub(super) fn next_event(&self) -> Option<Event> {
        self.events.borrow_mut().pop_front()
    }

    pub(super) fn outstanding(&self) -> usize {
        self.gets.borrow().len()
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

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&PORTS).remove(&self.number);
        let connected = {
            let mut inbox = lock(&self.port.inbox);
            inbox.has_ended = true;
            std::mem::take(&mut inbox.connected)
        };
        for (peer, endpoint) in connected {
            if let Some(peer) = peer.upgrade() {
                let _ = peer.push(Arrived::PeerEnded(endpoint));
            }
        }
        for (endpoint, peer) in std::mem::take(self.endpoints.get_mut()) {
            if let Some(peer) = peer {
                peer.dismiss(endpoint);
            }
        }
    }
}

fn bytes(payload: Payload) -> Answer<Vec<u8>> {
    match payload {
        Payload::None => Ok(Vec::new()),
        Payload::Bytes(bytes) => Ok(bytes),
        Payload::Memory {
            memory,
            offset,
            len,
        } => {
            let bytes = memory.buffer().bytes(offset, len);
            bytes.map(<[u8]>::to_vec).ok_or(OUT_OF_RANGE)
        }
    }
}

#[cfg(test)]
mod tests;
