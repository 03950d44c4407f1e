//! The tensors of an entry in a message: small ones inside, large ones described, to be transferred.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::{Items, NUM_ITEMS, entry_bytes};
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::tensor::{Meta, Received};
use crate::transfer::exposed::BufferDescription;

/// Bytes of an entry that travel inside its message. Above them, one copy costs more than one more round trip.
pub(super) const INLINE_CAP: usize = 32 << 10;

pub(super) const NOTHING: u8 = 0;
pub(super) const INLINE: u8 = 1;
pub(super) const OFFERED: u8 = 2;

/// # Errors
/// An operation whose tensors would bear the names of another's.
pub(super) fn check_operation(operation: u64) -> Result<()> {
    if operation < u64::MAX / NUM_ITEMS as u64 {
        return Ok(());
    }
    Err(Error::protocol(format_args!(
        "operation {operation} is out of range"
    )))
}

/// Names a tensor on its session: the operation, and which of its tensors.
pub(super) fn source_id(operation: u64, index: usize) -> u64 {
    operation
        .wrapping_mul(NUM_ITEMS as u64)
        .wrapping_add(index as u64)
}

pub(super) fn owner_of(source: u64) -> (u64, usize) {
    let count = NUM_ITEMS as u64;
    (source / count, (source % count) as usize)
}

#[derive(Debug)]
enum Slot {
    Nothing,
    Here(Buffer),
    Offered(BufferDescription),
}

/// An entry as its message describes it.
#[derive(Debug)]
pub(crate) struct EntryTransfer {
    metas: [Meta; NUM_ITEMS],
    slots: [Slot; NUM_ITEMS],
}

impl EntryTransfer {
    /// Reads the tensors of a message, to its end.
    pub(crate) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let mut entry = Self {
            metas: Default::default(),
            slots: [const { Slot::Nothing }; NUM_ITEMS],
        };
        let mut space = INLINE_CAP;
        for (meta, slot) in entry.metas.iter_mut().zip(&mut entry.slots) {
            *slot = match reader.u8()? {
                NOTHING => continue,
                INLINE => {
                    *meta = Meta::read(&mut reader)?;
                    let bytes = reader.bytes(space)?;
                    space -= bytes.len();
                    Slot::Here(Buffer::from_vec(bytes.to_vec()))
                }
                OFFERED => {
                    *meta = Meta::read(&mut reader)?;
                    Slot::Offered(BufferDescription::read(&mut reader)?)
                }
                other => return Err(Error::protocol(format_args!("a tensor of kind {other}"))),
            };
        }
        reader.end()?;
        Ok(entry)
    }

    /// What an entry of these tensors counts.
    pub(super) fn entry_bytes(&self, tokens: &[i64]) -> u64 {
        let len = |slot: &Slot| match slot {
            Slot::Nothing => 0,
            Slot::Here(buffer) => buffer.len() as u64,
            Slot::Offered(buffer) => buffer.len as u64,
        };
        entry_bytes(tokens, self.metas.iter().zip(self.slots.iter().map(len)))
    }

    /// The tensors that are not inside: index and description.
    pub(super) fn offered(&self) -> impl Iterator<Item = (usize, &BufferDescription)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(index, slot)| match slot {
            Slot::Offered(buffer) => Some((index, buffer)),
            Slot::Nothing | Slot::Here(_) => None,
        })
    }

    /// A tensor is here.
    pub(super) fn fill(&mut self, index: usize, buffer: Buffer) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Slot::Here(buffer);
        }
    }

    pub(super) fn into_items(self) -> Items {
        let mut metas = self.metas.into_iter();
        Items(self.slots.map(|slot| {
            let buffer = match slot {
                Slot::Here(buffer) => Some(buffer),
                Slot::Nothing | Slot::Offered(_) => None,
            };
            let meta = metas.next().unwrap_or_default();
            Arc::new(Received { meta, buffer })
        }))
    }
}

/// An entry whose tensors are all here, or why they are not.
pub(super) type Arrived = (u64, Result<Items>);
