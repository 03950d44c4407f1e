//! Whether this is still the process in which something was made.

use std::thread::{Builder, JoinHandle};

use crate::error::{Error, Result};

/// The process that made something. A forked child must not even look at it: descriptors are its parent's, and another
/// thread may have held a lock when it was forked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// One that was forked from this one's parent, or ended.
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

/// A thread that the child of a fork does not have: there its handle may be that of another.
#[derive(Debug)]
pub(crate) struct Thread {
    handle: Option<JoinHandle<()>>,
    process: Process,
}

impl Thread {
    pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<Self> {
        let handle = Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self {
            handle: Some(handle),
            process: Process::this(),
        })
    }

    /// Waits until it has ended.
    pub(crate) fn join(mut self) {
        let is_ours = self.process.check().is_ok();
        if let Some(handle) = self.handle.take_if(|_| is_ours) {
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
