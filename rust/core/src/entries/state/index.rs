//! The index of entries by their keys.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use super::{EntryId, Key};

/// Bytes of a token in the key of a lookup buffer's entry.
pub(in super::super) const TOKEN_BYTES: usize = size_of::<i64>();

/// The entry that a select requests. `K` is its key, borrowed or kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Query<K> {
    /// The entry of this key.
    Exact(K),
    /// The oldest entry.
    Oldest,
    /// The entry whose tokens have the longest prefix in common with these, the oldest of several. Not empty.
    LongestPrefix(K),
}

impl<K: AsRef<[u8]>> Query<K> {
    pub(in super::super) fn into_kept(self) -> Query<Key>
    where
        K: Into<Key>,
    {
        match self {
            Self::Exact(key) => Query::Exact(key.into()),
            Self::Oldest => Query::Oldest,
            Self::LongestPrefix(tokens) => Query::LongestPrefix(tokens.into()),
        }
    }

    /// Itself, with a key for a message.
    pub(in super::super) fn as_borrowed(&self) -> Query<Cow<'_, [u8]>> {
        match self {
            Self::Exact(key) => Query::Exact(key.as_ref().into()),
            Self::Oldest => Query::Oldest,
            Self::LongestPrefix(tokens) => Query::LongestPrefix(tokens.as_ref().into()),
        }
    }

    /// Bytes that it occupies while it waits.
    pub(in super::super) fn num_bytes(&self) -> usize {
        match self {
            Self::Oldest => 0,
            Self::Exact(key) | Self::LongestPrefix(key) => key.as_ref().len(),
        }
    }

    pub(super) fn matches(&self, key: &[u8]) -> bool {
        match self {
            Self::Exact(wanted) => wanted.as_ref() == key,
            Self::Oldest => true,
            Self::LongestPrefix(tokens) => is_match(tokens.as_ref(), key),
        }
    }
}

/// The object of a key of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    Entry(EntryId),
    Reserved,
}

/// The entries that can be found.
#[derive(Debug)]
pub(super) enum Index {
    /// Of a store: each key has one entry, which is found while it is leased too, or one reservation.
    Unique(HashMap<Key, Slot>),
    /// Of a lookup buffer: without the entries that are leased.
    Ordered(OrderedIndex),
}

impl Index {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Unique(slots) => slots.len(),
            Self::Ordered(ordered) => ordered.by_key.len().max(ordered.by_age.len()),
        }
    }

    pub(super) fn find<K: AsRef<[u8]>>(&self, query: &Query<K>) -> Option<EntryId> {
        match (self, query) {
            (Self::Unique(slots), Query::Exact(key)) => match slots.get(key.as_ref())? {
                Slot::Entry(id) => Some(*id),
                Slot::Reserved => None,
            },
            (Self::Ordered(ordered), Query::Oldest) => ordered.by_age.first().copied(),
            (Self::Ordered(ordered), Query::LongestPrefix(tokens)) => ordered.find(tokens.as_ref()),
            (Self::Unique(_), Query::Oldest | Query::LongestPrefix(_))
            | (Self::Ordered(_), Query::Exact(_)) => None,
        }
    }

    /// True if no other entry of this key can come.
    pub(super) fn is_occupied(&self, key: &[u8]) -> bool {
        matches!(self, Self::Unique(slots) if slots.contains_key(key))
    }

    pub(super) fn reserve(&mut self, key: &Key) {
        if let Self::Unique(slots) = self {
            slots.insert(Key::clone(key), Slot::Reserved);
        }
    }

    /// A reservation has ended.
    pub(super) fn unreserve(&mut self, key: &[u8]) {
        if let Self::Unique(slots) = self {
            slots.remove(key);
        }
    }

    /// An entry is committed, or its lease has ended without its end. Returns the key that the entry should keep: equal
    /// keys are shared.
    pub(super) fn show(&mut self, key: &Key, id: EntryId) -> Key {
        match self {
            Self::Unique(slots) => {
                slots.insert(Key::clone(key), Slot::Entry(id));
                Key::clone(key)
            }
            Self::Ordered(ordered) => ordered.insert(key, id),
        }
    }

    /// An entry is leased.
    pub(super) fn lease(&mut self, key: &[u8], id: EntryId) {
        if let Self::Ordered(ordered) = self {
            ordered.remove(key, id);
        }
    }

    /// An entry can be found no longer.
    pub(super) fn hide(&mut self, key: &[u8], id: EntryId) {
        match self {
            Self::Unique(slots) => {
                slots.remove(key);
            }
            Self::Ordered(ordered) => ordered.remove(key, id),
        }
    }
}

/// Entries in the order of their keys, and of their age. A key is a sequence of tokens of [`TOKEN_BYTES`] each.
#[derive(Debug, Default)]
pub(super) struct OrderedIndex {
    by_key: BTreeMap<Key, BTreeSet<EntryId>>,
    by_age: BTreeSet<EntryId>,
}

impl OrderedIndex {
    fn insert(&mut self, key: &Key, id: EntryId) -> Key {
        self.by_age.insert(id);
        let place = self.by_key.entry(Key::clone(key));
        let kept = Key::clone(place.key());
        place.or_default().insert(id);
        kept
    }

    fn remove(&mut self, key: &[u8], id: EntryId) {
        self.by_age.remove(&id);
        if let Some(entries) = self.by_key.get_mut(key) {
            entries.remove(&id);
            if entries.is_empty() {
                self.by_key.remove(key);
            }
        }
    }

    /// The entry with the longest match, the oldest of several.
    fn find(&self, tokens: &[u8]) -> Option<EntryId> {
        self.oldest_extension(tokens)
            .or_else(|| self.longest_prefix(tokens))
    }

    /// The oldest of the entries that begin with the whole query: no match is longer.
    fn oldest_extension(&self, tokens: &[u8]) -> Option<EntryId> {
        self.by_key
            .range::<[u8], _>((Bound::Included(tokens), Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(tokens))
            .filter_map(|(_, entries)| entries.first().copied())
            .min()
    }

    /// The longest entry that is a prefix of the query. The greatest entry up to the query either is that prefix, or differs
    /// from the query at some place; no entry longer than their common prefix is a prefix of the query then.
    fn longest_prefix(&self, mut tokens: &[u8]) -> Option<EntryId> {
        while !tokens.is_empty() {
            let (key, entries) = self
                .by_key
                .range::<[u8], _>((Bound::Unbounded, Bound::Included(tokens)))
                .next_back()?;
            let common = common_prefix(key, tokens);
            if common == key.len() {
                return entries.first().copied();
            }
            tokens = &tokens[..common];
        }
        None
    }
}

/// Tokens match when the shorter ones are a prefix of the longer ones, and not empty.
fn is_match(a: &[u8], b: &[u8]) -> bool {
    let len = a.len().min(b.len());
    len > 0 && a[..len] == b[..len]
}

/// Bytes of the tokens that both begin with.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let pairs = a.chunks_exact(TOKEN_BYTES).zip(b.chunks_exact(TOKEN_BYTES));
    pairs.take_while(|(a, b)| a == b).count() * TOKEN_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(tokens: &[i64]) -> Key {
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect()
    }

    fn index(entries: &[Vec<i64>]) -> OrderedIndex {
        let mut index = OrderedIndex::default();
        for (tokens, age) in entries.iter().zip(0..) {
            index.insert(&key(tokens), age);
        }
        index
    }

    /// The rule by brute force: the longest match, then the oldest.
    fn expected(entries: &[Vec<i64>], query: &[i64]) -> Option<EntryId> {
        let matches = entries.iter().zip(0..);
        matches
            .filter(|(tokens, _)| {
                let len = tokens.len().min(query.len());
                tokens[..len] == query[..len]
            })
            .min_by_key(|(tokens, age)| {
                (usize::MAX - tokens.len().min(query.len()), *age as EntryId)
            })
            .map(|(_, age)| age)
    }

    /// Tokens that differ in their first and in their last byte.
    fn tokens() -> impl Strategy<Value = Vec<i64>> {
        let token = prop_oneof![Just(-1), Just(0), Just(1), Just(1 << 56)];
        proptest::collection::vec(token, 1..6)
    }

    proptest! {
        #[test]
        fn the_longest_match_wins_then_the_oldest(entries in proptest::collection::vec(tokens(), 0..12), query in tokens()) {
            prop_assert_eq!(index(&entries).find(&key(&query)), expected(&entries, &query));
        }

        #[test]
        fn a_removed_entry_is_not_found(entries in proptest::collection::vec(tokens(), 1..12)) {
            let mut index = index(&entries);
            for (tokens, age) in entries.iter().zip(0..) {
                index.remove(&key(tokens), age);
                prop_assert_ne!(index.find(&key(tokens)), Some(age));
            }
            prop_assert!(index.by_key.is_empty() && index.by_age.is_empty());
        }
    }

    #[test]
    fn equal_keys_are_kept_once() {
        let mut index = OrderedIndex::default();
        let [a, b] = [1, 2].map(|entry| index.insert(&key(&[1, 2, 3]), entry));
        index.remove(&a, 1);
        let c = index.insert(&key(&[1, 2, 3]), 3);
        assert!(Key::ptr_eq(&a, &b) && Key::ptr_eq(&a, &c));
    }

    #[test]
    fn the_shorter_must_be_a_prefix_of_the_longer() {
        let is_match = |a: &[i64], b: &[i64]| Query::LongestPrefix(key(a)).matches(&key(b));
        assert!(is_match(&[1, 2], &[1, 2, 3]));
        assert!(is_match(&[1, 2, 3], &[1, 2]));
        assert!(!is_match(&[1, 2, 4], &[1, 2, 3]));
        assert!(!is_match(&[], &[1]));
    }
}
