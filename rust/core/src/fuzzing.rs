//! Interface of the fuzz harness (`rust/fuzz/harness`) beyond the public API: reactors that run one round at a time,
//! the data plane of a peer, and every decoder that reads bytes of a peer.

mod unreached;

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use crate::blocks::Metadata;
use crate::blocks::handoff::messages::HandoffMessage;
use crate::blocks::messages::{self as agent, AgentMessage, OFFER};
use crate::checksum;
use crate::control::messages::ControlMessage;
use crate::entries::messages::EntryMessage;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::encryption::EncryptionOffer;
use crate::net::fields::{read_refusal, write_refusal};
use crate::net::identity::{Canary, Identity};
use crate::tensor::Meta;
use crate::transfer::Message;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::region::RemoteRegion;
use crate::transport::{Memory, Transport, Worker};

pub use crate::reactor::manual::{Round, without_threads};
pub use unreached::Unreached;

/// The data plane of a peer that may send anything.
#[derive(Debug)]
pub struct PeerPlane {
    worker: Worker,
    memory: Arc<Memory>,
    canary: Arc<Memory>,
}

impl PeerPlane {
    /// Opens a worker, and exposes so many bytes of memory.
    pub fn open(transport: &Transport, len: usize) -> Result<Self> {
        let context = transport.open()?;
        Ok(Self {
            worker: context
                .worker()?
                .ok_or_else(|| Error::protocol("a transport without workers"))?,
            memory: context.register(Buffer::zeroed(len))?,
            canary: context.register(Buffer::zeroed(Canary::LEN))?,
        })
    }

    /// The worker's UCX address.
    pub fn ucx_address(&self) -> Result<Vec<u8>> {
        Ok(self.worker.address()?)
    }

    /// Address and key of the exposed memory.
    pub fn exposed(&self) -> Result<(u64, Vec<u8>)> {
        let address = self.memory.buffer().address() as u64;
        Ok((address, self.memory.pack_rkey()?))
    }

    /// The canary that an honest peer reads first.
    pub fn canary(&self) -> Result<Canary> {
        let bytes = self.canary.buffer().bytes(0, Canary::LEN);
        Ok(Canary {
            pid: std::process::id(),
            address: self.canary.buffer().address() as u64,
            rkey: self.canary.pack_rkey()?,
            checksum: bytes.map(checksum::of_shared).unwrap_or_default(),
        })
    }

    /// Connects to another worker.
    #[expect(unsafe_code, reason = "UCX does not check what it parses")]
    pub fn connect(&self, ucx_address: &[u8]) -> Result<()> {
        // SAFETY: the twin's worker, which checks all.
        let connected = unsafe { self.worker.connect(ucx_address) };
        connected
            .map(drop)
            .map_err(|status| Error::Connect(status.to_string()))
    }

    /// Progresses the worker, and drops what has arrived.
    pub fn progress(&self) {
        self.worker.progress();
        while self.worker.next_event().is_some() {}
    }
}

/// Decodes bytes of a peer, and encodes the value again; `None` if they are refused.
pub type Decoder = fn(&[u8]) -> Option<Vec<u8>>;

/// Every decoder, by name. The harness chooses by index: a new one goes to the end.
pub const DECODERS: [(&str, Decoder); 15] = [
    ("identity", |b| prefix(b, Identity::read, Identity::write)),
    ("meta", |b| prefix(b, Meta::read, Meta::write)),
    ("buffer", |b| {
        prefix(b, BufferDescription::read, BufferDescription::write)
    }),
    ("region", |b| {
        prefix(b, RemoteRegion::read, RemoteRegion::write)
    }),
    ("control", |b| {
        Some(ControlMessage::decode(b).ok()?.encode())
    }),
    ("regions", |b| {
        let read = agent::read_regions(Reader::new(b)).ok()?;
        Some(agent::write_regions(&read)[1..].to_vec())
    }),
    ("offered_blocks", offered_blocks),
    ("transfer", transfer_message),
    ("handoff", handoff_message),
    ("reason", |b| {
        Some(Writer::default().str(&agent::reason(b).ok()?).finish())
    }),
    ("buffer_checksums", buffer_checksums),
    ("metadata", |b| {
        Some(Metadata::from_bytes(b).ok()?.to_bytes())
    }),
    ("entries", entry_message),
    ("refusal", refusal),
    ("encryption", |b| {
        prefix(b, EncryptionOffer::read, EncryptionOffer::write)
    }),
];

/// A value at the beginning of the bytes.
fn prefix<T>(
    bytes: &[u8],
    read: impl FnOnce(&mut Reader<'_>) -> Result<T>,
    write: impl FnOnce(&T, Writer) -> Writer,
) -> Option<Vec<u8>> {
    let mut reader = Reader::new(bytes);
    let value = read(&mut reader).ok()?;
    Some(write(&value, Writer::default()).raw(reader.rest()).finish())
}

/// A header with its length in front, and the payload.
fn offered_blocks(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader::new(bytes);
    let header = reader.bytes(1 << 10).ok()?;
    let read = AgentMessage::decode(OFFER, Reader::new(header), reader.rest()).ok()?;
    let (header, payload) = read.encode(Writer::default());
    Some(join(&header.finish(), &payload))
}

/// A kind of a later version is read as the least specific one: only its text is encoded again.
fn refusal(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut written = write_refusal(&read_refusal(Reader::new(bytes)).ok()?);
    if bytes[0] > 4 {
        written[0] = bytes[0];
    }
    Some(written)
}

/// Kind and header with their length in front, and the payload.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader::new(bytes);
    let header = reader.bytes(1 << 10).ok()?;
    (!header.is_empty()).then(|| (header, reader.rest()))
}

fn join(header: &[u8], payload: &[u8]) -> Vec<u8> {
    Writer::default().bytes(header).raw(payload).finish()
}

/// The payload of DATA is placed, and not decoded.
fn transfer_message(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = split(bytes)?;
    let (id, read) = Message::decode(header[0], Reader::new(&header[1..]), payload).ok()?;
    let (header, written) = read.to_bytes(id);
    let is_data = matches!(read, Message::Data { .. });
    Some(join(&header, if is_data { payload } else { &written }))
}

/// The payload of a message that has none is ignored.
fn handoff_message(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = split(bytes)?;
    let read = HandoffMessage::decode(header[0], Reader::new(&header[1..]), payload);
    let (handoff, message) = read.ok()?;
    let (header, written) = message.to_bytes(&handoff);
    let is_ignored = written.is_empty();
    Some(join(&header, if is_ignored { payload } else { &written }))
}

/// The payload of a message that has none stays empty.
fn entry_message(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = split(bytes)?;
    let read = EntryMessage::decode(header[0], Reader::new(&header[1..]), payload).ok()?;
    let (kind, is_refusal) = (read.kind(), matches!(read, EntryMessage::Refused(_)));
    let (written_header, mut written) = read.into_bytes();
    if is_refusal {
        // A kind of a later version is read as the least specific one, and nothing of the header is read.
        written[0] = payload[0];
        return Some(join(header, &written));
    }
    Some(join(&[&[kind], &written_header[..]].concat(), &written))
}

/// A buffer, then messages with the checksums of its units, each with its length in front.
fn buffer_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader::new(bytes);
    let buffer = BufferDescription::read(&mut reader).ok()?;
    let (mut source, mut num_known) = (buffer.source(), 0);
    while let Ok(message) = reader.bytes(1 << 14) {
        let checksums = Reader::new(message).list(1 << 11, Reader::u64).ok()?;
        source.receive(num_known, &checksums).ok()?;
        num_known += checksums.len() as u64;
        assert!(num_known <= buffer.len as u64);
    }
    Some(bytes.to_vec())
}
