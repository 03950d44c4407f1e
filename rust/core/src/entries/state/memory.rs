//! The memory that entries and reservations count: all together, and with a quota those of each namespace.

use std::collections::{BTreeMap, HashMap};

use super::{EntryId, Tick};
use crate::error::{Error, Result};

/// The first bytes of a key are its namespace, which has one quota. The ranks of an engine share one.
pub(super) const NAMESPACE_BYTES: usize = 14;

/// Bytes in memory, of the whole store or of one namespace.
#[derive(Debug, Default)]
struct Usage {
    num_bytes: u64,
    reserved_bytes: u64,
    /// Of entries without a holder.
    evictable_bytes: u64,
    /// Entries without a holder, the longest unused first.
    unused: BTreeMap<Tick, EntryId>,
}

impl Usage {
    fn is_empty(&self) -> bool {
        self.num_bytes == 0 && self.unused.is_empty()
    }

    /// Bytes that no eviction frees.
    fn held_bytes(&self) -> u64 {
        self.num_bytes - self.evictable_bytes
    }

    fn exceeds(&self, limit: u64, more_bytes: u64) -> bool {
        self.num_bytes.saturating_add(more_bytes) > limit
    }

    fn oldest_unused(&self) -> Option<EntryId> {
        let (_, oldest) = self.unused.first_key_value()?;
        Some(*oldest)
    }

    /// Bytes of reservations, and of entries.
    fn held_by(&self) -> (u64, u64) {
        let reserved = self.reserved_bytes;
        (reserved, self.held_bytes() - reserved)
    }
}

#[derive(Debug)]
pub(super) struct MemoryUsage {
    capacity_bytes: u64,
    /// Limit of each namespace.
    quota_bytes: Option<u64>,
    total: Usage,
    /// Of those that have anything in memory; none without a quota.
    of_namespaces: HashMap<Box<[u8]>, Usage>,
}

impl MemoryUsage {
    pub(super) fn new(capacity_bytes: u64, quota_bytes: Option<u64>) -> Self {
        Self {
            capacity_bytes,
            quota_bytes,
            total: Usage::default(),
            of_namespaces: HashMap::new(),
        }
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_namespaces = self.of_namespaces.values();
        let unused = of_namespaces.map(|usage| usage.unused.len()).sum();
        vec![
            ("unused values", self.total.unused.len()),
            ("namespaces with values in memory", self.of_namespaces.len()),
            ("unused values of namespaces", unused),
        ]
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.total.num_bytes
    }

    /// Bytes of a namespace, those that no eviction frees, and the unused entry that was used last.
    #[cfg(test)]
    pub(super) fn of_namespace(&self, key: &[u8]) -> (u64, u64, Option<EntryId>) {
        let Some(usage) = self.of_namespaces.get(namespace(key)) else {
            return (0, 0, None);
        };
        let newest = usage.unused.values().next_back().copied();
        (usage.num_bytes, usage.held_bytes(), newest)
    }

    fn update(&mut self, key: &[u8], change: impl Fn(&mut Usage)) {
        change(&mut self.total);
        if self.quota_bytes.is_none() {
            return;
        }
        let namespace = namespace(key);
        let usage = self.of_namespaces.entry(namespace.into()).or_default();
        change(usage);
        if usage.is_empty() {
            self.of_namespaces.remove(namespace);
        }
    }

    pub(super) fn add(&mut self, key: &[u8], num_bytes: u64) {
        self.update(key, |usage| usage.num_bytes += num_bytes);
    }

    pub(super) fn remove(&mut self, key: &[u8], num_bytes: u64) {
        self.update(key, |usage| usage.num_bytes -= num_bytes);
    }

    pub(super) fn add_reservation(&mut self, key: &[u8], num_bytes: u64) {
        self.update(key, |usage| {
            usage.num_bytes += num_bytes;
            usage.reserved_bytes += num_bytes;
        });
    }

    pub(super) fn remove_reservation(&mut self, key: &[u8], num_bytes: u64) {
        self.update(key, |usage| {
            usage.num_bytes -= num_bytes;
            usage.reserved_bytes -= num_bytes;
        });
    }

    /// The last holder of an entry has closed it.
    pub(super) fn add_unused(&mut self, key: &[u8], (tick, id): (Tick, EntryId), num_bytes: u64) {
        self.update(key, |usage| {
            usage.evictable_bytes += num_bytes;
            usage.unused.insert(tick, id);
        });
    }

    /// An entry is pinned again, or removed.
    pub(super) fn remove_unused(&mut self, key: &[u8], tick: Tick, num_bytes: u64) {
        self.update(key, |usage| {
            if usage.unused.remove(&tick).is_some() {
                usage.evictable_bytes -= num_bytes;
            }
        });
    }

    /// Refuses an entry that never fits.
    ///
    /// # Errors
    /// `Config`: it is larger than the capacity or the quota.
    pub(super) fn check_size(&self, num_bytes: u64) -> Result<()> {
        let (limit, name) = match self.quota_bytes {
            Some(quota) if quota < self.capacity_bytes => (quota, "quota of a namespace"),
            _ => (self.capacity_bytes, "capacity"),
        };
        if num_bytes <= limit {
            return Ok(());
        }
        Err(Error::Config(format!(
            "a value that occupies {num_bytes} bytes can never be stored: the store's {name} is {limit} bytes"
        )))
    }

    /// Refuses a reservation for which the quota of its namespace has no room, whatever is evicted.
    ///
    /// # Errors
    /// `Exhausted`: with what holds the quota.
    pub(super) fn check_quota(&self, key: &[u8], num_bytes: u64) -> Result<()> {
        let (Some(quota), Some(usage)) = (self.quota_bytes, self.of_namespaces.get(namespace(key)))
        else {
            return Ok(());
        };
        if usage.held_bytes().saturating_add(num_bytes) <= quota {
            return Ok(());
        }
        let (reserved, held) = usage.held_by();
        Err(Error::Exhausted(format!(
            "no space for {num_bytes} bytes: of this namespace's quota of {quota} bytes, reservations hold {reserved}, \
             and open and leased values hold {held}; close values, or give the store a larger quota"
        )))
    }

    /// True if evictions can free so many bytes.
    pub(super) fn can_free(&self, num_bytes: u64) -> bool {
        self.total.held_bytes().saturating_add(num_bytes) <= self.capacity_bytes
    }

    /// The entry to be evicted next before a namespace has so many bytes more: one of its own while it exceeds its quota,
    /// then any while the store exceeds its capacity.
    pub(super) fn next_eviction(&self, key: &[u8], more_bytes: u64) -> Option<EntryId> {
        let is_full = self.total.exceeds(self.capacity_bytes, more_bytes);
        let own = self.next_eviction_of_namespace(key, more_bytes);
        own.or_else(|| self.total.oldest_unused().filter(|_| is_full))
    }

    /// The entry to be evicted next while a namespace with so many bytes more exceeds its quota.
    pub(super) fn next_eviction_of_namespace(
        &self,
        key: &[u8],
        more_bytes: u64,
    ) -> Option<EntryId> {
        let (quota, usage) = (self.quota_bytes?, self.of_namespaces.get(namespace(key))?);
        let is_over_quota = usage.exceeds(quota, more_bytes);
        usage.oldest_unused().filter(|_| is_over_quota)
    }

    /// Says what occupies a store, to a reservation that got no space in time.
    pub(super) fn full(&self, num_bytes: u64, num_reserved: u64) -> Error {
        let (reserved, held) = self.total.held_by();
        Error::Exhausted(format!(
            "no space for {num_bytes} bytes in time: of {} bytes, {num_reserved} reservations hold {reserved}, and open \
             and leased values hold {held}; close values, or give the store a larger capacity",
            self.capacity_bytes
        ))
    }
}

/// A namespace, which has one quota: a shorter key is one of its own.
fn namespace(key: &[u8]) -> &[u8] {
    &key[..key.len().min(NAMESPACE_BYTES)]
}
