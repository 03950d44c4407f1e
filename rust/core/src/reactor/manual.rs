//! Reactors without a thread: whoever made one runs it, a round at a time, so that the same bytes always lead to the same
//! end. For fuzzing.

use std::cell::Cell;

use super::Reactor;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether reactors that this thread makes get no thread, nor what they connect with.
pub(super) fn is_on() -> bool {
    IS_ON.get()
}

/// Makes reactors, or runs them, without threads of theirs.
pub fn without_threads<T>(what: impl FnOnce() -> T) -> T {
    IS_ON.set(true);
    let made = what();
    IS_ON.set(false);
    made
}

/// How a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// There is more to do.
    Busy,
    /// It would sleep now.
    AtRest {
        /// Its connections.
        num_sessions: usize,
    },
    /// The reactor has ended.
    Over,
}

impl<C> Reactor<C> {
    /// Looks at everything once.
    pub fn round(&self) -> Round {
        without_threads(|| self.driver.run_once())
    }
}
