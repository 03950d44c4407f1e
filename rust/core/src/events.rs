//! A queue from the progress thread to whoever drains it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Events that may wait before minor ones are dropped: whoever reaches the port can cause a line to log.
const MINOR_CAP: usize = 1024;

/// Events in order; clones share the queue.
#[derive(Debug)]
pub struct Events<T>(Arc<Queue<T>>);

#[derive(Debug)]
struct Queue<T> {
    events: Mutex<VecDeque<T>>,
    came: Condvar,
}

impl<T> Clone for Events<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Events<T> {
    fn default() -> Self {
        Self(Arc::new(Queue {
            events: Mutex::default(),
            came: Condvar::new(),
        }))
    }
}

impl<T> Events<T> {
    /// Appends an event.
    pub fn push(&self, event: T) {
        self.lock().push_back(event);
        self.0.came.notify_one();
    }

    /// Appends an event that nobody waits for, such as a line to log: it ends no wait, and is dropped while many are
    /// there to be drained.
    pub fn push_minor(&self, event: T) {
        let mut events = self.lock();
        if events.len() < MINOR_CAP {
            events.push_back(event);
        }
    }

    /// Takes all events.
    pub fn drain(&self) -> Vec<T> {
        self.lock().drain(..).collect()
    }

    /// Waits until there is something to drain, or so long.
    pub fn wait(&self, timeout: Duration) {
        let came = &self.0.came;
        drop(came.wait_timeout_while(self.lock(), timeout, |events| events.is_empty()));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

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

    #[test]
    fn an_event_ends_the_wait_for_one_and_a_minor_one_does_not() {
        let events = Events::default();
        let pushing = events.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            pushing.push_minor(1);
            std::thread::sleep(Duration::from_millis(50));
            pushing.push(2);
        });
        let began = Instant::now();
        events.wait(Duration::from_secs(60));
        assert_eq!(events.drain(), [1, 2]);
        assert!(began.elapsed() < Duration::from_secs(50));
        thread.join().unwrap();
    }

    #[test]
    fn a_wait_ends_in_time_when_nothing_comes() {
        let events = Events::<u8>::default();
        events.wait(Duration::from_millis(1));
        assert!(events.drain().is_empty());
    }
}
