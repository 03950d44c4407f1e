//! The tensors of an entry in a message: small ones inside, large ones described, to be transferred.

use std::collections::VecDeque;
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

/// An entry as its message describes it.
#[derive(Debug)]
pub(crate) struct EntryTransfer {
    items: [Received; NUM_ITEMS],
    /// The tensors that have not come, by their index.
    offered: VecDeque<(usize, BufferDescription)>,
}

impl EntryTransfer {
    /// Reads the tensors of a message, to its end.
    pub(crate) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let mut items = std::array::from_fn(|_| Received {
            meta: Meta::default(),
            buffer: None,
        });
        let (mut offered, mut space) = (VecDeque::new(), INLINE_CAP);
        for (index, item) in items.iter_mut().enumerate() {
            match reader.u8()? {
                NOTHING => {}
                INLINE => {
                    item.meta = Meta::read(&mut reader)?;
                    let bytes = reader.bytes(space)?;
                    space -= bytes.len();
                    item.buffer = Some(Buffer::from_vec(bytes.to_vec()));
                }
                OFFERED => {
                    item.meta = Meta::read(&mut reader)?;
                    let buffer = BufferDescription::read(&mut reader)?;
                    if buffer.is_validated() {
                        return Err(Error::protocol("a tensor of an entry that is validated"));
                    }
                    offered.push_back((index, buffer));
                }
                other => return Err(Error::protocol(format_args!("a tensor of kind {other}"))),
            }
        }
        reader.end()?;
        Ok(Self { items, offered })
    }

    /// Bytes that an entry of these tensors counts.
    pub(super) fn entry_bytes(&self, num_tokens: usize) -> u64 {
        let offered = self.offered.iter().map(|(_, buffer)| buffer.len as u64);
        entry_bytes(num_tokens, self.items.iter())
            .saturating_add(offered.fold(0, u64::saturating_add))
    }

    /// The tensors that have not come: index and description.
    pub(super) fn offered(&self) -> impl Iterator<Item = &(usize, BufferDescription)> {
        self.offered.iter()
    }

    /// The first of [`offered`](Self::offered) has come.
    pub(super) fn fill_first(&mut self, buffer: Option<Buffer>) {
        if let Some((index, _)) = self.offered.pop_front() {
            self.items[index].buffer = buffer;
        }
    }

    pub(super) fn into_items(self) -> Items {
        Items(self.items.map(Arc::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::codec::Writer;

    fn read(verification: u8) -> Result<EntryTransfer> {
        let (in_host, rkey) = (0, [1]);
        let mut message = Meta::default().write(Writer::default().u8(OFFERED));
        message = message.u64(1 << 20).u64(4096).u8(in_host);
        message = message.u8(verification).bytes(&rkey);
        let message = message.u8(NOTHING).u8(NOTHING).u8(NOTHING).u8(NOTHING);
        let message = message.finish();
        EntryTransfer::read(Reader::new(&message))
    }

    /// Nobody would ask.
    #[test]
    fn a_tensor_of_an_entry_that_is_to_be_validated_is_refused() {
        for verification in 0..3 {
            assert!(read(verification).is_ok(), "{verification}");
        }
        let refused = read(3).unwrap_err();
        assert!(matches!(refused, Error::Protocol(_)), "{refused:?}");
    }
}
