//! The earliest of many deadlines, so that a thread need not look at all of them in every round.

use std::time::Instant;

/// A bound: no deadline that was added is earlier. It may be too early, when that deadline is met.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Earliest(Option<Instant>);

impl Earliest {
    /// Takes one more deadline into account.
    pub(crate) fn add(&mut self, deadline: Option<Instant>) {
        self.0 = self.0.into_iter().chain(deadline).min();
    }

    /// True if a deadline may have passed, which clears the bound. The caller then checks all deadlines, and adds those
    /// to come again.
    pub(crate) fn clear_if_past(&mut self, now: Instant) -> bool {
        self.0.take_if(|at| *at <= now).is_some()
    }

    /// Time of the next check.
    pub(crate) fn at(&self) -> Option<Instant> {
        self.0
    }
}
