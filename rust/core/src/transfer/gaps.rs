//! Bytes of a sequence of runs that have not begun to come, where parts come in any order.

use std::collections::BTreeMap;

use super::outgoing_stream::WINDOW;
use super::region::{Cursor, Run};

/// Gaps of one sequence. As many parts come at once as fit into a window, so that more gaps are an error of the peer.
const GAPS_CAP: usize = 1024;

/// The gaps, by their first bytes: the end of each, and the position of its beginning.
#[derive(Debug)]
pub(super) struct Gaps(BTreeMap<u64, (u64, Cursor)>);

impl Gaps {
    /// No byte has begun to come.
    pub(super) fn new(num_bytes: u64) -> Self {
        let all = (num_bytes > 0).then(|| (0, (num_bytes, Cursor::default())));
        Self(all.into_iter().collect())
    }

    /// The first byte of the first one.
    pub(super) fn first(&self) -> Option<u64> {
        self.0.keys().next().copied()
    }

    /// Takes `len` bytes at `offset` out; the position of the first. None if one of them is taken already, there are none,
    /// or no source would send them now.
    pub(super) fn take(&mut self, runs: &[Run], offset: u64, len: u64) -> Option<Cursor> {
        let (&start, &(end, before)) = self.0.range(..=offset).next_back()?;
        let part_end = offset.checked_add(len).filter(|at| *at <= end)?;
        // A source sends in order, and no further than its credit goes.
        let is_too_far = offset - start > WINDOW;
        if len == 0 || is_too_far || self.0.len() >= GAPS_CAP {
            return None;
        }
        let mut begin = before;
        begin.advance_over(runs, offset - start);
        self.0.remove(&start);
        if start < offset {
            self.0.insert(start, (offset, before));
        }
        if part_end < end {
            let mut after = begin;
            after.advance_over(runs, len);
            self.0.insert(part_end, (end, after));
        }
        Some(begin)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_byte_is_taken_once_in_any_order_and_at_its_position() {
        let runs = [(7, 3), (20, 5)].map(|(to, len)| Run { to, from: 0, len });
        let mut gaps = Gaps::new(8);
        let mut take = |offset, len| {
            let cursor = gaps.take(&runs, offset, len)?;
            Some((
                cursor.bytes_behind(),
                cursor.piece(&runs, 8)?.to,
                gaps.first(),
            ))
        };
        assert_eq!(take(4, 2), Some((4, 21, Some(0))));
        for (offset, len) in [
            (4, 1),
            (3, 2),
            (5, 3),
            (0, 0),
            (7, 2),
            (8, 1),
            (u64::MAX, 2),
        ] {
            assert_eq!(take(offset, len), None, "{offset} {len}");
        }
        assert_eq!(take(0, 2), Some((0, 7, Some(2))));
        assert_eq!(take(6, 2), Some((6, 23, Some(2))));
        assert_eq!(take(2, 2), Some((2, 9, None)));
        assert_eq!(take(2, 2), None);
    }

    proptest! {
        #[test]
        fn parts_of_any_lengths_in_any_order_are_taken_once(
            lens in prop::collection::vec(1..9u64, 1..20), order in any::<prop::sample::Index>()
        ) {
            let num_bytes = lens.iter().sum();
            let runs = [Run { to: 0, from: 0, len: num_bytes }];
            let mut parts: Vec<(u64, u64)> = lens
                .iter()
                .scan(0, |at, len| {
                    *at += len;
                    Some((*at - len, *len))
                })
                .collect();
            let half = order.index(parts.len());
            parts.rotate_left(half);
            parts[half / 2..].reverse();
            let mut gaps = Gaps::new(num_bytes);
            for (offset, len) in &parts {
                let cursor = gaps.take(&runs, *offset, *len);
                prop_assert_eq!(cursor.map(Cursor::bytes_behind), Some(*offset));
                prop_assert!(gaps.take(&runs, *offset, *len).is_none());
            }
            prop_assert_eq!(gaps.first(), None);
        }
    }

    #[test]
    fn a_part_that_is_further_ahead_than_a_window_is_refused() {
        let len = 4 * WINDOW;
        let runs = [Run {
            to: 0,
            from: 0,
            len,
        }];
        let mut gaps = Gaps::new(len);
        assert!(gaps.take(&runs, WINDOW + 1, 1).is_none());
        assert!(gaps.take(&runs, WINDOW, 1).is_some());
        assert!(gaps.take(&runs, len - 1, 1).is_none());
    }

    #[test]
    fn a_peer_does_not_make_more_gaps_than_there_may_be() {
        let runs = [Run {
            to: 0,
            from: 0,
            len: 1 << 20,
        }];
        let mut gaps = Gaps::new(1 << 20);
        let num_taken = (0..1 << 19).take_while(|at| gaps.take(&runs, 2 * at + 1, 1).is_some());
        assert!(num_taken.count() < GAPS_CAP);
    }
}
