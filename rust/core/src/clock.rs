//! The time. Reactors without threads run in a time of their own, which their maker moves on: a day passes in seconds.

#[cfg(any(test, feature = "fuzzing"))]
use std::cell::Cell;
#[cfg(any(test, feature = "fuzzing"))]
use std::time::Duration;
use std::time::Instant;

/// The present time.
#[cfg(not(any(test, feature = "fuzzing")))]
pub(crate) fn now() -> Instant {
    Instant::now()
}

#[cfg(any(test, feature = "fuzzing"))]
thread_local! {
    static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The present time, as far ahead as the calling thread has moved it.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn now() -> Instant {
    Instant::now() + AHEAD.get()
}

/// Lets time pass for the reactors that the calling thread runs.
#[cfg(any(test, feature = "fuzzing"))]
pub fn advance(by: Duration) {
    AHEAD.set(AHEAD.get() + by);
}
