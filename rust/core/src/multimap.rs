//! Several values for each key: an index of everything that belongs to one session, or to one handoff.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// A set of values for each key. A key whose last value is removed takes no memory.
#[derive(Debug)]
pub(crate) struct Multimap<K, V>(HashMap<K, BTreeSet<V>>);

impl<K, V> Default for Multimap<K, V> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash, V: Ord> Multimap<K, V> {
    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.0.entry(key).or_default().insert(value);
    }

    pub(crate) fn remove(&mut self, key: K, value: &V) {
        if let Entry::Occupied(mut values) = self.0.entry(key) {
            values.get_mut().remove(value);
            if values.get().is_empty() {
                values.remove();
            }
        }
    }

    /// Removes a key, and returns its values.
    pub(crate) fn remove_key(&mut self, key: &K) -> BTreeSet<V> {
        self.0.remove(key).unwrap_or_default()
    }

    /// The values of a key, in ascending order.
    pub(crate) fn get(&self, key: &K) -> impl Iterator<Item = &V> {
        self.0.get(key).into_iter().flatten()
    }

    /// The values of a key that are not below `from`, in ascending order.
    pub(crate) fn get_from(&self, key: &K, from: V) -> impl Iterator<Item = &V> {
        let values = self.0.get(key).into_iter();
        values.flat_map(move |values| values.range(&from..))
    }

    /// Number of values of a key.
    pub(crate) fn num_values(&self, key: &K) -> usize {
        self.0.get(key).map_or(0, BTreeSet::len)
    }

    /// The values of each key.
    pub(crate) fn sets(&self) -> impl Iterator<Item = &BTreeSet<V>> {
        self.0.values()
    }

    /// Number of keys with values.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_forgotten_with_its_last_value() {
        let mut map = Multimap::default();
        for value in [3, 1, 2, 3] {
            map.insert("a", value);
        }
        map.insert("b", 4);
        assert!(map.get(&"a").eq(&[1, 2, 3]));
        assert!(map.get_from(&"a", 2).eq(&[2, 3]));
        map.remove("b", &5);
        assert_eq!((map.num_values(&"b"), map.len()), (1, 2));
        map.remove("b", &4);
        assert_eq!(map.remove_key(&"a"), BTreeSet::from([1, 2, 3]));
        assert_eq!((map.get(&"a").count(), map.len()), (0, 0));
    }
}
