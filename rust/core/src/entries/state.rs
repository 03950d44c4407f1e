//! The state of a store or of a lookup buffer: entries, reservations, open entries, leases, and the operations that wait. A
//! pure state machine: events in, actions out; no threads, no clock, and no bytes, which belong to the content.

mod disk;
mod entries;
mod holds;
mod index;
mod memory;
mod reservations;
mod waiting;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::info::StoreInfo;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::Timers;
use disk::{DiskCopy, DiskTier, SAVING_BYTES};
use holds::{Hold, Holds};
use index::{Index, OrderedIndex};
use memory::MemoryUsage;
use waiting::Waiting;

pub(super) use disk::KeptEntry;
pub(super) use entries::PAGE_ENTRIES;
pub(super) use index::{Query, TOKEN_BYTES};

/// An operation of a client: its session and the client's number, neither of which is used again. So a late call about an
/// operation that has ended meets nothing.
pub(super) type Holder = (SessionKey, u64);

/// Names an entry, never used again. It grows with the commits in a store, and with the reservations in a lookup buffer.
pub(super) type EntryId = u64;

/// The order of operations that wait, and of uses.
type Tick = u64;

pub(super) type Key = Arc<[u8]>;

/// An action that the caller has to do. `C` is the content of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EntryAction<C> {
    /// The reservation has its space.
    Reserved(Holder),
    /// The key has an entry, or another reservation is under way: the reservation is forgotten.
    Occupied(Holder),
    /// The reservation is forgotten for this reason.
    Refused(Holder, Error),
    /// The select or take has this entry, until [`Entries::release`].
    Offered(Holder, C),
    /// There was no entry in time, and the operation is forgotten.
    Nothing(Holder),
    /// The reservation or lease has ended by time.
    Expired(Holder),
    /// This entry goes to the disk: [`Entries::saved`].
    Save(EntryId, Key, C),
    /// Erases the copy on disk: [`Entries::erased`]. It comes after the `Save` of the same entry.
    Erase(EntryId),
    /// This entry comes from the disk: [`Entries::loaded`].
    Load(EntryId, u64),
}

impl<C> EntryAction<C> {
    /// The operation that it is for, if it is for one.
    pub(super) fn holder(&self) -> Option<Holder> {
        match self {
            Self::Reserved(holder)
            | Self::Occupied(holder)
            | Self::Refused(holder, _)
            | Self::Offered(holder, _)
            | Self::Nothing(holder)
            | Self::Expired(holder) => Some(*holder),
            Self::Save(..) | Self::Erase(_) | Self::Load(..) => None,
        }
    }
}

/// The rules that entries follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// A key has one entry. Entries without a holder may be evicted, and a reservation ends so long after its last use.
    Store { reservation: Duration },
    /// Entries of equal keys line up in the order of their reservations. They stay until they are consumed.
    Buffer,
}

/// The way in which a select has its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Beside others.
    Open,
    /// Alone, as long as the lease lasts; without end in a lookup buffer.
    Lease(Option<Duration>),
}

/// Place of the bytes of an entry.
#[derive(Debug)]
enum Place<C> {
    InMemory(C),
    OnDisk,
    /// On disk, and to be loaded as soon as there is space.
    AwaitsSpace(Tick),
    /// On their way into memory, where they count.
    Loading,
}

impl<C> Place<C> {
    fn counts_in_memory(&self) -> bool {
        matches!(self, Self::InMemory(_) | Self::Loading)
    }
}

#[derive(Debug)]
struct Entry<C> {
    key: Key,
    num_bytes: u64,
    footprint: u64,
    disk_footprint: u64,
    place: Place<C>,
    disk: DiskCopy,
    /// Selects that have it open.
    num_open: usize,
    is_leased: bool,
    /// Its turn to be evicted from memory and from the disk, while it has no holder.
    last_use: Option<Tick>,
    /// No key leads to it: it goes when its last holder has closed it.
    is_doomed: bool,
}

impl<C> Entry<C> {
    fn is_free(&self) -> bool {
        let is_awaited = matches!(self.place, Place::AwaitsSpace(_) | Place::Loading);
        self.num_open == 0 && !self.is_leased && !is_awaited
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Deadline {
    Hold(Holder),
    /// Of an entry with a time to live.
    Entry(EntryId),
    /// The end of the pause after a save that failed.
    Disk,
}

/// An entry as a list shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) key: Key,
    pub(super) num_bytes: u64,
    pub(super) is_leased: bool,
}

#[derive(Debug)]
pub(super) struct Entries<C> {
    info: StoreInfo,
    rules: Rules,
    /// Entries that a consumer has had. It counts those that are still leased, and not those that have come back.
    num_consumed: u64,
    memory: MemoryUsage,
    next_tick: Tick,
    index: Index,
    by_id: BTreeMap<EntryId, Entry<C>>,
    disk: Option<DiskTier>,
    holds: Holds,
    waiting: Waiting,
    deadlines: Timers<Deadline>,
    actions: VecDeque<EntryAction<C>>,
}

impl<C: Clone> Entries<C> {
    /// The state of an empty store.
    pub(super) fn of_store(
        capacity_bytes: u64,
        quota_bytes: Option<u64>,
        reservation: Duration,
    ) -> Self {
        let index = Index::Unique(HashMap::new());
        let memory = MemoryUsage::new(capacity_bytes, quota_bytes);
        Self::new(capacity_bytes, Rules::Store { reservation }, index, memory)
    }

    /// The state of an empty lookup buffer.
    pub(super) fn of_buffer(capacity_bytes: u64) -> Self {
        let index = Index::Ordered(OrderedIndex::default());
        let memory = MemoryUsage::new(capacity_bytes, None);
        Self::new(capacity_bytes, Rules::Buffer, index, memory)
    }

    fn new(capacity_bytes: u64, rules: Rules, index: Index, memory: MemoryUsage) -> Self {
        let info = StoreInfo {
            capacity_bytes,
            ..StoreInfo::default()
        };
        Self {
            info,
            rules,
            num_consumed: 0,
            memory,
            next_tick: 0,
            index,
            by_id: BTreeMap::new(),
            disk: None,
            holds: Holds::default(),
            waiting: Waiting::default(),
            deadlines: Timers::default(),
            actions: VecDeque::new(),
        }
    }

    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("keys", self.index.len()),
            ("values", self.by_id.len()),
            ("deadlines of entries", self.deadlines.len()),
        ];
        sizes.extend(self.memory.sizes());
        sizes.extend(self.holds.sizes());
        sizes.extend(self.waiting.sizes());
        sizes.extend(self.disk.iter().flat_map(DiskTier::sizes));
        sizes
    }

    pub(super) fn info(&self) -> StoreInfo {
        StoreInfo {
            num_bytes: self.memory.num_bytes(),
            ..self.info
        }
    }

    /// Entries that consumers have had.
    pub(super) fn num_consumed(&self) -> u64 {
        self.num_consumed
    }

    /// Drops everything but the sums of what was committed and consumed.
    pub(super) fn clear(&mut self) {
        let capacity_bytes = self.info.capacity_bytes;
        let (num_committed, num_consumed) = (self.info.num_committed, self.num_consumed);
        *self = match self.rules {
            Rules::Store { reservation } => Self::of_store(capacity_bytes, None, reservation),
            Rules::Buffer => Self::of_buffer(capacity_bytes),
        };
        self.info.num_committed = num_committed;
        self.num_consumed = num_consumed;
    }

    /// A call is refused because its reservation or lease has ended.
    pub(super) fn count_fenced(&mut self) {
        self.info.num_fenced += 1;
    }

    pub(super) fn next_action(&mut self) -> Option<EntryAction<C>> {
        self.actions.pop_front()
    }

    /// Checks that a client may begin this operation.
    ///
    /// # Errors
    /// `Protocol`: it has begun already. `Exhausted`: the client holds too much.
    pub(super) fn check_new(&self, holder: Holder) -> Result<()> {
        self.holds.check_new(holder)
    }

    fn tick(&mut self) -> Tick {
        self.next_tick += 1;
        self.next_tick
    }
}

/// Operations of holders, and expiry.
impl<C: Clone> Entries<C> {
    fn set_hold(&mut self, holder: Holder, hold: Hold, deadline: Option<Instant>) {
        hold.count(&mut self.info, true);
        self.holds.insert(holder, hold);
        match deadline {
            Some(at) => self.deadlines.set(Deadline::Hold(holder), at),
            None => self.deadlines.cancel(Deadline::Hold(holder)),
        }
    }

    fn remove_hold(&mut self, holder: Holder) -> Option<Hold> {
        let hold = self.holds.remove(holder)?;
        hold.count(&mut self.info, false);
        self.deadlines.cancel(Deadline::Hold(holder));
        match &hold {
            Hold::AwaitsSpace { tick, .. } => self.waiting.remove_claim(*tick),
            Hold::AwaitsEntry {
                tick,
                query,
                access,
                ..
            } => self.waiting.remove_select(query, *tick, *access),
            Hold::Reserved { .. } | Hold::Open(_) | Hold::Leased { .. } => {}
        }
        Some(hold)
    }

    /// Ends what an operation holds or waits for: a wait, a reservation, an open entry, a lease.
    pub(super) fn release(&mut self, holder: Holder, now: Instant) {
        match self.remove_hold(holder) {
            Some(Hold::AwaitsSpace { .. }) => self.grant(now),
            Some(Hold::Reserved { key, footprint, .. }) => {
                self.index.unreserve(&key);
                self.memory.remove_reservation(&key, footprint);
                self.grant(now);
            }
            Some(Hold::Open(id)) => {
                if let Some(entry) = self.by_id.get_mut(&id) {
                    entry.num_open -= 1;
                }
                self.settle(id, now);
            }
            Some(Hold::Leased { id, is_consumed }) => {
                self.num_consumed -= u64::from(is_consumed);
                if let Some(entry) = self.by_id.get_mut(&id) {
                    entry.is_leased = false;
                }
                self.serve_unless_doomed(id, now);
            }
            Some(Hold::AwaitsEntry { query, .. }) => self.abandon_load(&query, now),
            None => {}
        }
    }

    fn serve_unless_doomed(&mut self, id: EntryId, now: Instant) {
        if self.by_id.get(&id).is_some_and(|entry| entry.is_doomed) {
            self.settle(id, now);
        } else {
            self.show(id);
            self.serve_waiting(id, now);
        }
    }

    /// True if an operation waits for space or for an entry.
    pub(super) fn is_waiting(&self, holder: Holder) -> bool {
        self.holds.get(holder).is_some_and(Hold::is_waiting)
    }

    /// Extends a lease.
    ///
    /// # Errors
    /// `Timeout`: it has ended.
    pub(super) fn renew(&mut self, holder: Holder, lease: Duration, now: Instant) -> Result<()> {
        let Some(Hold::Leased { .. }) = self.holds.get(holder) else {
            self.count_fenced();
            return Err(lease_ended());
        };
        if let Some(at) = now.checked_add(lease) {
            self.deadlines.set(Deadline::Hold(holder), at);
        }
        Ok(())
    }

    /// The holder of a lease has all of its entry, and keeps it if it is lost from now on.
    ///
    /// # Errors
    /// `Timeout`: the lease has ended.
    pub(super) fn consume(&mut self, holder: Holder) -> Result<()> {
        match self.holds.get_mut(holder) {
            Some(Hold::Leased { is_consumed, .. }) => {
                self.num_consumed += u64::from(!*is_consumed);
                *is_consumed = true;
                Ok(())
            }
            _ => Err(lease_ended()),
        }
    }

    /// True if this operation has an entry.
    pub(super) fn is_held(&self, holder: Holder) -> bool {
        matches!(
            self.holds.get(holder),
            Some(Hold::Open(_) | Hold::Leased { .. })
        )
    }

    /// True if the entry of a lease was [consumed](Self::consume); `None` without a lease.
    pub(super) fn is_consumed(&self, holder: Holder) -> Option<bool> {
        match self.holds.get(holder) {
            Some(Hold::Leased { is_consumed, .. }) => Some(*is_consumed),
            _ => None,
        }
    }

    /// Deletes a leased entry; true if it is to be erased from the disk first.
    ///
    /// # Errors
    /// `Timeout`: the lease has ended.
    pub(super) fn acknowledge(&mut self, holder: Holder, now: Instant) -> Result<bool> {
        let Some(&Hold::Leased { id, is_consumed }) = self.holds.get(holder) else {
            self.count_fenced();
            return Err(lease_ended());
        };
        self.num_consumed += u64::from(!is_consumed);
        self.remove_hold(holder);
        let is_on_disk = self.erase(id);
        self.drop_entry(id);
        self.grant(now);
        Ok(is_on_disk)
    }

    /// A reader has found other bytes than were committed: no select finds the entry any more.
    ///
    /// # Errors
    /// `Timeout`: the reader did not hold it any more, so that it may have read anything.
    pub(super) fn corrupt(&mut self, holder: Holder) -> Result<()> {
        let Some(&(Hold::Open(id) | Hold::Leased { id, .. })) = self.holds.get(holder) else {
            return Err(lease_ended());
        };
        if self.by_id.get(&id).is_some_and(|entry| !entry.is_doomed) {
            self.info.num_corrupt += 1;
            self.hide(id);
        }
        Ok(())
    }

    /// Ends what has ended by time.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(expired) = self.deadlines.pop_expired(now) {
            match expired {
                Deadline::Hold(holder) => self.expire_hold(holder, now),
                Deadline::Entry(id) => {
                    self.info.num_expired += 1;
                    self.hide(id);
                    self.make_used(id);
                    self.settle(id, now);
                }
                Deadline::Disk => self.resume_saves(SAVING_BYTES),
            }
        }
    }

    fn expire_hold(&mut self, holder: Holder, now: Instant) {
        match self.holds.get(holder) {
            Some(Hold::AwaitsSpace { footprint, .. }) => {
                let full = self.full(*footprint);
                self.actions.push_back(EntryAction::Refused(holder, full));
            }
            Some(Hold::AwaitsEntry { .. }) => self.miss(holder),
            Some(Hold::Reserved { .. } | Hold::Leased { .. }) => {
                self.info.num_expired += 1;
                self.actions.push_back(EntryAction::Expired(holder));
            }
            Some(Hold::Open(_)) | None => return,
        }
        self.release(holder, now);
    }

    /// Time of the next call of [`expire`](Self::expire).
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Bytes of the queries of a client that wait.
    pub(super) fn num_waiting_bytes(&self, session: SessionKey) -> usize {
        self.holds.num_waiting_bytes(session)
    }

    /// A client is connected, and may hold something.
    pub(super) fn session_up(&mut self, session: SessionKey) {
        self.info.num_clients += 1;
        self.holds.session_up(session);
    }

    /// The operations of a client that hold something or wait.
    pub(super) fn held_by(&self, session: SessionKey) -> Vec<Holder> {
        self.holds.of(session)
    }

    /// A client is lost: everything that it held ends. What it has consumed does not come back.
    pub(super) fn session_down(&mut self, session: SessionKey, now: Instant) {
        let (waiting, held): (Vec<_>, Vec<_>) = self
            .held_by(session)
            .into_iter()
            .partition(|holder| self.is_waiting(*holder));
        // First, so that nothing which the client returns goes to it again.
        let mut awaited = Vec::new();
        for holder in waiting {
            if let Some(Hold::AwaitsEntry { query, .. }) = self.remove_hold(holder) {
                awaited.push(query);
            }
        }
        for query in awaited {
            self.abandon_load(&query, now);
        }
        for holder in held {
            self.info.num_lost += 1;
            if self.is_consumed(holder) == Some(true) {
                let _ = self.acknowledge(holder, now);
            } else {
                self.release(holder, now);
            }
        }
        self.grant(now);
        if self.holds.session_down(session) {
            self.info.num_clients -= 1;
        }
    }
}

fn lease_ended() -> Error {
    let text = "the lease has ended, and another may have the value: do not use what was read";
    Error::Timeout(text.to_owned())
}

#[cfg(test)]
mod tests;
