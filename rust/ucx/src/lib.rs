//! UCX for kvpipe: loaded at run time, one owning type per UCX object. This crate holds all of
//! kvpipe's foreign function calls; what it exports is safe to call, but for
//! [`Buffer::from_raw_parts`], [`CudaEvent::record`] and [`AssertSend::new`].
//!
//! What it does with CUDA memory is written by the documentation and has not run on a GPU: docs/gpu.md.
//!
//! # Ownership
//! ```text
//! Library ◄─ Context ◄─ Memory            (Arc: any thread)
//!               ▲
//!               └────── Worker ◄─ endpoints, operations, RemoteKey   (Rc: one thread at a time)
//! ```
//! Each object holds what it was made from, so UCX sees them destroyed in the right order however
//! they are dropped here. An operation holds its memory, its key and its worker until UCX has
//! called back; nothing else (not a timeout, not a close) lets go of them. The library is never
//! unloaded.
//!
//! # Threads
//! [`Library`], [`Context`], [`Buffer`] and [`Memory`] are `Send + Sync`; registering and packing
//! keys may happen on any thread. A [`Worker`] and all that comes from it are used by one thread at
//! a time, and change it only as one, in a [`AssertSend`]. There the owner repeats: post, [`progress`](Worker::progress), take
//! [events](Worker::next_event), and when there are none [`arm`](Worker::arm) and sleep on
//! [`event_fd`](Worker::event_fd). UCX's callbacks run inside these calls and only fill the queue.
//! Nothing may be used in the child of a `fork`.
//!
//! # Trust
//! UCX's own parsers are not hardened. Addresses and keys are checked for what can be checked from
//! outside; damaged keys and truncated addresses become errors, but a forged address can still
//! crash UCX: take them from authenticated peers only. Whoever can connect to a worker can
//! send it any message, of any size (the queue of received messages is bounded by nothing here),
//! and over TCP can read and write all memory of the process.

mod am;
mod assert_send;
mod config;
mod context;
mod cuda;
mod endpoint;
mod event;
mod exit_gate;
mod lane;
mod library;
mod memory;
mod process_vm;
mod reaper;
mod request;
mod rma;
mod status;
mod sys;
mod worker;

pub use am::{AmData, Payload, Placer};
pub use assert_send::AssertSend;
pub use config::Config;
pub use context::Context;
pub use cuda::{CudaError, CudaEvent, device_of, is_exportable};
pub use endpoint::EndpointId;
pub use event::Event;
pub use lane::Lane;
pub use library::{Library, LoadError, Search, has_rdma_devices};
pub use memory::{Buffer, Memory, MemoryKind};
pub use process_vm::{PIECES_CAP, Piece, ProcessVmReader};
pub use reaper::Reaper;
pub use request::Token;
pub use rma::{Domains, RemoteKey};
pub use status::Status;
pub use worker::Worker;
