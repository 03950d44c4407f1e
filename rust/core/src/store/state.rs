//! The state of a store: values, reservations, open values, leases, and the operations that wait. A pure state machine:
//! events in, actions out; no threads, no clock, and no bytes, which belong to the content.

mod holds;
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
use holds::{Hold, Holds};
use waiting::Waiting;

/// An operation of a client: its session and the client's number, neither of which is used again. So a late call about an
/// operation that has ended meets nothing.
pub(super) type Holder = (SessionKey, u64);

/// Names a committed value; grows with the commits, never used again.
pub(super) type ValueId = u64;

/// The order of operations that wait, and of uses.
type Tick = u64;

pub(super) type Key = Arc<[u8]>;

/// What the caller has to do. `C` is the content of a value.
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
}

/// What a key is of. A value that is to be deleted when its last holder has closed it has no key any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Value(ValueId),
    Reserved,
}

#[derive(Debug)]
struct StoredValue<C> {
    key: Key,
    num_bytes: u64,
    footprint: u64,
    content: C,
    /// Selects that have it open.
    num_open: usize,
    is_leased: bool,
    /// Its place among the values that may be evicted, while nobody holds it.
    last_use: Option<Tick>,
    /// Nobody finds it any more.
    is_doomed: bool,
}

impl<C> StoredValue<C> {
    fn is_free(&self) -> bool {
        self.num_open == 0 && !self.is_leased
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Deadline {
    Hold(Holder),
    /// Of a value with a time to live.
    Value(ValueId),
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
    /// Of values that nobody holds.
    evictable_bytes: u64,
    reserved_bytes: u64,
    next_tick: Tick,
    keys: HashMap<Key, Slot>,
    values: BTreeMap<ValueId, StoredValue<C>>,
    /// Values that nobody holds, the longest unused first.
    unused: BTreeMap<Tick, ValueId>,
    holds: Holds,
    waiting: Waiting,
    deadlines: Timers<Deadline>,
    actions: VecDeque<StoreAction<C>>,
}

impl<C: Clone> State<C> {
    pub(super) fn new(capacity_bytes: u64, reservation: Duration) -> Self {
        let info = StoreInfo {
            capacity_bytes,
            ..StoreInfo::default()
        };
        Self {
            info,
            reservation,
            evictable_bytes: 0,
            reserved_bytes: 0,
            next_tick: 0,
            keys: HashMap::new(),
            values: BTreeMap::new(),
            unused: BTreeMap::new(),
            holds: Holds::default(),
            waiting: Waiting::default(),
            deadlines: Timers::default(),
            actions: VecDeque::new(),
        }
    }

    /// What its maps and queues hold.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("keys", self.keys.len()),
            ("values", self.values.len()),
            ("unused values", self.unused.len()),
            ("deadlines of the store's state", self.deadlines.len()),
            ("actions of the store's state", self.actions.len()),
        ];
        sizes.extend(self.holds.sizes());
        sizes.extend(self.waiting.sizes());
        sizes
    }

    pub(super) fn info(&self) -> StoreInfo {
        self.info
    }

    pub(super) fn next_action(&mut self) -> Option<StoreAction<C>> {
        self.actions.pop_front()
    }

    /// Whether a client may begin this operation.
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

/// What holders do, and what ends by itself.
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
            Hold::AwaitsSpace { tick, .. } => self.waiting.remove_reserve(*tick),
            Hold::AwaitsValue { tick, key, lease } => {
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
                self.info.num_bytes -= footprint;
                self.reserved_bytes -= footprint;
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
            Some(Hold::AwaitsValue { .. }) | None => {}
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
            return Err(lease_ended());
        };
        if let Some(at) = now.checked_add(lease) {
            self.deadlines.set(Deadline::Hold(holder), at);
        }
        Ok(())
    }

    /// Deletes a leased value.
    ///
    /// # Errors
    /// `Timeout`: the lease has ended.
    pub(super) fn acknowledge(&mut self, holder: Holder, now: Instant) -> Result<()> {
        let Some(&Hold::Leased(id)) = self.holds.get(holder) else {
            return Err(lease_ended());
        };
        self.remove_hold(holder);
        self.drop_value(id);
        self.grant(now);
        Ok(())
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
            }
        }
    }

    fn expire_hold(&mut self, holder: Holder, now: Instant) {
        match self.holds.get(holder) {
            Some(Hold::AwaitsSpace { footprint, .. }) => {
                let full = self.full(*footprint);
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
        for holder in waiting {
            self.remove_hold(holder);
        }
        for holder in held {
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
