//! Tensors of a lookup buffer's entry: their key, and what they count.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::state::{Key, TOKEN_BYTES};
use crate::error::Error;
use crate::tensor::{Meta, Received};

/// Inserts of one client that may wait at a server; the client queues more of them itself.
pub(super) const INSERTS_IN_FLIGHT: usize = 64;
/// Bytes that an entry counts besides its tensors and tokens. Measured: 1.2 KiB with input tokens only, 1.8 KiB with all tensors.
const BOOKKEEPING_BYTES: u64 = 2 << 10;

/// Number of tensors of an entry: input tokens, region of interest, key, value, hidden states.
pub const NUM_ITEMS: usize = 5;

/// Descriptions of the tensors of an entry; `None` for one that is absent.
pub(super) type Metas = [Option<Meta>; NUM_ITEMS];

/// The tensors of an entry. Clones share them.
#[derive(Debug, Clone)]
pub struct Items(pub [Arc<Received>; NUM_ITEMS]);

impl Items {
    /// Bytes that the entry counts against a buffer's capacity, with a key of so many.
    pub(super) fn entry_bytes(&self, num_key: usize) -> u64 {
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

impl Items {
    pub(super) fn metas(&self) -> Metas {
        let meta = |item: &Arc<Received>| item.buffer.as_ref().map(|_| item.meta.clone());
        self.0.each_ref().map(meta)
    }

    /// Tensors of these descriptions, each with the next buffer.
    pub(super) fn of_metas(metas: Metas, mut buffers: impl Iterator<Item = Buffer>) -> Self {
        let item = |meta: Option<Meta>| {
            let buffer = meta.as_ref().and_then(|_| buffers.next());
            let meta = meta.unwrap_or_default();
            Arc::new(Received { meta, buffer })
        };
        Self(metas.map(item))
    }
}
