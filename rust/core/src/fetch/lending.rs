//! The source: memory that a peer may fetch, its checksums, and the stream of the message road.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::{DATA, MESSAGE_PIECE, Offer, Proof, SUMS, WINDOW, num_pieces, piece};
use crate::checksum;
use crate::codec::Writer;
use crate::data::Road;
use crate::error::{Error, Result};
use crate::node::{Io, LinkId};
use crate::transport::{Memory, Payload};

/// Pieces whose checksums are computed in one go, and told in one message.
const PIECES_AT_ONCE: usize = 4;

/// A buffer that a peer may fetch, until this is dropped.
#[derive(Debug)]
pub(crate) struct Lending {
    memory: Arc<Memory>,
    /// Names it on this link; chosen by this side.
    id: u64,
    proof: Proof,
    num_summed: usize,
    /// Message road: what has been sent, and what may be. None before the peer has asked for it.
    stream: Option<Stream>,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    sent: usize,
    credit: usize,
}

impl Lending {
    /// Registers a buffer for a peer to fetch.
    pub(crate) fn new(
        io: &Io,
        link: LinkId,
        buffer: Buffer,
        id: u64,
        is_summed: bool,
    ) -> Result<(Self, Offer)> {
        let is_get = matches!(io.road(link), Some(Road::Get(_)));
        let proof = match (is_summed, is_get) {
            (false, _) => Proof::None,
            (true, true) => Proof::Any,
            (true, false) => Proof::Messages,
        };
        let (len, address) = (buffer.len(), buffer.address() as u64);
        let memory = io.register(buffer)?;
        let key = memory.pack_rkey()?;
        let offer = Offer::new(len, address, proof, key);
        let lending = Self {
            memory,
            id,
            proof,
            num_summed: 0,
            stream: None,
        };
        Ok((lending, offer))
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.buffer().len()
    }

    /// The peer wants it as messages.
    pub(crate) fn accept(&mut self, io: &mut Io, link: LinkId) -> Result<()> {
        if self.stream.is_some() {
            return Err(Error::protocol(format_args!(
                "buffer {} was asked for twice",
                self.id
            )));
        }
        self.stream = Some(Stream {
            sent: 0,
            credit: WINDOW,
        });
        self.send_on(io, link);
        Ok(())
    }

    /// The peer has placed so many bytes.
    pub(crate) fn credit(&mut self, io: &mut Io, link: LinkId, credit: u64) {
        if let Some(stream) = &mut self.stream {
            let credit = usize::try_from(credit).unwrap_or(WINDOW);
            stream.credit = stream.credit.saturating_add(credit).min(WINDOW);
            self.send_on(io, link);
        }
    }

    fn send_on(&mut self, io: &mut Io, link: LinkId) {
        let total = self.len();
        while let Some(stream) = &mut self.stream {
            let (offset, len) = (stream.sent, MESSAGE_PIECE.min(total - stream.sent));
            if len == 0 || stream.credit < len {
                return;
            }
            stream.sent += len;
            stream.credit -= len;
            let sum = self.sum(offset, len);
            let header = io.header(link, DATA).u64(self.id);
            let header = header.u64(offset as u64).u64(sum);
            let memory = Arc::clone(&self.memory);
            let payload = Payload::Memory {
                memory,
                offset,
                len,
            };
            if !io.message(link, header, payload) {
                return;
            }
        }
    }

    fn sum(&self, offset: usize, len: usize) -> u64 {
        if self.proof == Proof::None {
            return 0;
        }
        let bytes = self.memory.buffer().bytes(offset, len);
        bytes.map_or(0, checksum::of)
    }

    /// Get road: computes and tells the next checksums; whether there were any to compute.
    pub(crate) fn sum_on(&mut self, io: &mut Io, link: LinkId) -> bool {
        let len = self.len();
        let end = num_pieces(len).min(self.num_summed + PIECES_AT_ONCE);
        if self.proof != Proof::Any || self.stream.is_some() || self.num_summed == end {
            return false;
        }
        let sums: Vec<u64> = (self.num_summed..end)
            .map(|index| piece(len, index))
            .map(|(at, size)| self.sum(at, size))
            .collect();
        let header = io.header(link, SUMS).u64(self.id);
        let payload = Writer::default().list(&sums, |w, sum| w.u64(*sum));
        self.num_summed = end;
        io.message(link, header, Payload::Bytes(payload.finish()))
    }
}
