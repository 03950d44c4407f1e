//! The tensors of entries on their way over one session: small ones inside the message, large ones offered and fetched.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvpipe_ucx::{AmData, Buffer, Status};

use super::{HUGE, Items, NUM_ITEMS, entry_bytes};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::reactor::ReactorContext;
use crate::tensor::{Meta, Received};
use crate::transfer::fetch::{ExposedBuffer, Fetch, Offer};
use crate::transfer::pool::Pool;
use crate::transport::Memory;

/// Bytes of an entry that travel inside its message. Above them, one copy costs more than one more round trip.
const INLINE_CAP: usize = 32 << 10;

const NOTHING: u8 = 0;
const INLINE: u8 = 1;
const OFFERED: u8 = 2;

/// # Errors
/// An operation whose tensors would bear the names of another's.
pub(super) fn check_operation(operation: u64) -> Result<()> {
    if operation < u64::MAX / NUM_ITEMS as u64 {
        return Ok(());
    }
    Err(Error::protocol(format_args!(
        "operation {operation} is out of range"
    )))
}

/// Names a tensor on its session: the operation, and which of its tensors.
fn fetch_id(operation: u64, index: usize) -> u64 {
    operation
        .wrapping_mul(NUM_ITEMS as u64)
        .wrapping_add(index as u64)
}

fn owner_of(fetch: u64) -> (u64, usize) {
    let count = NUM_ITEMS as u64;
    (fetch / count, (fetch % count) as usize)
}

/// What this side exposes to the peer.
#[derive(Debug)]
pub(super) struct Outgoing {
    exposed: HashMap<u64, ExposedBuffer>,
    /// Those that may have checksums to compute, in the order in which the peer fetches them.
    checksum_jobs: VecDeque<u64>,
    /// Whether the peer compares what it fetches with checksums.
    is_checksummed: bool,
}

impl Outgoing {
    pub(super) fn new(is_checksummed: bool) -> Self {
        Self {
            exposed: HashMap::new(),
            checksum_jobs: VecDeque::new(),
            is_checksummed,
        }
    }

    /// Appends the tensors of an operation to its message; those that are too large are exposed until
    /// [`release`](Self::release).
    pub(super) fn write(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        operation: u64,
        items: &Items,
        mut writer: Writer,
    ) -> Result<Writer> {
        let mut space = INLINE_CAP;
        for (index, item) in items.0.iter().enumerate() {
            item.meta.check()?;
            writer = match &item.buffer {
                None => writer.u8(NOTHING),
                Some(buffer) if buffer.len() <= space => {
                    space -= buffer.len();
                    item.meta.write(writer.u8(INLINE)).bytes(bytes(buffer)?)
                }
                Some(buffer) => {
                    let id = fetch_id(operation, index);
                    let (exposed, offer) =
                        ExposedBuffer::new(cx, session, buffer.clone(), id, self.is_checksummed)?;
                    self.exposed.insert(id, exposed);
                    self.checksum_jobs.push_back(id);
                    offer.write(item.meta.write(writer.u8(OFFERED)))
                }
            };
        }
        Ok(writer)
    }

    /// Nothing is exposed any more.
    pub(super) fn clear(&mut self) {
        self.exposed.clear();
        self.checksum_jobs.clear();
    }

    /// The peer has, or will never have, the tensors of an operation.
    pub(super) fn release(&mut self, operation: u64) {
        for index in 0..NUM_ITEMS {
            self.exposed.remove(&fetch_id(operation, index));
        }
        self.checksum_jobs
            .retain(|id| self.exposed.contains_key(id));
    }

    pub(super) fn accept(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
    ) -> Result<()> {
        self.exposed
            .get_mut(&id)
            .map_or(Ok(()), |exposed| exposed.accept(cx, session))
    }

    pub(super) fn credit(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        credit: u64,
    ) {
        if let Some(exposed) = self.exposed.get_mut(&id) {
            exposed.credit(cx, session, credit);
        }
    }

    /// Computes and tells some checksums; whether there were any.
    pub(super) fn run_checksum_slice(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
    ) -> bool {
        while let Some(id) = self.checksum_jobs.front() {
            let exposed = self.exposed.get_mut(id);
            if exposed.is_some_and(|exposed| exposed.run_checksum_slice(cx, session)) {
                return true;
            }
            self.checksum_jobs.pop_front();
        }
        false
    }
}

fn bytes(buffer: &Buffer) -> Result<&[u8]> {
    buffer.bytes(0, buffer.len()).ok_or_else(super::not_host)
}

#[derive(Debug)]
enum Slot {
    Nothing,
    Here(Buffer),
    Offered(Offer),
}

/// An entry as its message describes it.
#[derive(Debug)]
pub(crate) struct EntryTransfer {
    metas: [Meta; NUM_ITEMS],
    slots: [Slot; NUM_ITEMS],
}

impl EntryTransfer {
    /// Reads the tensors of a message, to its end.
    pub(crate) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let mut entry = Self {
            metas: Default::default(),
            slots: [const { Slot::Nothing }; NUM_ITEMS],
        };
        let mut space = INLINE_CAP;
        for (meta, slot) in entry.metas.iter_mut().zip(&mut entry.slots) {
            *slot = match reader.u8()? {
                NOTHING => continue,
                INLINE => {
                    *meta = Meta::read(&mut reader)?;
                    let bytes = reader.bytes(space)?;
                    space -= bytes.len();
                    Slot::Here(Buffer::from_vec(bytes.to_vec()))
                }
                OFFERED => {
                    *meta = Meta::read(&mut reader)?;
                    Slot::Offered(Offer::read(&mut reader)?)
                }
                other => return Err(Error::protocol(format_args!("a tensor of kind {other}"))),
            };
        }
        reader.end()?;
        Ok(entry)
    }

    /// What an entry of these tensors counts.
    pub(super) fn entry_bytes(&self, tokens: &[i64]) -> u64 {
        let len = |slot: &Slot| match slot {
            Slot::Nothing => 0,
            Slot::Here(buffer) => buffer.len() as u64,
            Slot::Offered(offer) => offer.len as u64,
        };
        entry_bytes(tokens, self.metas.iter().zip(self.slots.iter().map(len)))
    }

    fn take_offer(&mut self) -> Option<(usize, Offer)> {
        let is_offered = |slot: &Slot| matches!(slot, Slot::Offered(_));
        let index = self.slots.iter().position(is_offered)?;
        match std::mem::replace(&mut self.slots[index], Slot::Nothing) {
            Slot::Offered(offer) => Some((index, offer)),
            _ => None,
        }
    }

    fn into_items(self) -> Items {
        let mut metas = self.metas.into_iter();
        Items(self.slots.map(|slot| {
            let buffer = match slot {
                Slot::Here(buffer) => Some(buffer),
                Slot::Nothing | Slot::Offered(_) => None,
            };
            let meta = metas.next().unwrap_or_default();
            Arc::new(Received { meta, buffer })
        }))
    }
}

/// An entry whose tensors are all here, or why they are not.
pub(super) type Arrived = (u64, Result<Items>);

/// What the peer has described and this side fetches: one entry after the other, in the order of
/// [`begin`](Self::begin), and of an entry one tensor after the other.
#[derive(Debug)]
pub(super) struct Incoming {
    session: SessionKey,
    parcels: HashMap<u64, EntryTransfer>,
    ready: VecDeque<u64>,
    fetch: Option<Fetch>,
    pool: Pool,
}

impl Incoming {
    pub(super) fn new(session: SessionKey, pool: Pool) -> Self {
        Self {
            session,
            parcels: HashMap::new(),
            ready: VecDeque::new(),
            fetch: None,
            pool,
        }
    }

    /// Keeps an entry until its operation begins, or is forgotten.
    pub(super) fn add(&mut self, operation: u64, entry: EntryTransfer) {
        self.parcels.insert(operation, entry);
    }

    /// Drops an entry that has not begun; whether there was one.
    pub(super) fn forget(&mut self, operation: u64) -> bool {
        !self.ready.contains(&operation) && self.parcels.remove(&operation).is_some()
    }

    /// Has an entry fetched.
    pub(super) fn begin(&mut self, operation: u64) {
        self.ready.push_back(operation);
    }

    /// Begins what can be, and tells what has ended.
    pub(super) fn advance(&mut self, cx: &mut ReactorContext) -> Vec<Arrived> {
        let mut arrived = Vec::new();
        while let Some(&operation) = self.ready.front() {
            let outcome = match &self.fetch {
                None => self.begin_next(cx, operation),
                Some(fetch) => match fetch.outcome() {
                    None => break,
                    Some(Ok(())) => {
                        self.keep();
                        Ok(false)
                    }
                    Some(Err(error)) => Err(error),
                },
            };
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    let entry = self.remove(operation);
                    arrived.extend(entry.map(|entry| (operation, Ok(entry.into_items()))));
                }
                Err(error) => {
                    self.remove(operation);
                    arrived.push((operation, Err(error)));
                }
            }
        }
        arrived
    }

    fn remove(&mut self, operation: u64) -> Option<EntryTransfer> {
        self.fetch = None;
        self.ready.pop_front();
        self.parcels.remove(&operation)
    }

    /// Begins to fetch the next tensor of an entry; true when there is none.
    fn begin_next(&mut self, cx: &mut ReactorContext, operation: u64) -> Result<bool> {
        let offer = self
            .parcels
            .get_mut(&operation)
            .and_then(EntryTransfer::take_offer);
        let Some((index, offer)) = offer else {
            return Ok(true);
        };
        let memory = self.allocate(cx, offer.len)?;
        let id = fetch_id(operation, index);
        let begun = Fetch::begin(cx, self.session, id, offer, memory);
        // The peer's key is wrong: nothing good will come from there.
        let fetch = begun.inspect_err(|error| cx.fail(self.session, error.clone()))?;
        self.fetch = Some(fetch);
        Ok(false)
    }

    fn allocate(&self, cx: &ReactorContext, len: usize) -> Result<Arc<Memory>> {
        if len < HUGE {
            return cx.register(Buffer::zeroed(len));
        }
        self.pool.take(len, |buffer| cx.register(buffer))
    }

    /// Puts the tensor that is here where it belongs.
    fn keep(&mut self) {
        if let Some(fetch) = self.fetch.take() {
            let ((operation, index), len) = (owner_of(fetch.id()), fetch.len());
            let memory = fetch.into_memory();
            let buffer = if len < HUGE {
                Some(memory.buffer().clone())
            } else {
                self.pool.lend(memory, len)
            };
            let entry = self.parcels.get_mut(&operation);
            if let (Some(entry), Some(buffer)) = (entry, buffer) {
                entry.slots[index] = Slot::Here(buffer);
            }
        }
    }

    fn fetch(&mut self, id: u64) -> Option<&mut Fetch> {
        self.fetch.as_mut().filter(|fetch| fetch.id() == id)
    }

    /// Checksums have come.
    pub(super) fn checksums(&mut self, id: u64, data: &[u8]) -> Result<()> {
        if let Some(fetch) = self.fetch(id) {
            return fetch.receive_checksums(data);
        }
        let (operation, index) = owner_of(id);
        let slot = self
            .parcels
            .get_mut(&operation)
            .map(|entry| &mut entry.slots[index]);
        match slot {
            Some(Slot::Offered(offer)) => offer.receive_checksums(data).map(|_| ()),
            // Of an operation that was withdrawn, or has failed here.
            _ => Ok(()),
        }
    }

    /// A piece has come.
    pub(super) fn place(
        &mut self,
        cx: &mut ReactorContext,
        id: u64,
        header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        let session = self.session;
        match self.fetch(id) {
            Some(fetch) => fetch.take(cx, session, header, data),
            // Of a fetch that has failed here.
            None => Ok(()),
        }
    }

    /// A read has ended; false when it is none of this session.
    pub(super) fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) -> bool {
        let session = self.session;
        self.fetch
            .as_mut()
            .is_some_and(|fetch| fetch.done(cx, Some(session), token, result))
    }
}
