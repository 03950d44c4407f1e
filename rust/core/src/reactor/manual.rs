//! Reactors without a thread. Their maker runs them round by round, so that the same bytes always have the same effects.
//! For fuzzing and tests.

use std::cell::Cell;

use super::Reactor;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Size of each map and queue of an owner, by its name in `docs/internals/reactor.md`.
#[cfg(test)]
pub(crate) type Sizes = Vec<(&'static str, usize)>;

/// True if reactors that this thread makes have no thread of their own, and connect on the calling thread.
pub(super) fn is_on() -> bool {
    IS_ON.get()
}

/// Makes reactors, or runs them, without threads of their own.
pub fn without_threads<T>(what: impl FnOnce() -> T) -> T {
    IS_ON.set(true);
    let made = what();
    IS_ON.set(false);
    made
}

/// Outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// There is more to do now.
    Busy,
    /// It would sleep now.
    AtRest {
        /// Its sockets.
        num_sessions: usize,
    },
    /// The reactor has ended.
    Over,
}

impl<C> Reactor<C> {
    /// Runs one round.
    pub(crate) fn round(&self) -> Round {
        without_threads(|| self.driver.run_once())
    }

    /// Sizes of the handler's maps and queues between two rounds; empty once it has ended.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> Sizes {
        self.driver.sizes()
    }
}
