//! Operations that wait: reservations for space, selects and takes for a key, each in the order of their calls.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{Holder, Key, Tick};

#[derive(Debug, Default)]
struct WaitingForKey {
    selects: BTreeMap<Tick, Holder>,
    takes: BTreeMap<Tick, (Holder, Duration)>,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    reserves: BTreeMap<Tick, Holder>,
    of_keys: HashMap<Key, WaitingForKey>,
}

impl Waiting {
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_keys = |size: fn(&WaitingForKey) -> usize| self.of_keys.values().map(size).sum();
        vec![
            ("waiting reservations", self.reserves.len()),
            ("awaited keys", self.of_keys.len()),
            ("waiting selects of keys", of_keys(|it| it.selects.len())),
            ("waiting takes of keys", of_keys(|it| it.takes.len())),
        ]
    }

    pub(super) fn add_reserve(&mut self, tick: Tick, holder: Holder) {
        self.reserves.insert(tick, holder);
    }

    pub(super) fn first_reserve(&self) -> Option<(Tick, Holder)> {
        let (tick, holder) = self.reserves.first_key_value()?;
        Some((*tick, *holder))
    }

    pub(super) fn remove_reserve(&mut self, tick: Tick) {
        self.reserves.remove(&tick);
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
