//! Reads that UCX has not ended although their reactor has: the memory that they were given is kept until it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Their number, 0 while the reactor runs. It goes down as they end.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingReads(Arc<AtomicUsize>);

impl PendingReads {
    /// For who ends the worker.
    pub(crate) fn counter(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.0)
    }

    /// The error of what the reactor's end has ended: `reason`, and what is to be known of memory that was read into.
    pub(crate) fn closed(&self, reason: &str) -> Error {
        let pending = self.describe();
        Error::Closed(pending.map_or_else(
            || reason.to_owned(),
            |pending| format!("{reason}, but {pending}"),
        ))
    }

    /// Whether nothing is read into memory of the reactor any more.
    ///
    /// # Errors
    /// `Timeout` says how many reads have not ended.
    pub(crate) fn check(&self) -> Result<()> {
        let error = |pending| {
            Error::Timeout(format!(
                "closed, but {pending}; close again to see whether they have ended"
            ))
        };
        self.describe()
            .map_or(Ok(()), |pending| Err(error(pending)))
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
    /// Has it count so many.
    pub(crate) fn pretend(&self, reads: usize) {
        self.0.store(reads, Ordering::Release);
    }
}
