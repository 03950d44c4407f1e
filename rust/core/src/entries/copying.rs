//! The copy of an insert's tensors into the buffer of this process, by slices.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::items::{Items, NUM_ITEMS, not_host};
use crate::error::{Error, Result};
use crate::tensor::Received;
use crate::transfer::host::HUGE;
use crate::transport::Pool;
use crate::work::Completer;

/// An insert of this process. Once it is granted, its tensors are copied one after the other; each copy replaces the
/// caller's tensor.
#[derive(Debug)]
pub(super) struct LocalInsert {
    pub(super) items: Items,
    pub(super) completer: Completer<()>,
    num_copied: usize,
    /// The copy of a large tensor that is under way, and its copied bytes.
    partial: Option<(Arc<Buffer>, usize)>,
}

impl LocalInsert {
    pub(super) fn new(items: Items, completer: Completer<()>) -> Self {
        Self {
            items,
            completer,
            num_copied: 0,
            partial: None,
        }
    }

    /// Fails the insert; its caller's memory is released before.
    pub(super) fn fail(self, error: Error) {
        drop((self.items, self.partial));
        self.completer.complete(Err(error));
    }

    pub(super) fn is_being_copied(&self) -> bool {
        self.num_copied > 0 || self.partial.is_some()
    }

    /// Copies a small tensor, or up to `max_bytes` of a large one; true once all tensors are copied.
    pub(super) fn advance(&mut self, pool: &Pool<Buffer>, max_bytes: usize) -> Result<bool> {
        while let Some(item) = self.items.0.get_mut(self.num_copied) {
            let Some(buffer) = &item.buffer else {
                self.num_copied += 1;
                continue;
            };
            if let Some(copied) = copy(buffer, &mut self.partial, pool, max_bytes)? {
                let (meta, buffer) = (item.meta.clone(), Some(copied));
                *item = Arc::new(Received { meta, buffer });
                self.num_copied += 1;
            }
            break;
        }
        Ok(self.num_copied == NUM_ITEMS)
    }
}

/// Copies one tensor; `None` while it is partial.
fn copy(
    buffer: &Buffer,
    partial: &mut Option<(Arc<Buffer>, usize)>,
    pool: &Pool<Buffer>,
    max_bytes: usize,
) -> Result<Option<Buffer>> {
    let len = buffer.len();
    let exhausted = || Error::Exhausted(format!("no memory for a copy of {len} bytes"));
    if len < HUGE {
        let bytes = buffer.bytes(0, len).ok_or_else(not_host)?;
        let mut copied = Vec::new();
        copied.try_reserve_exact(len).map_err(|_| exhausted())?;
        bytes.append_to(&mut copied);
        return Ok(Some(Buffer::from_vec(copied)));
    }
    let (copied, at) = match partial.take() {
        Some(partial) => partial,
        None => (pool.acquire(len, |fresh| Ok(Arc::new(fresh)))?, 0),
    };
    let slice = max_bytes.min(len - at);
    copied.copy_from(at, buffer.bytes(at, slice).ok_or_else(not_host)?);
    if at + slice < len {
        *partial = Some((copied, at + slice));
        return Ok(None);
    }
    pool.lend(copied, len).ok_or_else(exhausted).map(Some)
}
