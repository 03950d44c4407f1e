//! Reservations: space in the order of the calls, the eviction of values that makes it, and commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::holds::Hold;
use super::{Deadline, Holder, Slot, State, StoreAction, StoredValue};
use crate::error::Error;

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
    pub(super) fn grant(&mut self, now: Instant) {
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

    /// Why a reservation is refused that got no space in time.
    pub(super) fn full(&self, footprint: u64) -> Error {
        let info = &self.info;
        let held = info.num_bytes - self.evictable_bytes - self.reserved_bytes;
        Error::Exhausted(format!(
            "no space for {footprint} bytes in time: of {} bytes, {} reservations hold {}, and open and leased values \
             hold {held}; close values, or give the store a larger capacity",
            info.capacity_bytes, info.num_reserved, self.reserved_bytes
        ))
    }
}
