//! The server of a store on its reactor: passes what clients ask to the state, and holds the bytes of values.

mod answers;
mod arrival;
mod arrivals;
mod disk_jobs;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::Status;

use super::content::Content;
use super::disk::Disk;
use super::messages::{Page, StoreMessage};
use super::state::{Holder, KeptValue, State};
use super::{StoreInfo, TRANSFERS_IN_FLIGHT};
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Payload, ReactorContext, Service};
use crate::transfer::{BufferExchange, Message};
use crate::work::Completer;
use arrival::{Arrival, PendingWrite};
use disk_jobs::DiskJobs;

/// What the process that serves asks for.
#[derive(Debug)]
pub(super) enum ServerCommand {
    Stats(Completer<StoreInfo>),
}

pub(super) struct Server {
    state: State<Arc<Content>>,
    /// The bytes of reservations.
    arrivals: HashMap<Holder, Arrival>,
    /// Writes whose bytes are read from their clients, by the owner of the transfer.
    writes: HashMap<u64, PendingWrite>,
    exchange: BufferExchange,
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
        disk: Option<(Disk, Vec<KeptValue>)>,
    ) -> Self {
        let mut state = State::new(capacity_bytes, quota_bytes, reservation);
        let disk = disk.map(|(disk, kept)| {
            state.add_disk(disk.capacity_bytes, kept, clock::now());
            DiskJobs::new(disk)
        });
        Self {
            state,
            disk,
            arrivals: HashMap::new(),
            writes: HashMap::new(),
            exchange: BufferExchange::new(TRANSFERS_IN_FLIGHT),
        }
    }

    fn receive(
        &mut self,
        cx: &mut ReactorContext,
        (session, operation): Holder,
        message: StoreMessage<'_>,
    ) -> Result<()> {
        let (holder, now) = ((session, operation), clock::now());
        match message {
            StoreMessage::Exists { keys } => {
                let present = keys.iter().map(|key| self.state.exists(key)).collect();
                StoreMessage::Present(present).send(cx, session, operation);
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
                self.select(cx, holder, (&key, None), after(timeout))?;
            }
            StoreMessage::Take {
                key,
                lease,
                timeout,
            } => self.select(cx, holder, (&key, Some(lease)), after(timeout))?,
            StoreMessage::Release { target } => {
                self.release(cx, (session, target));
                StoreMessage::Done.send(cx, session, operation);
            }
            other => self.receive_about_values(cx, holder, other)?,
        }
        Ok(())
    }

    fn receive_about_values(
        &mut self,
        cx: &mut ReactorContext,
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
                    self.exchange.withdraw(cx, session, take);
                }
                let is_on_disk = acknowledged == Ok(true);
                let answer =
                    acknowledged.map_or_else(StoreMessage::Refused, |_| StoreMessage::Done);
                self.answer_erased(cx, (session, operation), answer, is_on_disk);
            }
            StoreMessage::Corrupt { select } => {
                let found = self.state.corrupt((session, select));
                let refusal = found.err().unwrap_or_else(corrupt);
                StoreMessage::Refused(refusal).send(cx, session, operation);
            }
            StoreMessage::Delete { keys } => {
                let keys = keys.iter().map(|key| &key[..]);
                let (num_deleted, is_on_disk) = self.state.delete(keys, now);
                let answer = StoreMessage::Deleted(num_deleted);
                self.answer_erased(cx, (session, operation), answer, is_on_disk);
            }
            StoreMessage::List { prefix, after } => {
                let (values, next) = self.state.list(&prefix, after);
                StoreMessage::Page(Page { values, next }).send(cx, session, operation);
            }
            StoreMessage::Stats => {
                StoreMessage::Statistics(self.state.info()).send(cx, session, operation);
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
        cx: &mut ReactorContext,
        holder: Holder,
        (key, lease): (&[u8], Option<Duration>),
        deadline: Option<Instant>,
    ) -> Result<()> {
        if self.admit(cx, holder)? {
            let now = clock::now();
            self.state.select(holder, key, lease, deadline, now);
        }
        Ok(())
    }

    /// Whether an operation may begin that holds something; one too many is refused.
    fn admit(&mut self, cx: &mut ReactorContext, holder: Holder) -> Result<bool> {
        match self.state.check_new(holder) {
            Err(full @ Error::Exhausted(_)) => {
                StoreMessage::Refused(full).send(cx, holder.0, holder.1);
                Ok(false)
            }
            checked => checked.map(|()| true),
        }
    }
}

fn answer(cx: &mut ReactorContext, (session, operation): Holder, outcome: Result<()>) {
    let message = outcome.map_or_else(StoreMessage::Refused, |()| StoreMessage::Done);
    message.send(cx, session, operation);
}

fn corrupt() -> Error {
    let text =
        "the value differs from the checksum that it was committed with; the store has deleted it";
    Error::Corrupt(text.to_owned())
}

impl Service for Server {
    type Command = ServerCommand;

    fn command(&mut self, _cx: &mut ReactorContext, command: ServerCommand) {
        match command {
            ServerCommand::Stats(completer) => completer.complete(Ok(self.state.info())),
        }
    }

    fn session_up(&mut self, _cx: &mut ReactorContext, session: SessionKey, _peer: &Identity) {
        self.state.session_up(session);
        self.exchange.session_up(session);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.exchange.session_down(cx, session, &error);
        for holder in self.state.held_by(session) {
            self.arrivals.remove(&holder);
        }
        self.state.session_down(session, clock::now());
        self.advance(cx);
    }

    fn streams_lost(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        self.exchange.engine.streams_lost(cx, session);
        self.advance(cx);
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: Payload,
    ) -> Result<()> {
        let mut reader = Reader::new(header);
        let kind = reader.u8()?;
        if Message::is_kind(kind) {
            self.exchange.message(cx, session, (kind, reader), &data)?;
        } else {
            let operation = reader.u64()?;
            match StoreMessage::decode(kind, reader, &data) {
                Ok(message) => self.receive(cx, (session, operation), message)?,
                Err(error @ Error::Corrupt(_)) => {
                    StoreMessage::Refused(error).send(cx, session, operation);
                }
                Err(error) => return Err(error),
            }
        }
        drop(data);
        self.advance(cx);
        Ok(())
    }

    fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        self.exchange.engine.read_ended(cx, token, result);
        self.advance(cx);
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        let has_moved = self.exchange.engine.run_slice(cx);
        self.advance(cx);
        let has_reported = self.run_disk_reports(cx);
        has_moved || has_reported
    }

    fn has_work(&self) -> bool {
        let has_reports = self
            .disk
            .as_ref()
            .is_some_and(|it| it.disk.reports.len() > 0);
        self.exchange.engine.has_work() || has_reports
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        self.state.expire(clock::now());
        self.advance(cx);
        let deadlines = [
            self.state.next_deadline(),
            self.exchange.pool.expire(cx.now()),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        let closed = cx.closed("the store is closed");
        self.exchange.stop(&closed);
        self.save_rest(cx);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("reservations", self.arrivals.len()),
            ("writes under way", self.writes.len()),
        ];
        sizes.extend(self.state.sizes());
        sizes.extend(self.exchange.sizes());
        sizes.extend(self.disk.iter().flat_map(DiskJobs::sizes));
        sizes
    }
}
