//! A connected peer as other threads see it: its regions, its counters, and its loss.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::ids::{Incarnation, SessionKey};
use crate::sync::lock;
use crate::transfer::region::RemoteRegion;

/// The regions of a peer, by ascending ids.
pub type Regions = Arc<[Arc<RemoteRegion>]>;

/// Counters of the requests of this side; those of peers are not included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes that peers took.
    pub bytes_written: u64,
    /// Reads that were completed.
    pub num_reads: u64,
    /// Writes that were completed.
    pub num_writes: u64,
    /// Reads and writes that have not ended.
    pub in_flight: u64,
}

/// The same while it changes: written by one thread.
#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: Completed,
    writes: Completed,
    in_flight: AtomicU64,
}

/// Transfers of one kind that have succeeded.
#[derive(Debug, Default)]
struct Completed {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Counters {
    pub(super) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// A read ended, with this number of bytes when it went well.
    pub(super) fn end_read(&self, num_bytes: Option<u64>) {
        self.end(&self.reads, num_bytes);
    }

    /// A write ended, with this number of bytes when it went well.
    pub(super) fn end_write(&self, num_bytes: Option<u64>) {
        self.end(&self.writes, num_bytes);
    }

    fn end(&self, completed: &Completed, num_bytes: Option<u64>) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(num_bytes) = num_bytes {
            completed.count.fetch_add(1, Ordering::Relaxed);
            completed.bytes.fetch_add(num_bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self) -> Stats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            bytes_read: load(&self.reads.bytes),
            bytes_written: load(&self.writes.bytes),
            num_reads: load(&self.reads.count),
            num_writes: load(&self.writes.count),
            in_flight: load(&self.in_flight),
        }
    }
}

/// The transport by which this side gets a peer's blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionTransport {
    /// Its name, such as `cma`; empty without a session.
    pub name: String,
    /// Reason that it is slower than this host allows, and the remedy; empty if it is not.
    pub reason: String,
}

#[derive(Debug)]
struct PeerStatus {
    incarnation: Incarnation,
    transport: SessionTransport,
    regions: Regions,
    lost: Option<Error>,
}

#[derive(Debug)]
struct Shared {
    session: SessionKey,
    address: String,
    agent: Incarnation,
    counters: Counters,
    state: Mutex<PeerStatus>,
}

/// A peer; clones are the same one. Once lost it stays lost.
#[derive(Debug, Clone)]
pub struct Peer(Arc<Shared>);

impl Peer {
    pub(super) fn new(session: SessionKey, address: &str, agent: Incarnation) -> Self {
        Self(Arc::new(Shared {
            session,
            address: address.to_owned(),
            agent,
            counters: Counters::default(),
            state: Mutex::new(PeerStatus {
                incarnation: [0; 16],
                transport: SessionTransport::default(),
                regions: Regions::default(),
                lost: None,
            }),
        }))
    }

    fn state(&self) -> MutexGuard<'_, PeerStatus> {
        lock(&self.0.state)
    }

    /// Names it on this agent.
    pub fn session(&self) -> SessionKey {
        self.0.session
    }

    /// Its address: where it listens, or for one that connected to us, where it came from.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Its incarnation.
    pub fn incarnation(&self) -> Incarnation {
        self.state().incarnation
    }

    /// The transport by which this side gets its blocks.
    pub fn transport(&self) -> String {
        self.state().transport.name.clone()
    }

    /// Reason that this transport is slower than this host allows, and the remedy; empty if it is not.
    pub fn transport_reason(&self) -> String {
        self.state().transport.reason.clone()
    }

    /// Its regions, as it last described them.
    pub fn regions(&self) -> Regions {
        Arc::clone(&self.state().regions)
    }

    /// Reason for the loss of the peer, if it is lost.
    pub fn lost(&self) -> Option<String> {
        let state = self.state();
        state.lost.as_ref().map(|error| match error {
            Error::PeerLost { reason, .. } => reason.clone(),
            other => other.to_string(),
        })
    }

    /// Counters of the transfers between it and us.
    pub fn stats(&self) -> Stats {
        self.0.counters.read()
    }

    /// The life of the agent that it is a peer of.
    pub(super) fn agent(&self) -> Incarnation {
        self.0.agent
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    pub(super) fn set_identity(&self, incarnation: Incarnation, transport: SessionTransport) {
        let mut state = self.state();
        (state.incarnation, state.transport) = (incarnation, transport);
    }

    pub(super) fn set_transport(&self, transport: SessionTransport) {
        self.state().transport = transport;
    }

    pub(super) fn set_regions(&self, regions: Regions) {
        self.state().regions = regions;
    }

    pub(super) fn lose(&self, error: &Error) {
        self.state().lost.get_or_insert_with(|| error.clone());
    }

    /// # Errors
    /// It is lost, or its agent was closed.
    pub(super) fn check(&self) -> Result<()> {
        let Some(reason) = self.lost() else {
            return Ok(());
        };
        if let Some(Error::Closed(text)) = &self.state().lost {
            return Err(Error::Closed(text.clone()));
        }
        let text = format_args!("{reason}; connect again for a new peer");
        Err(Error::lost(&self.0.address, text))
    }

    /// One of its regions.
    ///
    /// # Errors
    /// It is lost, or has no region of this name.
    pub(super) fn region(&self, name: &str) -> Result<Arc<RemoteRegion>> {
        self.check()?;
        let regions = self.regions();
        let found = regions.iter().find(|region| region.name == name);
        found.cloned().ok_or_else(|| {
            let known: Vec<&str> = regions.iter().map(|region| &region.name[..]).collect();
            let address = self.address();
            Error::Config(format!(
                "peer {address} has no region {name:?}; its regions: {known:?}"
            ))
        })
    }
}
