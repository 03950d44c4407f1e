//! Lookup buffers: KV entries that are selected by their tokens; one consumer gets each entry. A [`LookupBuffer`] keeps them in
//! this process, and may serve other processes; or it is a client of such servers.

mod buffer;
mod client;
mod command_queue;
mod operation;
#[cfg(test)]
pub(super) mod tests;

use super::items::key_of;
use super::shared::SharedState;
use super::state::{Key, Query};
use crate::error::{Error, Result};

pub use super::items::{Items, NUM_ITEMS};
pub use buffer::LookupBuffer;
pub use operation::{Delivery, Operation, Selected};

/// Selects of one buffer that wait or whose entries are not picked up yet.
const SELECTS_CAP: usize = 4096;

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
    /// Of a buffer in this process.
    fn of(state: &SharedState) -> Self {
        let info = state.entries.info();
        Self {
            state: if state.is_closed { "closed" } else { "open" },
            num_inserted: info.num_committed,
            num_consumed: state.entries.num_consumed(),
            num_waiting: info.num_waiting as usize,
            num_entries: Some((info.num_values - info.num_leased) as usize),
            num_leased: Some(info.num_leased as usize),
            num_bytes: Some(info.num_bytes),
            capacity_bytes: Some(info.capacity_bytes),
            transport: String::new(),
        }
    }

    /// Of a buffer that cannot be looked at, in the child of a fork.
    fn closed() -> Self {
        Self {
            state: "closed",
            ..Self::default()
        }
    }
}
