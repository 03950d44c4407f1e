//! A queue of events from the reactor to the thread that drains it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

/// Most events in the queue before minor ones are dropped: anybody who reaches the port can cause a line to log.
const MINOR_CAP: usize = 1024;

/// Events in order; clones share the queue.
#[derive(Debug)]
pub struct Events<T>(Arc<Mutex<VecDeque<T>>>);

impl<T> Clone for Events<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Events<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Events<T> {
    /// Appends an event.
    pub fn push(&self, event: T) {
        lock(&self.0).push_back(event);
    }

    /// Appends an event that nobody waits for, such as a line to log, or drops it while the queue is long.
    pub fn push_minor(&self, event: T) {
        let mut events = lock(&self.0);
        if events.len() < MINOR_CAP {
            events.push_back(event);
        }
    }

    /// How many wait.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Removes and returns all events.
    pub fn drain(&self) -> Vec<T> {
        lock(&self.0).drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_events_are_dropped_when_nobody_drains() {
        let events = Events::default();
        for _ in 0..2 * MINOR_CAP {
            events.push_minor(0);
        }
        events.push(1);
        assert_eq!(events.drain().len(), MINOR_CAP + 1);
    }
}
