//! The error type of kvpipe: one variant for each remedy, and one Python class for each variant.

use std::fmt;

/// A failure, by what the caller can do about it.
///
/// It is not `#[non_exhaustive]`: the Python binding matches every variant, so that the compiler finds a forgotten one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument or setting is wrong, found before any I/O: fix it.
    #[error("{0}")]
    Config(String),
    /// UCX is missing, too old, or cannot reach this memory: install it, or use other memory.
    #[error("{0}")]
    Unavailable(String),
    /// The peer could not be reached or refused the connection: retry, or use another instance.
    #[error("{0}")]
    Connect(String),
    /// The proof of the token failed: give both sides the same token.
    #[error("{0}")]
    Authentication(String),
    /// Versions or fingerprints differ: fix the deployment.
    #[error("incompatible peer {peer}: {field} is {ours:?} here and {theirs:?} there{}", remedy(.field, .ours, .theirs))]
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
    /// The peer is gone: recompute, connect again.
    #[error("lost peer {peer}: {reason}")]
    PeerLost {
        /// The peer's address.
        peer: String,
        /// Reason for the loss of the peer.
        reason: String,
    },
    /// The operation was not completed in time; the message says whether the object is still usable.
    #[error("{0}")]
    Timeout(String),
    /// A checksum differs: the received data must not be used.
    #[error("{0}")]
    Corrupt(String),
    /// The sender closed the pipe, and everything it sent was received.
    #[error("the sender closed the pipe and everything it sent was received")]
    EndOfPipe,
    /// The peer broke the protocol: report a bug.
    #[error("{0}")]
    Protocol(String),
    /// A quota or a resource of the system is used up: slow down.
    #[error("{0}")]
    Exhausted(String),
    /// This side has closed the object.
    #[error("{0}")]
    Closed(String),
}

/// Shorthand of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of a failure, for metrics: a closed set, without what a peer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// The peer could not be reached.
    Unreachable,
    /// The token or the fingerprint of one side was refused.
    Refused,
    /// The session ended.
    Lost,
    /// The time was over.
    Timeout,
    /// The producer ended the handoff.
    Ended,
    /// A checksum differed.
    Corrupt,
    /// The caller cancelled.
    Cancelled,
    /// Anything else.
    Other,
}

impl FailureCause {
    /// Its name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Lost => "lost",
            Self::Timeout => "timeout",
            Self::Ended => "ended",
            Self::Corrupt => "corrupt",
            Self::Cancelled => "cancelled",
            Self::Other => "other",
        }
    }
}

impl Error {
    /// Its kind, for metrics.
    pub(crate) fn cause(&self) -> FailureCause {
        match self {
            Self::Connect(_) => FailureCause::Unreachable,
            Self::Authentication(_) | Self::Incompatible { .. } => FailureCause::Refused,
            Self::PeerLost { .. } | Self::Protocol(_) | Self::Closed(_) => FailureCause::Lost,
            Self::Timeout(_) => FailureCause::Timeout,
            Self::Corrupt(_) => FailureCause::Corrupt,
            Self::Config(_) | Self::Unavailable(_) | Self::EndOfPipe | Self::Exhausted(_) => {
                FailureCause::Other
            }
        }
    }

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

/// The setting that decides a field alone. Fields of engines are those of the connectors' fingerprint.
const SETTINGS: [(&str, &str); 10] = [
    ("protocol version", "kvpipe release"),
    ("encryption", "KVPIPE_ENCRYPTION"),
    ("dtype", "--dtype"),
    ("quantization", "--quantization"),
    (
        "kv cache dtype",
        "--kv-cache-dtype and --kv-cache-dtype-skip-layers",
    ),
    (
        "block size",
        "--block-size, large enough for models with recurrent states",
    ),
    ("kv cache layout", "VLLM_KV_CACHE_LAYOUT"),
    (
        "kv cache groups",
        "--max-model-len and flags for the KV cache, --disable-hybrid-kv-cache-manager among them",
    ),
    (
        "decode context parallel size",
        "--decode-context-parallel-size",
    ),
    ("tensor parallel size", "--tensor-parallel-size"),
];

/// Remedy for the values of a field that differ; none where no setting is known.
pub fn remedy_of_difference(field: &str, ours: &str, theirs: &str) -> Option<String> {
    // The connector's value of files that it cannot see.
    if ours.starts_with("not compared") || theirs.starts_with("not compared") {
        return Some("load both from the same local files".to_owned());
    }
    let found = SETTINGS.iter().find(|(name, _)| *name == field);
    found.map(|(_, setting)| format!("start both with the same {setting}"))
}

/// The same at the end of a message.
fn remedy(field: &str, ours: &str, theirs: &str) -> String {
    remedy_of_difference(field, ours, theirs)
        .map_or_else(String::new, |remedy| format!("; {remedy}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn incompatible(field: &str, ours: &str, theirs: &str) -> String {
        let error = Error::Incompatible {
            peer: "10.0.0.1:7100".to_owned(),
            field: field.to_owned(),
            ours: ours.to_owned(),
            theirs: theirs.to_owned(),
        };
        error.to_string()
    }

    #[test]
    fn files_that_are_on_one_side_only_have_a_remedy() {
        let remedy = "there; load both from the same local files";
        let weights = |ours, theirs| incompatible("weights", ours, theirs);
        assert!(weights("0123", "not compared: no weights").ends_with(remedy));
        assert!(weights("not compared: no weights", "0123").ends_with(remedy));
        assert!(weights("0123", "4567").ends_with("there"));
    }

    #[test]
    fn a_field_that_one_setting_decides_is_named_with_the_remedy() {
        let expected = "incompatible peer 10.0.0.1:7100: block size is \"16\" here and \"32\" there; \
            start both with the same --block-size, large enough for models with recurrent states";
        assert_eq!(incompatible("block size", "16", "32"), expected);
        let remedy = "the same --kv-cache-dtype and --kv-cache-dtype-skip-layers";
        assert!(incompatible("kv cache dtype", "auto", "fp8").ends_with(remedy));
        let remedy = "the same --max-model-len and flags for the KV cache, \
            --disable-hybrid-kv-cache-manager among them";
        assert!(incompatible("kv cache groups", "a", "b").ends_with(remedy));
    }
}
