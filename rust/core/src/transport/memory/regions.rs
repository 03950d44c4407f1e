//! Memory that is registered with the in-memory transport, and its keys.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kvpipe_ucx::{Buffer, MemoryKind};

use super::INVALID_PARAM;
use crate::sync::lock;
use crate::transport::UcxResult;

/// The registered memory of this process.
static REGIONS: Mutex<BTreeMap<u64, Buffer>> = Mutex::new(BTreeMap::new());

/// Registered memory. Its key is valid until it is dropped.
#[derive(Debug)]
pub(crate) struct TwinMemory {
    key: u64,
    buffer: Buffer,
}

impl TwinMemory {
    pub(in crate::transport) fn new(buffer: Buffer) -> UcxResult<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // The CUDA driver copies memory on a GPU.
        let is_reached =
            buffer.kind() == MemoryKind::Host || kvpipe_ucx::device_of(buffer.address()).is_ok();
        if buffer.is_empty() || !is_reached {
            return Err(INVALID_PARAM);
        }
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&REGIONS).insert(key, buffer.clone());
        Ok(Self { key, buffer })
    }

    pub(in crate::transport) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(in crate::transport) fn pack_rkey(&self) -> Vec<u8> {
        self.key.to_le_bytes().to_vec()
    }
}

impl Drop for TwinMemory {
    fn drop(&mut self) {
        // Dropping a buffer runs code of its owner: not under the lock.
        let removed = lock(&REGIONS).remove(&self.key);
        drop(removed);
    }
}

/// Access to registered memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryKey(u64);

impl MemoryKey {
    pub(in crate::transport) fn unpack(packed: &[u8]) -> UcxResult<Self> {
        let key = packed.try_into().map_err(|_| INVALID_PARAM)?;
        Ok(Self(u64::from_le_bytes(key)))
    }

    /// The memory, while it is registered.
    pub(super) fn find(self) -> Option<Buffer> {
        lock(&REGIONS).get(&self.0).cloned()
    }
}
