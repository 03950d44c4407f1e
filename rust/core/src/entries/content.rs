//! The content of an entry: parts of bytes, and what describes them.

use std::borrow::Cow;
use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::items::{Items, Metas, NUM_ITEMS};
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::tensor::Meta;
use crate::transfer::TransferError;
use crate::transfer::host::HUGE;
use crate::transport::Memory;

/// Most parts of an entry.
pub(super) const PARTS_CAP: usize = NUM_ITEMS;

/// Bytes that a value counts besides its bytes, key and record.
const BOOKKEEPING_BYTES: u64 = 512;
/// Large values are kept in huge pages.
const GRAIN: u64 = 2 << 20;

const ABSENT: u8 = 0;
const PRESENT: u8 = 1;

/// Bytes of an entry.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) buffer: Buffer,
    /// Registered memory of the bytes, if they were transferred.
    pub(super) memory: Option<Arc<Memory>>,
}

/// Description of the parts.
#[derive(Debug)]
pub(super) enum Description {
    /// The record of a value, which has one part.
    Record(Box<[u8]>),
    /// Of an entry of a lookup buffer, with a part for each that is there.
    Tensors(Box<Metas>),
}

impl Description {
    /// Its record in a message.
    ///
    /// # Errors
    /// `Config`: a description that no receiver would accept.
    pub(super) fn to_record(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Record(record) => Ok((&record[..]).into()),
            Self::Tensors(metas) => write_metas(metas).map(Cow::Owned),
        }
    }
}

/// A committed entry.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) parts: Vec<Part>,
    pub(super) description: Description,
    /// Of all parts and then the record; `None` in a lookup buffer, where each part is verified on its way.
    pub(super) checksum: Option<u64>,
}

impl Content {
    pub(super) fn num_bytes(&self) -> u64 {
        let lens = self.parts.iter().map(|part| part.buffer.len() as u64);
        lens.sum()
    }

    /// The content of tensors.
    pub(super) fn of_items(items: &Items) -> Self {
        let part = |buffer: Buffer| Part {
            buffer,
            memory: None,
        };
        let buffers = items.0.iter().filter_map(|item| item.buffer.clone());
        Self {
            parts: buffers.map(part).collect(),
            description: Description::Tensors(items.metas().into()),
            checksum: None,
        }
    }

    /// The tensors of the content; `None` of a value.
    pub(super) fn to_items(&self) -> Option<Items> {
        let Description::Tensors(metas) = &self.description else {
            return None;
        };
        let buffers = self.parts.iter().map(|part| part.buffer.clone());
        Some(Items::of_metas((**metas).clone(), buffers))
    }
}

/// The record that describes tensors.
///
/// # Errors
/// `Config`: one that no receiver would accept.
pub(super) fn write_metas(metas: &Metas) -> Result<Vec<u8>> {
    let mut writer = Writer::default();
    for meta in metas {
        writer = match meta {
            None => writer.u8(ABSENT),
            Some(meta) => {
                meta.check()?;
                meta.write(writer.u8(PRESENT))
            }
        };
    }
    Ok(writer.finish())
}

/// Reads a record that describes tensors.
///
/// # Errors
/// `Protocol`: it is none.
pub(super) fn read_metas(record: &[u8]) -> Result<Metas> {
    let mut reader = Reader::new(record);
    let mut metas = [const { None }; NUM_ITEMS];
    for meta in &mut metas {
        *meta = match reader.u8()? {
            ABSENT => None,
            PRESENT => Some(Meta::read(&mut reader)?),
            other => return Err(Error::protocol(format_args!("a tensor of kind {other}"))),
        };
    }
    reader.end()?;
    Ok(metas)
}

/// The outcome of the read of a part of `num_bytes`.
pub(super) fn read_outcome(
    outcome: std::result::Result<(), TransferError>,
    num_bytes: u64,
) -> Result<()> {
    outcome.map_err(|error| {
        error.into_error(|corruption| {
            let at = corruption.at;
            format!(
                "what came differs from its checksum at byte {at} of {num_bytes}; nothing was delivered, send it again"
            )
        })
    })
}

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
