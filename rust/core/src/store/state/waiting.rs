//! What waits: reservations and loads for space, selects and takes for a key, each in the order of their calls.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{Holder, Key, Tick, ValueId};

/// Waiters for space in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    Reservation(Holder),
    /// Of a value that is on disk.
    Load(ValueId),
}

#[derive(Debug, Default)]
struct WaitingForKey {
    selects: BTreeMap<Tick, Holder>,
    takes: BTreeMap<Tick, (Holder, Duration)>,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    claims: BTreeMap<Tick, Claim>,
    of_keys: HashMap<Key, WaitingForKey>,
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
        key: &Key,
        tick: Tick,
        (holder, lease): (Holder, Option<Duration>),
    ) {
        let waiting = self.of_keys.entry(Key::clone(key)).or_default();
        match lease {
            None => waiting.selects.insert(tick, holder).is_some(),
            Some(lease) => waiting.takes.insert(tick, (holder, lease)).is_some(),
        };
    }

    pub(super) fn first_select(&self, key: &[u8]) -> Option<Holder> {
        let (_, holder) = self.of_keys.get(key)?.selects.first_key_value()?;
        Some(*holder)
    }

    pub(super) fn first_take(&self, key: &[u8]) -> Option<(Holder, Duration)> {
        let (_, take) = self.of_keys.get(key)?.takes.first_key_value()?;
        Some(*take)
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

    pub(super) fn remove_select(&mut self, key: &[u8], tick: Tick, is_take: bool) {
        let Some(waiting) = self.of_keys.get_mut(key) else {
            return;
        };
        if is_take {
            waiting.takes.remove(&tick);
        } else {
            waiting.selects.remove(&tick);
        }
        if waiting.selects.is_empty() && waiting.takes.is_empty() {
            self.of_keys.remove(key);
        }
    }
}
