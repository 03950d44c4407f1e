//! The server of entries on its reactor: passes what clients ask to the shared state, and holds the bytes of entries.

mod answers;
mod arrival;
mod arrivals;
mod disk_jobs;
mod requests;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use super::disk::Disk;
use super::messages::EntryMessage;
use super::shared::{ChangedBy, Shared, SharedState};
use super::state::{Holder, KeptEntry};
use super::{TRANSFERS_IN_FLIGHT, check_operation};
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::transfer::exposed::ExposedBuffers;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use arrival::{Arrival, PendingWrite};
use disk_jobs::DiskJobs;

/// The face whose clients a server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Face {
    Store,
    LookupBuffer,
}

pub(super) struct Server {
    shared: Arc<Shared>,
    face: Face,
    /// With which the clients of a lookup buffer verify what they read. The checksum of its commit verifies a value.
    integrity: Integrity,
    clients: HashSet<SessionKey>,
    /// The bytes of reservations.
    arrivals: BTreeMap<Holder, Arrival>,
    /// Inserts of each client of a lookup buffer that have their space: their bytes come one after the other, in the order
    /// of the calls.
    inserts: HashMap<SessionKey, VecDeque<Holder>>,
    /// Writes whose bytes are read from their clients, by the owner of the transfer.
    writes: HashMap<u64, PendingWrite>,
    exposed: ExposedBuffers,
    disk: Option<DiskJobs>,
}

impl Server {
    /// A server of values. With a disk, it begins with what is kept there.
    pub(super) fn of_store(shared: Arc<Shared>, disk: Option<(Disk, Vec<KeptEntry>)>) -> Self {
        let disk = disk.map(|(disk, kept)| {
            let (capacity_bytes, now) = (disk.capacity_bytes, clock::now());
            let add = |state: &mut SharedState| state.entries.add_disk(capacity_bytes, kept, now);
            let _ = shared.change(ChangedBy::Server, add);
            DiskJobs::new(disk)
        });
        let mut server = Self::new(shared, Face::Store, Integrity::None);
        server.disk = disk;
        server
    }

    /// A server of a lookup buffer, whose clients verify checksums if it is so.
    pub(super) fn of_buffer(shared: Arc<Shared>, is_checksummed: bool) -> Self {
        let integrity = Integrity::of_checksums(is_checksummed);
        Self::new(shared, Face::LookupBuffer, integrity)
    }

    fn new(shared: Arc<Shared>, face: Face, integrity: Integrity) -> Self {
        Self {
            shared,
            face,
            integrity,
            clients: HashSet::new(),
            arrivals: BTreeMap::new(),
            inserts: HashMap::new(),
            writes: HashMap::new(),
            exposed: ExposedBuffers::default(),
            disk: None,
        }
    }

    /// Changes the state; what follows is done by [`run_actions`](Self::run_actions).
    ///
    /// # Errors
    /// `Closed`: the process that serves has closed it.
    fn change<R>(&self, change: impl FnOnce(&mut SharedState) -> R) -> Result<R> {
        self.shared.change(ChangedBy::Server, change)
    }
}

impl TransferService for Server {
    type Command = Infallible;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.clients.insert(session);
        self.exposed.session_up(session);
        let _ = self.change(|state| state.entries.session_up(session));
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _error: Error) {
        self.clients.remove(&session);
        self.inserts.remove(&session);
        self.exposed.session_down(session);
        let of_client = self.arrivals.range((session, 0)..=(session, u64::MAX));
        let of_client: Vec<_> = of_client.map(|(holder, _)| *holder).collect();
        for holder in of_client {
            self.arrivals.remove(&holder);
        }
        let _ = self.change(|state| state.entries.session_down(session, clock::now()));
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let operation = header.u64()?;
        check_operation(operation)?;
        match EntryMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, (session, operation), message),
            Err(error @ Error::Corrupt(_)) => {
                EntryMessage::Refused(error).send(cx.links, session, operation);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        self.exposed.requested(request)
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        self.arrived(cx, completion);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        self.run_actions(cx);
    }

    fn run_slice(&mut self, cx: &mut Cx<'_>) -> bool {
        match self.face {
            Face::Store => self.run_disk_reports(cx),
            Face::LookupBuffer => self.shared.run_copy_slice(),
        }
    }

    fn has_work(&self) -> bool {
        let disk = self.disk.as_ref();
        disk.is_some_and(|it| it.disk.reports.len() > 0)
    }

    fn expire(&mut self, _cx: &mut Cx<'_>) {
        let now = clock::now();
        if self.shared.next_deadline().is_some_and(|at| at <= now) {
            let _ = self.change(|state| state.entries.expire(now));
        }
    }

    fn next_deadline(&mut self, links: &Links) -> Option<Instant> {
        let idle = self.shared.pool.expire(links.now());
        idle.into_iter().chain(self.shared.next_deadline()).min()
    }

    /// [`drop`](Drop::drop) ends what clients hold: a lookup buffer stays usable in its own process.
    fn stop(&mut self, cx: &mut Cx<'_>) {
        let closed = cx.links.closed("the server is closed");
        cx.transfers.stop(&closed);
        self.exposed.clear();
        self.save_rest(cx);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("clients", self.clients.len()),
            ("reservations", self.arrivals.len()),
            (
                "inserts in line",
                self.inserts.values().map(VecDeque::len).sum(),
            ),
            ("writes under way", self.writes.len()),
            ("exposed buffers", self.exposed.len()),
            ("pooled buffers", self.shared.pool.len()),
        ];
        sizes.extend(self.change(|state| state.sizes()).unwrap_or_default());
        sizes.extend(self.disk.iter().flat_map(DiskJobs::sizes));
        sizes
    }
}

/// Runs when the reactor panics too: a lookup buffer itself is still usable then.
impl Drop for Server {
    fn drop(&mut self) {
        let now = clock::now();
        for session in &self.clients {
            let _ = self.change(|state| state.entries.session_down(*session, now));
        }
        // No client waits for an answer any more.
        self.shared.drain_client_actions();
        match self.face {
            Face::Store => self.shared.close(),
            Face::LookupBuffer => self.shared.end_copies(),
        }
    }
}

#[cfg(test)]
mod tests;
