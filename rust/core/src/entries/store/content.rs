//! What a value is besides its key.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use crate::transport::Memory;

/// A committed value: its bytes, its record, and the checksum of both.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) buffer: Buffer,
    /// Memory of the bytes, if they are too many for a message.
    pub(super) memory: Option<Arc<Memory>>,
    pub(super) record: Box<[u8]>,
    pub(super) checksum: u64,
}
