//! Tensors that have arrived at the receiving end and wait for a receive, in order.

use std::collections::VecDeque;

use kvpipe_ucx::Buffer;

use super::{EAGER_CAP, MESSAGES_IN_FLIGHT};
use crate::checksum;
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::tensor::Meta;
use crate::transfer::exposed::BufferDescription;

/// A tensor that is here, or that can be transferred.
pub(super) struct IncomingTensor {
    pub(super) sequence: u64,
    pub(super) meta: Meta,
    pub(super) content: Content,
}

impl IncomingTensor {
    /// Why it does not fit the memory that a caller receives into.
    pub(super) fn mismatch(&self, out: Option<&(Meta, Buffer)>) -> Option<Error> {
        let (meta, buffer) = out?;
        let len = match &self.content {
            Content::Eager(bytes) => bytes.len(),
            Content::Offer(buffer) => buffer.len,
            Content::Corrupt { .. } => return None,
        };
        if *meta == self.meta && buffer.len() == len {
            return None;
        }
        let show = |meta: &Meta| match meta.family {
            0 => "None".to_owned(),
            1 => format!("torch {} {:?}", meta.dtype, meta.shape),
            _ => format!("numpy {} {:?}", meta.dtype, meta.shape),
        };
        Some(Error::Config(format!(
            "out= is {}, the next tensor is {}; it was not consumed, receive it with a matching out= or without",
            show(meta),
            show(&self.meta)
        )))
    }
}

pub(super) enum Content {
    Eager(Vec<u8>),
    /// The message differs from its checksum.
    Corrupt {
        /// An offer: its sender waits for an answer.
        was_offered: bool,
    },
    Offer(BufferDescription),
}

/// The queue, and the sequence number of the next tensor.
#[derive(Default)]
pub(super) struct IncomingQueue {
    queue: VecDeque<IncomingTensor>,
    next_sequence: u64,
}

/// Messages of the sender.
impl IncomingQueue {
    /// A small tensor with its bytes.
    pub(super) fn eager(&mut self, sequence: u64, header: Reader<'_>, data: &[u8]) -> Result<()> {
        if !matches_checksum(header, data)? {
            return self.corrupt(sequence, false);
        }
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let bytes = reader.bytes(EAGER_CAP)?.to_vec();
        reader.end()?;
        self.push(IncomingTensor {
            sequence,
            meta,
            content: Content::Eager(bytes),
        })
    }

    /// A large tensor, to be transferred. Returns its buffer, unless the message is corrupt.
    pub(super) fn offer(
        &mut self,
        sequence: u64,
        header: Reader<'_>,
        data: &[u8],
    ) -> Result<Option<BufferDescription>> {
        if !matches_checksum(header, data)? {
            self.corrupt(sequence, true)?;
            return Ok(None);
        }
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let buffer = BufferDescription::read(&mut reader)?;
        reader.end()?;
        if buffer.len <= EAGER_CAP && !buffer.is_cuda {
            let len = buffer.len;
            return Err(Error::protocol(format_args!("an offer of {len} bytes")));
        }
        self.push(IncomingTensor {
            sequence,
            meta,
            content: Content::Offer(buffer.clone()),
        })?;
        Ok(Some(buffer))
    }

    /// A message that differs from its checksum: none of its fields can be trusted.
    fn corrupt(&mut self, sequence: u64, was_offered: bool) -> Result<()> {
        self.push(IncomingTensor {
            sequence,
            meta: Meta::default(),
            content: Content::Corrupt { was_offered },
        })
    }

    fn push(&mut self, tensor: IncomingTensor) -> Result<()> {
        if tensor.sequence != self.next_sequence || self.queue.len() >= MESSAGES_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "tensor {} arrived, {} was next and {} wait",
                tensor.sequence,
                self.next_sequence,
                self.queue.len()
            )));
        }
        self.next_sequence += 1;
        self.queue.push_back(tensor);
        Ok(())
    }

    /// Drops a tensor that its sender withdraws; false if it is not in the queue.
    pub(super) fn withdraw(&mut self, sequence: u64) -> bool {
        let is_match = |tensor: &IncomingTensor| tensor.sequence == sequence;
        let at = self.queue.iter().position(is_match);
        at.and_then(|at| self.queue.remove(at)).is_some()
    }

    /// Drops the offers, whose memory is gone with the sender. Eager tensors stay.
    pub(super) fn drop_offers(&mut self) {
        self.queue
            .retain(|tensor| !matches!(tensor.content, Content::Offer(_)));
    }
}

/// The receiver's side.
impl IncomingQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn next(&self) -> Option<&IncomingTensor> {
        self.queue.front()
    }

    pub(super) fn pop(&mut self) -> Option<IncomingTensor> {
        self.queue.pop_front()
    }

    /// Returns a popped tensor that was not received to the front.
    pub(super) fn requeue(&mut self, tensor: IncomingTensor) {
        self.queue.push_front(tensor);
    }
}

/// Compares a payload with the checksum in the rest of its header; true without a checksum.
fn matches_checksum(mut header: Reader<'_>, payload: &[u8]) -> Result<bool> {
    let (is_checksummed, checksum) = (header.flag()?, header.u64()?);
    header.end()?;
    Ok(!is_checksummed || checksum::of(payload) == checksum)
}
