//! Values: who reads them, who waits for them, and when they go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::PAGE_VALUES;
use super::disk::DiskCopy;
use super::holds::Hold;
use super::{Deadline, Holder, Key, Listed, Place, Slot, State, StoreAction, StoredValue, ValueId};

impl<C: Clone> State<C> {
    pub(super) fn selectable(&self, key: &[u8]) -> Option<(ValueId, &StoredValue<C>)> {
        let Some(Slot::Value(id)) = self.keys.get(key) else {
            return None;
        };
        let value = self.values.get(id)?;
        (!value.is_leased).then_some((*id, value))
    }

    /// True if a key can be selected now.
    pub(in super::super) fn exists(&self, key: &[u8]) -> bool {
        self.selectable(key).is_some()
    }

    /// Requests a value to read beside others, or with a lease, alone.
    pub(in super::super) fn select(
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
            .map(|(id, value)| (id, matches!(value.place, Place::InMemory(_))));
        match found {
            Some((id, true)) => self.offer(holder, id, lease, now),
            Some((id, false)) => self.await_load(holder, id, lease, deadline, now),
            None if deadline.is_some_and(|at| at <= now) => self.miss(holder),
            None => {
                self.info.num_waits += 1;
                let (tick, key): (_, Key) = (self.tick(), key.into());
                self.waiting.add_select(&key, tick, (holder, lease));
                let hold = Hold::AwaitsValue {
                    tick,
                    key,
                    lease,
                    until: deadline,
                };
                self.set_hold(holder, hold, deadline);
            }
        }
    }

    pub(super) fn miss(&mut self, holder: Holder) {
        self.info.num_misses += 1;
        self.actions.push_back(StoreAction::Nothing(holder));
    }

    fn offer(&mut self, holder: Holder, id: ValueId, lease: Option<Duration>, now: Instant) {
        self.make_used(id);
        let Some(value) = self.values.get_mut(&id) else {
            return;
        };
        let Place::InMemory(content) = &value.place else {
            return;
        };
        let content = content.clone();
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
        self.info.hit_bytes += value.num_bytes;
        self.set_hold(holder, hold, deadline);
        self.actions
            .push_back(StoreAction::Offered(holder, content));
    }

    /// A value that was committed or given back: all selects that wait see it, then one take gets it.
    pub(super) fn serve_waiting(&mut self, id: ValueId, now: Instant) {
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
    pub(super) fn settle(&mut self, id: ValueId, now: Instant) {
        let Some(value) = self.values.get(&id).filter(|value| value.is_free()) else {
            return;
        };
        if value.is_doomed {
            self.drop_value(id);
        } else if let Some((holder, lease)) = self.waiting.first_take(&value.key)
            && matches!(value.place, Place::InMemory(_))
        {
            self.remove_hold(holder);
            self.offer(holder, id, Some(lease), now);
        } else {
            let key = Key::clone(&value.key);
            // Its record may go beyond the quota. This value stays: it was just used.
            while let Some(oldest) = self.memory.next_eviction_of_namespace(&key, 0) {
                self.evict(oldest);
            }
            self.make_unused(id);
        }
        self.grant(now);
    }

    /// A value may be evicted from now on, from memory and from the disk.
    pub(super) fn make_unused(&mut self, id: ValueId) {
        let tick = self.tick();
        let Some(value) = self.values.get_mut(&id) else {
            return;
        };
        if value.last_use.is_some() {
            return;
        }
        value.last_use = Some(tick);
        if matches!(value.place, Place::InMemory(_)) {
            let (key, unused) = (&value.key, (tick, id));
            self.memory.add_unused(key, unused, value.footprint);
        }
        if let Some(disk) = &mut self.disk
            && value.disk == DiskCopy::Kept
        {
            disk.unused.insert(tick, id);
        }
    }

    /// A value is not among those that may be evicted any more.
    pub(super) fn make_used(&mut self, id: ValueId) {
        self.forget_in_memory(id);
        if let Some(value) = self.values.get_mut(&id)
            && let Some(tick) = value.last_use.take()
            && let Some(disk) = &mut self.disk
        {
            disk.unused.remove(&tick);
        }
    }

    /// A value is not among those that may be evicted from memory any more.
    pub(super) fn forget_in_memory(&mut self, id: ValueId) {
        if let Some(value) = self.values.get(&id)
            && let Some(tick) = value.last_use
        {
            self.memory.remove_unused(&value.key, tick, value.footprint);
        }
    }

    pub(super) fn hide(&mut self, id: ValueId) {
        if let Some(value) = self.values.get_mut(&id)
            && !value.is_doomed
        {
            value.is_doomed = true;
            self.info.num_values -= 1;
            self.keys.remove(&value.key);
            self.deadlines.cancel(Deadline::Value(id));
            self.erase(id);
        }
    }

    pub(super) fn drop_value(&mut self, id: ValueId) {
        self.hide(id);
        self.make_used(id);
        if let Some(value) = self.values.remove(&id)
            && value.place.counts_in_memory()
        {
            self.memory.remove(&value.key, value.footprint);
        }
    }

    /// Deletes values that nobody holds; returns how many there were, and whether any is to be erased from the disk first.
    pub(in super::super) fn delete<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a [u8]>,
        now: Instant,
    ) -> (u64, bool) {
        let (mut num_deleted, mut is_on_disk) = (0, false);
        for key in keys {
            let found = self.selectable(key).filter(|(_, value)| value.is_free());
            if let Some((id, _)) = found {
                is_on_disk |= self.erase(id);
                self.drop_value(id);
                num_deleted += 1;
            }
        }
        self.grant(now);
        (num_deleted, is_on_disk)
    }

    /// The next values after `after` whose keys begin so, and where to go on.
    pub(in super::super) fn list(
        &self,
        prefix: &[u8],
        after: ValueId,
    ) -> (Vec<Listed>, Option<ValueId>) {
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
