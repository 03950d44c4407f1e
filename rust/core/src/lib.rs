//! The transport of kvpipe without Python: authenticated sessions, pipes, block transfers and handoffs.
//!
//! A [`reactor::Reactor`] owns everything: its listener, its sessions, its UCX worker and the state of what runs on it. One
//! thread at a time runs it; others hand it commands and get [`work::Work`] or [`events::Events`] back. Nothing here is
//! `unsafe`, but for the promise that a reactor may change its thread, or knows Python; what touches memory lives in
//! `kvpipe-ucx`.
#![deny(unsafe_code)]

pub mod agent;
pub mod checksum;
pub mod control;
mod earliest;
mod error;
pub mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handoff;
pub mod ids;
pub mod lookup;
pub mod net;
pub mod pipe;
mod process;
pub mod reactor;
pub mod session;
pub mod tensor;
pub mod trace;
mod transfer;
pub mod transport;
pub mod work;

pub use error::{Error, Result};
pub use transfer::region;
pub use transport::DataPath;
