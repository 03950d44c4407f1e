//! What the fuzz harness (`rust/fuzz/harness`) needs besides the public API: reactors that run one round at a time, the
//! data plane of a peer, and every decoder that reads bytes of a peer.

use std::net::Ipv4Addr;
use std::sync::Arc;

use kvpipe_ucx::{Buffer, EndpointId};

use crate::blocks::Metadata;
use crate::blocks::messages::{self as blocks, Offered, RemoteRegions};
use crate::control::messages::ControlMessage;
use crate::error::Result;
use crate::lookup::messages as lookup;
use crate::lookup::transfer::EntryTransfer;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::Identity;
use crate::tensor::Meta;
use crate::transfer::fetch::Offer;
use crate::transfer::region::{Pieces, RemoteRegion};
use crate::transport::{Memory, Payload, Transport, Worker};

pub use crate::reactor::manual::{Round, without_threads};

/// The data plane of a peer that may send anything.
#[derive(Debug)]
pub struct PeerPlane {
    worker: Worker,
    memory: Arc<Memory>,
    endpoint: Option<EndpointId>,
}

impl PeerPlane {
    /// Opens a worker, and exposes so many bytes of memory.
    pub fn open(transport: &Transport, len: usize) -> Result<Self> {
        let context = transport.open(Ipv4Addr::LOCALHOST.into())?;
        Ok(Self {
            worker: context.worker()?,
            memory: context.register(Buffer::zeroed(len))?,
            endpoint: None,
        })
    }

    /// Where the worker can be reached.
    pub fn ucx_address(&self) -> Result<Vec<u8>> {
        Ok(self.worker.address()?)
    }

    /// Address and key of the exposed memory.
    pub fn exposed(&self) -> Result<(u64, Vec<u8>)> {
        let address = self.memory.buffer().address() as u64;
        Ok((address, self.memory.pack_rkey()?))
    }

    /// Connects to another worker.
    pub fn connect(&mut self, ucx_address: &[u8]) -> Result<()> {
        self.endpoint = Some(self.worker.connect(ucx_address)?);
        Ok(())
    }

    /// Sends an active message, if the endpoint is connected and usable.
    pub fn send(&self, header: Vec<u8>, payload: &[u8]) {
        if let Some(endpoint) = self.endpoint {
            let payload = Payload::Bytes(payload.to_vec());
            let _ = self.worker.am_send(endpoint, header, payload, 0);
        }
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
pub const DECODERS: [(&str, Decoder); 16] = [
    ("identity", |b| prefix(b, Identity::read, Identity::write)),
    ("meta", |b| prefix(b, Meta::read, Meta::write)),
    ("offer", |b| prefix(b, Offer::read, Offer::write)),
    ("region", |b| {
        prefix(b, RemoteRegion::read, RemoteRegion::write)
    }),
    ("control", |b| {
        Some(ControlMessage::decode(b).ok()?.encode())
    }),
    ("regions", |b| {
        let read = RemoteRegions::read(Reader::new(b)).ok()?;
        Some(blocks::regions(&read.0)[1..].to_vec())
    }),
    ("offered_blocks", offered_blocks),
    ("block_ids", |b| {
        Some(blocks::ids(&blocks::read_ids(b).ok()?))
    }),
    ("ready_blocks", |b| {
        Some(blocks::ready_blocks(&blocks::read_ready_blocks(b).ok()?))
    }),
    ("reason", |b| {
        Some(Writer::default().str(&blocks::reason(b).ok()?).finish())
    }),
    ("block_checksums", |b| {
        Some(blocks::checksums(&blocks::read_checksums(b).ok()?))
    }),
    ("metadata", |b| {
        Some(Metadata::from_bytes(b).ok()?.to_bytes())
    }),
    ("select", |b| {
        let (query, timeout) = lookup::read_select(b).ok()?;
        Some(lookup::write_select(&query, timeout))
    }),
    ("refusal", refusal),
    // Entries are encoded from registered memory only.
    ("entry", |b| {
        EntryTransfer::read(Reader::new(b)).ok().map(|_| b.to_vec())
    }),
    ("offer_checksums", offer_checksums),
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
    let read = Offered::read(Reader::new(header), reader.rest()).ok()?;
    let pieces = Pieces {
        runs: Vec::new(),
        to_ids: read.to_ids,
        from_ids: read.from_ids,
        num_bytes: 0,
    };
    let notice = read
        .notice
        .as_ref()
        .map(|(number, tag)| (*number, &tag[..]));
    let ids = (read.offer, read.to, read.from);
    let (header, payload) =
        Offered::write(Writer::default(), ids, &pieces, read.is_checksummed, notice);
    Some(
        Writer::default()
            .bytes(&header.finish())
            .raw(&payload)
            .finish(),
    )
}

/// A kind of a later version is read as the least specific one: only its text is encoded again.
fn refusal(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut written = lookup::write_refusal(&lookup::read_refusal(bytes).ok()?);
    if bytes[0] > 3 {
        written[0] = bytes[0];
    }
    Some(written)
}

/// An offer, then messages with the checksums of its pieces, each with its length in front.
fn offer_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader::new(bytes);
    let mut offer = Offer::read(&mut reader).ok()?;
    let mut num_known = 0;
    while let Ok(message) = reader.bytes(1 << 14) {
        let known = offer.receive_checksums(message).ok()?;
        assert_eq!(known.start, num_known);
        num_known = known.end;
        assert!(num_known <= offer.len);
    }
    Some(bytes.to_vec())
}
