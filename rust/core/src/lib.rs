//! The transport of kvpipe without Python: authenticated sessions, pipes, block transfers and handoffs.
//!
//! A [`node::Node`] owns everything: its listener, its links, its UCX worker and the state of what runs on it. One
//! thread at a time runs it; others hand it commands and get [`work::Work`] or [`events::Events`] back. Nothing here is
//! `unsafe`, but for the promise that a node may change its thread, or knows Python; what touches memory lives in
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
mod earliest;
mod error;
pub mod events;
mod fair;
mod fetch;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod handoff;
pub mod handshake;
pub mod identity;
pub mod link;
pub mod lookup;
pub mod node;
pub mod pipe;
mod pool;
mod process;
mod recent;
pub mod region;
mod road;
mod stream;
pub mod trace;
pub mod transport;
pub mod work;

pub use error::{Error, Result};
pub use road::Road;
