//! The state of a store: values, reservations, open values, leases, and the operations that wait. A pure state machine:
//! events in, actions out; no threads, no clock, and no bytes, which belong to the content.

mod disk;
mod holds;
mod memory;
mod reservations;
mod values;
mod waiting;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::StoreInfo;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::Timers;
use disk::{DiskCopy, DiskTier, SAVING_BYTES};
use holds::{Hold, Holds};
use memory::Memory;
use waiting::Waiting;

pub(super) use disk::KeptValue;

/// An operation of a client: its session and the client's number, neither of which is used again. So a late call about an
/// operation that has ended meets nothing.
pub(super) type Holder = (SessionKey, u64);

/// Names a committed value; grows with the commits, never used again.
pub(super) type ValueId = u64;

/// The order of operations that wait, and of uses.
type Tick = u64;

pub(super) type Key = Arc<[u8]>;

/// An action that the caller has to do. `C` is the content of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreAction<C> {
    /// The reservation has its space.
    Reserved(Holder),
    /// The key has a value, or another reservation is under way: the reservation is forgotten.
    Occupied(Holder),
    /// The reservation is forgotten for this reason.
    Refused(Holder, Error),
    /// The select or take has this value, until [`State::release`].
    Offered(Holder, C),
    /// There was no value in time, and the operation is forgotten.
    Nothing(Holder),
    /// The reservation or lease has ended by time.
    Expired(Holder),
    /// This value goes to the disk: [`State::saved`].
    Save(ValueId, Key, C),
    /// Erases the copy on disk: [`State::erased`]. It comes after the `Save` of the same value.
    Erase(ValueId),
    /// This value comes from the disk: [`State::loaded`].
    Load(ValueId, u64),
}

/// The object of a key. A value that is to be deleted when its last holder has closed it has no key any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Value(ValueId),
    Reserved,
}

/// Place of the bytes of a value.
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
struct StoredValue<C> {
    key: Key,
    num_bytes: u64,
    footprint: u64,
    disk_footprint: u64,
    place: Place<C>,
    disk: DiskCopy,
    /// Selects that have it open.
    num_open: usize,
    is_leased: bool,
    /// Its turn to be evicted from memory and from the disk, while nobody holds it.
    last_use: Option<Tick>,
    /// No key leads to it.
    is_doomed: bool,
}

impl<C> StoredValue<C> {
    fn is_free(&self) -> bool {
        let is_awaited = matches!(self.place, Place::AwaitsSpace(_) | Place::Loading);
        self.num_open == 0 && !self.is_leased && !is_awaited
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Deadline {
    Hold(Holder),
    /// Of a value with a time to live.
    Value(ValueId),
    /// The end of the pause after a save that failed.
    Disk,
}

/// A value as a list shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) key: Key,
    pub(super) num_bytes: u64,
    pub(super) is_leased: bool,
}

#[derive(Debug)]
pub(super) struct State<C> {
    info: StoreInfo,
    /// Between a reservation, or the last write into it, and its commit.
    reservation: Duration,
    memory: Memory,
    next_tick: Tick,
    keys: HashMap<Key, Slot>,
    values: BTreeMap<ValueId, StoredValue<C>>,
    disk: Option<DiskTier>,
    holds: Holds,
    waiting: Waiting,
    deadlines: Timers<Deadline>,
    actions: VecDeque<StoreAction<C>>,
}

impl<C: Clone> State<C> {
    pub(super) fn new(
        capacity_bytes: u64,
        quota_bytes: Option<u64>,
        reservation: Duration,
    ) -> Self {
        let info = StoreInfo {
            capacity_bytes,
            ..StoreInfo::default()
        };
        Self {
            info,
            reservation,
            memory: Memory::new(capacity_bytes, quota_bytes),
            next_tick: 0,
            keys: HashMap::new(),
            values: BTreeMap::new(),
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
            ("keys", self.keys.len()),
            ("values", self.values.len()),
            ("deadlines of the store's state", self.deadlines.len()),
            ("actions of the store's state", self.actions.len()),
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

    /// A call is refused because its reservation or lease has ended.
    pub(super) fn count_fenced(&mut self) {
        self.info.num_fenced += 1;
    }

    pub(super) fn next_action(&mut self) -> Option<StoreAction<C>> {
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
impl<C: Clone> State<C> {
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
            Hold::AwaitsValue {
                tick, key, lease, ..
            } => {
                self.waiting.remove_select(key, *tick, lease.is_some());
            }
            Hold::Reserved { .. } | Hold::Open(_) | Hold::Leased(_) => {}
        }
        Some(hold)
    }

    /// Ends what an operation holds or waits for: a wait, a reservation, an open value, a lease.
    pub(super) fn release(&mut self, holder: Holder, now: Instant) {
        match self.remove_hold(holder) {
            Some(Hold::AwaitsSpace { .. }) => self.grant(now),
            Some(Hold::Reserved { key, footprint }) => {
                self.keys.remove(&key);
                self.memory.remove_reservation(&key, footprint);
                self.grant(now);
            }
            Some(Hold::Open(id)) => {
                if let Some(value) = self.values.get_mut(&id) {
                    value.num_open -= 1;
                }
                self.settle(id, now);
            }
            Some(Hold::Leased(id)) => {
                if let Some(value) = self.values.get_mut(&id) {
                    value.is_leased = false;
                }
                self.serve_unless_doomed(id, now);
            }
            Some(Hold::AwaitsValue { key, .. }) => self.abandon_load(&key, now),
            None => {}
        }
    }

    fn serve_unless_doomed(&mut self, id: ValueId, now: Instant) {
        if self.values.get(&id).is_some_and(|value| value.is_doomed) {
            self.settle(id, now);
        } else {
            self.serve_waiting(id, now);
        }
    }

    /// Extends a lease.
    ///
    /// # Errors
    /// `Timeout`: it has ended.
    pub(super) fn renew(&mut self, holder: Holder, lease: Duration, now: Instant) -> Result<()> {
        let Some(Hold::Leased(_)) = self.holds.get(holder) else {
            self.count_fenced();
            return Err(lease_ended());
        };
        if let Some(at) = now.checked_add(lease) {
            self.deadlines.set(Deadline::Hold(holder), at);
        }
        Ok(())
    }

    /// Deletes a leased value; whether it is to be erased from the disk first.
    ///
    /// # Errors
    /// `Timeout`: the lease has ended.
    pub(super) fn acknowledge(&mut self, holder: Holder, now: Instant) -> Result<bool> {
        let Some(&Hold::Leased(id)) = self.holds.get(holder) else {
            self.count_fenced();
            return Err(lease_ended());
        };
        self.remove_hold(holder);
        let is_on_disk = self.erase(id);
        self.drop_value(id);
        self.grant(now);
        Ok(is_on_disk)
    }

    /// A reader has found other bytes than were committed: nobody finds the value any more.
    ///
    /// # Errors
    /// `Timeout`: the reader did not hold it any more, so that it may have read anything.
    pub(super) fn corrupt(&mut self, holder: Holder) -> Result<()> {
        let Some(&(Hold::Open(id) | Hold::Leased(id))) = self.holds.get(holder) else {
            return Err(lease_ended());
        };
        if self.values.get(&id).is_some_and(|value| !value.is_doomed) {
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
                Deadline::Value(id) => {
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
                let full = self.memory.full(*footprint, self.info.num_reserved);
                self.actions.push_back(StoreAction::Refused(holder, full));
            }
            Some(Hold::AwaitsValue { .. }) => self.miss(holder),
            Some(Hold::Reserved { .. } | Hold::Leased(_)) => {
                self.info.num_expired += 1;
                self.actions.push_back(StoreAction::Expired(holder));
            }
            Some(Hold::Open(_)) | None => return,
        }
        self.release(holder, now);
    }

    /// When to call [`expire`](Self::expire).
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
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

    /// A client is lost: everything that it held ends.
    pub(super) fn session_down(&mut self, session: SessionKey, now: Instant) {
        let is_waiting = |hold: Option<&Hold>| hold.is_some_and(Hold::is_waiting);
        let (waiting, held): (Vec<_>, Vec<_>) = self
            .held_by(session)
            .into_iter()
            .partition(|holder| is_waiting(self.holds.get(*holder)));
        // First, so that nothing which the client returns goes to it again.
        let mut awaited = Vec::new();
        for holder in waiting {
            if let Some(Hold::AwaitsValue { key, .. }) = self.remove_hold(holder) {
                awaited.push(key);
            }
        }
        for key in awaited {
            self.abandon_load(&key, now);
        }
        for holder in held {
            self.info.num_lost += 1;
            self.release(holder, now);
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
