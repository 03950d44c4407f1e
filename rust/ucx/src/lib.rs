//! UCX for kvpipe: loaded at run time, one owning type per UCX object. This crate holds all of
//! kvpipe's foreign function calls; what it exports is safe to call, but for
//! [`Buffer::from_raw_parts`], [`Buffer::read_only`], [`Worker::connect`], [`CudaEvent::record`] and
//! [`AssertSend::new`].
//!
//! docs/gpu.md lists the uses of CUDA memory that have run on a GPU.
//!
//! # Ownership
//! ```text
//! Library ◄─ Context ◄─ Memory            (Arc: any thread)
//!               ▲
//!               └────── Worker ◄─ endpoints, operations, RemoteKey   (Rc: one thread at a time)
//! ```
//! Each object holds the one that it was made from, so that UCX's objects are destroyed in the right
//! order, whatever the order of the drops here. An operation holds its memory, its key and its worker
//! until UCX has called back; no timeout and no close releases them. The library is never unloaded.
//!
//! # Threads
//! [`Library`], [`Context`], [`Buffer`] and [`Memory`] are `Send + Sync`; registering and packing
//! keys may happen on any thread. One thread at a time uses a [`Worker`] and all that comes from it;
//! they move to another thread together, in an [`AssertSend`]. The owner repeats: post,
//! [`progress`](Worker::progress), take [events](Worker::next_event), and when there are none
//! [`arm`](Worker::arm) and sleep on [`event_fd`](Worker::event_fd). UCX's callbacks run inside these
//! calls and only fill the queue. The child of a `fork` may use nothing.
//!
//! # Trust
//! UCX's own parsers are not hardened. Addresses and keys are checked as far as possible from the
//! outside: damaged keys and truncated addresses become errors, but a forged address can still
//! crash UCX. Take them from authenticated peers only. Every process that can connect to a worker over
//! TCP can read and write all memory of this process.

mod assert_send;
mod buffer;
mod config;
mod context;
mod cuda;
mod device_copy;
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
mod shared_bytes;
pub mod socket;
mod status;
mod sys;
mod worker;

pub use assert_send::AssertSend;
pub use buffer::{Buffer, DeviceWrites, MemoryKind};
pub use config::Config;
pub use context::Context;
pub use cuda::{
    Chunks, CopyReport, CudaError, CudaEvent, DeviceBlock, Digests, OnDigested, device_of,
    flush_remote_writes, has_cuda_devices, is_exportable,
};
pub use device_copy::{DeviceCopy, copy_between};
pub use endpoint::{EndpointId, EndpointProgress};
pub use event::Event;
pub use lane::{Lane, LanesError};
pub use library::{Library, LoadError, Search, has_rdma_devices};
pub use memory::Memory;
pub use process_vm::{PIECES_CAP, Piece, ProcessVmError, ProcessVmReader, let_processes_read};
pub use reaper::Reaper;
pub use request::Token;
pub use rma::{Domains, Get, RemoteKey};
pub use shared_bytes::SharedBytes;
pub use status::Status;
pub use worker::Worker;
