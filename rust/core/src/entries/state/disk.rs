//! The disk tier. Every entry without a time to live is saved soon after its commit, so that eviction from memory needs no
//! time; what is on disk alone is loaded when it is selected. The longest unused entries are evicted from the disk, too.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::holds::Hold;
use super::waiting::Claim;
use super::{
    Access, Deadline, Entries, Entry, EntryAction, EntryId, Holder, Key, Place, Query, Tick,
};
use crate::error::Error;

/// While the disk saves so many bytes, it is given no more. Memory of entries that are evicted meanwhile is free when
/// they are saved.
pub(super) const SAVING_BYTES: u64 = 64 << 20;
/// Least time for which a query that waits for a load stays in the queue; its own deadline may be later.
pub(super) const LOAD_TIMEOUT: Duration = Duration::from_millis(400);
/// Pause of all saves after a save has failed, as on a full disk.
pub(super) const SAVE_PAUSE: Duration = Duration::from_secs(10);
/// The unit of space on disk.
const DISK_GRAIN: u64 = 4 << 10;

/// Bytes that an entry counts against the capacity of the disk: its bytes and record in blocks, and one block besides.
pub(super) fn disk_footprint(num_bytes: u64) -> u64 {
    let occupied = num_bytes.checked_next_multiple_of(DISK_GRAIN);
    occupied.unwrap_or(u64::MAX).saturating_add(DISK_GRAIN)
}

/// The copy of an entry on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskCopy {
    None,
    /// It is being written.
    Saving,
    Kept,
}

/// An entry that was on disk when the store started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct KeptEntry {
    pub(in super::super) id: EntryId,
    pub(in super::super) key: Key,
    pub(in super::super) num_bytes: u64,
    pub(in super::super) num_record: u64,
    /// Bytes that it counts in memory.
    pub(in super::super) footprint: u64,
}

/// Copies on disk whose erasure is not durable: a kill would bring them back.
#[derive(Debug, Default)]
struct Erasures {
    keys: HashMap<EntryId, Key>,
    num_of_keys: HashMap<Key, usize>,
}

impl Erasures {
    fn add(&mut self, id: EntryId, key: &Key) {
        if self.keys.insert(id, Key::clone(key)).is_none() {
            *self.num_of_keys.entry(Key::clone(key)).or_default() += 1;
        }
    }

    fn remove(&mut self, id: EntryId) {
        let Some(key) = self.keys.remove(&id) else {
            return;
        };
        if let Some(num) = self.num_of_keys.get_mut(&key) {
            *num -= 1;
            if *num == 0 {
                self.num_of_keys.remove(&key);
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct DiskTier {
    capacity_bytes: u64,
    /// After a save that failed.
    is_paused: bool,
    /// Committed, and not yet given to the disk.
    unsaved: VecDeque<EntryId>,
    /// Given to the disk, with what they count.
    saving: HashMap<EntryId, u64>,
    saving_bytes: u64,
    erasures: Erasures,
    /// Entries on disk without a holder, the longest unused first.
    pub(super) unused: BTreeMap<Tick, EntryId>,
}

impl DiskTier {
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("values to be saved", self.unsaved.len()),
            ("values being saved", self.saving.len()),
            ("values being erased", self.erasures.keys.len()),
            (
                "keys with values being erased",
                self.erasures.num_of_keys.len(),
            ),
            ("unused values on disk", self.unused.len()),
        ]
    }
}

impl<C: Clone> Entries<C> {
    /// Begins with what is on a disk, in the order of the commits. Values that do not fit any more are erased, the oldest
    /// first.
    pub(in super::super) fn add_disk(
        &mut self,
        capacity_bytes: u64,
        mut kept: Vec<KeptEntry>,
        now: Instant,
    ) {
        self.info.disk_capacity_bytes = capacity_bytes;
        self.disk = Some(DiskTier {
            capacity_bytes,
            is_paused: false,
            unsaved: VecDeque::new(),
            saving: HashMap::new(),
            saving_bytes: 0,
            erasures: Erasures::default(),
            unused: BTreeMap::new(),
        });
        kept.sort_unstable_by_key(|entry| entry.id);
        self.next_tick = kept.last().map_or(0, |entry| entry.id);
        for entry in kept {
            self.add_kept(entry, now);
        }
        self.make_disk_space(0);
    }

    fn add_kept(&mut self, kept: KeptEntry, now: Instant) {
        let id = kept.id;
        if self.memory.check_size(kept.footprint).is_err() {
            // It can never be loaded.
            return self.begin_erase(id, &kept.key);
        }
        if let Some(older) = self.index.find(&Query::Exact(&kept.key)) {
            // It was to be erased when the last server ended.
            self.drop_entry(older);
        }
        let entry = Entry {
            key: kept.key,
            num_bytes: kept.num_bytes,
            footprint: kept.footprint,
            disk_footprint: disk_footprint(kept.num_bytes + kept.num_record),
            place: Place::OnDisk,
            disk: DiskCopy::Kept,
            num_open: 0,
            is_leased: false,
            last_use: None,
            is_doomed: false,
        };
        self.info.num_disk_values += 1;
        self.info.num_disk_bytes += entry.disk_footprint;
        self.info.num_values += 1;
        self.by_id.insert(id, entry);
        self.show(id);
        self.settle(id, now);
    }

    /// An entry was committed: it is saved in its turn, if it can be loaded again.
    pub(super) fn save(&mut self, id: EntryId) {
        let entry = self.by_id.get(&id);
        let fits = entry.is_none_or(|entry| self.memory.check_size(entry.footprint).is_ok());
        if let Some(disk) = &mut self.disk
            && fits
        {
            disk.unsaved.push_back(id);
            if disk.unsaved.len() > 2 * self.by_id.len() + 64 {
                // The disk hangs: most of them have been evicted.
                disk.unsaved.retain(|id| self.by_id.contains_key(id));
            }
            self.save_some(SAVING_BYTES);
        }
    }

    /// Gives everything to the disk that is not there yet, because the store ends; returns how many entries.
    pub(in super::super) fn save_all(&mut self) -> usize {
        self.resume_saves(u64::MAX);
        self.disk.as_ref().map_or(0, |disk| disk.saving.len())
    }

    /// Saves again, after a pause.
    pub(super) fn resume_saves(&mut self, limit_bytes: u64) {
        if let Some(disk) = &mut self.disk {
            disk.is_paused = false;
        }
        self.save_some(limit_bytes);
    }

    fn save_some(&mut self, limit_bytes: u64) {
        while let Some(disk) = &mut self.disk
            && !disk.is_paused
            && disk.saving_bytes < limit_bytes
            && let Some(id) = disk.unsaved.pop_front()
        {
            let wanted = self.by_id.get(&id).filter(|entry| !entry.is_doomed);
            let Some(footprint) = wanted.map(|entry| entry.disk_footprint) else {
                continue;
            };
            if self.make_disk_space(footprint) {
                self.begin_save(id, footprint);
            }
        }
    }

    fn begin_save(&mut self, id: EntryId, footprint: u64) {
        let (Some(disk), Some(entry)) = (&mut self.disk, self.by_id.get_mut(&id)) else {
            return;
        };
        if let Place::InMemory(content) = &entry.place {
            entry.disk = DiskCopy::Saving;
            disk.saving.insert(id, footprint);
            disk.saving_bytes += footprint;
            self.info.num_disk_bytes += footprint;
            let save = EntryAction::Save(id, Key::clone(&entry.key), content.clone());
            self.actions.push_back(save);
        }
    }

    /// A save has ended, well or not. After one that failed there is a pause, and then it is tried again. The disk may have
    /// the entry all the same: it erases it.
    pub(in super::super) fn saved(&mut self, id: EntryId, is_kept: bool, now: Instant) {
        let Some(disk) = &mut self.disk else { return };
        disk.saving_bytes -= disk.saving.remove(&id).unwrap_or(0);
        if !is_kept {
            self.info.num_disk_failures += 1;
            disk.is_paused = true;
            self.deadlines.set(Deadline::Disk, now + SAVE_PAUSE);
        }
        if let Some(entry) = self.by_id.get_mut(&id)
            && entry.disk == DiskCopy::Saving
        {
            if is_kept {
                entry.disk = DiskCopy::Kept;
                self.info.num_disk_values += 1;
                if let Some(tick) = entry.last_use {
                    disk.unused.insert(tick, id);
                }
                self.claim_load(id, now);
            } else {
                entry.disk = DiskCopy::None;
                self.info.num_disk_bytes -= entry.disk_footprint;
                disk.erasures.add(id, &entry.key);
                if matches!(entry.place, Place::OnDisk) {
                    self.info.num_evicted += 1;
                    self.lose(id, now);
                } else {
                    disk.unsaved.push_back(id);
                }
            }
        }
        self.save_some(SAVING_BYTES);
    }

    /// An erasure is durable.
    pub(in super::super) fn erased(&mut self, id: EntryId) {
        if let Some(disk) = &mut self.disk {
            disk.erasures.remove(id);
        }
    }

    /// An entry is neither in memory nor on disk any more.
    fn lose(&mut self, id: EntryId, now: Instant) {
        if let Some(key) = self.by_id.get(&id).map(|entry| Key::clone(&entry.key)) {
            self.drop_entry(id);
            self.miss_or_wait(&key, now);
            self.grant(now);
        }
    }

    /// Erases entries without a holder from the disk, the longest unused first, until so many bytes are free.
    fn make_disk_space(&mut self, num_bytes: u64) -> bool {
        while let Some(disk) = &self.disk {
            if self.info.num_disk_bytes.saturating_add(num_bytes) <= disk.capacity_bytes {
                return true;
            }
            if num_bytes > disk.capacity_bytes {
                return false;
            }
            let Some((_, &oldest)) = disk.unused.first_key_value() else {
                return false;
            };
            let is_in_memory = |entry: &Entry<C>| matches!(entry.place, Place::InMemory(_));
            if self.by_id.get(&oldest).is_some_and(is_in_memory) {
                self.erase(oldest);
            } else {
                self.info.num_evicted += 1;
                self.drop_entry(oldest);
            }
        }
        false
    }

    /// Erases an entry's copy on disk, if there is one; whether a kill could bring its key back.
    pub(super) fn erase(&mut self, id: EntryId) -> bool {
        let (Some(entry), Some(disk)) = (self.by_id.get_mut(&id), &mut self.disk) else {
            return false;
        };
        let copy = std::mem::replace(&mut entry.disk, DiskCopy::None);
        let key = Key::clone(&entry.key);
        if copy == DiskCopy::None {
            return disk.erasures.num_of_keys.contains_key(&key);
        }
        self.info.num_disk_bytes -= entry.disk_footprint;
        self.info.num_disk_values -= u64::from(copy == DiskCopy::Kept);
        if let Some(tick) = entry.last_use {
            disk.unused.remove(&tick);
        }
        self.begin_erase(id, &key);
        true
    }

    fn begin_erase(&mut self, id: EntryId, key: &Key) {
        if let Some(disk) = &mut self.disk {
            disk.erasures.add(id, key);
            self.actions.push_back(EntryAction::Erase(id));
        }
    }

    /// A select or take wants an entry that is on disk alone.
    pub(super) fn await_load(
        &mut self,
        holder: Holder,
        id: EntryId,
        access: Access,
        until: Option<Instant>,
        now: Instant,
    ) {
        let Some(key) = self.by_id.get(&id).map(|entry| Key::clone(&entry.key)) else {
            return;
        };
        let (tick, query) = (self.tick(), Query::Exact(key));
        self.waiting.add_select(&query, tick, (holder, access));
        let deadline = until.map(|until| until.max(now + LOAD_TIMEOUT));
        let hold = Hold::AwaitsEntry {
            tick,
            query,
            access,
            until,
        };
        self.set_hold(holder, hold, deadline);
        self.info.num_waits += 1;
        self.claim_load(id, now);
    }

    /// An entry that is on disk alone claims space in memory, if a select waits for it.
    fn claim_load(&mut self, id: EntryId, now: Instant) {
        let is_ready = |entry: &Entry<C>| {
            matches!(entry.place, Place::OnDisk)
                && entry.disk == DiskCopy::Kept
                && self.waiting.is_awaited(&entry.key)
        };
        if !self.by_id.get(&id).is_some_and(is_ready) {
            return;
        }
        self.make_used(id);
        let tick = self.tick();
        if let Some(entry) = self.by_id.get_mut(&id) {
            entry.place = Place::AwaitsSpace(tick);
        }
        self.waiting.add_claim(tick, Claim::Load(id));
        self.grant(now);
    }

    /// The load whose turn it is begins, or is a miss, because the quota has no room for it; false if there is no space.
    pub(super) fn begin_load(&mut self, id: EntryId, now: Instant) -> bool {
        let Some(entry) = self.by_id.get(&id) else {
            return true;
        };
        let (key, footprint) = (Key::clone(&entry.key), entry.footprint);
        if self.memory.check_quota(&key, footprint).is_err() {
            self.info.num_over_quota += 1;
            self.give_up_load(id, now);
            return true;
        }
        if !self.make_space(&key, footprint) {
            return false;
        }
        self.memory.add(&key, footprint);
        if let Some(entry) = self.by_id.get_mut(&id) {
            entry.place = Place::Loading;
            let load = EntryAction::Load(id, entry.num_bytes);
            self.actions.push_back(load);
        }
        true
    }

    /// A load has ended. An entry that has changed is deleted; after another failure it stays on disk.
    pub(in super::super) fn loaded(
        &mut self,
        id: EntryId,
        outcome: Result<C, Error>,
        now: Instant,
    ) {
        let Some(entry) = self.by_id.get_mut(&id) else {
            return;
        };
        match outcome {
            Ok(content) => {
                entry.place = Place::InMemory(content);
                self.info.num_loaded += 1;
                self.serve_waiting(id, now);
            }
            Err(Error::Corrupt(_)) => {
                self.info.num_corrupt += 1;
                self.lose(id, now);
            }
            Err(_) => {
                self.info.num_disk_failures += 1;
                self.memory.remove(&entry.key, entry.footprint);
                self.give_up_load(id, now);
                self.grant(now);
            }
        }
    }

    /// An entry stays on disk: it is loaded when it is wanted the next time.
    fn give_up_load(&mut self, id: EntryId, now: Instant) {
        if let Some(entry) = self.by_id.get_mut(&id) {
            entry.place = Place::OnDisk;
            let key = Key::clone(&entry.key);
            self.make_unused(id);
            self.miss_or_wait(&key, now);
        }
    }

    /// There is no load any more for those that wait for a key: they wait for a commit if they wanted to.
    fn miss_or_wait(&mut self, key: &[u8], now: Instant) {
        for holder in self.waiting.of_key(key) {
            let Some(&Hold::AwaitsEntry { until, .. }) = self.holds.get(holder) else {
                continue;
            };
            match until {
                Some(at) if at <= now => {
                    self.miss(holder);
                    self.remove_hold(holder);
                }
                Some(at) => self.deadlines.set(Deadline::Hold(holder), at),
                None => self.deadlines.cancel(Deadline::Hold(holder)),
            }
        }
    }

    /// An operation waits no longer: a load that no other waits for claims no space.
    pub(super) fn abandon_load(&mut self, query: &Query<Key>, now: Instant) {
        let Query::Exact(key) = query else {
            return;
        };
        if self.waiting.is_awaited(key) {
            return;
        }
        let Some(id) = self.index.find(query) else {
            return;
        };
        if let Some(entry) = self.by_id.get_mut(&id)
            && let Place::AwaitsSpace(tick) = entry.place
        {
            entry.place = Place::OnDisk;
            self.waiting.remove_claim(tick);
            self.settle(id, now);
        }
    }
}
