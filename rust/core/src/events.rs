//! A queue of events from the reactor to the thread that drains it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::sync::lock;

/// Most events in the queue before minor ones are dropped: any host that reaches the port can cause a line to log.
const MINOR_CAP: usize = 1024;

/// Events in order; clones share the queue.
#[derive(Debug)]
pub struct Events<T>(Arc<Queue<T>>);

#[derive(Debug)]
struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<T>,
    /// Set by a push, cleared by [`Events::wait`].
    has_new: bool,
    is_closed: bool,
}

impl<T> Clone for Events<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Events<T> {
    fn default() -> Self {
        let state = State {
            waiting: VecDeque::new(),
            has_new: false,
            is_closed: false,
        };
        Self(Arc::new(Queue {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }))
    }
}

impl<T> Events<T> {
    /// Appends an event.
    pub fn push(&self, event: T) {
        let mut state = lock(&self.0.state);
        state.waiting.push_back(event);
        self.announce(&mut state);
    }

    /// Appends an event without a waiter, such as a line to log, or drops it while the queue is long.
    pub fn push_minor(&self, event: T) {
        let mut state = lock(&self.0.state);
        if state.waiting.len() < MINOR_CAP {
            state.waiting.push_back(event);
            self.announce(&mut state);
        }
    }

    fn announce(&self, state: &mut State<T>) {
        state.has_new = true;
        self.0.changed.notify_all();
    }

    /// Blocks until an event has been pushed since the last call, even if it has been drained; false after
    /// [`close`](Self::close).
    pub fn wait(&self) -> bool {
        let state = lock(&self.0.state);
        let waited = self
            .0
            .changed
            .wait_while(state, |state| !state.has_new && !state.is_closed);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.has_new = false;
        !state.is_closed
    }

    /// Ends all waits, now and later.
    pub fn close(&self) {
        lock(&self.0.state).is_closed = true;
        self.0.changed.notify_all();
    }

    /// Number of waiting events.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0.state).waiting.len()
    }

    /// Removes and returns all events.
    pub fn drain(&self) -> Vec<T> {
        lock(&self.0.state).waiting.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_events_are_dropped_while_the_queue_is_long() {
        let events = Events::default();
        for _ in 0..2 * MINOR_CAP {
            events.push_minor(0);
        }
        events.push(1);
        assert_eq!(events.drain().len(), MINOR_CAP + 1);
    }

    #[test]
    fn a_wait_ends_with_an_event_or_with_the_queue() {
        let events = Events::default();
        let pushed = events.clone();
        let thread = std::thread::spawn(move || pushed.push(0));
        assert!(events.wait());
        thread.join().unwrap();
        let closed = events.clone();
        let thread = std::thread::spawn(move || closed.close());
        assert!(!events.wait());
        thread.join().unwrap();
    }
}
