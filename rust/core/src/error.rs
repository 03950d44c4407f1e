//! The one error type of kvpipe: a variant for each remedy (style: one variant, one Python class).

use std::fmt;

/// What went wrong, by what the caller can do about it.
///
/// Not `#[non_exhaustive]`: the binding matches every variant, so the compiler finds a forgotten one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Bad argument or setting, found before any I/O: fix it.
    #[error("{0}")]
    Config(String),
    /// No UCX, too old, or none for this memory: install it or use another memory.
    #[error("{0}")]
    Unavailable(String),
    /// The peer could not be reached or refused us: retry, or another instance.
    #[error("{0}")]
    Connect(String),
    /// The token challenge failed: give both sides the same token.
    #[error("{0}")]
    Authentication(String),
    /// Versions or fingerprints differ: fix the deployment.
    #[error("incompatible peer {peer}: {field} is {ours:?} here and {theirs:?} there")]
    Incompatible {
        /// The peer's address.
        peer: String,
        /// The field that differs.
        field: String,
        /// This side's value.
        ours: String,
        /// The other side's value.
        theirs: String,
    },
    /// The peer went away: recompute, connect again.
    #[error("lost peer {peer}: {reason}")]
    PeerLost {
        /// The peer's address.
        peer: String,
        /// Why it counts as lost.
        reason: String,
    },
    /// Not done in time; the message says whether the object is still usable.
    #[error("{0}")]
    Timeout(String),
    /// A checksum differs: what came must not be used.
    #[error("{0}")]
    Corrupt(String),
    /// The sender closed in order and everything was taken.
    #[error("the sender closed the pipe and everything it sent was received")]
    EndOfPipe,
    /// The peer sent nonsense: report a bug.
    #[error("{0}")]
    Protocol(String),
    /// A buffer stayed full: slow down.
    #[error("{0}")]
    Exhausted(String),
    /// This side had closed the object.
    #[error("{0}")]
    Closed(String),
}

/// Shorthand of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn protocol(what: impl fmt::Display) -> Self {
        Self::Protocol(format!("protocol error: {what}"))
    }

    pub(crate) fn lost(peer: &str, reason: impl fmt::Display) -> Self {
        Self::PeerLost {
            peer: peer.to_owned(),
            reason: reason.to_string(),
        }
    }
}

impl From<kvpipe_ucx::LoadError> for Error {
    fn from(error: kvpipe_ucx::LoadError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl From<kvpipe_ucx::Status> for Error {
    fn from(status: kvpipe_ucx::Status) -> Self {
        Self::Unavailable(status.to_string())
    }
}
