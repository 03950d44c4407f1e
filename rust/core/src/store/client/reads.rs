//! Reads of open values into memory of callers. The reader hashes what came, and compares: that covers the way and the rest
//! of the value in the store.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::super::hashing::ValueHasher;
use super::super::messages::{Carried, StoreMessage};
use super::super::values::OpenedValue;
use super::{Client, HashTask, Pending};
use crate::error::{Error, Result};
use crate::session::ReactorContext;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::{Completion, TransferRequest};
use crate::work::Completer;

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    value: Arc<OpenedValue>,
    buffer: Buffer,
    hasher: ValueHasher,
    pub(super) completer: Completer<()>,
}

impl Client {
    /// A value is offered to a caller.
    pub(super) fn open(
        &mut self,
        value: OpenedValue,
        completer: Completer<Option<Arc<OpenedValue>>>,
    ) {
        if let (Carried::Offered(buffer), Some(session)) = (&value.bytes, self.session) {
            let engine = &mut self.exchange.engine;
            engine.add_source(session, value.operation, buffer.source());
        }
        self.opened.insert(value.operation, false);
        completer.complete(Ok(Some(Arc::new(value))));
    }

    pub(super) fn read(
        &mut self,
        cx: &mut ReactorContext,
        value: &Arc<OpenedValue>,
        buffer: Buffer,
        completer: Completer<()>,
    ) {
        if let Err(error) = self.check_open(value) {
            drop(buffer); // before the read completes
            return completer.complete(Err(error));
        }
        let owner = cx.token();
        let reading = Reading {
            value: Arc::clone(value),
            buffer: buffer.clone(),
            hasher: ValueHasher::default(),
            completer,
        };
        match &value.bytes {
            Carried::Inline(bytes) => {
                buffer.write(0, bytes);
                self.reads.insert(owner, reading);
                self.hash_queue.push_back(HashTask::Read(owner));
            }
            Carried::Offered(offered) => {
                match self.begin_read(cx, owner, (value.operation, offered), buffer) {
                    Ok(transfer) => {
                        self.reads.insert(owner, reading);
                        self.exchange.engine.enqueue(cx, transfer);
                    }
                    Err(error) => reading.fail(error),
                }
            }
        }
    }

    fn check_open(&self, value: &OpenedValue) -> Result<()> {
        self.usable()?;
        match self.opened.get(&value.operation) {
            Some(false) => Ok(()),
            Some(true) => Err(lease_ended()),
            None => Err(Error::Closed("the value is closed".to_owned())),
        }
    }

    fn begin_read(
        &mut self,
        cx: &ReactorContext,
        owner: u64,
        (source, offered): (u64, &BufferDescription),
        buffer: Buffer,
    ) -> Result<u64> {
        let session = self.usable()?;
        let request = TransferRequest {
            owner,
            ..offered.transfer(session, source, cx.register(buffer)?)
        };
        Ok(self.exchange.engine.add(request))
    }

    pub(super) fn arrived(&mut self, cx: &mut ReactorContext, completion: Completion) {
        let Some(reading) = self.reads.remove(&completion.owner) else {
            return;
        };
        let outcome = completion.outcome;
        let outcome = outcome.map_err(|error| error.into_error(|_| "a read differs".to_owned()));
        match outcome {
            Ok(()) => {
                self.reads.insert(completion.owner, reading);
                self.hash_queue.push_back(HashTask::Read(completion.owner));
            }
            Err(error) => {
                if matches!(error, Error::Protocol(_) | Error::PeerLost { .. }) {
                    cx.fail(completion.session, error.clone());
                }
                let has_ended = self.opened.get(&reading.value.operation) == Some(&true);
                reading.fail(if has_ended { lease_ended() } else { error });
            }
        }
    }

    pub(super) fn hash_read(&mut self, cx: &mut ReactorContext, owner: u64) {
        let Some(mut reading) = self.reads.remove(&owner) else {
            return;
        };
        let len = reading.buffer.len();
        if !reading.hasher.run_slice(&reading.buffer, 0, len) {
            self.reads.insert(owner, reading);
            return self.hash_queue.push_back(HashTask::Read(owner));
        }
        let Reading {
            value,
            buffer,
            hasher,
            completer,
        } = reading;
        drop(buffer);
        if hasher.finish(&value.record) == value.checksum {
            return completer.complete(Ok(()));
        }
        // The server knows whether the value has changed, or whether this operation did not hold it any more.
        let operation = self.shared.next_operation();
        let select = value.operation;
        let question = StoreMessage::Corrupt { select };
        self.ask(cx, operation, question, (Pending::Done(completer), None));
    }
}

impl Reading {
    /// Ends the read; its caller's memory is released before.
    fn fail(self, error: Error) {
        drop(self.buffer);
        self.completer.complete(Err(error));
    }
}

fn lease_ended() -> Error {
    let text = "the lease has ended, and another may have the value: do not use what was read";
    Error::Timeout(text.to_owned())
}
