//! Room that peers share. One peer may have all of it while nobody else wants any; once it is full, whoever has most of it
//! makes place for one who has less, so that none can shut out others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::ids::SessionKey;

/// A place of which it is known which session has it.
pub(crate) trait Waiter {
    fn session(&self) -> SessionKey;
}

/// At most so many places, in the order in which they were taken. How many each session has is counted as they come and go: a
/// peer that asks on although it has most costs no look at all of them.
#[derive(Debug)]
pub(crate) struct FairWaitlist<T> {
    waiting: Vec<T>,
    held: HashMap<SessionKey, usize>,
    cap: usize,
}

impl<T: Waiter> FairWaitlist<T> {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            waiting: Vec::new(),
            held: HashMap::new(),
            cap,
        }
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.waiting.iter()
    }

    /// Lets `one` wait, and returns what may not: nothing while there is room, else the latest of the peer that has most.
    pub(crate) fn admit(&mut self, one: T) -> Option<T> {
        if self.waiting.len() < self.cap {
            self.put(one);
            return None;
        }
        let most = self.held.values().copied().max().unwrap_or(0);
        // With one less than another it would only change places with it, again and again.
        if self.held_by(one.session()) + 1 >= most {
            return Some(one);
        }
        let has_most = |other: &T| self.held_by(other.session()) == most;
        let Some(latest) = self.waiting.iter().rposition(has_most) else {
            return Some(one);
        };
        let displaced = self.waiting.remove(latest);
        self.give_up(displaced.session());
        self.put(one);
        Some(displaced)
    }

    /// Ends the wait of those that it is said of, and returns them.
    pub(crate) fn remove_if(&mut self, mut is_over: impl FnMut(&T) -> bool) -> Vec<T> {
        let over = self.waiting.extract_if(.., |one| is_over(one));
        let taken: Vec<T> = over.collect();
        for one in &taken {
            self.give_up(one.session());
        }
        taken
    }

    fn put(&mut self, one: T) {
        *self.held.entry(one.session()).or_default() += 1;
        self.waiting.push(one);
    }

    fn held_by(&self, session: SessionKey) -> usize {
        self.held.get(&session).map_or(0, |held| *held)
    }

    fn give_up(&mut self, session: SessionKey) {
        if let Entry::Occupied(mut held) = self.held.entry(session) {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }
}

/// Tells a peer why one of its `what` may not wait.
pub(crate) fn waitlist_full(what: &str, cap: usize) -> String {
    format!(
        "{cap} {what} wait here, more cannot, and no other peer has more of them than this one; ask for fewer at once"
    )
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
    fn one_peer_alone_has_all_the_room_and_no_more() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((1, CAP)), Some((1, CAP)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn the_latest_of_who_has_most_makes_place() {
        let mut waitlist = filled_by(1);
        assert_eq!(waitlist.admit((2, 0)), Some((1, CAP - 1)));
        assert_eq!(waitlist.admit((2, 1)), Some((1, CAP - 2)));
        assert_eq!(waitlist.iter().len(), CAP);
    }

    #[test]
    fn in_the_end_all_have_as_much_whoever_came_first_or_asks_most() {
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

    /// Whatever came and went: what each has is what is counted of it.
    #[test]
    fn a_place_that_is_given_up_counts_no_more() {
        let mut waitlist = filled_by(1);
        waitlist.admit((2, 0));
        let taken = waitlist.remove_if(|(session, n)| *session == 2 || *n < 4);
        assert_eq!(taken, [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]);
        assert_eq!(waitlist.held, HashMap::from([(1, CAP - 5)]));
        waitlist.remove_if(|_| true);
        assert!(waitlist.held.is_empty(), "no session is remembered");
    }

    /// Counts how often anybody asks whose it is.
    struct Counting(Rc<Cell<usize>>);

    impl Waiter for Counting {
        fn session(&self) -> SessionKey {
            self.0.set(self.0.get() + 1);
            1
        }
    }

    #[test]
    fn a_peer_that_is_refused_costs_no_look_at_those_who_wait() {
        let (mut waitlist, num_looks) = (FairWaitlist::new(CAP), Rc::new(Cell::new(0)));
        for _ in 0..CAP {
            waitlist.admit(Counting(Rc::clone(&num_looks)));
        }
        num_looks.set(0);
        assert!(waitlist.admit(Counting(Rc::clone(&num_looks))).is_some());
        assert_eq!(num_looks.get(), 1, "at itself only");
    }
}
