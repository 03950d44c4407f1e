//! One buffer that a peer may read, as a pipe or a lookup buffer exposes it: its owner registers and describes it, the
//! other side makes a source of the description. Its checksums are sent unasked, while the description is on its way.

use std::sync::Arc;

use kvpipe_ucx::{Buffer, MemoryKind};

use super::region::{Layout, Pieces, RKEY_CAP};
use super::remote_source::{ChecksumMode, RemoteSource};
use super::source::SourceRequest;
use super::transfer::TransferRequest;
use super::verifier::Checksums;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::session::ReactorContext;
use crate::transport::{DataPath, Memory};

/// What one checksum of a buffer covers: a read of UCX's, so that it is computed while the bytes are in the cache.
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
    /// Whether its checksums are sent unasked.
    pub(super) pushes_checksums: bool,
}

impl ExposedBuffer {
    /// Registers a buffer for a peer to read. What is on a GPU has no checksums: nobody computes any there.
    pub(crate) fn new(
        cx: &ReactorContext,
        session: SessionKey,
        buffer: Buffer,
        is_checksummed: bool,
    ) -> Result<(Self, BufferDescription)> {
        let is_read = matches!(cx.peer_data_path(session), Some(DataPath::RemoteRead(_)));
        let is_cuda = is_cuda(buffer.kind());
        let checksum_mode = match (is_checksummed && !is_cuda, is_read) {
            (false, _) => ChecksumMode::OnRequest,
            (true, true) => ChecksumMode::Pushed,
            (true, false) => ChecksumMode::StreamOnly,
        };
        let (len, address) = (buffer.len(), buffer.address() as u64);
        let memory = cx.register(buffer)?;
        let described = BufferDescription {
            len,
            address,
            is_cuda,
            checksum_mode,
            key: key(&memory)?,
        };
        let exposed = Self {
            memory,
            pushes_checksums: checksum_mode == ChecksumMode::Pushed,
        };
        Ok((exposed, described))
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.buffer().len()
    }

    /// What a peer reads of it: all of it as one block, once.
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

/// A buffer as its owner describes it to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BufferDescription {
    /// Its length, over 0.
    pub(crate) len: usize,
    address: u64,
    pub(crate) is_cuda: bool,
    checksum_mode: ChecksumMode,
    key: Vec<u8>,
}

impl BufferDescription {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u64(self.len as u64)
            .u64(self.address)
            .u8(self.is_cuda.into())
            .u8(self.checksum_mode as u8)
            .bytes(&self.key)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (len, address) = (reader.u64()?, reader.u64()?);
        let is_cuda = reader.flag()?;
        let checksum_mode = match reader.u8()? {
            0 => ChecksumMode::OnRequest,
            1 => ChecksumMode::Pushed,
            2 => ChecksumMode::StreamOnly,
            other => {
                let text = format_args!("a buffer with checksums of mode {other}");
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
        // Nobody checksums what is on a GPU.
        if is_cuda && checksum_mode != ChecksumMode::OnRequest {
            return Err(Error::protocol("checksums of a buffer in CUDA memory"));
        }
        Ok(Self {
            len: len as usize,
            address,
            is_cuda,
            checksum_mode,
            key,
        })
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
            memory,
            pieces: Arc::new(Pieces::whole(self.len as u64, UNIT)),
            checksums: Checksums::all_if(self.checksum_mode != ChecksumMode::OnRequest),
            is_verified_by_owner: false,
            is_retry: false,
            deadline: None,
        }
    }

    /// What the engine reads it from.
    pub(crate) fn source(&self) -> RemoteSource {
        RemoteSource {
            checksum_mode: self.checksum_mode,
            num_units: (self.len as u64).div_ceil(UNIT),
            ..RemoteSource::new(self.address, self.key.clone(), self.is_cuda)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn buffer(len: u64, address: u64, checksum_mode: u8) -> Result<BufferDescription> {
        buffer_in(0, len, address, checksum_mode)
    }

    fn buffer_in(held: u8, len: u64, address: u64, checksum_mode: u8) -> Result<BufferDescription> {
        let message = Writer::default()
            .u64(len)
            .u64(address)
            .u8(held)
            .u8(checksum_mode)
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
        assert!(buffer_in(2, 1 << 20, 4096, 0).is_err());
    }

    #[test]
    fn a_buffer_that_cannot_exist_is_refused() {
        assert!(buffer(0, 4096, 1).is_err());
        assert!(buffer(u64::MAX, 0, 1).is_err());
        assert!(buffer(4096, u64::MAX - 4000, 1).is_err());
        assert!(buffer(4096, 4096, 3).is_err());
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
