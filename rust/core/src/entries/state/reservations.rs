//! Reservations: space in the order of the calls, the eviction of entries that makes it, and commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::disk::{DiskCopy, disk_footprint};
use super::holds::Hold;
use super::waiting::Claim;
use super::{Deadline, Entries, Entry, EntryAction, EntryId, Holder, Key, Place, Rules};
use crate::error::{Error, Result};

impl<C: Clone> Entries<C> {
    /// Requests space for an entry. [`Reserved`](EntryAction::Reserved), [`Occupied`](EntryAction::Occupied) or
    /// [`Refused`](EntryAction::Refused) follows.
    pub(in super::super) fn reserve(
        &mut self,
        holder: Holder,
        key: impl AsRef<[u8]> + Into<Key>,
        footprint: u64,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        if let Err(too_large) = self.check_size(footprint) {
            let refused = EntryAction::Refused(holder, too_large);
            return self.actions.push_back(refused);
        }
        if self.index.is_occupied(key.as_ref()) {
            return self.actions.push_back(EntryAction::Occupied(holder));
        }
        if self.is_over_quota(holder, key.as_ref(), footprint) {
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

    /// # Errors
    /// `Config`: an entry of this footprint never fits.
    pub(in super::super) fn check_size(&self, footprint: u64) -> Result<()> {
        let checked = self.memory.check_size(footprint);
        if checked.is_err() && self.rules == Rules::Buffer {
            let capacity_bytes = self.info.capacity_bytes;
            return Err(Error::Config(format!(
                "an entry of {footprint} bytes can never be inserted: the buffer's capacity is {capacity_bytes} bytes"
            )));
        }
        checked
    }

    /// Says to a reservation of this footprint why it got no space in time.
    pub(super) fn full(&self, footprint: u64) -> Error {
        match self.rules {
            Rules::Store { .. } => self.memory.full(footprint, self.info.num_reserved),
            Rules::Buffer => Error::Exhausted(format!(
                "no place for {footprint} bytes in time: {} of {} are taken; nothing was inserted, the buffer is usable",
                self.memory.num_bytes(),
                self.info.capacity_bytes
            )),
        }
    }

    /// The end of a reservation that is not used until then.
    fn reservation_end(&self, now: Instant) -> Option<Instant> {
        match self.rules {
            Rules::Store { reservation } => Some(now + reservation),
            Rules::Buffer => None,
        }
    }

    /// Refuses a reservation that its namespace has no room for, at once: it would hold up those of other namespaces.
    fn is_over_quota(&mut self, holder: Holder, key: &[u8], footprint: u64) -> bool {
        let Err(over_quota) = self.memory.check_quota(key, footprint) else {
            return false;
        };
        self.info.num_over_quota += 1;
        let refused = EntryAction::Refused(holder, over_quota);
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
            if self.index.is_occupied(&key) {
                self.remove_hold(holder);
                self.actions.push_back(EntryAction::Occupied(holder));
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
            self.index.reserve(&key);
            let hold = Hold::Reserved {
                tick,
                key,
                footprint,
            };
            self.set_hold(holder, hold, self.reservation_end(now));
            self.actions.push_back(EntryAction::Reserved(holder));
        }
    }

    /// Evicts entries until so many bytes are free; false, and evicts none, if they never are.
    pub(super) fn make_space(&mut self, key: &[u8], num_bytes: u64) -> bool {
        let can_free = self.memory.can_free(num_bytes);
        if can_free {
            self.evict_for(key, num_bytes);
        }
        can_free
    }

    /// Evicts entries, the longest unused first, while so many bytes more exceed the quota of a namespace or the capacity.
    /// Those on disk stay there.
    pub(super) fn evict_for(&mut self, key: &[u8], more_bytes: u64) {
        while let Some(oldest) = self.memory.next_eviction(key, more_bytes) {
            self.evict(oldest);
        }
    }

    pub(super) fn evict(&mut self, id: EntryId) {
        match self.by_id.get_mut(&id) {
            Some(entry) if entry.disk != DiskCopy::None => {
                entry.place = Place::OnDisk;
                self.memory.remove(&entry.key, entry.footprint);
                self.forget_in_memory(id);
            }
            _ => {
                self.info.num_evicted += 1;
                self.drop_entry(id);
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
        if self.is_reserved(holder)
            && let Some(at) = self.reservation_end(now)
        {
            self.deadlines.set(Deadline::Hold(holder), at);
        }
    }

    /// Makes a reserved entry visible; false if the reservation has ended. Its record and everything else that the
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
        let Some(Hold::Reserved {
            tick,
            key,
            footprint,
        }) = self.remove_hold(holder)
        else {
            return false;
        };
        self.memory.remove_reservation(&key, footprint);
        // If every entry is held, the records of new entries exceed the capacity.
        let footprint = footprint + more_bytes;
        self.evict_for(&key, footprint);
        self.memory.add(&key, footprint);
        self.info.num_committed += 1;
        self.info.committed_bytes += num_bytes;
        let id = match self.rules {
            Rules::Store { .. } => self.tick(),
            Rules::Buffer => tick,
        };
        let entry = Entry {
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
        self.by_id.insert(id, entry);
        self.show(id);
        match ttl.and_then(|ttl| now.checked_add(ttl)) {
            Some(at) => self.deadlines.set(Deadline::Entry(id), at),
            None => self.save(id),
        }
        self.serve_waiting(id, now);
        true
    }
}
