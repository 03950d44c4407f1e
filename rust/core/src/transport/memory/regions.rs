//! Memory that is registered in this process, and the keys to it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kvpipe_ucx::Buffer;

use super::{INVALID_PARAM, lock};
use crate::transport::Answer;

/// The registered memory of this process.
static REGIONS: Mutex<BTreeMap<u64, Buffer>> = Mutex::new(BTreeMap::new());

/// Registered memory; its key is good as long as it lives.
#[derive(Debug)]
pub struct Registered {
    key: u64,
    buffer: Buffer,
}

impl Registered {
    pub(in crate::transport) fn new(buffer: Buffer) -> Answer<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if buffer.is_empty() || buffer.bytes(0, 0).is_none() {
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

impl Drop for Registered {
    fn drop(&mut self) {
        // The buffer's owner may do anything as it is dropped: not under the lock.
        let removed = lock(&REGIONS).remove(&self.key);
        drop(removed);
    }
}

/// Access to registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Key(u64);

impl Key {
    pub(in crate::transport) fn unpack(packed: &[u8]) -> Answer<Self> {
        let key = packed.try_into().map_err(|_| INVALID_PARAM)?;
        Ok(Self(u64::from_le_bytes(key)))
    }

    /// The memory, while it is registered.
    pub(super) fn find(self) -> Option<Buffer> {
        lock(&REGIONS).get(&self.0).cloned()
    }
}
