//! One buffer that a peer may read, as a pipe or a lookup buffer exposes it: its owner registers and describes it, the
//! other side makes a source of the description. Its checksums are sent unasked, while the description is on its way.

use std::collections::HashMap;
use std::sync::Arc;

use kvpipe_ucx::{Buffer, MemoryKind};

use super::host::Cx;
use super::region::{Layout, Pieces, RKEY_CAP};
use super::remote_source::{RemoteSource, Verification};
use super::source::SourceRequest;
use super::transfer::TransferRequest;
use super::verifier::Checksums;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::{Reader, Writer};
use crate::session::Links;
use crate::transport::{DataPath, Memory};

/// Bytes that one checksum of a buffer covers: a read of UCX's, so that it is computed while the bytes are in the cache.
pub(super) const UNIT: u64 = 1 << 20;

const fn is_cuda(kind: MemoryKind) -> bool {
    matches!(kind, MemoryKind::Cuda { .. })
}

/// The key of a buffer; an empty one if it can be streamed only. UCX may be unable to pack one for memory that CUDA
/// cannot share between processes.
pub(crate) fn key(memory: &Memory) -> Result<Vec<u8>> {
    match memory.pack_rkey() {
        Err(_) if is_cuda(memory.buffer().kind()) => Ok(Vec::new()),
        packed => Ok(packed?),
    }
}

/// A buffer that a peer may read, as long as its owner keeps this.
#[derive(Debug)]
pub(crate) struct ExposedBuffer {
    pub(super) memory: Arc<Memory>,
    len: usize,
    /// True if its checksums are sent unasked.
    pub(super) pushes_checksums: bool,
}

impl ExposedBuffer {
    /// Registers a buffer for a peer to read. Memory on a GPU has no checksums, because they are computed on the CPU
    /// only. With integrity `Validate` its owner answers whether it is still exposed.
    pub(crate) fn new(
        links: &Links,
        session: SessionKey,
        buffer: Buffer,
        integrity: Integrity,
    ) -> Result<(Self, BufferDescription)> {
        let len = buffer.len();
        Self::of(links, session, links.register(buffer)?, len, integrity)
    }

    /// As [`new`](Self::new), of the first `len` bytes of registered memory.
    pub(crate) fn of(
        links: &Links,
        session: SessionKey,
        memory: Arc<Memory>,
        len: usize,
        integrity: Integrity,
    ) -> Result<(Self, BufferDescription)> {
        let buffer = memory.buffer();
        let is_read = matches!(links.peer_data_path(session), Some(DataPath::RemoteRead(_)));
        let is_cuda = is_cuda(buffer.kind());
        let verification = match (integrity.resolved(buffer.kind()), is_read) {
            (Integrity::Validate, _) => Verification::Validated,
            (Integrity::Checksum, true) if !is_cuda => Verification::Pushed,
            (Integrity::Checksum, false) if !is_cuda => Verification::StreamOnly,
            _ => Verification::OnRequest,
        };
        let described = BufferDescription {
            len,
            address: buffer.address() as u64,
            is_cuda,
            verification,
            key: key(&memory)?,
        };
        let exposed = Self {
            memory,
            len,
            pushes_checksums: verification == Verification::Pushed,
        };
        Ok((exposed, described))
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory and layout of it for a peer: all of it as one block, read once.
    ///
    /// # Errors
    /// The peer asks for something else.
    pub(crate) fn requested(&self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        if request.ids != [0] {
            let num = request.ids.len();
            return Err(Error::Config(format!(
                "a buffer is one block, id 0; {num} ids were requested"
            )));
        }
        Ok((Arc::clone(&self.memory), Layout::whole(self.len() as u64)))
    }
}

/// The buffers that each peer of a service may read, under ids of the service's choice.
#[derive(Debug, Default)]
pub(crate) struct ExposedBuffers(HashMap<SessionKey, HashMap<u64, ExposedBuffer>>);

impl ExposedBuffers {
    /// Number of them.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.values().map(HashMap::len).sum()
    }

    pub(crate) fn session_up(&mut self, session: SessionKey) {
        self.0.insert(session, HashMap::new());
    }

    pub(crate) fn session_down(&mut self, session: SessionKey) {
        self.0.remove(&session);
    }

    /// The reactor has ended: nothing is exposed any more.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Lets a peer read the first bytes of registered memory.
    ///
    /// # Errors
    /// It has no remote key.
    pub(crate) fn expose(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        source: u64,
        (memory, len): (Arc<Memory>, usize),
        integrity: Integrity,
    ) -> Result<BufferDescription> {
        let (exposed, described) = ExposedBuffer::of(cx.links, session, memory, len, integrity)?;
        if let Some(sources) = self.0.get_mut(&session) {
            cx.transfers.expose(session, source, &exposed);
            sources.insert(source, exposed);
        }
        Ok(described)
    }

    /// Ends the exposure: nothing of the source is sent from now on, and none of it may be read.
    pub(crate) fn withdraw(&mut self, cx: &mut Cx<'_>, session: SessionKey, source: u64) {
        let sources = self.0.get_mut(&session);
        if sources.is_some_and(|sources| sources.remove(&source).is_some()) {
            cx.transfers.withdraw_source(cx.links, session, source);
        }
    }

    /// The memory that a peer asks for.
    ///
    /// # Errors
    /// It is not exposed, or the peer asks for something else than all of it.
    pub(crate) fn requested(&self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let source = request.source;
        let exposed = self.0.get(&request.session);
        match exposed.and_then(|exposed| exposed.get(&source)) {
            Some(exposed) => exposed.requested(request),
            None => Err(Error::Config(format!(
                "buffer {source} is not exposed any more"
            ))),
        }
    }
}

/// A buffer as its owner describes it to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BufferDescription {
    /// Its length, over 0.
    pub(crate) len: usize,
    address: u64,
    pub(crate) is_cuda: bool,
    verification: Verification,
    key: Vec<u8>,
}

impl BufferDescription {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u64(self.len as u64)
            .u64(self.address)
            .u8(self.is_cuda.into())
            .u8(self.verification as u8)
            .bytes(&self.key)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (len, address) = (reader.u64()?, reader.u64()?);
        let is_cuda = reader.flag()?;
        let verification = match reader.u8()? {
            0 => Verification::OnRequest,
            1 => Verification::Pushed,
            2 => Verification::StreamOnly,
            3 => Verification::Validated,
            other => {
                let text = format_args!("a buffer with verification {other}");
                return Err(Error::protocol(text));
            }
        };
        let key = reader.bytes(RKEY_CAP)?.to_vec();
        let is_possible =
            isize::try_from(len).is_ok_and(|len| len > 0) && address.checked_add(len).is_some();
        if !is_possible {
            let text = format_args!("a buffer of {len} bytes at {address:#x}");
            return Err(Error::protocol(text));
        }
        // Memory on a GPU has no checksums.
        let has_checksums = matches!(
            verification,
            Verification::Pushed | Verification::StreamOnly
        );
        if is_cuda && has_checksums {
            return Err(Error::protocol("checksums of a buffer in CUDA memory"));
        }
        Ok(Self {
            len: len as usize,
            address,
            is_cuda,
            verification,
            key,
        })
    }

    /// True if its owner is asked, after the last read, whether it still exposes it.
    pub(crate) fn is_validated(&self) -> bool {
        self.verification == Verification::Validated
    }

    /// Its address in its owner's process.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Checksums that the destination compares.
    fn checksums(&self) -> Checksums {
        match self.verification {
            Verification::OnRequest => Checksums::None,
            Verification::Pushed | Verification::StreamOnly => Checksums::All,
            Verification::Validated => Checksums::OfStream,
        }
    }

    /// The transfer of all of it into `memory`. Its owner is the id of the source.
    pub(crate) fn transfer(
        &self,
        session: SessionKey,
        source: u64,
        memory: Arc<Memory>,
    ) -> TransferRequest {
        TransferRequest {
            owner: source,
            session,
            source,
            grant: 0,
            memory,
            pieces: Arc::new(Pieces::whole(self.len as u64, UNIT)),
            checksums: self.checksums(),
            is_verified_by_owner: false,
            is_retry: false,
            deadline: None,
        }
    }

    /// The source that the engine reads it from.
    pub(crate) fn source(&self) -> RemoteSource {
        RemoteSource {
            verification: self.verification,
            num_units: (self.len as u64).div_ceil(UNIT),
            ..RemoteSource::new(self.address, self.key.clone(), self.is_cuda)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn buffer(len: u64, address: u64, verification: u8) -> Result<BufferDescription> {
        buffer_in(0, len, address, verification)
    }

    fn buffer_in(held: u8, len: u64, address: u64, verification: u8) -> Result<BufferDescription> {
        let message = Writer::default()
            .u64(len)
            .u64(address)
            .u8(held)
            .u8(verification)
            .bytes(&[1])
            .finish();
        BufferDescription::read(&mut Reader::new(&message))
    }

    #[test]
    fn a_buffer_is_read_as_written() {
        let read = buffer(1 << 20, 4096, 1).unwrap();
        let message = read.write(Writer::default()).finish();
        assert_eq!(
            BufferDescription::read(&mut Reader::new(&message)).unwrap(),
            read
        );
    }

    #[test]
    fn a_buffer_in_cuda_memory_has_no_checksums() {
        let read = buffer_in(1, 1 << 20, 4096, 0).unwrap();
        assert!(read.is_cuda);
        let message = read.write(Writer::default()).finish();
        assert_eq!(
            BufferDescription::read(&mut Reader::new(&message)).unwrap(),
            read
        );
        assert!(buffer_in(1, 1 << 20, 4096, 1).is_err());
        assert!(buffer_in(1, 1 << 20, 4096, 2).is_err());
        assert!(buffer_in(1, 1 << 20, 4096, 3).unwrap().is_validated());
        assert!(buffer_in(2, 1 << 20, 4096, 0).is_err());
    }

    #[test]
    fn of_a_buffer_that_is_validated_only_a_stream_is_compared() {
        let compared = |verification| buffer(1 << 20, 4096, verification).unwrap().checksums();
        assert_eq!(compared(3), Checksums::OfStream);
        assert_eq!(compared(0), Checksums::None);
        for verification in [1, 2] {
            assert_eq!(compared(verification), Checksums::All);
        }
    }

    #[test]
    fn a_buffer_that_cannot_exist_is_refused() {
        assert!(buffer(0, 4096, 1).is_err());
        assert!(buffer(u64::MAX, 0, 1).is_err());
        assert!(buffer(4096, u64::MAX - 4000, 1).is_err());
        assert!(buffer(4096, 4096, 4).is_err());
    }

    #[test]
    fn more_checksums_than_units_are_refused() {
        let mut source = buffer(2 * UNIT, 4096, 1).unwrap().source();
        assert_eq!(source.receive(0, &[7]), Ok(()));
        assert!(source.receive(1, &[7, 7]).is_err());
        assert_eq!(source.receive(1, &[7]), Ok(()));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_buffer_or_an_error(message: Vec<u8>) {
            let _ = BufferDescription::read(&mut Reader::new(&message));
        }
    }
}
