//! The server of a store on its reactor: passes what clients ask to the state, and holds the bytes of values.

mod answers;
mod arrival;
mod arrivals;
mod disk_jobs;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TRANSFERS_IN_FLIGHT;
use super::content::Content;
use super::disk::Disk;
use super::messages::{Page, StoreMessage};
use crate::clock;
use crate::entries::StoreInfo;
use crate::entries::state::{Access, Entries, Holder, KeptEntry, Query};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::transfer::exposed::ExposedBuffers;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Completer;
use arrival::{Arrival, PendingWrite};
use disk_jobs::DiskJobs;

/// Requests of the process that serves.
#[derive(Debug)]
pub(super) enum ServerCommand {
    Stats(Completer<StoreInfo>),
}

pub(super) struct Server {
    state: Entries<Arc<Content>>,
    /// The bytes of reservations.
    arrivals: HashMap<Holder, Arrival>,
    /// Writes whose bytes are read from their clients, by the owner of the transfer.
    writes: HashMap<u64, PendingWrite>,
    exposed: ExposedBuffers,
    disk: Option<DiskJobs>,
}

fn after(timeout: Option<Duration>) -> Option<Instant> {
    clock::now().checked_add(timeout?)
}

impl Server {
    /// With a disk, it begins with what is kept there.
    pub(super) fn new(
        capacity_bytes: u64,
        quota_bytes: Option<u64>,
        reservation: Duration,
        disk: Option<(Disk, Vec<KeptEntry>)>,
    ) -> Self {
        let mut state = Entries::of_store(capacity_bytes, quota_bytes, reservation);
        let disk = disk.map(|(disk, kept)| {
            state.add_disk(disk.capacity_bytes, kept, clock::now());
            DiskJobs::new(disk)
        });
        Self {
            state,
            disk,
            arrivals: HashMap::new(),
            writes: HashMap::new(),
            exposed: ExposedBuffers::default(),
        }
    }

    fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        message: StoreMessage<'_>,
    ) -> Result<()> {
        let (holder, now) = ((session, operation), clock::now());
        match message {
            StoreMessage::Exists { keys } => {
                let present = keys.iter().map(|key| self.state.exists(key)).collect();
                StoreMessage::Present(present).send(cx.links, session, operation);
            }
            StoreMessage::Reserve {
                key,
                num_bytes,
                ttl,
                timeout,
            } => {
                let arrival = Arrival::new(num_bytes, ttl);
                self.reserve(cx, holder, &key, (arrival, after(timeout)))?;
            }
            StoreMessage::Put {
                key,
                ttl,
                record,
                bytes,
            } => {
                let arrival = Arrival::of_put(operation, ttl, record, bytes);
                self.reserve(cx, holder, &key, (arrival, Some(now)))?;
            }
            StoreMessage::Write { reservation, bytes } => {
                self.write(cx, (session, reservation), operation, bytes)?;
            }
            StoreMessage::Commit {
                reservation,
                checksum,
                record,
            } => {
                let commit = (operation, checksum, record);
                self.begin_commit(cx, (session, reservation), commit)?;
            }
            StoreMessage::Checksum(checksum) => self.set_checksum(cx, holder, checksum),
            StoreMessage::Select { key, timeout } => {
                self.select(cx, holder, (&key, Access::Open), after(timeout))?;
            }
            StoreMessage::Take {
                key,
                lease,
                timeout,
            } => {
                let access = Access::Lease(Some(lease));
                self.select(cx, holder, (&key, access), after(timeout))?;
            }
            StoreMessage::Release { target } => {
                self.release(cx, (session, target));
                StoreMessage::Done.send(cx.links, session, operation);
            }
            other => self.receive_about_values(cx, holder, other)?,
        }
        Ok(())
    }

    fn receive_about_values(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        message: StoreMessage<'_>,
    ) -> Result<()> {
        let now = clock::now();
        match message {
            StoreMessage::Renew { take, lease } => {
                let renewed = self.state.renew((session, take), lease, now);
                answer(cx, (session, operation), renewed);
            }
            StoreMessage::Acknowledge { take } => {
                let acknowledged = self.state.acknowledge((session, take), now);
                if acknowledged.is_ok() {
                    self.exposed.withdraw(cx, session, take);
                }
                let is_on_disk = acknowledged == Ok(true);
                let answer =
                    acknowledged.map_or_else(StoreMessage::Refused, |_| StoreMessage::Done);
                self.answer_erased(cx, (session, operation), answer, is_on_disk);
            }
            StoreMessage::Corrupt { select } => {
                let found = self.state.corrupt((session, select));
                let refusal = found.err().unwrap_or_else(corrupt);
                StoreMessage::Refused(refusal).send(cx.links, session, operation);
            }
            StoreMessage::Delete { keys } => {
                let keys = keys.iter().map(|key| &key[..]);
                let (num_deleted, is_on_disk) = self.state.delete(keys, now);
                let answer = StoreMessage::Deleted(num_deleted);
                self.answer_erased(cx, (session, operation), answer, is_on_disk);
            }
            StoreMessage::List { prefix, after } => {
                let (values, next) = self.state.list(&prefix, after);
                StoreMessage::Page(Page { values, next }).send(cx.links, session, operation);
            }
            StoreMessage::Stats => {
                StoreMessage::Statistics(self.state.info()).send(cx.links, session, operation);
            }
            other => {
                let text = format_args!("message {} to a store", other.kind());
                return Err(Error::protocol(text));
            }
        }
        Ok(())
    }

    fn select(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        (key, access): (&[u8], Access),
        deadline: Option<Instant>,
    ) -> Result<()> {
        if self.admit(cx, holder)? {
            let (query, now) = (Query::Exact(key), clock::now());
            self.state.select(holder, &query, access, deadline, now);
        }
        Ok(())
    }

    /// True if an operation may begin that holds something; one too many is refused.
    fn admit(&mut self, cx: &mut Cx<'_>, holder: Holder) -> Result<bool> {
        match self.state.check_new(holder) {
            Err(full @ Error::Exhausted(_)) => {
                StoreMessage::Refused(full).send(cx.links, holder.0, holder.1);
                Ok(false)
            }
            checked => checked.map(|()| true),
        }
    }
}

fn answer(cx: &mut Cx<'_>, (session, operation): Holder, outcome: Result<()>) {
    let message = outcome.map_or_else(StoreMessage::Refused, |()| StoreMessage::Done);
    message.send(cx.links, session, operation);
}

fn corrupt() -> Error {
    let text =
        "the value differs from the checksum that it was committed with; the store has deleted it";
    Error::Corrupt(text.to_owned())
}

impl TransferService for Server {
    type Command = ServerCommand;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: ServerCommand) {
        match command {
            ServerCommand::Stats(completer) => completer.complete(Ok(self.state.info())),
        }
    }

    fn session_up(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.state.session_up(session);
        self.exposed.session_up(session);
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, session: SessionKey, _error: Error) {
        self.exposed.session_down(session);
        for holder in self.state.held_by(session) {
            self.arrivals.remove(&holder);
        }
        self.state.session_down(session, clock::now());
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let operation = header.u64()?;
        match StoreMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, (session, operation), message),
            Err(error @ Error::Corrupt(_)) => {
                StoreMessage::Refused(error).send(cx.links, session, operation);
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
        self.run_disk_reports(cx)
    }

    fn has_work(&self) -> bool {
        let disk = self.disk.as_ref();
        disk.is_some_and(|it| it.disk.reports.len() > 0)
    }

    fn expire(&mut self, _cx: &mut Cx<'_>) {
        self.state.expire(clock::now());
    }

    fn next_deadline(&mut self, _links: &Links) -> Option<Instant> {
        self.state.next_deadline()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let closed = cx.links.closed("the store is closed");
        cx.transfers.stop(&closed);
        self.exposed.clear();
        self.save_rest(cx);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("reservations", self.arrivals.len()),
            ("writes under way", self.writes.len()),
            ("exposed buffers", self.exposed.len()),
        ];
        sizes.extend(self.state.sizes());
        sizes.extend(self.disk.iter().flat_map(DiskJobs::sizes));
        sizes
    }
}
