//! Detection of forks, and threads that a forked child does not join.

use std::thread::{Builder, JoinHandle};

use crate::error::{Error, Result};

/// The process that made an object. A forked child must not touch the object: descriptors are its parent's, and another
/// thread may have held a lock at the fork.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Not this process.
    #[cfg(test)]
    pub(crate) fn another() -> Self {
        Self(0)
    }

    pub(crate) fn check(self) -> Result<()> {
        if self.0 == std::process::id() {
            return Ok(());
        }
        Err(Error::Closed(
            "this object was made before fork(), whose child cannot use it; start processes with spawn or forkserver"
                .to_owned(),
        ))
    }
}

/// A thread of the process that made it. A forked child does not have the thread, and its handle there may name another.
#[derive(Debug)]
pub(crate) struct Thread {
    handle: Option<JoinHandle<()>>,
    process: Process,
}

impl Thread {
    /// # Errors
    /// `Exhausted`: the system gives no thread.
    pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Self> {
        let spawned = Builder::new().name(name.to_owned()).spawn(run);
        let handle = spawned.map_err(|error| Error::Exhausted(format!("no thread: {error}")))?;
        Ok(Self {
            handle: Some(handle),
            process: Process::this(),
        })
    }

    /// Waits for the thread's end.
    pub(crate) fn join(mut self) {
        let is_same_process = self.process.check().is_ok();
        if let Some(handle) = self.handle.take_if(|_| is_same_process) {
            let _ = handle.join();
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if self.process.check().is_err() {
            std::mem::forget(self.handle.take());
        }
    }
}
