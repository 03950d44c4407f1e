//! Reservations: space in the order of the calls, the eviction of values that makes it, and commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::disk::{DiskCopy, disk_footprint};
use super::holds::Hold;
use super::waiting::Claim;
use super::{Deadline, Holder, Place, Slot, State, StoreAction, StoredValue, ValueId};

impl<C: Clone> State<C> {
    /// Requests space for a value. [`Reserved`](StoreAction::Reserved), [`Occupied`](StoreAction::Occupied) or
    /// [`Refused`](StoreAction::Refused) follows.
    pub(in super::super) fn reserve(
        &mut self,
        holder: Holder,
        key: &[u8],
        footprint: u64,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        if let Err(too_large) = self.memory.check_size(footprint) {
            let refused = StoreAction::Refused(holder, too_large);
            return self.actions.push_back(refused);
        }
        if self.keys.contains_key(key) {
            return self.actions.push_back(StoreAction::Occupied(holder));
        }
        if self.is_over_quota(holder, key, footprint) {
            return;
        }
        let tick = self.tick();
        self.waiting.add_claim(tick, Claim::Reservation(holder));
        let key = key.into();
        let hold = Hold::AwaitsSpace {
            tick,
            key,
            footprint,
        };
        self.set_hold(holder, hold, deadline);
        self.grant(now);
        self.expire(now);
        if matches!(self.holds.get(holder), Some(Hold::AwaitsSpace { .. })) {
            self.info.num_waits += 1;
        }
    }

    /// Refuses a reservation that its namespace has no room for, at once: it would hold up those of other namespaces.
    fn is_over_quota(&mut self, holder: Holder, key: &[u8], footprint: u64) -> bool {
        let Err(over_quota) = self.memory.check_quota(key, footprint) else {
            return false;
        };
        self.info.num_over_quota += 1;
        let refused = StoreAction::Refused(holder, over_quota);
        self.actions.push_back(refused);
        true
    }

    /// Gives space to reservations and loads that wait, in order: a small one never overtakes a large one.
    pub(super) fn grant(&mut self, now: Instant) {
        while let Some((tick, claim)) = self.waiting.first_claim() {
            let holder = match claim {
                Claim::Reservation(holder) => holder,
                Claim::Load(id) if self.begin_load(id, now) => {
                    self.waiting.remove_claim(tick);
                    continue;
                }
                Claim::Load(_) => return,
            };
            let Some(Hold::AwaitsSpace { key, footprint, .. }) = self.holds.get(holder) else {
                self.waiting.remove_claim(tick);
                continue;
            };
            let (key, footprint) = (Arc::clone(key), *footprint);
            if self.keys.contains_key(&key) {
                self.remove_hold(holder);
                self.actions.push_back(StoreAction::Occupied(holder));
                continue;
            }
            if self.is_over_quota(holder, &key, footprint) {
                self.remove_hold(holder);
                continue;
            }
            if !self.make_space(&key, footprint) {
                return;
            }
            self.remove_hold(holder);
            self.memory.add_reservation(&key, footprint);
            self.keys.insert(Arc::clone(&key), Slot::Reserved);
            let hold = Hold::Reserved { key, footprint };
            self.set_hold(holder, hold, Some(now + self.reservation));
            self.actions.push_back(StoreAction::Reserved(holder));
        }
    }

    /// Evicts values until so many bytes are free; false, and evicts none, if they never are.
    pub(super) fn make_space(&mut self, key: &[u8], num_bytes: u64) -> bool {
        let can_free = self.memory.can_free(num_bytes);
        if can_free {
            self.evict_for(key, num_bytes);
        }
        can_free
    }

    /// Evicts values, the longest unused first, while so many bytes more exceed the quota of a namespace or the capacity.
    /// Those on disk stay there.
    pub(super) fn evict_for(&mut self, key: &[u8], more_bytes: u64) {
        while let Some(oldest) = self.memory.next_eviction(key, more_bytes) {
            self.evict(oldest);
        }
    }

    pub(super) fn evict(&mut self, id: ValueId) {
        match self.values.get_mut(&id) {
            Some(value) if value.disk != DiskCopy::None => {
                value.place = Place::OnDisk;
                self.memory.remove(&value.key, value.footprint);
                self.forget_in_memory(id);
            }
            _ => {
                self.info.num_evicted += 1;
                self.drop_value(id);
            }
        }
    }

    /// True if this reservation is under way.
    pub(in super::super) fn is_reserved(&self, holder: Holder) -> bool {
        matches!(self.holds.get(holder), Some(Hold::Reserved { .. }))
    }

    /// A write into a reservation begins: it does not end by time meanwhile.
    pub(in super::super) fn begin_write(&mut self, holder: Holder) {
        self.deadlines.cancel(Deadline::Hold(holder));
    }

    /// A write has ended.
    pub(in super::super) fn end_write(&mut self, holder: Holder, now: Instant) {
        if self.is_reserved(holder) {
            self.deadlines
                .set(Deadline::Hold(holder), now + self.reservation);
        }
    }

    /// Makes a reserved value visible; false if the reservation has ended. Its record and everything else that the
    /// reservation did not count are `more_bytes`.
    pub(in super::super) fn commit(
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
        self.memory.remove_reservation(&key, footprint);
        // Where everything is held, the records of new values are beyond the capacity.
        let footprint = footprint + more_bytes;
        self.evict_for(&key, footprint);
        self.memory.add(&key, footprint);
        self.info.num_committed += 1;
        self.info.committed_bytes += num_bytes;
        let id = self.tick();
        self.keys.insert(Arc::clone(&key), Slot::Value(id));
        let value = StoredValue {
            key,
            num_bytes,
            footprint,
            disk_footprint: disk_footprint(num_bytes + more_bytes),
            place: Place::InMemory(content),
            disk: DiskCopy::None,
            num_open: 0,
            is_leased: false,
            last_use: None,
            is_doomed: false,
        };
        self.info.num_values += 1;
        self.values.insert(id, value);
        match ttl.and_then(|ttl| now.checked_add(ttl)) {
            Some(at) => self.deadlines.set(Deadline::Value(id), at),
            None => self.save(id),
        }
        self.serve_waiting(id, now);
        true
    }
}
