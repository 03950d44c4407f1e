//! The client of a store on its reactor: sends each operation, and ends it with the answer.

mod commands;
mod hashing;
mod pending;
mod reads;
mod uploads;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::Status;

use super::TRANSFERS_IN_FLIGHT;
use super::messages::StoreMessage;
use super::values::OpenedValue;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::session::{Payload, ReactorContext, Service};
use crate::sync::lock;
use crate::transfer::{BufferExchange, Message};
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
    exchange: BufferExchange,
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
            exchange: BufferExchange::new(TRANSFERS_IN_FLIGHT),
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
        cx: &mut ReactorContext,
        operation: u64,
        message: StoreMessage<'_>,
        (pending, timeout): (Pending, Option<Duration>),
    ) {
        match self.usable() {
            Ok(session) => {
                message.send(cx, session, operation);
                self.pending.insert(operation, pending);
                if let Some(timeout) = timeout {
                    let grace = GracePeriod::new(cx.now(), cx.now() + timeout);
                    self.next_looks.add(Some(grace.next(cx, &[session])));
                    self.graces.insert(operation, grace);
                }
            }
            Err(error) => pending.fail(error),
        }
    }

    /// Ends what an operation waits for or holds, here and at the server.
    fn release(&mut self, cx: &mut ReactorContext, operation: u64, completer: Completer<()>) {
        let waited = self.pending.remove(&operation);
        self.graces.remove(&operation);
        let is_upload = self.remove_upload(cx, operation);
        let is_open = self.opened.remove(&operation).is_some();
        if is_open && let Some(session) = self.session {
            let closed = Error::Closed("the value is closed".to_owned());
            let engine = &mut self.exchange.engine;
            engine.remove_source(cx, session, operation, &closed);
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
    fn send_release(
        &mut self,
        cx: &mut ReactorContext,
        target: u64,
        completer: Option<Completer<()>>,
    ) {
        let operation = self.shared.next_operation();
        let message = StoreMessage::Release { target };
        match (completer, self.usable()) {
            (Some(completer), _) => {
                self.ask(cx, operation, message, (Pending::Done(completer), None));
            }
            (None, Ok(session)) => message.send(cx, session, operation),
            (None, Err(_)) => {}
        }
    }

    fn receive(
        &mut self,
        cx: &mut ReactorContext,
        operation: u64,
        message: StoreMessage<'_>,
    ) -> Result<()> {
        if let StoreMessage::Ended = message {
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
            (pending, StoreMessage::Refused(error)) => pending.fail(error),
            (
                Pending::Reserve {
                    completer,
                    num_bytes,
                },
                StoreMessage::Reserved,
            ) => {
                self.uploads.insert(operation, Upload::new(num_bytes));
                completer.complete(Ok(Some(operation)));
            }
            (
                Pending::Open(completer),
                StoreMessage::Offer {
                    checksum,
                    record,
                    bytes,
                },
            ) => {
                let value = OpenedValue::new(operation, checksum, &record, bytes);
                self.open(cx, value, completer);
            }
            (pending, message) => pending.complete(message)?,
        }
        Ok(())
    }

    /// A reservation or a lease has ended by time.
    fn ended(&mut self, cx: &mut ReactorContext, operation: u64) {
        if let Some(has_ended) = self.opened.get_mut(&operation) {
            *has_ended = true;
        } else {
            self.upload_ended(cx, operation);
        }
    }

    /// Handles buffers that have been read.
    fn advance(&mut self, cx: &mut ReactorContext) {
        while let Some(completion) = self.exchange.engine.next_completion() {
            self.arrived(cx, completion);
        }
    }

    /// Ends operations whose answer is overdue.
    fn expire(&mut self, cx: &mut ReactorContext) {
        let Some(session) = self.session else { return };
        if !self.next_looks.take_if_past(cx.now()) {
            return;
        }
        let mut overdue = Vec::new();
        for (&operation, grace) in &mut self.graces {
            match grace.look(cx, &[session]) {
                AnswerStage::Overdue => overdue.push(operation),
                AnswerStage::InTime | AnswerStage::Late => {
                    self.next_looks.add(Some(grace.next(cx, &[session])));
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

impl Service for Client {
    type Command = ClientCommand;

    fn command(&mut self, cx: &mut ReactorContext, command: ClientCommand) {
        match command {
            ClientCommand::Connect { address, completer } => {
                self.connecting = Some(completer);
                self.session = Some(cx.connect(&address));
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

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, _peer: &Identity) {
        self.exchange.session_up(session);
        self.data_path_changed(cx, session);
        if let Some(completer) = self.connecting.take() {
            completer.complete(Ok(()));
        }
    }

    fn data_path_changed(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        if let Some(data_path) = cx.data_path(session) {
            let transport = &mut *lock(&self.shared.transport);
            data_path.transport().clone_into(transport);
        }
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.exchange.session_down(cx, session, &error);
        self.failure.get_or_insert_with(|| error.clone());
        self.fail(&error);
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
                Ok(message) => self.receive(cx, operation, message)?,
                // What the server holds for it is released.
                Err(Error::Corrupt(text)) => {
                    let refused = StoreMessage::Refused(Error::Corrupt(text));
                    self.send_release(cx, operation, None);
                    self.receive(cx, operation, refused)?;
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
        self.exchange.engine.run_slice(cx);
        self.advance(cx);
        if let Some(operation) = self.hash_queue.pop_front() {
            self.hash_upload(cx, operation);
        }
        self.has_work()
    }

    fn has_work(&self) -> bool {
        self.exchange.engine.has_work() || !self.hash_queue.is_empty()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        self.expire(cx);
        self.next_looks.at()
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        let closed = cx.closed("the store is closed");
        self.exchange.stop(&closed);
        self.fail(&closed);
        for (_, reading) in self.reads.drain() {
            reading.completer.complete(Err(closed.clone()));
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("pending operations of a store", self.pending.len()),
            ("grace periods", self.graces.len()),
            ("uploads", self.uploads.len()),
            ("unanswered writes", self.writes.len()),
            ("opened values", self.opened.len()),
            ("reads of values", self.reads.len()),
            ("uploads to be hashed", self.hash_queue.len()),
        ];
        sizes.extend(self.exchange.sizes());
        sizes
    }
}
