//! The stream path: pieces of memory as a sequence of messages, sent as far as the destination's credit goes, each
//! with its place in the sequence and a checksum. The destination puts them where they belong while UCX still has
//! them in its receive buffer, which saves a copy; the event that follows says only that they are there.

mod incoming;
mod outgoing;

pub(crate) use incoming::Incoming;
pub(crate) use outgoing::Outgoing;

/// Bytes a source may send before the destination's next credit.
const WINDOW: u64 = 4 << 20;
