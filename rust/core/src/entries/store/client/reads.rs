//! Reads of open values into memory of callers. The reader compares the checksum of what came: that covers the way and the
//! rest of the value in the store.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::super::values::OpenedValue;
use super::{Client, Pending};
use crate::checksum::RunningChecksum;
use crate::entries::messages::{Carried, EntryMessage};
use crate::entries::source_id;
use crate::error::{Error, Result};
use crate::transfer::exposed::BufferDescription;
use crate::transfer::region::Pieces;
use crate::transfer::{Checksums, Completion, Cx, TransferRequest};
use crate::work::Completer;

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    value: Arc<OpenedValue>,
    pub(super) completer: Completer<()>,
}

impl Client {
    /// A value is offered to a caller.
    pub(super) fn open(
        &mut self,
        cx: &mut Cx<'_>,
        mut value: OpenedValue,
        completer: Completer<Option<Arc<OpenedValue>>>,
    ) {
        if let (Carried::Offered(buffer), Some(session)) = (&value.bytes, self.session) {
            let source = source_id(value.operation, 0);
            cx.transfers.add_source(session, source, buffer.source());
            let process = cx.links.process(session);
            value.process = process.map(|process| (process, buffer.address()));
        }
        self.opened.insert(value.operation, false);
        completer.complete(Ok(Some(Arc::new(value))));
    }

    pub(super) fn read(
        &mut self,
        cx: &mut Cx<'_>,
        value: &Arc<OpenedValue>,
        buffer: Buffer,
        completer: Completer<()>,
    ) {
        if let Err(error) = self.check_open(value) {
            drop(buffer); // before the read completes
            return completer.complete(Err(error));
        }
        let reading = Reading {
            value: Arc::clone(value),
            completer,
        };
        match &value.bytes {
            Carried::Inline(bytes) => {
                buffer.write(0, bytes);
                drop(buffer);
                let mut checksum = RunningChecksum::default();
                checksum.add(bytes[..].into());
                self.compare(cx, reading, checksum);
            }
            Carried::Offered(offered) => {
                let owner = cx.links.token();
                match self.begin_read(cx, owner, (source_id(value.operation, 0), offered), buffer) {
                    Ok(transfer) => {
                        self.reads.insert(owner, reading);
                        cx.transfers.enqueue(cx.links, transfer);
                    }
                    Err(error) => reading.completer.complete(Err(error)),
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
        cx: &mut Cx<'_>,
        owner: u64,
        (source, offered): (u64, &BufferDescription),
        buffer: Buffer,
    ) -> Result<u64> {
        let session = self.usable()?;
        let request = TransferRequest {
            owner,
            pieces: Arc::new(Pieces::at(0, offered.len as u64)),
            checksums: Checksums::OfOwner(RunningChecksum::default()),
            ..offered.transfer(session, source, cx.links.register(buffer)?)
        };
        Ok(cx.transfers.add(request))
    }

    pub(super) fn arrived(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let Some(reading) = self.reads.remove(&completion.owner) else {
            return;
        };
        // The caller's memory is released before its read completes.
        let (session, checksum) = (completion.session, completion.checksum);
        drop(completion.memory);
        let outcome = completion.outcome;
        match outcome.map_err(|error| error.into_error(|_| "a read differs".to_owned())) {
            Ok(()) => self.compare(cx, reading, checksum.unwrap_or_default()),
            Err(error) => {
                if matches!(error, Error::Protocol(_) | Error::PeerLost { .. }) {
                    cx.links.fail(session, error.clone());
                }
                let has_ended = self.opened.get(&reading.value.operation) == Some(&true);
                let error = if has_ended { lease_ended() } else { error };
                reading.completer.complete(Err(error));
            }
        }
    }

    /// Ends a read whose bytes have this checksum.
    fn compare(&mut self, cx: &mut Cx<'_>, reading: Reading, mut checksum: RunningChecksum) {
        let Reading { value, completer } = reading;
        checksum.add(value.record[..].into());
        if checksum.get() == value.checksum {
            return completer.complete(Ok(()));
        }
        // The server knows whether the value has changed, or whether this operation did not hold it any more.
        let operation = self.shared.next_operation();
        let target = value.operation;
        let question = EntryMessage::Corrupt { target };
        self.ask(cx, operation, question, (Pending::Done(completer), None));
    }
}

fn lease_ended() -> Error {
    let text = "the lease has ended, and another may have the value: do not use what was read";
    Error::Timeout(text.to_owned())
}
