//! What has come of a pipe's tensors and has not been received yet, in order.

use std::collections::VecDeque;

use super::{EAGER_CAP, MESSAGES_IN_FLIGHT, Meta};
use crate::checksum;
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::transfer::fetch::{Held, Offer};

/// A tensor that has come, or that can be fetched.
pub(super) struct Arrived {
    pub(super) sequence: u64,
    pub(super) meta: Meta,
    pub(super) content: Content,
}

pub(super) enum Content {
    Eager(Vec<u8>),
    /// It differs from its checksum.
    Corrupt {
        /// Its sender waits to hear what has become of it.
        was_offered: bool,
    },
    Offer(Offer),
}

/// Those that wait, and the number of the next one to come.
#[derive(Default)]
pub(super) struct Arrivals {
    queue: VecDeque<Arrived>,
    next_sequence: u64,
}

/// What the sender says.
impl Arrivals {
    /// A small tensor, with its bytes.
    pub(super) fn eager(&mut self, sequence: u64, header: Reader<'_>, data: &[u8]) -> Result<()> {
        if !is_whole(header, data)? {
            return self.corrupt(sequence, false);
        }
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let bytes = reader.bytes(EAGER_CAP)?.to_vec();
        reader.end()?;
        self.arrive(Arrived {
            sequence,
            meta,
            content: Content::Eager(bytes),
        })
    }

    /// A large tensor, which is to be fetched.
    pub(super) fn offer(&mut self, sequence: u64, header: Reader<'_>, data: &[u8]) -> Result<()> {
        if !is_whole(header, data)? {
            return self.corrupt(sequence, true);
        }
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let offer = Offer::read(&mut reader)?;
        reader.end()?;
        if offer.len <= EAGER_CAP && offer.held == Held::Host {
            let len = offer.len;
            return Err(Error::protocol(format_args!("an offer of {len} bytes")));
        }
        self.arrive(Arrived {
            sequence,
            meta,
            content: Content::Offer(offer),
        })
    }

    /// Nothing that was said of it can be believed.
    fn corrupt(&mut self, sequence: u64, was_offered: bool) -> Result<()> {
        self.arrive(Arrived {
            sequence,
            meta: Meta::default(),
            content: Content::Corrupt { was_offered },
        })
    }

    fn arrive(&mut self, arrived: Arrived) -> Result<()> {
        if arrived.sequence != self.next_sequence || self.queue.len() >= MESSAGES_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "tensor {} came, {} was next and {} wait",
                arrived.sequence,
                self.next_sequence,
                self.queue.len()
            )));
        }
        self.next_sequence += 1;
        self.queue.push_back(arrived);
        Ok(())
    }

    /// The sender wants this one back; whether it was here.
    pub(super) fn withdraw(&mut self, sequence: u64) -> bool {
        let is_it = |arrived: &Arrived| arrived.sequence == sequence;
        let at = self.queue.iter().position(is_it);
        at.and_then(|at| self.queue.remove(at)).is_some()
    }

    /// Their sender's memory is gone; what came whole stays.
    pub(super) fn lose_offers(&mut self) {
        self.queue
            .retain(|arrived| !matches!(arrived.content, Content::Offer(_)));
    }
}

/// What the receiver looks at.
impl Arrivals {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn next(&self) -> Option<&Arrived> {
        self.queue.front()
    }

    pub(super) fn take_next(&mut self) -> Option<Arrived> {
        self.queue.pop_front()
    }

    /// What was taken was not received: it is the next again.
    pub(super) fn put_back(&mut self, arrived: Arrived) {
        self.queue.push_front(arrived);
    }

    /// The offer of this number, if it waits here.
    pub(super) fn offer_of(&mut self, sequence: u64) -> Option<&mut Offer> {
        let is_it = |arrived: &&mut Arrived| arrived.sequence == sequence;
        match &mut self.queue.iter_mut().find(is_it)?.content {
            Content::Offer(offer) => Some(offer),
            _ => None,
        }
    }
}

/// Whether a payload, bytes and what is said of them, is what the rest of its header says.
fn is_whole(mut header: Reader<'_>, payload: &[u8]) -> Result<bool> {
    let (is_checksummed, checksum) = (header.flag()?, header.u64()?);
    header.end()?;
    Ok(!is_checksummed || checksum::of(payload) == checksum)
}
