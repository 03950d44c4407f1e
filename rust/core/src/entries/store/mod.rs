//! A memory server for values of KV, and its client. A [`StoreServer`] keeps values by their keys; a [`StoreClient`] reserves,
//! writes, commits, selects and takes them. What the operations mean is `kvpipe.store.KVStore`.

mod api;
mod client;
mod values;

use crate::transfer::host::HUGE;

pub use api::{DiskConfig, StoreClient, StoreServer};
pub use values::{ListedValue, OpenedValue, ValuePage};

/// Bytes that a value counts besides its bytes, key and record.
const BOOKKEEPING_BYTES: u64 = 512;
/// Large values are kept in huge pages.
const GRAIN: u64 = 2 << 20;

/// Bytes that a value counts against the capacity, without its record: all memory that it occupies.
pub(super) fn footprint(key: &[u8], num_bytes: u64) -> u64 {
    let occupied = if num_bytes < HUGE as u64 {
        num_bytes
    } else {
        num_bytes
            .checked_next_multiple_of(GRAIN)
            .unwrap_or(u64::MAX)
    };
    occupied.saturating_add(key.len() as u64 + BOOKKEEPING_BYTES)
}
