//! Lookup buffers: KV entries that are selected by their tokens; one consumer gets each entry. A [`LookupBuffer`] keeps them in
//! this process, and may serve other processes; or it is a client of such servers.

mod buffer;
mod client;
mod command_queue;
mod operation;
#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;

use super::state::{Key, Query, TOKEN_BYTES};
use crate::error::{Error, Result};
use crate::tensor::{Meta, Received};

pub use buffer::LookupBuffer;
pub use operation::{Delivery, Operation, Selected};

/// Inserts of one client that may wait at a server; the client queues more of them itself.
pub(super) const INSERTS_IN_FLIGHT: usize = 64;
/// Selects of one client that may wait at a server.
const SELECTS_CAP: usize = 4096;

/// Bytes that an entry counts besides its tensors and tokens. Measured: 1.2 KiB with input tokens only, 1.8 KiB with all tensors.
const BOOKKEEPING_BYTES: u64 = 2 << 10;

/// Number of tensors of an entry: input tokens, region of interest, key, value, hidden states.
pub const NUM_ITEMS: usize = 5;

/// The entry that a select requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupQuery {
    /// The oldest entry.
    Any,
    /// The entry with the longest common prefix, the oldest of several. Not empty.
    Tokens(Vec<i64>),
}

impl LookupQuery {
    /// As the entries of a buffer are asked for it.
    fn to_query(&self) -> Query<Key> {
        match self {
            Self::Any => Query::Oldest,
            Self::Tokens(tokens) => Query::LongestPrefix(key_of(tokens)),
        }
    }

    fn check(&self) -> Result<()> {
        if *self == Self::Tokens(Vec::new()) {
            return Err(Error::Config(
                "the query has no tokens under its roi; None as query takes the oldest entry"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// The tensors of an entry. Clones share them.
#[derive(Debug, Clone)]
pub struct Items(pub [Arc<Received>; NUM_ITEMS]);

impl Items {
    /// Bytes that the entry counts against a buffer's capacity, with a key of so many.
    fn entry_bytes(&self, num_key: usize) -> u64 {
        let with_bytes = || self.0.iter().filter(|item| item.buffer.is_some());
        let buffers = with_bytes().filter_map(|item| item.buffer.as_ref());
        let num_bytes = buffers.map(|buffer| buffer.len() as u64).sum();
        entry_bytes(num_key, with_bytes().map(|item| &item.meta), num_bytes)
    }
}

/// The key of an entry with these tokens.
pub(super) fn key_of(tokens: &[i64]) -> Key {
    let mut key = Vec::with_capacity(tokens.len() * TOKEN_BYTES);
    key.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    key.into()
}

pub(super) fn not_host() -> Error {
    let text = "only host memory can be inserted in this version; copy the tensor to the CPU first";
    Error::Unavailable(text.to_owned())
}

/// Bytes that an entry counts against a buffer's capacity: all memory that it occupies.
pub(super) fn entry_bytes<'a>(
    num_key: usize,
    metas: impl Iterator<Item = &'a Meta>,
    num_bytes: u64,
) -> u64 {
    metas
        .map(Meta::num_bytes)
        .chain([num_key as u64, num_bytes])
        .fold(BOOKKEEPING_BYTES, u64::saturating_add)
}

/// Counters and state of a lookup buffer. What only a server knows is `None` at a client.
#[derive(Debug, Clone, Default)]
pub struct LookupInfo {
    /// `open` or `closed`.
    pub state: &'static str,
    /// Inserted entries; at a server, those of its clients too.
    pub num_inserted: u64,
    /// Consumed entries; at a server, those of its clients too.
    pub num_consumed: u64,
    /// Inserts and selects that wait.
    pub num_waiting: usize,
    /// Entries that can be selected.
    pub num_entries: Option<usize>,
    /// Entries on their way to a consumer.
    pub num_leased: Option<usize>,
    /// Bytes that all entries and granted inserts count.
    pub num_bytes: Option<u64>,
    /// Most bytes.
    pub capacity_bytes: Option<u64>,
    /// The transport of large tensors to the servers; empty in the same process.
    pub transport: String,
}

impl LookupInfo {
    /// Of a buffer that cannot be looked at, in the child of a fork.
    pub(super) fn closed() -> Self {
        Self {
            state: "closed",
            ..Self::default()
        }
    }
}
