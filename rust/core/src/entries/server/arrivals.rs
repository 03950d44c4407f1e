//! Bytes on their way into reservations: allocated when the space is granted, read from the client or copied from its
//! messages, and committed when all of it is here and matches.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::super::carrying::remove_sources;
use super::super::content::{Description, Part, footprint, read_metas, read_outcome};
use super::super::items::{INSERTS_IN_FLIGHT, entry_bytes};
use super::super::messages::{Carried, EntryMessage, check_tokens};
use super::super::shared::SharedState;
use super::super::state::{Holder, Key, TOKEN_BYTES};
use super::super::{INLINE_CAP, KEY_CAP, TOKENS_CAP, source_id};
use super::arrival::{Arrival, Expected, PendingCommit, PendingWrite};
use super::{Face, Server};
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::region::Pieces;
use crate::transfer::{Checksums, Completion, Cx, TransferRequest};
use crate::transport::Memory;

/// Operations of clients.
impl Server {
    /// Begins an operation that reserves, writes and commits.
    ///
    /// # Errors
    /// `Protocol`: no client of ours sends it.
    pub(super) fn put(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        key: &[u8],
        (mut arrival, deadline): (Arrival, Option<Instant>),
    ) -> Result<()> {
        let num_bytes = match self.face {
            Face::Store => {
                let is_possible =
                    arrival.rest.len() == 1 && arrival.is_hashed() && key.len() <= KEY_CAP;
                if !is_possible {
                    return Err(Error::protocol("a put that is none of a value"));
                }
                arrival.rest.iter().try_for_each(Carried::check_value)?;
                footprint(key, arrival.num_bytes)
            }
            Face::LookupBuffer => self.check_insert(holder.0, key, &mut arrival)?,
        };
        for (part, bytes) in arrival.rest.iter().enumerate() {
            if let Carried::Offered(buffer) = bytes {
                let source = source_id(holder.1, part);
                cx.transfers.add_source(holder.0, source, buffer.source());
            }
        }
        self.begin_arrival(cx, holder, key, (arrival, num_bytes, deadline))
    }

    /// Reads the descriptions of an insert into a lookup buffer, and returns the bytes that it counts.
    ///
    /// # Errors
    /// `Protocol`: it describes no entry, or a client that respects the limits does not send it.
    fn check_insert(&self, session: SessionKey, key: &[u8], arrival: &mut Arrival) -> Result<u64> {
        check_tokens(key)?;
        let none = || Error::protocol("a put that is none of an entry");
        let commit = arrival.commit.as_mut().ok_or_else(none)?;
        let metas = read_metas(&commit.description.to_record()?)?;
        let num_bytes = entry_bytes(key.len(), metas.iter().flatten(), arrival.num_bytes);
        let num_tensors = metas.iter().flatten().count();
        commit.description = Description::Tensors(metas.into());
        if arrival.is_hashed() || arrival.ttl.is_some() || arrival.rest.len() != num_tensors {
            return Err(none());
        }
        let of_client = self.arrivals.range((session, 0)..=(session, u64::MAX));
        let (num_open, num_key) = of_client.fold((0, key.len()), |(num_open, num_key), open| {
            (num_open + 1, num_key + open.1.num_key)
        });
        if num_open >= INSERTS_IN_FLIGHT || num_key > TOKENS_CAP * TOKEN_BYTES {
            return Err(Error::protocol("an insert that is too much"));
        }
        Ok(num_bytes)
    }

    pub(super) fn reserve(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        key: &[u8],
        (arrival, deadline): (Arrival, Option<Instant>),
    ) -> Result<()> {
        let footprint = footprint(key, arrival.num_bytes);
        self.begin_arrival(cx, holder, key, (arrival, footprint, deadline))
    }

    fn begin_arrival(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        key: &[u8],
        (arrival, footprint, deadline): (Arrival, u64, Option<Instant>),
    ) -> Result<()> {
        let (num_key, key, now) = (key.len(), Key::from(key), clock::now());
        let reserve = |state: &mut SharedState| {
            state.entries.check_new(holder)?;
            (state.entries).reserve(holder, key, footprint, deadline, now);
            Ok(())
        };
        match self.change(reserve)? {
            Ok(()) => {
                self.arrivals.insert(holder, Arrival { num_key, ..arrival });
                Ok(())
            }
            Err(full @ Error::Exhausted(_)) => {
                remove_sources(cx, holder, &ended());
                EntryMessage::Refused(full).send(cx.links, holder.0, holder.1);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// A reservation has its space.
    pub(super) fn reserved(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let (session, operation) = holder;
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return self.release(cx, holder);
        };
        if arrival.is_cancelled {
            return self.refuse_reservation(cx, holder, operation, late());
        }
        arrival.has_space = true;
        if arrival.is_put(holder) {
            return self.begin_put(cx, holder);
        }
        match allocate(cx, arrival.num_bytes) {
            Ok(part) => {
                arrival.parts.push(part);
                EntryMessage::Reserved.send(cx.links, session, operation);
            }
            Err(error) => self.refuse_reservation(cx, holder, operation, error),
        }
    }

    /// Begins to receive a put; in a lookup buffer in its turn.
    fn begin_put(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        if self.face == Face::LookupBuffer {
            let line = self.inserts.entry(holder.0).or_default();
            line.push_back(holder);
            if line.len() > 1 {
                return;
            }
        }
        self.write_next(cx, holder);
    }

    /// An insert has ended: the next one of its client comes.
    fn end_turn(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let Some(line) = self.inserts.get_mut(&holder.0) else {
            return;
        };
        let was_first = line.front() == Some(&holder);
        line.retain(|other| *other != holder);
        match line.front().copied() {
            Some(next) if was_first => self.write_next(cx, next),
            Some(_) => {}
            None => {
                self.inserts.remove(&holder.0);
            }
        }
    }

    /// Receives the next parts of a put, up to one that is read from the client.
    fn write_next(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        while let Some(arrival) = self.arrivals.get_mut(&holder)
            && arrival.transfer.is_none()
            && let Some(bytes) = arrival.rest.pop_front()
        {
            match bytes {
                Carried::Inline(bytes) => {
                    if arrival.is_hashed() {
                        arrival.checksum.add(bytes[..].into());
                    }
                    arrival.num_written += bytes.len() as u64;
                    let (buffer, memory) = (Buffer::from_vec(bytes.into_owned()), None);
                    arrival.parts.push(Part { buffer, memory });
                }
                Carried::Offered(offered) => match part_of(self.face, cx, offered.len) {
                    Ok(part) => {
                        arrival.parts.push(part);
                        let part = arrival.parts.len() - 1;
                        self.begin_read(cx, holder, (holder.1, part), &offered);
                    }
                    Err(error) => {
                        return self.refuse_reservation(cx, holder, holder.1, error);
                    }
                },
            }
        }
        self.finish(cx, holder);
    }

    /// Ends a reservation with an error, which answers this operation.
    fn refuse_reservation(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        error: Error,
    ) {
        self.release(cx, holder);
        EntryMessage::Refused(error).send(cx.links, holder.0, operation);
    }

    /// Drops the bytes of a reservation; those that are being read when the read has ended. False if there is none.
    pub(super) fn remove_arrival(&mut self, cx: &mut Cx<'_>, holder: Holder) -> bool {
        let Some(arrival) = self.arrivals.remove(&holder) else {
            return false;
        };
        if let Some(transfer) = arrival.transfer {
            cx.transfers.fail(cx.links, transfer, &ended());
        }
        remove_sources(cx, holder, &ended());
        self.end_turn(cx, holder);
        true
    }

    /// A put is late, or its client has withdrawn it.
    pub(super) fn cancel(&mut self, cx: &mut Cx<'_>, holder: Holder, is_withdrawn: bool) {
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return;
        };
        match (arrival.has_space, is_withdrawn) {
            (false, true) => {
                let withdrawn = Error::Closed("withdrawn".to_owned());
                self.refuse_reservation(cx, holder, holder.1, withdrawn);
            }
            // It has its own deadline here, and is refused for the lack of space.
            (false, false) => arrival.is_cancelled = true,
            (true, false) => match arrival.transfer {
                Some(transfer) => cx.transfers.fail(cx.links, transfer, &late()),
                None => self.refuse_reservation(cx, holder, holder.1, late()),
            },
            // Its commit is answered.
            (true, true) => {}
        }
    }

    pub(super) fn write(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        operation: u64,
        bytes: Carried<'_>,
    ) -> Result<()> {
        bytes.check_value()?;
        let arrival = self.arrivals.get_mut(&holder);
        let Some(arrival) = arrival.filter(|arrival| arrival.has_space) else {
            return self.refuse_late(cx, holder.0, operation);
        };
        match arrival.check_write(&bytes) {
            Ok(()) => {}
            Err(error @ Error::Config(_)) => {
                EntryMessage::Refused(error).send(cx.links, holder.0, operation);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        match bytes {
            Carried::Inline(bytes) => {
                if let Some(part) = arrival.parts.first() {
                    part.buffer.write(arrival.num_written as usize, &bytes);
                }
                arrival.checksum.add(bytes[..].into());
                arrival.num_written += bytes.len() as u64;
                let now = clock::now();
                self.change(|state| state.entries.end_write(holder, now))?;
                EntryMessage::Done.send(cx.links, holder.0, operation);
            }
            Carried::Offered(offered) => {
                let source = source_id(operation, 0);
                cx.transfers.add_source(holder.0, source, offered.source());
                self.begin_read(cx, holder, (operation, 0), &offered);
            }
        }
        Ok(())
    }

    /// Reads the bytes of a part behind those that are in it.
    fn begin_read(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        (operation, part): (u64, usize),
        offered: &BufferDescription,
    ) {
        let Some(arrival) = self.arrivals.get_mut(&holder) else {
            return;
        };
        let is_put = arrival.is_put(holder);
        let Some(Part {
            buffer,
            memory: Some(memory),
        }) = arrival.parts.get(part)
        else {
            return;
        };
        let (owner, source) = (cx.links.token(), source_id(operation, part));
        let request = TransferRequest {
            owner,
            ..offered.transfer(holder.0, source, Arc::clone(memory))
        };
        let request = if arrival.is_hashed() {
            let at = if is_put { 0 } else { arrival.num_written };
            TransferRequest {
                pieces: Arc::new(Pieces::at(at, offered.len as u64)),
                checksums: Checksums::OfOwner(arrival.checksum),
                ..request
            }
        } else {
            request
        };
        let transfer = cx.transfers.add(request);
        let write = PendingWrite {
            holder,
            operation,
            source,
            transfer,
            _buffer: buffer.clone(),
        };
        self.writes.insert(owner, write);
        arrival.transfer = Some(transfer);
        if self.face == Face::Store {
            let _ = self.change(|state| state.entries.begin_write(holder));
        }
        cx.transfers.enqueue(cx.links, transfer);
    }

    /// The read of a write has ended.
    pub(super) fn arrived(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let Some(write) = self.writes.remove(&completion.owner) else {
            return;
        };
        let (holder, operation) = (write.holder, write.operation);
        cx.transfers
            .remove_source(cx.links, holder.0, write.source, &ended());
        let num_bytes = completion.pieces.num_bytes;
        let outcome = read_outcome(completion.outcome, num_bytes);
        if let Err(error @ (Error::Protocol(_) | Error::PeerLost { .. })) = &outcome {
            cx.links.fail(holder.0, error.clone());
        }
        // A client may have begun another operation under the number of one that has ended.
        let arrival = (self.arrivals.get_mut(&holder))
            .filter(|arrival| arrival.transfer == Some(write.transfer));
        let Some(arrival) = arrival else {
            // The reservation has ended, and a put has its answer.
            if operation != holder.1 {
                let _ = self.refuse_late(cx, holder.0, operation);
            }
            return;
        };
        arrival.transfer = None;
        let is_put = arrival.is_put(holder);
        let now = clock::now();
        match outcome {
            Ok(()) => {
                arrival.num_written += num_bytes;
                if arrival.is_hashed() {
                    arrival.checksum = completion.checksum.unwrap_or_default();
                }
                if self.face == Face::Store {
                    let _ = self.change(|state| state.entries.end_write(holder, now));
                }
                if is_put {
                    self.write_next(cx, holder);
                } else {
                    EntryMessage::Done.send(cx.links, holder.0, operation);
                }
            }
            Err(error) if is_put => self.refuse_reservation(cx, holder, operation, error),
            Err(error) => {
                let _ = self.change(|state| state.entries.end_write(holder, now));
                EntryMessage::Refused(error).send(cx.links, holder.0, operation);
            }
        }
    }

    pub(super) fn begin_commit(
        &mut self,
        cx: &mut Cx<'_>,
        holder: Holder,
        (operation, checksum, record): (u64, u64, Cow<'_, [u8]>),
    ) -> Result<()> {
        let arrival = self.arrivals.get_mut(&holder);
        let Some(arrival) = arrival.filter(|arrival| arrival.has_space) else {
            return self.refuse_late(cx, holder.0, operation);
        };
        if arrival.transfer.is_some() || arrival.commit.is_some() {
            return Err(Error::protocol("a commit that is not to come"));
        }
        let (num_written, num_bytes) = (arrival.num_written, arrival.num_bytes);
        if num_written < num_bytes {
            let short = Error::Config(format!(
                "{num_written} of {num_bytes} reserved bytes were written; the reservation is aborted"
            ));
            self.refuse_reservation(cx, holder, operation, short);
            return Ok(());
        }
        arrival.commit = Some(PendingCommit {
            operation,
            description: Description::Record(record.into()),
            expected: Expected::Known(checksum),
        });
        self.finish(cx, holder);
        Ok(())
    }

    pub(super) fn set_checksum(&mut self, cx: &mut Cx<'_>, holder: Holder, checksum: u64) {
        // Without a reservation, its answer was on its way.
        if let Some(arrival) = self.arrivals.get_mut(&holder)
            && let Some(commit) = &mut arrival.commit
            && commit.expected == Expected::Awaited
        {
            commit.expected = Expected::Known(checksum);
            self.finish(cx, holder);
        }
    }

    /// Commits a reservation if everything of it is here and matches.
    fn finish(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        let arrival = self.arrivals.get(&holder);
        if !arrival.is_some_and(Arrival::is_complete) {
            return;
        }
        let arrival = self.arrivals.remove(&holder);
        let Some(arrival) = arrival else { return };
        self.commit(cx, holder, arrival);
        self.end_turn(cx, holder);
    }

    fn commit(&mut self, cx: &mut Cx<'_>, holder: Holder, arrival: Arrival) {
        let (num_bytes, ttl) = (arrival.num_bytes, arrival.ttl);
        let Some((operation, content)) = arrival.into_content() else {
            return;
        };
        let content = match content {
            Ok(content) => content,
            Err(error) => return self.refuse_reservation(cx, holder, operation, error),
        };
        let num_more = match &content.description {
            Description::Record(record) => record.len() as u64,
            // They were counted when the entry was reserved.
            Description::Tensors(_) => 0,
        };
        let (sized, now) = ((content, num_bytes, num_more), clock::now());
        let committed = self.change(|state| state.entries.commit(holder, sized, ttl, now));
        if committed == Ok(true) {
            EntryMessage::Done.send(cx.links, holder.0, operation);
        } else {
            let _ = self.refuse_late(cx, holder.0, operation);
        }
    }

    /// Refuses a write or commit whose reservation has ended.
    fn refuse_late(&self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) -> Result<()> {
        EntryMessage::Refused(ended()).send(cx.links, session, operation);
        self.change(|state| state.entries.count_fenced())
    }
}

fn ended() -> Error {
    Error::Timeout("the reservation has ended; nothing was committed".to_owned())
}

/// The error for a put that its client has cancelled.
fn late() -> Error {
    Error::Closed("its client has cancelled it, because it is late".to_owned())
}

/// The memory of a reservation or a load.
pub(super) fn allocate(cx: &Cx<'_>, num_bytes: u64) -> Result<Part> {
    let len = usize::try_from(num_bytes).unwrap_or(usize::MAX);
    if len > INLINE_CAP {
        return part_in(cx, cx.exact_memory(len)?, len);
    }
    let (buffer, memory) = (Buffer::zeroed(len), None);
    Ok(Part { buffer, memory })
}

/// Memory for a part of a put.
fn part_of(face: Face, cx: &Cx<'_>, len: usize) -> Result<Part> {
    let memory = match face {
        Face::Store => cx.exact_memory(len)?,
        Face::LookupBuffer => cx.memory(len)?,
    };
    part_in(cx, memory, len)
}

/// The first bytes of memory, which goes back with them.
fn part_in(cx: &Cx<'_>, memory: Arc<Memory>, len: usize) -> Result<Part> {
    let exhausted = || Error::Exhausted(format!("no memory for {len} bytes"));
    let buffer = (cx.lend(Arc::clone(&memory), len)).ok_or_else(exhausted)?;
    let memory = Some(memory);
    Ok(Part { buffer, memory })
}
