//! Lookup buffers: KV entries that are found by their tokens, each delivered to exactly one consumer and then gone. In one
//! process ([`LocalBuffer`]), which may serve it to others, who connect ([`RemoteBuffer`]).

mod client;
mod command_queue;
mod copying;
mod index;
mod local;
pub(crate) mod messages;
mod operation;
mod remote;
mod server;
mod shared;
mod state;
mod store;
mod tensors;
#[cfg(test)]
mod tests;
pub(crate) mod transfer;

use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use crate::error::{Error, Result};
use crate::tensor::{Meta, Received};
use crate::transport::Transport;
use crate::work::Then;

pub use local::LocalBuffer;
pub use operation::{Delivery, Operation, Selected};
pub use remote::RemoteBuffer;

/// Inserts of one client that a server lets wait; the client keeps more of them back.
const INSERTS_IN_FLIGHT: usize = 64;
/// Selects of one client that a server lets wait.
const SELECTS_CAP: usize = 4096;
/// Tokens that they may have together: 128 MiB.
const SELECT_TOKENS_CAP: usize = 1 << 24;

/// What an entry takes besides parts of any size: 1.2 KiB if input tokens are its only tensor, 1.8 KiB with all five.
const BOOKKEEPING_BYTES: u64 = 2 << 10;

/// Tensors from this size are kept in memory of a pool, which is cut into huge pages: the first use of a page costs more
/// than the copy (64 MiB into new pages: 36 ms, into new huge pages 15 ms, into pages that were used before 5 ms).
const HUGE: usize = 4 << 20;

/// Tensors of an entry: input tokens, region of interest, key, value, hidden states.
pub const NUM_ITEMS: usize = 5;

/// What a select asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupQuery {
    /// The oldest entry.
    Any,
    /// The entry that shares the longest prefix with these tokens, of several the oldest. Not empty.
    Tokens(Vec<i64>),
}

impl LookupQuery {
    fn matches(&self, tokens: &[i64]) -> bool {
        match self {
            Self::Any => true,
            Self::Tokens(query) => index::is_match(query, tokens),
        }
    }

    fn num_tokens(&self) -> usize {
        match self {
            Self::Any => 0,
            Self::Tokens(tokens) => tokens.len(),
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
    /// What an entry of these tensors counts.
    fn entry_bytes(&self, tokens: &[i64]) -> u64 {
        let len = |buffer: &Buffer| buffer.len() as u64;
        let tensors = self.0.iter();
        entry_bytes(
            tokens,
            tensors.map(|item| (&item.meta, item.buffer.as_ref().map_or(0, len))),
        )
    }
}

fn not_host() -> Error {
    let text = "only host memory can be inserted in this version; copy the tensor to the CPU first";
    Error::Unavailable(text.to_owned())
}

/// What an entry counts against a buffer's capacity: all that it takes, so that the capacity bounds that.
fn entry_bytes<'a>(tokens: &[i64], tensors: impl Iterator<Item = (&'a Meta, u64)>) -> u64 {
    tensors
        .flat_map(|(meta, len)| [meta.num_bytes(), len])
        .chain([size_of_val(tokens) as u64])
        .fold(BOOKKEEPING_BYTES, u64::saturating_add)
}

fn check_entry(tokens: &[i64]) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::Config(
            "the entry has no tokens under its roi: nobody could select it by them".to_owned(),
        ));
    }
    Ok(())
}

/// Counters and state of a lookup buffer. What only the server knows is `None` at a client.
#[derive(Debug, Clone, Default)]
pub struct LookupInfo {
    /// `open` or `closed`.
    pub state: &'static str,
    /// Entries that were inserted here, or at a server those of its clients too.
    pub num_inserted: u64,
    /// Entries that were taken here, or at a server those of its clients too.
    pub num_consumed: u64,
    /// Inserts and selects that wait.
    pub num_waiting: usize,
    /// Entries that can be selected.
    pub num_entries: Option<usize>,
    /// Entries on their way to a consumer that has not acknowledged them.
    pub num_leased: Option<usize>,
    /// Bytes that all entries and inserts under way count.
    pub num_bytes: Option<u64>,
    /// How many bytes there may be.
    pub capacity_bytes: Option<u64>,
    /// What carries large tensors to the servers; empty in the same process.
    pub transport: String,
}

/// A lookup buffer, wherever its entries are. Any thread may call.
#[derive(Debug)]
pub enum LookupBuffer {
    /// In this process.
    Local(LocalBuffer),
    /// In others.
    Remote(RemoteBuffer),
}

impl LookupBuffer {
    /// Inserts the tensors; see [`LocalBuffer::insert`] and [`RemoteBuffer::insert`].
    pub fn insert(
        &self,
        tokens: Vec<i64>,
        items: Items,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<()>> {
        match self {
            Self::Local(local) => local.insert(tokens, items, timeout),
            Self::Remote(remote) => remote.insert(tokens, items, timeout, then),
        }
    }

    /// Takes an entry; the operation ends with `None` at `timeout`.
    pub fn select(
        &self,
        query: LookupQuery,
        timeout: Option<Duration>,
        then: Then,
    ) -> Result<Operation<Selected>> {
        match self {
            Self::Local(local) => local.select(query, timeout),
            Self::Remote(remote) => remote.select(query, timeout, then),
        }
    }

    /// Lets others connect; see [`LocalBuffer::serve`].
    pub fn serve(
        &self,
        address: &str,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
    ) -> Result<()> {
        match self {
            Self::Local(local) => local.serve(address, token, transport, is_checksummed),
            Self::Remote(_) => Err(Error::Config(
                "this buffer belongs to other processes; one in this process can be served"
                    .to_owned(),
            )),
        }
    }

    /// Where others connect, or where this is connected to, separated by commas; empty for a buffer that is not
    /// served.
    pub fn address(&self) -> String {
        match self {
            Self::Local(local) => local
                .address()
                .map_or_else(String::new, |at| at.to_string()),
            Self::Remote(remote) => remote.addresses().join(","),
        }
    }

    /// Counters and state.
    pub fn info(&self) -> LookupInfo {
        match self {
            Self::Local(local) => local.info(),
            Self::Remote(remote) => remote.info(),
        }
    }

    /// Ends the buffer; what waits ends as closed.
    pub fn close(&self) {
        match self {
            Self::Local(local) => local.close(),
            Self::Remote(remote) => remote.close(),
        }
    }
}
