//! The time. Tests run reactors in a time of their own, which they move on: a day passes in seconds.

#[cfg(test)]
use std::cell::Cell;
#[cfg(test)]
use std::time::Duration;
use std::time::Instant;

/// The present time.
#[cfg(not(test))]
pub(crate) fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
thread_local! {
    static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static STOPPED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The present time, as far ahead as the calling thread has moved it.
#[cfg(test)]
pub(crate) fn now() -> Instant {
    STOPPED.get().unwrap_or_else(Instant::now) + AHEAD.get()
}

/// Stops the time of the reactors that the calling thread runs: however long a busy machine keeps it waiting, no deadline
/// passes.
#[cfg(test)]
pub(crate) fn stop() {
    STOPPED.set(Some(Instant::now()));
}

/// Lets time pass for the reactors that the calling thread runs.
#[cfg(test)]
pub(crate) fn advance(by: Duration) {
    AHEAD.set(AHEAD.get() + by);
}
