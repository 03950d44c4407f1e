//! An index of entries by their tokens: finds the one with the longest prefix in common with a query.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::store::Ticket;

/// The visible entries in the order of their tokens; entries of equal tokens in the order of their age.
#[derive(Debug, Default)]
pub(super) struct Index(BTreeMap<Arc<[i64]>, BTreeSet<Ticket>>);

impl Index {
    /// Returns the tokens that the entry should keep: equal tokens are shared.
    pub(super) fn insert(&mut self, tokens: Arc<[i64]>, entry: Ticket) -> Arc<[i64]> {
        let place = self.0.entry(tokens);
        let kept = Arc::clone(place.key());
        place.or_default().insert(entry);
        kept
    }

    pub(super) fn remove(&mut self, tokens: &[i64], entry: Ticket) {
        if let Some(entries) = self.0.get_mut(tokens) {
            entries.remove(&entry);
            if entries.is_empty() {
                self.0.remove(tokens);
            }
        }
    }

    /// The entry with the longest match, the oldest of several.
    pub(super) fn find(&self, query: &[i64]) -> Option<Ticket> {
        self.oldest_extension(query)
            .or_else(|| self.longest_prefix(query))
    }

    /// The oldest of the entries that begin with the whole query: no match is longer.
    fn oldest_extension(&self, query: &[i64]) -> Option<Ticket> {
        self.0
            .range::<[i64], _>((Bound::Included(query), Bound::Unbounded))
            .take_while(|(tokens, _)| tokens.starts_with(query))
            .filter_map(|(_, entries)| entries.first().copied())
            .min()
    }

    /// The longest entry that is a prefix of the query. The greatest entry up to the query either is that prefix, or differs
    /// from the query at some place; no entry longer than their common prefix is a prefix of the query then.
    fn longest_prefix(&self, mut query: &[i64]) -> Option<Ticket> {
        while !query.is_empty() {
            let (tokens, entries) = self
                .0
                .range::<[i64], _>((Bound::Unbounded, Bound::Included(query)))
                .next_back()?;
            let common = common_prefix(tokens, query);
            if common == tokens.len() {
                return entries.first().copied();
            }
            query = &query[..common];
        }
        None
    }
}

/// Tokens match when the shorter ones are a prefix of the longer ones, and not empty.
pub(super) fn is_match(a: &[i64], b: &[i64]) -> bool {
    let len = a.len().min(b.len());
    len > 0 && a[..len] == b[..len]
}

fn common_prefix(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule by brute force: the longest match, then the oldest.
    fn expected(entries: &[Vec<i64>], query: &[i64]) -> Option<Ticket> {
        let matches = entries.iter().zip(0..);
        matches
            .filter(|(tokens, _)| is_match(tokens, query))
            .min_by_key(|(tokens, age)| {
                (usize::MAX - tokens.len().min(query.len()), *age as Ticket)
            })
            .map(|(_, age)| age)
    }

    fn tokens() -> impl Strategy<Value = Vec<i64>> {
        proptest::collection::vec(-1..3i64, 1..6)
    }

    proptest! {
        #[test]
        fn the_longest_match_wins_then_the_oldest(entries in proptest::collection::vec(tokens(), 0..12), query in tokens()) {
            let mut index = Index::default();
            for (tokens, age) in entries.iter().zip(0..) {
                index.insert(tokens.as_slice().into(), age);
            }
            prop_assert_eq!(index.find(&query), expected(&entries, &query));
        }

        #[test]
        fn a_removed_entry_is_not_found(entries in proptest::collection::vec(tokens(), 1..12)) {
            let mut index = Index::default();
            for (tokens, age) in entries.iter().zip(0..) {
                index.insert(tokens.as_slice().into(), age);
            }
            for (tokens, age) in entries.iter().zip(0..) {
                index.remove(tokens, age);
                prop_assert_ne!(index.find(tokens), Some(age));
            }
            prop_assert!(index.0.is_empty());
        }
    }

    #[test]
    fn equal_tokens_are_kept_once() {
        let mut index = Index::default();
        let [a, b] = [1, 2].map(|entry| index.insert([1, 2, 3].into(), entry));
        index.remove(&a, 1);
        let c = index.insert([1, 2, 3].into(), 3);
        assert!(Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&a, &c));
    }

    #[test]
    fn the_shorter_must_be_a_prefix_of_the_longer() {
        assert!(is_match(&[1, 2], &[1, 2, 3]));
        assert!(is_match(&[1, 2, 3], &[1, 2]));
        assert!(!is_match(&[1, 2, 4], &[1, 2, 3]));
        assert!(!is_match(&[], &[1]));
    }
}
