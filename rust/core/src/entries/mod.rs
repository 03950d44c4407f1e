//! Entries that wait for their readers. One state, one server and one set of messages serve both faces: a [store] keeps one
//! value for each key, and evicts those that are unused; a [lookup buffer](lookup) lines entries up by their tokens, and
//! delivers each once.

mod carrying;
mod content;
mod copying;
mod disk;
mod info;
mod items;
pub mod lookup;
pub(crate) mod messages;
mod server;
mod shared;
mod state;
pub mod store;

use crate::error::{Error, Result};

pub use info::StoreInfo;

/// Longest key of a store.
pub const KEY_CAP: usize = 512;
/// Keys in one message.
pub const KEYS_CAP: usize = 1 << 14;
/// Longest record.
pub const RECORD_CAP: usize = 64 << 10;
/// Most tokens of a lookup buffer's entry, of the inserts of one client that wait together, and of a query.
const TOKENS_CAP: usize = 1 << 22;
/// Bytes that travel inside a message. Above them, one copy costs more than one more round trip.
const INLINE_CAP: usize = 32 << 10;
/// Buffers that are read from one peer at once.
const TRANSFERS_IN_FLIGHT: usize = 4;

/// Names a part of an operation's entry on its session.
fn source_id(operation: u64, part: usize) -> u64 {
    operation
        .wrapping_mul(content::PARTS_CAP as u64)
        .wrapping_add(part as u64)
}

/// # Errors
/// `Protocol`: the parts of this operation would bear the names of another's.
fn check_operation(operation: u64) -> Result<()> {
    if operation < u64::MAX / content::PARTS_CAP as u64 {
        return Ok(());
    }
    Err(Error::protocol(format_args!(
        "operation {operation} is out of range"
    )))
}
