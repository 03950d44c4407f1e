//! The source: memory that a peer may fetch, and its checksums.

use std::sync::Arc;

use kvpipe_ucx::{Buffer, Status};

use super::{CHECKSUMS, ChecksumMode, DATA, Held, Offer, num_pieces, piece};
use crate::checksum;
use crate::error::{Error, Result};
use crate::net::codec::Writer;
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::data_path::DataPath;
use crate::transfer::region::Pieces;
use crate::transfer::stream::Outgoing;
use crate::transport::{Memory, Payload};

/// Pieces whose checksums are computed in one go, and told in one message.
const PIECES_AT_ONCE: usize = 4;

/// The key of a buffer; an empty one if it can go as messages only. UCX may be unable to pack one for memory that CUDA
/// cannot share between processes.
pub(crate) fn key(held: Held, packed: std::result::Result<Vec<u8>, Status>) -> Result<Vec<u8>> {
    match (held, packed) {
        (Held::Cuda, Err(_)) => Ok(Vec::new()),
        (_, packed) => Ok(packed?),
    }
}

/// A buffer that a peer may fetch, until this is dropped.
#[derive(Debug)]
pub(crate) struct ExposedBuffer {
    memory: Arc<Memory>,
    /// Names it on this session; chosen by this side.
    id: u64,
    checksum_mode: ChecksumMode,
    num_checksummed: usize,
    /// Stream path, once the peer has asked for it.
    stream: Option<Outgoing>,
}

impl ExposedBuffer {
    /// Registers a buffer for a peer to fetch. What is on a GPU has no checksums: nobody computes any there.
    pub(crate) fn new(
        cx: &ReactorContext,
        session: SessionKey,
        buffer: Buffer,
        id: u64,
        is_checksummed: bool,
    ) -> Result<(Self, Offer)> {
        let is_get = matches!(cx.data_path(session), Some(DataPath::RemoteRead(_)));
        let held = Held::from(buffer.kind());
        let checksum_mode = match (is_checksummed && held == Held::Host, is_get) {
            (false, _) => ChecksumMode::None,
            (true, true) => ChecksumMode::Any,
            (true, false) => ChecksumMode::Messages,
        };
        let (len, address) = (buffer.len(), buffer.address() as u64);
        let memory = cx.register(buffer)?;
        let key = key(held, memory.pack_rkey())?;
        let offer = Offer::new((len, address), held, checksum_mode, key);
        let exposed = Self {
            memory,
            id,
            checksum_mode,
            num_checksummed: 0,
            stream: None,
        };
        Ok((exposed, offer))
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.buffer().len()
    }

    /// The peer wants it as messages.
    pub(crate) fn accept(&mut self, cx: &mut ReactorContext, session: SessionKey) -> Result<()> {
        if self.stream.is_some() {
            return Err(Error::protocol(format_args!(
                "buffer {} was asked for twice",
                self.id
            )));
        }
        let memory = Arc::clone(&self.memory);
        let whole = Pieces::whole(self.len() as u64);
        let stream = Outgoing::new(memory, whole.runs, self.checksum_mode != ChecksumMode::None);
        self.stream
            .insert(stream)
            .send(cx, session, (DATA, self.id));
        Ok(())
    }

    /// The peer has placed so many bytes.
    pub(crate) fn credit(&mut self, cx: &mut ReactorContext, session: SessionKey, credit: u64) {
        if let Some(stream) = &mut self.stream {
            stream.grant(credit);
            stream.send(cx, session, (DATA, self.id));
        }
    }

    fn checksum(&self, offset: usize, len: usize) -> u64 {
        let bytes = self.memory.buffer().bytes(offset, len);
        bytes.map_or(0, checksum::of)
    }

    /// Remote read: computes and tells the next checksums; whether there were any to compute.
    pub(crate) fn run_checksum_slice(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
    ) -> bool {
        let len = self.len();
        let end = num_pieces(len).min(self.num_checksummed + PIECES_AT_ONCE);
        if self.checksum_mode != ChecksumMode::Any
            || self.stream.is_some()
            || self.num_checksummed == end
        {
            return false;
        }
        let checksums: Vec<u64> = (self.num_checksummed..end)
            .map(|index| piece(len, index))
            .map(|(at, size)| self.checksum(at, size))
            .collect();
        let header = cx.header(session, CHECKSUMS).u64(self.id);
        let payload = Writer::default().list(&checksums, |w, checksum| w.u64(*checksum));
        self.num_checksummed = end;
        cx.message(session, header, Payload::Bytes(payload.finish()))
    }
}
