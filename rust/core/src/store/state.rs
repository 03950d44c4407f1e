//! The state of a store: values, reservations, open values, leases, and the operations that wait. A pure state machine:
//! events in, actions out; no threads, no clock, and no bytes, which belong to the content.

mod holds;
mod waiting;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{PAGE_VALUES, StoreInfo};
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

/// Reservations.
impl<C: Clone> State<C> {
    /// Requests space for a value. [`Reserved`](StoreAction::Reserved), [`Occupied`](StoreAction::Occupied) or
    /// [`Refused`](StoreAction::Refused) follows.
    pub(super) fn reserve(
        &mut self,
        holder: Holder,
        key: &[u8],
        footprint: u64,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        if footprint > self.info.capacity_bytes {
            let too_large = Error::Config(format!(
                "a value that occupies {footprint} bytes can never be stored: the store's capacity is {} bytes",
                self.info.capacity_bytes
            ));
            return self
                .actions
                .push_back(StoreAction::Refused(holder, too_large));
        }
        if self.keys.contains_key(key) {
            return self.actions.push_back(StoreAction::Occupied(holder));
        }
        let tick = self.tick();
        self.waiting.add_reserve(tick, holder);
        let key = key.into();
        let hold = Hold::AwaitsSpace {
            tick,
            key,
            footprint,
        };
        self.set_hold(holder, hold, deadline);
        self.grant(now);
        self.expire(now);
    }

    /// Gives space to reservations that wait, in order: a small one never overtakes a large one.
    fn grant(&mut self, now: Instant) {
        while let Some((tick, holder)) = self.waiting.first_reserve() {
            let Some(Hold::AwaitsSpace { key, footprint, .. }) = self.holds.get(holder) else {
                self.waiting.remove_reserve(tick);
                continue;
            };
            let (key, footprint) = (Arc::clone(key), *footprint);
            if self.keys.contains_key(&key) {
                self.remove_hold(holder);
                self.actions.push_back(StoreAction::Occupied(holder));
                continue;
            }
            if !self.make_space(footprint) {
                return;
            }
            self.remove_hold(holder);
            self.info.num_bytes += footprint;
            self.reserved_bytes += footprint;
            self.keys.insert(Arc::clone(&key), Slot::Reserved);
            let hold = Hold::Reserved { key, footprint };
            self.set_hold(holder, hold, Some(now + self.reservation));
            self.actions.push_back(StoreAction::Reserved(holder));
        }
    }

    /// Evicts values, the longest unused first, until so many bytes are free; false, and evicts none, if they never are.
    fn make_space(&mut self, num_bytes: u64) -> bool {
        let capacity = self.info.capacity_bytes;
        let held = self.info.num_bytes - self.evictable_bytes;
        if held.saturating_add(num_bytes) > capacity {
            return false;
        }
        while self.info.num_bytes + num_bytes > capacity
            && let Some((_, &oldest)) = self.unused.first_key_value()
        {
            self.info.num_evicted += 1;
            self.drop_value(oldest);
        }
        true
    }

    /// Whether this reservation is under way.
    pub(super) fn is_reserved(&self, holder: Holder) -> bool {
        matches!(self.holds.get(holder), Some(Hold::Reserved { .. }))
    }

    /// A write into a reservation begins: it does not end by time meanwhile.
    pub(super) fn begin_write(&mut self, holder: Holder) {
        self.deadlines.cancel(Deadline::Hold(holder));
    }

    /// A write has ended.
    pub(super) fn end_write(&mut self, holder: Holder, now: Instant) {
        if self.is_reserved(holder) {
            self.deadlines
                .set(Deadline::Hold(holder), now + self.reservation);
        }
    }

    /// Makes a reserved value visible; false if the reservation has ended. Its record and everything else that the
    /// reservation did not count are `more_bytes`.
    pub(super) fn commit(
        &mut self,
        holder: Holder,
        (content, num_bytes, more_bytes): (C, u64, u64),
        ttl: Option<Duration>,
        now: Instant,
    ) -> bool {
        if !self.is_reserved(holder) {
            return false;
        }
        let Some(Hold::Reserved { key, footprint }) = self.remove_hold(holder) else {
            return false;
        };
        self.reserved_bytes -= footprint;
        // Where everything is held, the records of new values are beyond the capacity.
        self.make_space(more_bytes);
        self.info.num_bytes += more_bytes;
        self.info.num_committed += 1;
        let id = self.tick();
        self.keys.insert(Arc::clone(&key), Slot::Value(id));
        let value = StoredValue {
            key,
            num_bytes,
            footprint: footprint + more_bytes,
            content,
            num_open: 0,
            is_leased: false,
            last_use: None,
            is_doomed: false,
        };
        self.info.num_values += 1;
        self.values.insert(id, value);
        if let Some(at) = ttl.and_then(|ttl| now.checked_add(ttl)) {
            self.deadlines.set(Deadline::Value(id), at);
        }
        self.serve_waiting(id, now);
        true
    }
}

/// Values.
impl<C: Clone> State<C> {
    fn selectable(&self, key: &[u8]) -> Option<(ValueId, &StoredValue<C>)> {
        let Some(Slot::Value(id)) = self.keys.get(key) else {
            return None;
        };
        let value = self.values.get(id)?;
        (!value.is_leased).then_some((*id, value))
    }

    /// Whether a key can be selected now.
    pub(super) fn exists(&self, key: &[u8]) -> bool {
        self.selectable(key).is_some()
    }

    /// Requests a value to read beside others, or with a lease, alone.
    pub(super) fn select(
        &mut self,
        holder: Holder,
        key: &[u8],
        lease: Option<Duration>,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        let found = self
            .selectable(key)
            .filter(|(_, value)| lease.is_none() || value.num_open == 0)
            .map(|(id, _)| id);
        match found {
            Some(id) => self.offer(holder, id, lease, now),
            None if deadline.is_some_and(|at| at <= now) => self.miss(holder),
            None => {
                let (tick, key): (_, Key) = (self.tick(), key.into());
                self.waiting.add_select(&key, tick, (holder, lease));
                self.set_hold(holder, Hold::AwaitsValue { tick, key, lease }, deadline);
            }
        }
    }

    fn miss(&mut self, holder: Holder) {
        self.info.num_misses += 1;
        self.actions.push_back(StoreAction::Nothing(holder));
    }

    fn offer(&mut self, holder: Holder, id: ValueId, lease: Option<Duration>, now: Instant) {
        self.make_used(id);
        let Some(value) = self.values.get_mut(&id) else {
            return;
        };
        let content = value.content.clone();
        let (hold, deadline) = match lease {
            None => {
                value.num_open += 1;
                (Hold::Open(id), None)
            }
            Some(lease) => {
                value.is_leased = true;
                (Hold::Leased(id), now.checked_add(lease))
            }
        };
        self.info.num_hits += 1;
        self.set_hold(holder, hold, deadline);
        self.actions
            .push_back(StoreAction::Offered(holder, content));
    }

    /// A value that was committed or given back: all selects that wait see it, then one take gets it.
    fn serve_waiting(&mut self, id: ValueId, now: Instant) {
        let Some(key) = self.values.get(&id).map(|value| Arc::clone(&value.key)) else {
            return;
        };
        while let Some(holder) = self.waiting.first_select(&key) {
            self.remove_hold(holder);
            self.offer(holder, id, None, now);
        }
        self.settle(id, now);
    }

    /// A value may have lost its last holder: a take gets it, or it may be evicted from now on.
    fn settle(&mut self, id: ValueId, now: Instant) {
        let Some(value) = self.values.get(&id).filter(|value| value.is_free()) else {
            return;
        };
        if value.is_doomed {
            self.drop_value(id);
        } else if let Some((holder, lease)) = self.waiting.first_take(&value.key) {
            self.remove_hold(holder);
            self.offer(holder, id, Some(lease), now);
        } else {
            let tick = self.tick();
            if let Some(value) = self.values.get_mut(&id)
                && value.last_use.is_none()
            {
                value.last_use = Some(tick);
                self.evictable_bytes += value.footprint;
                self.unused.insert(tick, id);
            }
        }
        self.grant(now);
    }

    /// A value is not among those that may be evicted any more.
    fn make_used(&mut self, id: ValueId) {
        if let Some(value) = self.values.get_mut(&id)
            && let Some(tick) = value.last_use.take()
        {
            self.evictable_bytes -= value.footprint;
            self.unused.remove(&tick);
        }
    }

    fn hide(&mut self, id: ValueId) {
        if let Some(value) = self.values.get_mut(&id)
            && !value.is_doomed
        {
            value.is_doomed = true;
            self.info.num_values -= 1;
            self.keys.remove(&value.key);
            self.deadlines.cancel(Deadline::Value(id));
        }
    }

    fn drop_value(&mut self, id: ValueId) {
        self.hide(id);
        self.make_used(id);
        if let Some(value) = self.values.remove(&id) {
            self.info.num_bytes -= value.footprint;
        }
    }

    /// Deletes values that nobody holds; returns how many there were.
    pub(super) fn delete<'a>(&mut self, keys: impl Iterator<Item = &'a [u8]>, now: Instant) -> u64 {
        let mut num_deleted = 0;
        for key in keys {
            let found = self.selectable(key).filter(|(_, value)| value.is_free());
            if let Some((id, _)) = found {
                self.drop_value(id);
                num_deleted += 1;
            }
        }
        self.grant(now);
        num_deleted
    }

    /// The next values after `after` whose keys begin so, and where to go on.
    pub(super) fn list(&self, prefix: &[u8], after: ValueId) -> (Vec<Listed>, Option<ValueId>) {
        let rest = self.values.range(after.saturating_add(1)..);
        let looked_at: Vec<_> = rest.take(PAGE_VALUES).collect();
        let next = looked_at.last().map(|(id, _)| **id);
        let is_listed = |value: &&StoredValue<C>| !value.is_doomed && value.key.starts_with(prefix);
        let values = looked_at.iter().map(|(_, value)| *value).filter(is_listed);
        let listed = values.map(|value| Listed {
            key: Arc::clone(&value.key),
            num_bytes: value.num_bytes,
            is_leased: value.is_leased,
        });
        let listed = listed.collect();
        (listed, next.filter(|_| looked_at.len() == PAGE_VALUES))
    }
}

/// What holders do, and what ends by itself.
impl<C: Clone> State<C> {
    fn set_hold(&mut self, holder: Holder, hold: Hold, deadline: Option<Instant>) {
        self.holds.count(&hold, &mut self.info, true);
        self.holds.insert(holder, hold);
        match deadline {
            Some(at) => self.deadlines.set(Deadline::Hold(holder), at),
            None => self.deadlines.cancel(Deadline::Hold(holder)),
        }
    }

    fn remove_hold(&mut self, holder: Holder) -> Option<Hold> {
        let hold = self.holds.remove(holder)?;
        self.holds.count(&hold, &mut self.info, false);
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
        let (Some(&Hold::Open(id)) | Some(&Hold::Leased(id))) = self.holds.get(holder) else {
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

    fn full(&self, footprint: u64) -> Error {
        let info = &self.info;
        let held = info.num_bytes - self.evictable_bytes - self.reserved_bytes;
        Error::Exhausted(format!(
            "no space for {footprint} bytes in time: of {} bytes, {} reservations hold {}, and open and leased values \
             hold {held}; close values, or give the store a larger capacity",
            info.capacity_bytes, info.num_reserved, self.reserved_bytes
        ))
    }
}

fn lease_ended() -> Error {
    let text = "the lease has ended, and another may have the value: do not use what was read";
    Error::Timeout(text.to_owned())
}

#[cfg(test)]
mod tests;
