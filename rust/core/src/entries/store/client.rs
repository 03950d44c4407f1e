//! The client of a store on its reactor: sends each operation, and ends it with the answer.

mod commands;
mod hashing;
mod pending;
mod reads;
mod uploads;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::values::OpenedValue;
use crate::earliest::Earliest;
use crate::entries::messages::EntryMessage;
use crate::entries::{TRANSFERS_IN_FLIGHT, source_id};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::session::{Links, Payload};
use crate::sync::lock;
use crate::transfer::exposed::ExposedBuffers;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Completer;
pub(super) use commands::{ClientCommand, ClientShared};
pub(super) use pending::Pending;
use reads::Reading;
use uploads::Upload;

pub(super) struct Client {
    session: Option<SessionKey>,
    connecting: Option<Completer<()>>,
    failure: Option<Error>,
    /// Operations that the server has not answered.
    pending: HashMap<u64, Pending>,
    /// Of those with a timeout: how long a late answer is waited for.
    graces: HashMap<u64, GracePeriod>,
    next_looks: Earliest,
    /// Reservations and puts.
    uploads: HashMap<u64, Upload>,
    /// The reservations of writes that the server has not answered.
    writes: HashMap<u64, u64>,
    /// Values that callers have open, and whether the lease has ended.
    opened: HashMap<u64, bool>,
    /// Reads of callers, by the owner of the transfer.
    reads: HashMap<u64, Reading>,
    /// Uploads whose bytes are to be hashed.
    hash_queue: VecDeque<u64>,
    exposed: ExposedBuffers,
    shared: Arc<ClientShared>,
}

impl Client {
    pub(super) fn new(shared: Arc<ClientShared>) -> Self {
        Self {
            session: None,
            connecting: None,
            failure: None,
            pending: HashMap::new(),
            graces: HashMap::new(),
            next_looks: Earliest::default(),
            uploads: HashMap::new(),
            writes: HashMap::new(),
            opened: HashMap::new(),
            reads: HashMap::new(),
            hash_queue: VecDeque::new(),
            exposed: ExposedBuffers::default(),
            shared,
        }
    }

    /// The session, if the server can be asked now.
    fn usable(&self) -> Result<SessionKey> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.connecting.is_some() {
            let text = "the store has not accepted the connection yet";
            return Err(Error::Connect(text.to_owned()));
        }
        let none = || Error::Connect("not connected to a store".to_owned());
        self.session.ok_or_else(none)
    }

    fn ask(
        &mut self,
        cx: &mut Cx<'_>,
        operation: u64,
        message: EntryMessage<'_>,
        (pending, timeout): (Pending, Option<Duration>),
    ) {
        match self.usable() {
            Ok(session) => {
                message.send(cx.links, session, operation);
                self.pending.insert(operation, pending);
                if let Some(timeout) = timeout {
                    let grace = GracePeriod::new(cx.links.now(), cx.links.now() + timeout);
                    self.next_looks.add(Some(grace.next(cx.links, &[session])));
                    self.graces.insert(operation, grace);
                }
            }
            Err(error) => pending.fail(error),
        }
    }

    /// Ends what an operation waits for or holds, here and at the server.
    fn release(&mut self, cx: &mut Cx<'_>, operation: u64, completer: Completer<()>) {
        let waited = self.pending.remove(&operation);
        self.graces.remove(&operation);
        let is_upload = self.remove_upload(cx, operation);
        let is_open = self.opened.remove(&operation).is_some();
        if is_open && let Some(session) = self.session {
            let closed = Error::Closed("the value is closed".to_owned());
            let source = source_id(operation, 0);
            cx.transfers
                .remove_source(cx.links, session, source, &closed);
        }
        let holds = waited.is_some() || is_upload || is_open;
        if let Some(waited) = waited {
            waited.fail(Error::Closed("the operation was withdrawn".to_owned()));
        }
        if holds {
            self.send_release(cx, operation, Some(completer));
        } else {
            completer.complete(Ok(()));
        }
    }

    /// Has the server end what an operation holds there.
    fn send_release(&mut self, cx: &mut Cx<'_>, target: u64, completer: Option<Completer<()>>) {
        let operation = self.shared.next_operation();
        let message = EntryMessage::Release { target };
        match (completer, self.usable()) {
            (Some(completer), _) => {
                self.ask(cx, operation, message, (Pending::Done(completer), None));
            }
            (None, Ok(session)) => message.send(cx.links, session, operation),
            (None, Err(_)) => {}
        }
    }

    fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        operation: u64,
        message: EntryMessage<'_>,
    ) -> Result<()> {
        if let EntryMessage::Ended = message {
            self.ended(cx, operation);
            return Ok(());
        }
        self.graces.remove(&operation);
        if self.upload_answered(cx, operation, &message) {
            return Ok(());
        }
        // Otherwise the operation was withdrawn while the answer was on its way, and the server was told.
        let Some(pending) = self.pending.remove(&operation) else {
            return Ok(());
        };
        match (pending, message) {
            (pending, EntryMessage::Refused(error)) => pending.fail(error),
            (
                Pending::Reserve {
                    completer,
                    num_bytes,
                },
                EntryMessage::Reserved,
            ) => {
                self.uploads.insert(operation, Upload::new(num_bytes));
                completer.complete(Ok(Some(operation)));
            }
            (
                Pending::Open(completer),
                EntryMessage::Offer {
                    checksum: Some(checksum),
                    record,
                    mut parts,
                },
            ) if parts.len() == 1 => {
                if let Some(bytes) = parts.pop() {
                    bytes.check_value()?;
                    let value = OpenedValue::new(operation, checksum, &record, bytes);
                    self.open(cx, value, completer);
                }
            }
            (pending, message) => pending.complete(message)?,
        }
        Ok(())
    }

    /// A reservation or a lease has ended by time.
    fn ended(&mut self, cx: &mut Cx<'_>, operation: u64) {
        if let Some(has_ended) = self.opened.get_mut(&operation) {
            *has_ended = true;
        } else {
            self.upload_ended(cx, operation);
        }
    }

    /// Ends operations whose answer is overdue.
    fn end_overdue(&mut self, cx: &mut Cx<'_>) {
        let Some(session) = self.session else { return };
        if !self.next_looks.clear_if_past(cx.links.now()) {
            return;
        }
        let mut overdue = Vec::new();
        for (&operation, grace) in &mut self.graces {
            match grace.look(cx.links, &[session]) {
                AnswerStage::Overdue => overdue.push(operation),
                AnswerStage::InTime | AnswerStage::Late => {
                    self.next_looks.add(Some(grace.next(cx.links, &[session])));
                }
            }
        }
        for operation in overdue {
            let text = "the store has not answered in time; the operation is withdrawn";
            if let Some(pending) = self.pending.remove(&operation) {
                self.send_release(cx, operation, None);
                pending.fail(Error::Timeout(text.to_owned()));
            }
            self.graces.remove(&operation);
        }
    }

    /// Ends all operations. The server reads nothing any more.
    fn fail(&mut self, error: &Error) {
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        for (_, pending) in self.pending.drain() {
            pending.fail(error.clone());
        }
        for (_, upload) in self.uploads.drain() {
            upload.fail(error.clone());
        }
        self.graces.clear();
        self.writes.clear();
        self.opened.clear();
    }
}

impl TransferService for Client {
    type Command = ClientCommand;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, cx: &mut Cx<'_>, command: ClientCommand) {
        match command {
            ClientCommand::Connect { address, completer } => {
                self.connecting = Some(completer);
                self.session = Some(cx.links.connect(&address));
            }
            ClientCommand::Ask {
                operation,
                message,
                pending,
                timeout,
            } => self.ask(cx, operation, message, (pending, timeout)),
            ClientCommand::Put {
                operation,
                key,
                ttl,
                record,
                buffer,
                completer,
            } => {
                let upload = Upload::of_put(operation, buffer, record, completer);
                self.put(cx, operation, (key, ttl), upload);
            }
            ClientCommand::Write {
                operation,
                reservation,
                buffer,
                completer,
            } => self.write(cx, reservation, (operation, buffer, completer)),
            ClientCommand::Commit {
                operation,
                reservation,
                record,
                completer,
            } => self.commit(cx, reservation, (operation, record, completer)),
            ClientCommand::Read {
                value,
                buffer,
                completer,
            } => self.read(cx, &value, buffer, completer),
            ClientCommand::Release { target, completer } => self.release(cx, target, completer),
        }
    }

    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.exposed.session_up(session);
        self.data_path_changed(cx, session);
        if let Some(completer) = self.connecting.take() {
            completer.complete(Ok(()));
        }
    }

    fn data_path_changed(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        if let Some(data_path) = cx.links.data_path(session) {
            let transport = &mut *lock(&self.shared.transport);
            data_path.transport().clone_into(transport);
        }
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, session: SessionKey, error: Error) {
        self.exposed.session_down(session);
        self.failure.get_or_insert_with(|| error.clone());
        self.fail(&error);
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        _session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let operation = header.u64()?;
        match EntryMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, operation, message),
            // Releases what the server holds for it.
            Err(Error::Corrupt(text)) => {
                let refused = EntryMessage::Refused(Error::Corrupt(text));
                self.send_release(cx, operation, None);
                self.receive(cx, operation, refused)
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

    fn run_slice(&mut self, cx: &mut Cx<'_>) -> bool {
        let Some(operation) = self.hash_queue.pop_front() else {
            return false;
        };
        self.hash_upload(cx, operation);
        true
    }

    fn has_work(&self) -> bool {
        !self.hash_queue.is_empty()
    }

    fn expire(&mut self, cx: &mut Cx<'_>) {
        self.end_overdue(cx);
    }

    fn next_deadline(&mut self, _links: &Links) -> Option<Instant> {
        self.next_looks.at()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let closed = cx.links.closed("the store is closed");
        cx.transfers.stop(&closed);
        self.exposed.clear();
        self.fail(&closed);
        for (_, reading) in self.reads.drain() {
            reading.completer.complete(Err(closed.clone()));
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("pending operations of a store", self.pending.len()),
            ("grace periods", self.graces.len()),
            ("uploads", self.uploads.len()),
            ("unanswered writes", self.writes.len()),
            ("opened values", self.opened.len()),
            ("reads of values", self.reads.len()),
            ("uploads to be hashed", self.hash_queue.len()),
            ("exposed buffers", self.exposed.len()),
        ]
    }
}
