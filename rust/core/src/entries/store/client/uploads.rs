//! Values on their way to the server. The server reads a write's bytes while this side hashes them; the checksum follows with
//! the commit.

use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::hashing::ValueHasher;
use super::{Client, Pending};
use crate::entries::carrying::carry;
use crate::entries::messages::{Carried, EntryMessage};
use crate::entries::{INLINE_CAP, source_id};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::transfer::Cx;
use crate::work::Completer;

/// The caller that waits for bytes to be with the server.
#[derive(Debug)]
enum Uploader {
    Write(Completer<()>),
    /// With its record.
    Put(Completer<bool>, Vec<u8>),
}

/// Bytes that the server may be reading.
#[derive(Debug)]
struct CurrentWrite {
    operation: u64,
    buffer: Buffer,
    uploader: Uploader,
    is_hashed: bool,
    is_answered: bool,
}

/// A reservation, or a put.
#[derive(Debug)]
pub(super) struct Upload {
    num_bytes: u64,
    /// Before the current write.
    num_written: usize,
    hasher: ValueHasher,
    write: Option<CurrentWrite>,
    /// By time, or because a write has failed.
    has_ended: bool,
}

impl Upload {
    pub(super) fn new(num_bytes: u64) -> Self {
        Self {
            num_bytes,
            num_written: 0,
            hasher: ValueHasher::default(),
            write: None,
            has_ended: false,
        }
    }

    pub(super) fn of_put(
        operation: u64,
        buffer: Buffer,
        record: Vec<u8>,
        completer: Completer<bool>,
    ) -> Self {
        let mut upload = Self::new(buffer.len() as u64);
        upload.write = Some(CurrentWrite {
            operation,
            buffer,
            uploader: Uploader::Put(completer, record),
            is_hashed: false,
            is_answered: false,
        });
        upload
    }

    pub(super) fn fail(self, error: Error) {
        if let Some(write) = self.write {
            write.fail(error);
        }
    }

    /// # Errors
    /// So many more bytes cannot be written now.
    fn check_write(&self, num_bytes: usize) -> Result<()> {
        if self.has_ended {
            return Err(reservation_ended());
        }
        if self.write.is_some() {
            let text = "another thread writes into the reservation: one at a time may";
            return Err(Error::Config(text.to_owned()));
        }
        let num_left = self.num_bytes - self.num_written as u64;
        if num_bytes as u64 > num_left {
            return Err(Error::Config(format!(
                "{num_bytes} bytes, but only {num_left} of the {} reserved are left; nothing was written",
                self.num_bytes
            )));
        }
        Ok(())
    }
}

impl CurrentWrite {
    /// Ends it with an error; its caller's memory is released before.
    fn fail(self, error: Error) {
        drop(self.buffer);
        match self.uploader {
            Uploader::Write(completer) => completer.complete(Err(error)),
            Uploader::Put(completer, _) => completer.complete(Err(error)),
        }
    }
}

impl Client {
    /// The bytes as a message carries them, and lets the server read them if they are too many.
    fn carry(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): (SessionKey, u64),
        buffer: &Buffer,
    ) -> Result<Carried<'static>> {
        buffer.bytes(0, buffer.len()).ok_or_else(not_host)?;
        let source = (session, source_id(operation, 0));
        let exposed = &mut self.exposed;
        let mut space = INLINE_CAP;
        carry(
            cx,
            exposed,
            source,
            Integrity::None,
            (buffer, None),
            &mut space,
        )
    }

    /// The server reads nothing of an operation any more.
    fn withdraw(&mut self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) {
        self.exposed.withdraw(cx, session, source_id(operation, 0));
    }

    pub(super) fn put(
        &mut self,
        cx: &mut Cx<'_>,
        operation: u64,
        (key, ttl): (Vec<u8>, Option<Duration>),
        upload: Upload,
    ) {
        let Some(CurrentWrite {
            buffer,
            uploader: Uploader::Put(_, record),
            ..
        }) = &upload.write
        else {
            return;
        };
        let carried = self.usable().and_then(|session| {
            let bytes = self.carry(cx, (session, operation), buffer)?;
            Ok((session, bytes))
        });
        match carried {
            Ok((session, bytes)) => {
                let message = EntryMessage::Put {
                    key: key.into(),
                    ttl,
                    timeout: Some(Duration::ZERO),
                    is_hashed: true,
                    record: record.into(),
                    parts: vec![bytes],
                };
                message.send(cx.links, session, operation);
                self.uploads.insert(operation, upload);
                self.hash_queue.push_back(operation);
            }
            Err(error) => upload.fail(error),
        }
    }

    pub(super) fn write(
        &mut self,
        cx: &mut Cx<'_>,
        reservation: u64,
        (operation, buffer, completer): (u64, Buffer, Completer<()>),
    ) {
        let carried = self.usable().and_then(|session| {
            let upload = self.uploads.get(&reservation);
            upload
                .ok_or_else(reservation_ended)?
                .check_write(buffer.len())?;
            let bytes = self.carry(cx, (session, operation), &buffer)?;
            Ok((session, bytes))
        });
        let write = CurrentWrite {
            operation,
            buffer,
            uploader: Uploader::Write(completer),
            is_hashed: false,
            is_answered: false,
        };
        match carried {
            Ok((session, bytes)) => {
                EntryMessage::Write { reservation, bytes }.send(cx.links, session, operation);
                if let Some(upload) = self.uploads.get_mut(&reservation) {
                    upload.write = Some(write);
                }
                self.writes.insert(operation, reservation);
                self.hash_queue.push_back(reservation);
            }
            Err(error) => write.fail(error),
        }
    }

    /// Hashes a slice of what is being written.
    pub(super) fn hash_upload(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let Some(upload) = self.uploads.get_mut(&operation) else {
            return;
        };
        let Some(write) = &mut upload.write else {
            return;
        };
        let (buffer, len) = (&write.buffer, write.buffer.len());
        if !upload.hasher.run_slice(buffer, upload.num_written, len) {
            return self.hash_queue.push_back(operation);
        }
        write.is_hashed = true;
        if let Uploader::Put(_, record) = &write.uploader {
            let checksum = std::mem::take(&mut upload.hasher).finish(record);
            if let Ok(session) = self.usable() {
                EntryMessage::Checksum(checksum).send(cx.links, session, operation);
            }
        }
        self.end_write_if_done(operation);
    }

    /// A write into a reservation is over when the server has its bytes, and they are hashed.
    fn end_write_if_done(&mut self, reservation: u64) {
        let Some(upload) = self.uploads.get_mut(&reservation) else {
            return;
        };
        let is_done = |write: &mut CurrentWrite| write.is_hashed && write.is_answered;
        if let Some(write) = upload.write.take_if(is_done) {
            upload.num_written += write.buffer.len();
            drop(write.buffer);
            if let Uploader::Write(completer) = write.uploader {
                completer.complete(Ok(()));
            }
        }
    }

    pub(super) fn commit(
        &mut self,
        cx: &mut Cx<'_>,
        reservation: u64,
        (operation, record, completer): (u64, Vec<u8>, Completer<()>),
    ) {
        let Some(upload) = self.uploads.remove(&reservation) else {
            let error = self.usable().err().unwrap_or_else(reservation_ended);
            return completer.complete(Err(error));
        };
        if let Err(error) = upload.check_write(0) {
            self.uploads.insert(reservation, upload);
            return completer.complete(Err(error));
        }
        // The server refuses, and aborts, a reservation that is not full.
        let message = EntryMessage::Commit {
            reservation,
            checksum: upload.hasher.finish(&record),
            record: record.into(),
        };
        self.ask(cx, operation, message, (Pending::Done(completer), None));
    }

    /// The server has answered a put or a write; whether it was one.
    pub(super) fn upload_answered(
        &mut self,
        cx: &mut Cx<'_>,
        operation: u64,
        answer: &EntryMessage<'_>,
    ) -> bool {
        let Some(session) = self.session else {
            return false;
        };
        if let Some(reservation) = self.writes.remove(&operation) {
            self.withdraw(cx, session, operation);
            self.write_answered(cx, reservation, operation, answer);
            return true;
        }
        let is_put = |upload: &Upload| {
            let write = upload.write.as_ref();
            write.is_some_and(|write| write.operation == operation)
        };
        if !self.uploads.get(&operation).is_some_and(is_put) {
            return false;
        }
        self.withdraw(cx, session, operation);
        if let Some(upload) = self.uploads.remove(&operation)
            && let Some(write) = upload.write
        {
            let outcome = match answer {
                EntryMessage::Done => Ok(true),
                EntryMessage::Occupied => Ok(false),
                EntryMessage::Refused(error) => Err(error.clone()),
                other => Err(unexpected(other)),
            };
            drop(write.buffer);
            if let Uploader::Put(completer, _) = write.uploader {
                completer.complete(outcome);
            }
        }
        true
    }

    fn write_answered(
        &mut self,
        cx: &mut Cx<'_>,
        reservation: u64,
        operation: u64,
        answer: &EntryMessage<'_>,
    ) {
        let Some(upload) = self.uploads.get_mut(&reservation) else {
            return;
        };
        let is_it = |write: &mut CurrentWrite| write.operation == operation;
        match answer {
            EntryMessage::Done => {
                if let Some(write) = upload
                    .write
                    .as_mut()
                    .filter(|write| write.operation == operation)
                {
                    write.is_answered = true;
                }
                self.end_write_if_done(reservation);
            }
            answer => {
                let error = match answer {
                    EntryMessage::Refused(error) => error.clone(),
                    other => unexpected(other),
                };
                // The bytes that were hashed so far do not count any more.
                let was_held = !std::mem::replace(&mut upload.has_ended, true);
                if let Some(write) = upload.write.take_if(is_it) {
                    write.fail(error);
                }
                self.uploads.remove(&reservation);
                if was_held {
                    self.send_release(cx, reservation, None);
                }
            }
        }
    }

    /// A reservation has ended by time. A write into it has its own answer.
    pub(super) fn upload_ended(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let Some(upload) = self.uploads.get_mut(&operation) else {
            return;
        };
        upload.has_ended = true;
        let is_put = |write: &mut CurrentWrite| write.operation == operation;
        if let Some(write) = upload.write.take_if(is_put) {
            write.fail(reservation_ended());
            if let Some(session) = self.session {
                self.exposed.withdraw(cx, session, source_id(operation, 0));
            }
        }
        if upload.write.is_none() {
            self.uploads.remove(&operation);
        }
    }

    /// Forgets a reservation or a put; whether there was one. A write into it stays exposed until the server has answered.
    pub(super) fn remove_upload(&mut self, cx: &mut Cx<'_>, operation: u64) -> bool {
        let Some(upload) = self.uploads.remove(&operation) else {
            return false;
        };
        if let Some(session) = self.session {
            self.withdraw(cx, session, operation);
        }
        upload.fail(Error::Closed("the reservation was aborted".to_owned()));
        true
    }
}

fn unexpected(answer: &EntryMessage<'_>) -> Error {
    Error::protocol(format_args!("message {} is no answer here", answer.kind()))
}

fn reservation_ended() -> Error {
    Error::Timeout("the reservation has ended; nothing was committed".to_owned())
}

fn not_host() -> Error {
    let text = "only host memory can be written to a store; copy it to the CPU first";
    Error::Unavailable(text.to_owned())
}
