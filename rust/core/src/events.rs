//! A queue from the progress thread to whoever drains it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Events that may wait before minor ones are dropped: whoever reaches the port can cause a line to log.
const MINOR_CAP: usize = 1024;

/// Events in order; clones share the queue.
#[derive(Debug)]
pub struct Events<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    queue: Mutex<VecDeque<T>>,
    has_come: Condvar,
}

impl<T> Clone for Events<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Events<T> {
    fn default() -> Self {
        Self(Arc::new(Shared {
            queue: Mutex::default(),
            has_come: Condvar::new(),
        }))
    }
}

impl<T> Events<T> {
    /// Appends an event.
    pub fn push(&self, event: T) {
        self.lock().push_back(event);
        self.0.has_come.notify_all();
    }

    /// Appends an event that nobody waits for, such as a line to log: while many wait to be drained, it is dropped.
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

    /// Sleeps until there is something to take, for `timeout` at most.
    pub fn wait(&self, timeout: Duration) {
        drop(
            self.0
                .has_come
                .wait_timeout_while(self.lock(), timeout, |queue| queue.is_empty()),
        );
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
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
    fn who_waits_is_woken_by_an_event_and_by_the_end_of_his_time() {
        let events = Events::default();
        events.wait(Duration::from_millis(1));
        assert_eq!(events.drain(), []);
        let began = Instant::now();
        let pushing = events.clone();
        let pusher = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            pushing.push(1);
        });
        events.wait(Duration::from_secs(60));
        assert!(began.elapsed() < Duration::from_secs(30));
        assert_eq!(events.drain(), [1]);
        pusher.join().unwrap();
    }

    #[test]
    fn who_waits_for_what_has_come_does_not_sleep() {
        let events = Events::default();
        events.push(1);
        let began = Instant::now();
        events.wait(Duration::from_secs(60));
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
