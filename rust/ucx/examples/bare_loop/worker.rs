//! One UCX worker with one region, and the endpoint to the worker of the other process.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use kvpipe_ucx::{
    Buffer, Config, Context, EndpointId, Event, Get, Library, Memory, MemoryKind, RemoteKey,
    Search, Worker,
};

use crate::Result;
use crate::request::{Request, Role, pattern};

/// The other process, once connected.
pub(crate) struct Peer {
    pub(crate) endpoint: EndpointId,
    pub(crate) key: RemoteKey,
    pub(crate) region: u64,
    /// Remote memory is read by hardware or by the kernel, not by UCX's emulation over TCP.
    pub(crate) has_remote_read: bool,
}

/// The worker of this process.
pub(crate) struct BareWorker {
    pub(crate) role: Role,
    pub(crate) region: Arc<Memory>,
    pub(crate) peer: Option<Peer>,
    pub(crate) in_flight: usize,
    worker: Worker,
}

impl BareWorker {
    pub(crate) fn new(role: Role, total: usize) -> Result<Self> {
        let search = Search {
            explicit: std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from),
            wheel_dir: None,
        };
        let context = Context::new(Library::load(&search)?, &Config::new())?;
        Ok(Self {
            role,
            region: context.register(Buffer::from_vec(pattern(total)))?,
            peer: None,
            in_flight: 0,
            worker: Worker::new(&context)?,
        })
    }

    /// Line with the addresses and the key that the other process needs to reach this one.
    pub(crate) fn hello(&self) -> Result<String> {
        let (worker, key) = (self.worker.address()?, self.region.pack_rkey()?);
        let region = self.region.buffer().address();
        Ok(format!(
            "hello worker={} region={region} rkey={}",
            hex(&worker),
            hex(&key)
        ))
    }

    /// Connects to the process with this hello.
    pub(crate) fn connect(&mut self, request: &Request) -> Result<String> {
        let address = unhex(request.text("worker")?)?;
        // SAFETY: the worker of the other process has written it.
        let endpoint = unsafe { self.worker.connect(&address) }?;
        let key =
            self.worker
                .unpack_rkey(endpoint, &unhex(request.text("rkey")?)?, MemoryKind::Host)?;
        let region = request.number("region")? as u64;
        self.peer = Some(Peer {
            endpoint,
            key,
            region,
            has_remote_read: false,
        });
        self.worker.flush(endpoint, 1)?;
        self.in_flight += 1;
        self.wait_below(1)?;
        let lanes = self.worker.lanes(endpoint)?;
        let mut readers = lanes.iter().filter(|lane| lane.is_rma);
        let reader = readers.find(|lane| lane.transport != "tcp");
        let data_path = reader.map_or("tcp", |lane| &lane.transport).to_owned();
        if let Some(peer) = &mut self.peer {
            peer.has_remote_read = reader.is_some();
        }
        Ok(format!("ok transport={data_path}"))
    }

    pub(crate) fn peer(&self) -> Result<&Peer> {
        Ok(self.peer.as_ref().ok_or("run before meet")?)
    }

    /// Reads a piece of the other's region.
    pub(crate) fn get(&mut self, offset: usize, len: usize, remote: usize) -> Result<()> {
        let peer = self.peer()?;
        let get = Get {
            local: &self.region,
            offset,
            len,
            remote: peer.region + remote as u64,
            rkey: &peer.key,
            token: 1,
        };
        self.worker.get(peer.endpoint, get)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Waits until fewer than `limit` operations are in flight.
    pub(crate) fn wait_below(&mut self, limit: usize) -> Result<()> {
        while self.in_flight >= limit {
            self.poll_event()?;
        }
        Ok(())
    }

    /// Handles one event, or sleeps if there is none.
    fn poll_event(&mut self) -> Result<()> {
        match self.worker.next_event() {
            Some(Event::Done { result, .. }) => {
                result?;
                self.in_flight -= 1;
            }
            Some(Event::EndpointFailed { status, .. }) => return Err(status.into()),
            Some(Event::Closed { .. }) => {}
            None => {
                if self.worker.progress() == 0 && self.worker.arm()? {
                    self.sleep();
                }
            }
        }
        Ok(())
    }

    fn sleep(&self) {
        let mut poll = libc::pollfd {
            fd: self.worker.event_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd, and a count of one. It sleeps a second at most, as kvpipe's reactor does.
        unsafe { libc::poll(&raw mut poll, 1, 1000) };
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    digits.map(digit).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    digits.map(byte).collect()
}
