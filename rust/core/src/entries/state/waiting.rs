//! Operations that wait: reservations and loads for space, selects for an entry, each in the order of their calls.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{Access, EntryId, Holder, Key, Query, Tick};

/// Waiters for space in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    Reservation(Holder),
    /// Of an entry that is on disk.
    Load(EntryId),
}

#[derive(Debug, Default)]
struct WaitingForKey {
    selects: BTreeMap<Tick, Holder>,
    /// Selects with a lease.
    takes: BTreeMap<Tick, (Holder, Option<Duration>)>,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    claims: BTreeMap<Tick, Claim>,
    of_keys: HashMap<Key, WaitingForKey>,
    /// Selects for any of several keys, which all lease their entry.
    queries: BTreeMap<Tick, (Holder, Query<Key>)>,
}

impl Waiting {
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_keys = |size: fn(&WaitingForKey) -> usize| self.of_keys.values().map(size).sum();
        vec![
            ("claims on space", self.claims.len()),
            ("awaited keys", self.of_keys.len()),
            ("waiting selects of keys", of_keys(|it| it.selects.len())),
            ("waiting takes of keys", of_keys(|it| it.takes.len())),
            ("waiting queries", self.queries.len()),
        ]
    }

    pub(super) fn add_claim(&mut self, tick: Tick, claim: Claim) {
        self.claims.insert(tick, claim);
    }

    pub(super) fn first_claim(&self) -> Option<(Tick, Claim)> {
        let (tick, claim) = self.claims.first_key_value()?;
        Some((*tick, *claim))
    }

    pub(super) fn remove_claim(&mut self, tick: Tick) {
        self.claims.remove(&tick);
    }

    pub(super) fn add_select(
        &mut self,
        query: &Query<Key>,
        tick: Tick,
        (holder, access): (Holder, Access),
    ) {
        let Query::Exact(key) = query else {
            self.queries.insert(tick, (holder, query.clone()));
            return;
        };
        let waiting = self.of_keys.entry(Key::clone(key)).or_default();
        match access {
            Access::Open => waiting.selects.insert(tick, holder).is_some(),
            Access::Lease(lease) => waiting.takes.insert(tick, (holder, lease)).is_some(),
        };
    }

    pub(super) fn first_select(&self, key: &[u8]) -> Option<Holder> {
        let (_, holder) = self.of_keys.get(key)?.selects.first_key_value()?;
        Some(*holder)
    }

    /// The first select that leases an entry of this key.
    pub(super) fn first_lease(&self, key: &[u8]) -> Option<(Holder, Option<Duration>)> {
        if let Some(waiting) = self.of_keys.get(key) {
            return waiting.takes.first_key_value().map(|(_, take)| *take);
        }
        let mut queries = self.queries.values();
        let first = queries.find(|(_, query)| query.matches(key));
        first.map(|(holder, _)| (*holder, None))
    }

    pub(super) fn is_awaited(&self, key: &[u8]) -> bool {
        self.of_keys.contains_key(key)
    }

    /// All selects and takes of a key.
    pub(super) fn of_key(&self, key: &[u8]) -> Vec<Holder> {
        let Some(waiting) = self.of_keys.get(key) else {
            return Vec::new();
        };
        let takes = waiting.takes.values().map(|(holder, _)| *holder);
        waiting.selects.values().copied().chain(takes).collect()
    }

    pub(super) fn remove_select(&mut self, query: &Query<Key>, tick: Tick, access: Access) {
        let Query::Exact(key) = query else {
            self.queries.remove(&tick);
            return;
        };
        let Some(waiting) = self.of_keys.get_mut(key) else {
            return;
        };
        match access {
            Access::Open => waiting.selects.remove(&tick).is_some(),
            Access::Lease(_) => waiting.takes.remove(&tick).is_some(),
        };
        if waiting.selects.is_empty() && waiting.takes.is_empty() {
            self.of_keys.remove(key);
        }
    }
}
