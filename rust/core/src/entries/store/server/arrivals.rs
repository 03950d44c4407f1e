//! Bytes on their way into reservations: allocated when the space is granted, read from the client or copied from its
//! messages, and committed when all of it is here and matches.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::super::content::Content;
use super::super::messages::{Carried, StoreMessage};
use super::super::{INLINE_CAP, footprint};
use super::Server;
use super::arrival::{Allocated, Arrival, PendingCommit, PendingWrite};
use crate::checksum::RunningChecksum;
use crate::clock;
use crate::entries::state::Holder;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::region::Pieces;
use crate::transfer::{Checksums, Completion, Cx, TransferRequest};

/// Operations of clients.
impl Server {
    pub(super) fn reserve(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        key: &[u8],
        (arrival, deadline): (Arrival, Option<Instant>),
    ) -> Result<()> {
        if !self.admit(cx, holder)? {
            return Ok(());
        }
        let footprint = footprint(key, arrival.num_bytes);
        self.arrivals.insert(holder, arrival);
        let now = clock::now();
        self.state.reserve(holder, key, footprint, deadline, now);
        Ok(())
    }

    /// A reservation has its space.
    pub(super) fn reserved(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let (session, operation) = holder;
        let num_bytes = self.arrivals.get(&holder).map(|arrival| arrival.num_bytes);
        let allocated = num_bytes.map(|num_bytes| allocate(cx, num_bytes));
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return self.state.release(holder, clock::now());
        };
        match allocated {
            Some(Ok(allocated)) => arrival.allocated = Some(allocated),
            Some(Err(error)) => return self.refuse_reservation(cx, holder, operation, error),
            None => {}
        }
        match arrival.put.take() {
            Some(bytes) => self.write_allocated(cx, holder, operation, bytes),
            None => StoreMessage::Reserved.send(cx.links, session, operation),
        }
    }

    /// Ends a reservation with an error, which answers this operation.
    fn refuse_reservation(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        error: Error,
    ) {
        self.remove_arrival(cx, holder);
        self.state.release(holder, clock::now());
        StoreMessage::Refused(error).send(cx.links, holder.0, operation);
    }

    /// Drops the bytes of a reservation; those that are being read when the read has ended.
    pub(super) fn remove_arrival(&mut self, cx: &mut Cx<'_>, holder: Holder) -> bool {
        let Some(arrival) = self.arrivals.remove(&holder) else {
            return false;
        };
        if let Some(transfer) = arrival.transfer {
            cx.transfers.fail(cx.links, transfer, &ended());
        }
        true
    }

    pub(super) fn write(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        bytes: Carried<'_>,
    ) -> Result<()> {
        let arrival = self.arrivals.get(&holder);
        let Some(arrival) = arrival.filter(|arrival| arrival.allocated.is_some()) else {
            self.refuse_late(cx, holder.0, operation);
            return Ok(());
        };
        match arrival.check_write(&bytes) {
            Ok(()) => self.write_allocated(cx, holder, operation, bytes),
            Err(error @ Error::Config(_)) => {
                StoreMessage::Refused(error).send(cx.links, holder.0, operation);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn write_allocated(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        bytes: Carried<'_>,
    ) {
        match bytes {
            Carried::Inline(bytes) => {
                let Some(arrival) = self.arrivals.get(&holder) else {
                    return;
                };
                let mut checksum = arrival.checksum;
                checksum.add(bytes[..].into());
                if let Some(allocated) = &arrival.allocated {
                    allocated.buffer.write(arrival.num_written, &bytes);
                }
                self.state.end_write(holder, clock::now());
                self.written(cx, holder, operation, (bytes.len(), checksum));
            }
            Carried::Offered(buffer) => self.begin_read(cx, holder, operation, &buffer),
        }
    }

    fn begin_read(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        offered: &BufferDescription,
    ) {
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return;
        };
        let Some(Allocated {
            buffer,
            memory: Some(memory),
        }) = &arrival.allocated
        else {
            return;
        };
        let (owner, at) = (cx.links.token(), arrival.num_written as u64);
        cx.transfers
            .add_source(holder.0, operation, offered.source());
        let transfer = cx.transfers.add(TransferRequest {
            owner,
            pieces: Arc::new(Pieces::at(at, offered.len as u64)),
            checksums: Checksums::OfOwner(arrival.checksum),
            ..offered.transfer(holder.0, operation, Arc::clone(memory))
        });
        let write = PendingWrite {
            holder,
            operation,
            _buffer: buffer.clone(),
        };
        self.writes.insert(owner, write);
        arrival.transfer = Some(transfer);
        self.state.begin_write(holder);
        cx.transfers.enqueue(cx.links, transfer);
    }

    /// The read of a write has ended.
    pub(super) fn arrived(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let Some(write) = self.writes.remove(&completion.owner) else {
            return;
        };
        let (holder, operation) = (write.holder, write.operation);
        cx.transfers
            .remove_source(cx.links, holder.0, operation, &ended());
        let outcome = completion.outcome;
        let outcome = outcome.map_err(|error| error.into_error(|_| "a write differs".to_owned()));
        if let Err(error @ (Error::Protocol(_) | Error::PeerLost { .. })) = &outcome {
            cx.links.fail(holder.0, error.clone());
        }
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            // The reservation has ended, and a put has its answer.
            if operation != holder.1 {
                self.refuse_late(cx, holder.0, operation);
            }
            return;
        };
        arrival.transfer = None;
        self.state.end_write(holder, clock::now());
        match outcome {
            Ok(()) => {
                let num_bytes = completion.pieces.num_bytes as usize;
                let checksum = completion.checksum.unwrap_or_default();
                self.written(cx, holder, operation, (num_bytes, checksum));
            }
            Err(error) if operation == holder.1 => {
                self.refuse_reservation(cx, holder, operation, error);
            }
            Err(error) => StoreMessage::Refused(error).send(cx.links, holder.0, operation),
        }
    }

    /// Bytes of a write are here; the checksum is that of all that was written.
    fn written(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        (num_bytes, checksum): (usize, RunningChecksum),
    ) {
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return;
        };
        arrival.num_written += num_bytes;
        arrival.checksum = checksum;
        if !arrival.is_put(holder) {
            StoreMessage::Done.send(cx.links, holder.0, operation);
        }
        self.finish(cx, holder);
    }

    pub(super) fn begin_commit(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        (operation, checksum, record): (u64, u64, Cow<'_, [u8]>),
    ) -> Result<()> {
        let arrival = self.arrivals.get_mut(&holder);
        let Some(arrival) = arrival.filter(|arrival| arrival.allocated.is_some()) else {
            self.refuse_late(cx, holder.0, operation);
            return Ok(());
        };
        if arrival.transfer.is_some() || arrival.commit.is_some() {
            return Err(Error::protocol("a commit that is not to come"));
        }
        let (num_written, num_bytes) = (arrival.num_written as u64, arrival.num_bytes);
        if num_written < num_bytes {
            let short = Error::Config(format!(
                "{num_written} of {num_bytes} reserved bytes were written; the reservation is aborted"
            ));
            self.refuse_reservation(cx, holder, operation, short);
            return Ok(());
        }
        arrival.commit = Some(PendingCommit {
            operation,
            record: record.into(),
            checksum: Some(checksum),
        });
        self.finish(cx, holder);
        Ok(())
    }

    pub(super) fn set_checksum(&mut self, cx: &mut Cx<'_>, holder: Holder, checksum: u64) {
        // Without a reservation, its answer was on its way.
        if let Some(arrival) = self.arrivals.get_mut(&holder)
            && let Some(commit) = &mut arrival.commit
        {
            commit.checksum = Some(checksum);
            self.finish(cx, holder);
        }
    }

    /// Commits a reservation if everything of it is here and matches.
    fn finish(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let arrival = self.arrivals.get(&holder);
        if !arrival.is_some_and(Arrival::is_complete) {
            return;
        }
        let Some(Arrival {
            num_bytes,
            ttl,
            allocated: Some(Allocated { buffer, memory }),
            checksum: mut running,
            commit:
                Some(PendingCommit {
                    operation,
                    record,
                    checksum: Some(expected),
                }),
            ..
        }) = self.arrivals.remove(&holder)
        else {
            return;
        };
        running.add(record[..].into());
        let (num_record, checksum) = (record.len() as u64, running.get());
        if checksum != expected {
            let text = "the bytes that came differ from the checksum of those that were written; nothing was committed";
            let corrupt = Error::Corrupt(text.to_owned());
            return self.refuse_reservation(cx, holder, operation, corrupt);
        }
        let content = Arc::new(Content {
            buffer,
            memory,
            record,
            checksum,
        });
        let now = clock::now();
        let sized = (content, num_bytes, num_record);
        let is_committed = self.state.commit(holder, sized, ttl, now);
        if is_committed {
            StoreMessage::Done.send(cx.links, holder.0, operation);
        } else {
            self.refuse_late(cx, holder.0, operation);
        }
    }

    /// Refuses a write or commit whose reservation has ended.
    fn refuse_late(&mut self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) {
        self.state.count_fenced();
        StoreMessage::Refused(ended()).send(cx.links, session, operation);
    }
}

fn ended() -> Error {
    Error::Timeout("the reservation has ended; nothing was committed".to_owned())
}

/// The memory of a reservation or a load.
pub(super) fn allocate(cx: &Cx<'_>, num_bytes: u64) -> Result<Allocated> {
    let len = usize::try_from(num_bytes).unwrap_or(usize::MAX);
    if len <= INLINE_CAP {
        let buffer = Buffer::zeroed(len);
        let memory = None;
        return Ok(Allocated { buffer, memory });
    }
    let memory = cx.exact_memory(len)?;
    let lent = cx.lend(Arc::clone(&memory), len);
    let buffer = lent.ok_or_else(|| Error::Exhausted(format!("no memory for {len} bytes")))?;
    let memory = Some(memory);
    Ok(Allocated { buffer, memory })
}
