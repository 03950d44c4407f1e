//! The transport of kvpipe without Python: authenticated sessions, pipes, block transfers and handoffs.
//!
//! A [`reactor::Reactor`] owns everything: its listener, its sessions, its UCX worker and the state of what runs on it. One
//! thread at a time runs it; others hand it commands and get [`work::Work`] or [`events::Events`] back. Nothing here is
//! `unsafe`, but for the promise that a reactor may change its thread, or knows Python; what touches memory lives in
//! `kvpipe-ucx`.
#![deny(unsafe_code)]

pub mod address;
mod advice;
pub mod blocks;
pub mod checksum;
pub mod codec;
pub mod control;
mod cursor;
mod data;
mod data_path;
mod earliest;
mod error;
pub mod events;
mod fair_waitlist;
mod fetch;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod handoff;
pub mod handshake;
pub mod identity;
pub mod lookup;
pub mod pipe;
mod pool;
mod process;
pub mod reactor;
mod recent;
pub mod region;
pub mod session;
mod stream;
pub mod trace;
pub mod transport;
pub mod work;

pub use data_path::DataPath;
pub use error::{Error, Result};
