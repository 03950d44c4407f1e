//! Blocks of a process on this machine: many of them, or much of a large one, in one call to the kernel, where UCX makes
//! one for each 512 KiB of each (CMA either way). A call returns when the bytes are here, so that nothing is in flight.

use kvpipe_ucx::{Buffer, Piece, ProcessVmReader};

use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::random;
use crate::session::ReactorContext;
use crate::transfer::cursor::Cursor;
use crate::transfer::region::Run;
use crate::transport::DataPath;

/// Of one call, which sockets and other transfers wait for: less than a millisecond.
const PIECES: usize = 256;
const BYTES: u64 = 4 << 20;
/// The same where it is compared with checksums right after: what a core's own cache still has then.
pub(crate) const CHECKSUMMED_BYTES: u64 = 1 << 20;

/// Random bytes in this process's memory, by which a process of this host knows that it reads the right one.
#[derive(Debug)]
pub(crate) struct Secret(Option<Buffer>);

impl Secret {
    pub(crate) fn new() -> Self {
        let secret = random::<16>().ok();
        Self(secret.map(|secret| Buffer::from_vec(secret.to_vec())))
    }

    /// Says where this process's memory can be read.
    pub(crate) fn write(&self, writer: Writer) -> Option<Writer> {
        let buffer = self.0.as_ref()?;
        let writer = writer.u32(std::process::id());
        let writer = writer.u64(buffer.address() as u64);
        Some(writer.raw(buffer.bytes(0, 16)?))
    }
}

/// Where a peer says that its memory can be read.
#[derive(Debug)]
pub(crate) struct ProcessAddress {
    pub(crate) pid: u32,
    pub(crate) address: u64,
    pub(crate) secret: [u8; 16],
}

impl ProcessAddress {
    pub(crate) fn read(mut reader: Reader<'_>) -> Result<Self> {
        let (pid, address, secret) = (reader.u32()?, reader.u64()?, reader.fixed()?);
        reader.end()?;
        Ok(Self {
            pid,
            address,
            secret,
        })
    }
}

/// Whether UCX reads the peer's memory over CMA, as calls of our own would.
pub(crate) fn is_cma(cx: &ReactorContext, session: SessionKey) -> bool {
    matches!(cx.data_path(session), Some(DataPath::RemoteRead(transport)) if transport == "cma")
}

/// Reads the next pieces of `runs` with one call to the kernel, into `memory`, and returns how many bytes they have.
pub(crate) fn read_slice(
    process: &ProcessVmReader,
    (memory, base): (&Buffer, u64),
    runs: &[Run],
    cursor: &mut Cursor,
    is_checksummed: bool,
) -> std::io::Result<u64> {
    let bytes = if is_checksummed {
        CHECKSUMMED_BYTES
    } else {
        BYTES
    };
    let (mut pieces, mut num_bytes) = (Vec::with_capacity(PIECES), 0);
    while pieces.len() < PIECES
        && num_bytes < bytes
        && let Some(run) = cursor.piece(runs, bytes - num_bytes)
    {
        pieces.push(Piece {
            to: run.to as usize,
            from: base + run.from,
            len: run.len as usize,
        });
        num_bytes += run.len;
        cursor.advance(runs, run.len);
    }
    process.read(memory, &pieces)?;
    Ok(num_bytes)
}
