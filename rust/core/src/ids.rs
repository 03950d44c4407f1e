//! Names that several modules share.

/// Names a session of a reactor; never reused.
pub type SessionKey = u64;

/// Names one attempt to move one request's KV; random, made by the proxy.
pub type HandoffId = [u8; 16];
