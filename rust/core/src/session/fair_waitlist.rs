//! A quota shared by peers. When it is full, the peer with the largest share gives up one place to a peer with a smaller
//! one, so that no peer can shut out others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::ids::{HandoffId, SessionKey};
use crate::multimap::Multimap;
use crate::reactor::Timers;

/// Waiters on behalf of sessions, until something happens to a handoff.
pub(crate) trait Waiter {
    /// The session.
    fn session(&self) -> SessionKey;
    /// The handoff.
    fn handoff(&self) -> HandoffId;
}

/// Waiters by the numbers of their admissions, up to a cap. Those of a session, those of a handoff and those whose deadline has
/// passed are found without a look at the others.
#[derive(Debug)]
pub(crate) struct FairWaitlist<T> {
    waiting: BTreeMap<u64, T>,
    of_sessions: Multimap<SessionKey, u64>,
    of_handoffs: Multimap<HandoffId, u64>,
    deadlines: Timers<u64>,
    num_admitted: u64,
    cap: usize,
}

impl<T: Waiter> FairWaitlist<T> {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            waiting: BTreeMap::new(),
            of_sessions: Multimap::default(),
            of_handoffs: Multimap::default(),
            deadlines: Timers::default(),
            num_admitted: 0,
            cap,
        }
    }

    /// All waiters, in the order of their admissions.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &T> {
        self.waiting.values()
    }

    /// Sizes: waiters, their sessions, their handoffs, and their deadlines.
    #[cfg(test)]
    pub(crate) fn sizes(&self, names: [&'static str; 4]) -> crate::reactor::manual::Sizes {
        let sizes = [
            self.waiting.len(),
            self.of_sessions.len(),
            self.of_handoffs.len(),
            self.deadlines.len(),
        ];
        names.into_iter().zip(sizes).collect()
    }

    /// Adds a waiter, and returns the one that may not wait: none below the cap, else the latest of the largest share.
    pub(crate) fn admit(&mut self, waiter: T, deadline: Option<Instant>) -> Option<T> {
        let session = waiter.session();
        let mut evicted = None;
        if self.waiting.len() >= self.cap {
            let shares = || self.of_sessions.sets();
            let largest = shares().map(BTreeSet::len).max().unwrap_or(0);
            // With one less than the largest share the two would only change places, again and again.
            if self.of_sessions.num_values(&session) + 1 >= largest {
                return Some(waiter);
            }
            let largest = shares().filter(|share| share.len() == largest);
            let latest = largest.filter_map(BTreeSet::last).max().copied();
            evicted = latest.and_then(|latest| self.remove(latest));
        }
        let number = self.num_admitted;
        self.num_admitted += 1;
        self.of_sessions.insert(session, number);
        self.of_handoffs.insert(waiter.handoff(), number);
        self.waiting.insert(number, waiter);
        self.set_deadline(number, deadline);
        evicted
    }

    pub(crate) fn get(&self, number: u64) -> Option<&T> {
        self.waiting.get(&number)
    }

    /// The numbers of a handoff's waiters, in the order of their admissions.
    pub(crate) fn of_handoff(&self, handoff: &HandoffId) -> Vec<u64> {
        self.of_handoffs.get(handoff).copied().collect()
    }

    /// The number of a waiter of both a session and a handoff.
    pub(crate) fn find(&self, session: SessionKey, handoff: &HandoffId) -> Option<u64> {
        let mut numbers = self.of_handoffs.get(handoff).copied();
        let is_of = |number: &u64| {
            let waiter = self.waiting.get(number);
            waiter.is_some_and(|waiter| waiter.session() == session)
        };
        numbers.find(is_of)
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let waiter = self.waiting.remove(&number)?;
        self.of_sessions.remove(waiter.session(), &number);
        self.of_handoffs.remove(waiter.handoff(), &number);
        self.deadlines.cancel(number);
        Some(waiter)
    }

    /// Removes and returns the waiters of a handoff, in the order of their admissions.
    pub(crate) fn remove_handoff(&mut self, handoff: &HandoffId) -> Vec<T> {
        let numbers = self.of_handoff(handoff);
        let removed = numbers.into_iter().filter_map(|it| self.remove(it));
        removed.collect()
    }

    pub(crate) fn remove_session(&mut self, session: SessionKey) {
        let numbers: Vec<u64> = self.of_sessions.get(&session).copied().collect();
        for number in numbers {
            self.remove(number);
        }
    }

    /// Sets the deadline of a waiter, in place of an earlier one.
    pub(crate) fn set_deadline(&mut self, number: u64, deadline: Option<Instant>) {
        match deadline {
            Some(deadline) => self.deadlines.set(number, deadline),
            None => self.deadlines.cancel(number),
        }
    }

    /// The number of a waiter whose deadline has passed, once: it waits on without one.
    pub(crate) fn pop_expired(&mut self, now: Instant) -> Option<u64> {
        self.deadlines.pop_expired(now)
    }

    /// The earliest deadline.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
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
    use std::time::Duration;

    use super::*;

    const CAP: usize = 12;

    impl Waiter for (SessionKey, usize) {
        fn session(&self) -> SessionKey {
            self.0
        }

        fn handoff(&self) -> HandoffId {
            [self.1 as u8; 16]
        }
    }

    fn filled_by(session: SessionKey) -> FairWaitlist<(SessionKey, usize)> {
        let mut waitlist = FairWaitlist::new(CAP);
        for n in 0..CAP {
            assert_eq!(waitlist.admit((session, n), None), None);
        }
        waitlist
    }

    #[test]
    fn one_peer_alone_has_the_whole_quota_and_no_more() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((1, CAP), None), Some((1, CAP)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn the_latest_waiter_of_the_largest_share_is_evicted() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((2, 0), None), Some((1, CAP - 1)));
        assert_eq!(waitlist.admit((2, 1), None), Some((1, CAP - 2)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn in_the_end_all_shares_are_equal_in_any_order_and_number_of_requests() {
        let mut waitlist = filled_by(1);
        for n in 0..CAP {
            for session in [1, 2, 3, 1, 1] {
                waitlist.admit((session, n), None);
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

    /// Waiters that have been removed leave nothing behind.
    fn assert_empty(waitlist: &mut FairWaitlist<(SessionKey, usize)>) {
        assert_eq!(waitlist.next_deadline(), None);
        let sizes = waitlist.sizes(["waiters", "sessions", "handoffs", "deadlines"]);
        assert!(sizes.iter().all(|(_, size)| *size == 0), "{sizes:?}");
    }

    #[test]
    fn a_waiter_that_is_removed_counts_no_more() {
        let mut waitlist = filled_by(1);
        waitlist.admit((2, 3), None);
        assert_eq!(waitlist.remove_handoff(&[3; 16]), [(1, 3), (2, 3)]);
        assert_eq!(waitlist.find(2, &[3; 16]), None);
        for n in [0, 1] {
            assert_eq!(waitlist.admit((2, n), None), None, "there is room again");
        }
        waitlist.remove_session(1);
        assert!(waitlist.iter().eq(&[(2, 0), (2, 1)]));
        assert_eq!(waitlist.of_handoff(&[4; 16]), [0; 0]);
        let number = waitlist.find(2, &[1; 16]).expect("it waits");
        assert_eq!(waitlist.remove(number), Some((2, 1)));
        assert_eq!(waitlist.remove(number), None);
        waitlist.remove_session(2);
        assert_empty(&mut waitlist);
    }

    #[test]
    fn a_waiter_expires_once_unless_it_was_removed_evicted_or_given_another_deadline() {
        let (mut waitlist, now) = (FairWaitlist::new(3), Instant::now());
        let later = now + Duration::from_secs(1);
        for n in 0..3 {
            waitlist.admit((1, n), Some(now));
        }
        assert_eq!(waitlist.admit((2, 0), Some(later)), Some((1, 2)));
        waitlist.set_deadline(0, None);
        assert_eq!(waitlist.pop_expired(now), Some(1));
        assert_eq!(waitlist.pop_expired(now), None);
        assert_eq!(waitlist.next_deadline(), Some(later));
        waitlist.set_deadline(1, Some(now));
        waitlist.remove_handoff(&[0; 16]);
        assert_eq!(waitlist.next_deadline(), Some(now));
        waitlist.remove(1);
        assert_empty(&mut waitlist);
    }

    /// Counts how often its session is asked for.
    struct Counting(Rc<Cell<usize>>);

    impl Waiter for Counting {
        fn session(&self) -> SessionKey {
            self.0.set(self.0.get() + 1);
            1
        }

        fn handoff(&self) -> HandoffId {
            [1; 16]
        }
    }

    #[test]
    fn a_peer_that_is_refused_costs_no_scan_of_the_waiters() {
        let (mut waitlist, num_looks) = (FairWaitlist::new(CAP), Rc::new(Cell::new(0)));
        for _ in 0..CAP {
            waitlist.admit(Counting(Rc::clone(&num_looks)), None);
        }
        num_looks.set(0);
        assert!(
            waitlist
                .admit(Counting(Rc::clone(&num_looks)), None)
                .is_some()
        );
        assert_eq!(num_looks.get(), 1, "at itself only");
    }
}
