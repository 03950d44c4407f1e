//! Entries: how they are found, delivered and dropped.

use std::sync::Arc;
use std::time::Instant;

use super::disk::DiskCopy;
use super::holds::Hold;
use super::{
    Access, Deadline, Entries, Entry, EntryAction, EntryId, Holder, Key, Listed, Place, Query,
    Rules,
};

/// Entries that one page of a list is made from.
pub(in super::super) const PAGE_ENTRIES: usize = 1 << 12;

impl<C: Clone> Entries<C> {
    fn selectable<K: AsRef<[u8]>>(&self, query: &Query<K>) -> Option<(EntryId, &Entry<C>)> {
        let id = self.index.find(query)?;
        let entry = self.by_id.get(&id)?;
        (!entry.is_leased).then_some((id, entry))
    }

    /// Lets an entry be found.
    pub(super) fn show(&mut self, id: EntryId) {
        if let Some(entry) = self.by_id.get_mut(&id) {
            entry.key = self.index.show(&entry.key, id);
        }
    }

    /// True if a key can be selected now.
    pub(in super::super) fn exists(&self, key: &[u8]) -> bool {
        self.selectable(&Query::Exact(key)).is_some()
    }

    /// Requests an entry. [`Offered`](EntryAction::Offered) or [`Nothing`](EntryAction::Nothing) follows.
    pub(in super::super) fn select<K: AsRef<[u8]> + Into<Key>>(
        &mut self,
        holder: Holder,
        query: Query<K>,
        access: Access,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        let found = self
            .selectable(&query)
            .filter(|(_, entry)| access == Access::Open || entry.num_open == 0)
            .map(|(id, entry)| (id, matches!(entry.place, Place::InMemory(_))));
        match found {
            Some((id, true)) => self.offer(holder, id, access, now),
            Some((id, false)) => self.await_load(holder, id, access, deadline, now),
            None if deadline.is_some_and(|at| at <= now) => self.miss(holder),
            None => {
                self.info.num_waits += 1;
                let (tick, query) = (self.tick(), query.into_kept());
                self.waiting.add_select(&query, tick, (holder, access));
                let hold = Hold::AwaitsEntry {
                    tick,
                    query,
                    access,
                    until: deadline,
                };
                self.set_hold(holder, hold, deadline);
            }
        }
    }

    pub(super) fn miss(&mut self, holder: Holder) {
        self.info.num_misses += 1;
        self.actions.push_back(EntryAction::Nothing(holder));
    }

    fn offer(&mut self, holder: Holder, id: EntryId, access: Access, now: Instant) {
        self.make_used(id);
        let Some(entry) = self.by_id.get_mut(&id) else {
            return;
        };
        let Place::InMemory(content) = &entry.place else {
            return;
        };
        let content = content.clone();
        let (hold, deadline) = match access {
            Access::Open => {
                entry.num_open += 1;
                (Hold::Open(id), None)
            }
            Access::Lease(lease) => {
                entry.is_leased = true;
                self.index.lease(&entry.key, id);
                let is_consumed = false;
                let end = lease.and_then(|lease| now.checked_add(lease));
                (Hold::Leased { id, is_consumed }, end)
            }
        };
        self.info.num_hits += 1;
        self.info.hit_bytes += entry.num_bytes;
        self.set_hold(holder, hold, deadline);
        self.actions
            .push_back(EntryAction::Offered(holder, content));
    }

    /// An entry was committed or given back: all selects that wait to open it get it, then one that leases it.
    pub(super) fn serve_waiting(&mut self, id: EntryId, now: Instant) {
        let Some(key) = self.by_id.get(&id).map(|entry| Arc::clone(&entry.key)) else {
            return;
        };
        while let Some(holder) = self.waiting.first_select(&key) {
            self.remove_hold(holder);
            self.offer(holder, id, Access::Open, now);
        }
        self.settle(id, now);
    }

    /// An entry may have lost its last holder: a select leases it, or it may be evicted from now on.
    pub(super) fn settle(&mut self, id: EntryId, now: Instant) {
        let Some(entry) = self.by_id.get(&id).filter(|entry| entry.is_free()) else {
            return;
        };
        if entry.is_doomed {
            self.drop_entry(id);
        } else if let Some((holder, lease)) = self.waiting.first_lease(&entry.key)
            && matches!(entry.place, Place::InMemory(_))
        {
            self.remove_hold(holder);
            self.offer(holder, id, Access::Lease(lease), now);
        } else if self.rules != Rules::Buffer {
            let key = Key::clone(&entry.key);
            // Its record may go beyond the quota. This entry stays: it was just used.
            while let Some(oldest) = self.memory.next_eviction_of_namespace(&key, 0) {
                self.evict(oldest);
            }
            self.make_unused(id);
        }
        self.grant(now);
    }

    /// An entry may be evicted from now on, from memory and from the disk.
    pub(super) fn make_unused(&mut self, id: EntryId) {
        let tick = self.tick();
        let Some(entry) = self.by_id.get_mut(&id) else {
            return;
        };
        if entry.last_use.is_some() {
            return;
        }
        entry.last_use = Some(tick);
        if matches!(entry.place, Place::InMemory(_)) {
            let (key, unused) = (&entry.key, (tick, id));
            self.memory.add_unused(key, unused, entry.footprint);
        }
        if let Some(disk) = &mut self.disk
            && entry.disk == DiskCopy::Kept
        {
            disk.unused.insert(tick, id);
        }
    }

    /// An entry is not among those that may be evicted any more.
    pub(super) fn make_used(&mut self, id: EntryId) {
        self.forget_in_memory(id);
        if let Some(entry) = self.by_id.get_mut(&id)
            && let Some(tick) = entry.last_use.take()
            && let Some(disk) = &mut self.disk
        {
            disk.unused.remove(&tick);
        }
    }

    /// An entry is not among those that may be evicted from memory any more.
    pub(super) fn forget_in_memory(&mut self, id: EntryId) {
        if let Some(entry) = self.by_id.get(&id)
            && let Some(tick) = entry.last_use
        {
            self.memory.remove_unused(&entry.key, tick, entry.footprint);
        }
    }

    pub(super) fn hide(&mut self, id: EntryId) {
        if let Some(entry) = self.by_id.get_mut(&id)
            && !entry.is_doomed
        {
            entry.is_doomed = true;
            self.info.num_values -= 1;
            self.index.hide(&entry.key, id);
            self.deadlines.cancel(Deadline::Entry(id));
            self.erase(id);
        }
    }

    pub(super) fn drop_entry(&mut self, id: EntryId) {
        self.hide(id);
        self.make_used(id);
        if let Some(entry) = self.by_id.remove(&id)
            && entry.place.counts_in_memory()
        {
            self.memory.remove(&entry.key, entry.footprint);
        }
    }

    /// Deletes entries without a holder; returns their number, and true if any is to be erased from the disk first.
    pub(in super::super) fn delete<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a [u8]>,
        now: Instant,
    ) -> (u64, bool) {
        let (mut num_deleted, mut is_on_disk) = (0, false);
        for key in keys {
            let found = self.selectable(&Query::Exact(key));
            let found = found.filter(|(_, entry)| entry.is_free());
            if let Some((id, _)) = found {
                is_on_disk |= self.erase(id);
                self.drop_entry(id);
                num_deleted += 1;
            }
        }
        self.grant(now);
        (num_deleted, is_on_disk)
    }

    /// The next entries after `after` whose keys begin so, and where to go on.
    pub(in super::super) fn list(
        &self,
        prefix: &[u8],
        after: EntryId,
    ) -> (Vec<Listed>, Option<EntryId>) {
        let rest = self.by_id.range(after.saturating_add(1)..);
        let looked_at: Vec<_> = rest.take(PAGE_ENTRIES).collect();
        let next = looked_at.last().map(|(id, _)| **id);
        let is_listed = |entry: &&Entry<C>| !entry.is_doomed && entry.key.starts_with(prefix);
        let entries = looked_at.iter().map(|(_, entry)| *entry).filter(is_listed);
        let listed = entries.map(|entry| Listed {
            key: Arc::clone(&entry.key),
            num_bytes: entry.num_bytes,
            is_leased: entry.is_leased,
        });
        let listed = listed.collect();
        (listed, next.filter(|_| looked_at.len() == PAGE_ENTRIES))
    }
}
