//! A quota shared by peers. When it is full, the peer with the largest share gives up one place to a peer with a smaller
//! one, so that no peer can shut out others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::ids::SessionKey;

/// What waits on behalf of a session.
pub(crate) trait Waiter {
    /// The session.
    fn session(&self) -> SessionKey;
}

/// Waiters in the order in which they were admitted, up to a cap. The number of each session's is kept: a peer that asks on
/// although it has the largest share costs no scan.
#[derive(Debug)]
pub(crate) struct FairWaitlist<T> {
    waiting: Vec<T>,
    shares: HashMap<SessionKey, usize>,
    cap: usize,
}

impl<T: Waiter> FairWaitlist<T> {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            waiting: Vec::new(),
            shares: HashMap::new(),
            cap,
        }
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.waiting.iter()
    }

    /// Sessions that have waiters.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn num_sessions(&self) -> usize {
        self.shares.len()
    }

    /// Adds a waiter, and returns the one that may not wait: none below the cap, else the latest of the largest share.
    pub(crate) fn admit(&mut self, waiter: T) -> Option<T> {
        if self.waiting.len() < self.cap {
            self.push(waiter);
            return None;
        }
        let largest = self.shares.values().copied().max().unwrap_or(0);
        // With one less than the largest share the two would only change places, again and again.
        if self.share_of(waiter.session()) + 1 >= largest {
            return Some(waiter);
        }
        let has_largest = |other: &T| self.share_of(other.session()) == largest;
        let Some(latest) = self.waiting.iter().rposition(has_largest) else {
            return Some(waiter);
        };
        let evicted = self.waiting.remove(latest);
        self.uncount(evicted.session());
        self.push(waiter);
        Some(evicted)
    }

    /// Removes and returns the waiters for which `is_over` holds.
    pub(crate) fn remove_if(&mut self, mut is_over: impl FnMut(&T) -> bool) -> Vec<T> {
        let over = self.waiting.extract_if(.., |waiter| is_over(waiter));
        let removed: Vec<T> = over.collect();
        for waiter in &removed {
            self.uncount(waiter.session());
        }
        removed
    }

    fn push(&mut self, waiter: T) {
        *self.shares.entry(waiter.session()).or_default() += 1;
        self.waiting.push(waiter);
    }

    fn share_of(&self, session: SessionKey) -> usize {
        self.shares.get(&session).map_or(0, |share| *share)
    }

    fn uncount(&mut self, session: SessionKey) {
        if let Entry::Occupied(mut share) = self.shares.entry(session) {
            *share.get_mut() -= 1;
            if *share.get() == 0 {
                share.remove();
            }
        }
    }
}

/// The reason that a peer gets whose `what` may not wait.
pub(crate) fn waitlist_full(what: &str, cap: usize) -> String {
    format!("too many pending {what} (limit {cap}); ask for fewer at once")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    const CAP: usize = 12;

    impl Waiter for (SessionKey, usize) {
        fn session(&self) -> SessionKey {
            self.0
        }
    }

    fn filled_by(session: SessionKey) -> FairWaitlist<(SessionKey, usize)> {
        let mut waitlist = FairWaitlist::new(CAP);
        for n in 0..CAP {
            assert_eq!(waitlist.admit((session, n)), None);
        }
        waitlist
    }

    #[test]
    fn one_peer_alone_has_the_whole_quota_and_no_more() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((1, CAP)), Some((1, CAP)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn the_latest_waiter_of_the_largest_share_is_evicted() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((2, 0)), Some((1, CAP - 1)));
        assert_eq!(waitlist.admit((2, 1)), Some((1, CAP - 2)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn in_the_end_all_shares_are_equal_whoever_came_first_or_asks_most() {
        let mut waitlist = filled_by(1);
        for n in 0..CAP {
            for session in [1, 2, 3, 1, 1] {
                waitlist.admit((session, n));
            }
        }
        let held = |session| {
            waitlist
                .iter()
                .filter(|(other, _)| *other == session)
                .count()
        };
        assert_eq!([1, 2, 3].map(held), [CAP / 3; 3]);
    }

    #[test]
    fn a_waiter_that_is_removed_counts_no_more() {
        let mut waitlist = filled_by(1);
        waitlist.admit((2, 0));
        let taken = waitlist.remove_if(|(session, n)| *session == 2 || *n < 4);
        assert_eq!(taken, [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]);
        assert_eq!(waitlist.shares, HashMap::from([(1, CAP - 5)]));
        waitlist.remove_if(|_| true);
        assert!(waitlist.shares.is_empty(), "no session is remembered");
    }

    /// Counts how often its session is asked for.
    struct Counting(Rc<Cell<usize>>);

    impl Waiter for Counting {
        fn session(&self) -> SessionKey {
            self.0.set(self.0.get() + 1);
            1
        }
    }

    #[test]
    fn a_peer_that_is_refused_costs_no_scan_of_the_waiters() {
        let (mut waitlist, num_looks) = (FairWaitlist::new(CAP), Rc::new(Cell::new(0)));
        for _ in 0..CAP {
            waitlist.admit(Counting(Rc::clone(&num_looks)));
        }
        num_looks.set(0);
        assert!(waitlist.admit(Counting(Rc::clone(&num_looks))).is_some());
        assert_eq!(num_looks.get(), 1, "at itself only");
    }
}
