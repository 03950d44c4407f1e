//! The transport of kvpipe without Python: authenticated sessions, pipes, block transfers and handoffs.
//!
//! A [`reactor::Reactor`] has a thread, an event handler and what other threads ask of it. [`session`] is that handler: it
//! owns the listener, the sessions and the UCX worker, and calls a `session::Service`: agent, pipe, lookup buffer or
//! control. Other threads send commands, and get [`work::Work`] or [`events::Events`] back. Nothing here knows Python. The
//! `unsafe` here makes three promises of our own code: a reactor may move between threads, what places the payloads of
//! streams uses no worker, and UCX gets addresses of authenticated peers only. So services are not public. Code that touches
//! memory lives in `kvpipe-ucx`.
//!
//! ```compile_fail,E0603
//! use kvpipe_core::session::Service;
//! ```
#![deny(unsafe_code)]

pub mod blocks;
pub mod checksum;
mod clock;
pub mod completions;
pub mod control;
mod earliest;
pub mod entries;
mod error;
pub mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod ids;
mod integrity;
#[cfg(test)]
mod logged;
mod multimap;
pub mod net;
pub mod pipe;
mod process;
pub mod reactor;
pub mod session;
#[cfg(test)]
mod simulated_day;
mod sync;
pub mod tensor;
pub mod trace;
mod transfer;
pub mod transport;
pub mod work;

pub use error::{Error, FailureCause, Result, remedy_of_difference};
pub use integrity::Integrity;
pub use transfer::region;
pub use transport::DataPath;
