//! Whether this is still the process in which something was made.

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
            "this object was made before fork(); make a new one in the child process".to_owned(),
        ))
    }
}
