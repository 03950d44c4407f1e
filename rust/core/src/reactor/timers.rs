//! Deadlines of many objects at once, by their keys.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::Hash;
use std::time::Instant;

/// One deadline for each key. Setting and expiring cost O(log n), also where deadlines move all the time.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    deadlines: HashMap<K, Instant>,
    /// The deadlines in order, among others that were moved or cancelled since.
    heap: BinaryHeap<Reverse<(Instant, K)>>,
}

impl<K: Ord> Default for Timers<K> {
    fn default() -> Self {
        Self {
            deadlines: HashMap::new(),
            heap: BinaryHeap::new(),
        }
    }
}

impl<K: Copy + Hash + Ord> Timers<K> {
    /// Sets the deadline of a key, in place of an earlier one.
    pub(crate) fn set(&mut self, key: K, deadline: Instant) {
        if self.deadlines.insert(key, deadline) != Some(deadline) {
            self.heap.push(Reverse((deadline, key)));
        }
        if self.heap.len() > 2 * self.deadlines.len() + 64 {
            let live = self.deadlines.iter().map(|(&key, &at)| Reverse((at, key)));
            self.heap = live.collect();
        }
    }

    /// Removes the deadline of a key.
    pub(crate) fn cancel(&mut self, key: K) {
        self.deadlines.remove(&key);
    }

    /// Removes and returns a key whose deadline has passed.
    pub(crate) fn pop_expired(&mut self, now: Instant) -> Option<K> {
        self.next().filter(|deadline| *deadline <= now)?;
        let Reverse((_, key)) = self.heap.pop()?;
        self.deadlines.remove(&key);
        Some(key)
    }

    /// Number of entries in the heap, those that were moved or cancelled included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    /// The earliest deadline.
    pub(crate) fn next(&mut self) -> Option<Instant> {
        while let Some(Reverse((deadline, key))) = self.heap.peek() {
            if self.deadlines.get(key) == Some(deadline) {
                return Some(*deadline);
            }
            self.heap.pop();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn expired(timers: &mut Timers<u64>, now: Instant) -> Vec<u64> {
        std::iter::from_fn(|| timers.pop_expired(now)).collect()
    }

    #[test]
    fn deadlines_expire_in_order_and_once() {
        let (mut timers, start) = (Timers::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for key in [3, 1, 2] {
            timers.set(key, at(key));
        }
        assert_eq!(timers.next(), Some(at(1)));
        assert_eq!(expired(&mut timers, at(2)), [1, 2]);
        assert_eq!(timers.next(), Some(at(3)));
        assert_eq!(expired(&mut timers, at(9)), [3]);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_deadline_that_is_moved_or_cancelled_counts_no_more() {
        let (mut timers, start) = (Timers::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        timers.set(1, at(1));
        timers.set(1, at(5));
        timers.set(2, at(2));
        timers.set(2, at(1));
        timers.set(3, at(1));
        timers.cancel(3);
        assert_eq!(expired(&mut timers, at(4)), [2]);
        assert_eq!(expired(&mut timers, at(5)), [1]);
    }

    #[test]
    fn moving_one_deadline_for_ever_needs_no_more_memory() {
        let (mut timers, start) = (Timers::default(), Instant::now());
        for count in 0..10_000 {
            timers.set(1, start + Duration::from_millis(count));
        }
        assert!(timers.heap.len() < 100);
    }
}
