//! A queue from the progress thread to whoever drains it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

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
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(event);
    }

    /// Takes all events.
    pub fn drain(&self) -> Vec<T> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain(..)
            .collect()
    }
}
