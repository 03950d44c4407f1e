//! A promise that a value may move between threads with all that it shares.

/// A value that moves between threads with everything that it shares without atomics, such as a worker with its
/// keys, received data and operations. One thread at a time has it.
#[derive(Debug)]
pub struct AssertSend<T>(T);

// SAFETY: by the promise of `new`, no other thread can reach what `T` shares without atomics: the thread with the
// `AssertSend` has all of it. UCX allows any thread to use a worker of UCS_THREAD_MODE_SERIALIZED, one at a time.
unsafe impl<T> Send for AssertSend<T> {}

impl<T> AssertSend<T> {
    /// Makes the value movable.
    ///
    /// # Safety
    /// Whatever `value` shares without atomics (an `Rc`, a raw pointer) must not be reachable but through `value`, now
    /// and as long as this lives: neither from a thread-local nor from another value. `value` must not
    /// depend on the thread that it is used or dropped on.
    pub unsafe fn new(value: T) -> Self {
        Self(value)
    }

    /// The value. A value that is moved out of it must be [`Send`] itself.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }

    /// The value, for the thread that has it.
    pub fn into_inner(self) -> T {
        self.0
    }
}
