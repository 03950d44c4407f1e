//! Moves bytes. [`TransferEngine`] owns everything that is under way between registered memories, in both directions:
//! reads of a peer's memory over UCX or by `process_vm_readv`, streams with credits, and checksums of either. It knows
//! neither regions nor handoffs nor users. A [service](TransferService) above (agent, pipe, lookup, store) hands it
//! [requests](TransferRequest) that carry an owner of its choice, and answers which memory a peer's read is of; its
//! [host] hands it what has ended.
//!
//! A transfer, at its destination:
//!
//! ```text
//!          enqueue          its turn, by path         all has come, and is compared
//!   Held ----------> Queued ----------------> Reading -------------------------+
//!                      |                                                       v
//!                      | its turn, no path reads       all has come       completed
//!                      +--------------> Streaming -----------------------------^
//!
//!   any of them -- fail: caller, session, deadline, refusal --> Failed -- the last read has ended --> completed
//! ```
//!
//! Transfers from one peer begin in order, a few at a time; the first of them has the reads. A slice of work takes less
//! than a millisecond, and slices go round among transfers and peers.

mod destination;
pub(crate) mod engine;
pub(crate) mod exposed;
mod gaps;
pub(crate) mod host;
mod incoming_stream;
pub(crate) mod message;
mod outgoing_stream;
mod posted_reads;
pub mod region;
pub(crate) mod remote_source;
pub(crate) mod source;
pub(crate) mod steps;
#[expect(clippy::module_inception, reason = "one transfer of the engine")]
pub(crate) mod transfer;
mod verifier;

pub(crate) use engine::{Completion, TransferEngine};
pub(crate) use host::{Cx, TransferService};
pub(crate) use message::Message;
pub(crate) use transfer::{TransferError, TransferRequest};
pub(crate) use verifier::Checksums;
