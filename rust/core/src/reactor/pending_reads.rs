//! Reads that UCX has not ended although their reactor has. Their memory is kept until it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Their number, 0 while the reactor runs. It goes down as they end.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingReads(Arc<AtomicUsize>);

impl PendingReads {
    /// For the worker, which counts them when it ends.
    pub(crate) fn counter(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.0)
    }

    /// The error of an operation that the reactor's end has ended: `reason`, and whether memory may still be written to.
    pub(crate) fn closed(&self, reason: &str) -> Error {
        Error::Closed(match self.describe() {
            None => reason.to_owned(),
            Some(pending) => format!("{reason}, but {pending}"),
        })
    }

    /// Checks that no read of the reactor is pending.
    ///
    /// # Errors
    /// `Timeout` says how many reads have not ended.
    pub(crate) fn check(&self) -> Result<()> {
        match self.describe() {
            None => Ok(()),
            Some(pending) => Err(Error::Timeout(format!(
                "closed, but {pending}; close again to see whether they have ended"
            ))),
        }
    }

    fn describe(&self) -> Option<String> {
        let reads = self.0.load(Ordering::Acquire);
        (reads > 0).then(|| {
            format!(
                "{reads} reads have not ended: memory that they were given may still be written to, kvpipe keeps it \
                 alive; do not use it again, take other memory"
            )
        })
    }
}

#[cfg(test)]
impl PendingReads {
    /// Sets their number.
    pub(crate) fn pretend(&self, reads: usize) {
        self.0.store(reads, Ordering::Release);
    }
}
