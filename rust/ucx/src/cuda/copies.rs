//! Copies of many pieces of GPU memory by one launch of a kernel. A copy of the CUDA driver's own costs several
//! microseconds for each piece, whatever its size. Another kernel computes digests of what it copies.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::kernel::{Code, ITEMS_CAP, Kernel, NO_DIGEST, Report};
use super::{
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUdeviceptr, Calls, CudaError, Current, Device, driver,
};

const COPY: Code = Code {
    ptx: concat!(include_str!("copy_chunks.ptx"), "\0"),
    entry: c"kvpipe_copy_chunks",
};
const COPY_AND_DIGEST: Code = Code {
    ptx: concat!(include_str!("copy_and_digest.ptx"), "\0"),
    entry: c"kvpipe_copy_and_digest",
};

/// A part of a piece, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) to: CUdeviceptr,
    pub(super) from: CUdeviceptr,
    pub(super) num_bytes: u64,
}

/// The same with its digest, which the kernel writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DigestedChunk {
    pub(super) from: CUdeviceptr,
    pub(super) num_bytes: u64,
    pub(super) digest: u64,
    pub(super) to: CUdeviceptr,
}

/// Division of pieces into chunks, of which one launch copies [`CAP`](Self::CAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// No chunk has bytes of two such blocks.
    block_bytes: usize,
    chunk_bytes: usize,
}

impl Chunks {
    /// Most chunks of a launch.
    pub const CAP: usize = ITEMS_CAP;
    /// Bytes of a chunk that is digested, unless its block ends before: what a warp copies at a time.
    pub const DIGESTED_BYTES: usize = 16 << 10;
    /// Of a copy without digests: what a thread block copies at a time.
    pub const COPIED: Self = Self {
        block_bytes: usize::MAX,
        chunk_bytes: 32 << 10,
    };

    /// Of a copy with digests of blocks of so many bytes.
    #[must_use]
    pub const fn digested(block_bytes: usize) -> Self {
        Self {
            block_bytes: if block_bytes == 0 { 1 } else { block_bytes },
            chunk_bytes: Self::DIGESTED_BYTES,
        }
    }

    /// Number of the chunks of a piece.
    #[must_use]
    pub const fn num_of(self, len: usize) -> usize {
        let of_blocks = len / self.block_bytes * self.num_of_block();
        of_blocks + (len % self.block_bytes).div_ceil(self.chunk_bytes)
    }

    const fn num_of_block(self) -> usize {
        self.block_bytes.div_ceil(self.chunk_bytes)
    }

    /// Length of the longest piece that has at most so many chunks and bytes. It ends with a block, if there are digests.
    #[must_use]
    pub fn room(self, num_chunks: usize, num_bytes: usize) -> usize {
        if self.block_bytes == usize::MAX {
            return num_bytes.min(num_chunks * self.chunk_bytes);
        }
        let num_blocks = num_bytes / self.block_bytes;
        num_blocks.min(num_chunks / self.num_of_block()) * self.block_bytes
    }

    /// Offset and length of each chunk of a piece.
    pub(super) fn of(self, len: usize) -> impl Iterator<Item = (usize, usize)> {
        let blocks = (0..len).step_by(self.block_bytes);
        blocks.flat_map(move |block| {
            let end = block.saturating_add(self.block_bytes).min(len);
            let chunks = (block..end).step_by(self.chunk_bytes);
            chunks.map(move |at| (at, self.chunk_bytes.min(end - at)))
        })
    }
}

/// The end of a copy that has succeeded: its time, and digests of what was read, if they are wanted and the device computes
/// them.
#[derive(Debug)]
pub struct CopyReport {
    /// Digests are wanted of blocks of so many bytes.
    block_bytes: Option<usize>,
    end: OnceLock<(Instant, Vec<u64>)>,
}

impl CopyReport {
    /// Of a copy without digests, or of pieces that consist of blocks of so many bytes.
    #[must_use]
    pub const fn new(block_bytes: Option<usize>) -> Self {
        Self {
            block_bytes,
            end: OnceLock::new(),
        }
    }

    /// Raw CRC-64/NVME from the state 0 of the [chunks](Chunks::digested) of all pieces, in order. Empty until the copy has
    /// ended, and if there are none.
    #[must_use]
    pub fn digests(&self) -> &[u64] {
        self.end.get().map_or(&[], |(_, digests)| digests)
    }

    /// Time at which the driver reported its end.
    #[must_use]
    pub fn ended_at(&self) -> Option<Instant> {
        self.end.get().map(|(at, _)| *at)
    }

    fn end(&self, digests: Vec<u64>) {
        // A copy ends once.
        let _ = self.end.set((Instant::now(), digests));
    }
}

/// One piece to be copied: addresses of the destination and of the source, and its length in bytes.
pub(crate) type DevicePiece = (CUdeviceptr, CUdeviceptr, usize);

/// Callback for the end of a copy, with true if it succeeded. It runs on a thread of the CUDA driver's, and must not
/// call CUDA.
pub(crate) type OnCopied = Box<dyn FnOnce(bool) + Send>;

/// A device's copying kernel.
pub(super) struct Copier(Kernel<Chunk>);

impl Copier {
    /// Loads the kernel into the current context.
    pub(super) fn new(calls: &Calls, current: &Current<'_>) -> Result<Self, CudaError> {
        Kernel::new(calls, current, COPY).map(Self)
    }

    /// Number of lists that no launch uses.
    #[cfg(test)]
    pub(super) fn num_free(&self) -> usize {
        self.0.num_free()
    }

    /// Launches the kernel, and has `on_copied` called when it has ended.
    ///
    /// # Errors
    /// The driver's error: nothing is copied, and `on_copied` is not called.
    ///
    /// # Safety
    /// As of [`copy_pieces`].
    pub(super) unsafe fn launch(
        &'static self,
        calls: &Calls,
        current: &Current<'_>,
        pieces: impl Iterator<Item = DevicePiece>,
        report: Arc<CopyReport>,
        on_copied: OnCopied,
    ) -> Result<(), CudaError> {
        let chunks = pieces.flat_map(|(to, from, len)| {
            Chunks::COPIED.of(len).map(move |(at, num_bytes)| Chunk {
                to: to + at as u64,
                from: from + at as u64,
                num_bytes: num_bytes as u64,
            })
        });
        let on_ended = move |chunks: Option<&[Chunk]>| -> Report {
            let is_copied = chunks.is_some();
            if is_copied {
                report.end(Vec::new());
            }
            Box::new(move || on_copied(is_copied))
        };
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(calls, current, chunks, Box::new(on_ended)) }.map(drop)
    }
}

/// A device's kernel that computes digests of what it copies.
pub(super) struct DigestingCopier(Kernel<DigestedChunk>);

impl DigestingCopier {
    /// Loads the kernel into the current context.
    pub(super) fn new(calls: &Calls, current: &Current<'_>) -> Result<Self, CudaError> {
        Kernel::new(calls, current, COPY_AND_DIGEST).map(Self)
    }

    /// As [`Copier::launch`], of blocks of so many bytes.
    ///
    /// # Errors
    /// The same.
    ///
    /// # Safety
    /// The same.
    pub(super) unsafe fn launch(
        &'static self,
        calls: &Calls,
        current: &Current<'_>,
        pieces: impl Iterator<Item = DevicePiece>,
        (report, block_bytes): (Arc<CopyReport>, usize),
        on_copied: OnCopied,
    ) -> Result<(), CudaError> {
        let division = Chunks::digested(block_bytes);
        let chunks = pieces.flat_map(|(to, from, len)| {
            division.of(len).map(move |(at, num_bytes)| DigestedChunk {
                from: from + at as u64,
                num_bytes: num_bytes as u64,
                digest: NO_DIGEST,
                to: to + at as u64,
            })
        });
        let on_ended = move |chunks: Option<&[DigestedChunk]>| -> Report {
            if let Some(chunks) = chunks {
                report.end(chunks.iter().map(|chunk| chunk.digest).collect());
            }
            let is_copied = chunks.is_some();
            Box::new(move || on_copied(is_copied))
        };
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(calls, current, chunks, Box::new(on_ended)) }.map(drop)
    }
}

/// Lets the kernels of one device use the memory of another in this process.
///
/// # Errors
/// The driver's error, if nothing connects the two.
pub(crate) fn reach(ordinal: u32, other: u32) -> Result<(), CudaError> {
    if ordinal == other {
        return Ok(());
    }
    let driver = driver()?;
    let peer = driver.device(other)?.context;
    let _entered = driver.enter(ordinal)?;
    // SAFETY: a context is current, and the other one is never released.
    let code = unsafe { (driver.calls.cuCtxEnablePeerAccess)(peer, 0) };
    if code == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
        return Ok(());
    }
    driver.calls.check(code, "cuCtxEnablePeerAccess")
}

/// Makes ready what copies need on a device, unless that was done: it takes milliseconds, for which no transfer should wait.
pub(crate) fn prepare_copies(ordinal: u32) -> Result<(), CudaError> {
    let driver = driver()?;
    let (current, device) = driver.enter(ordinal)?;
    device.prepare_slots(&driver.calls, &current);
    device.copier(&driver.calls, &current).map(drop)
}

impl Device {
    fn copier(&self, calls: &Calls, current: &Current<'_>) -> Result<&Copier, CudaError> {
        let copier = self.copier.get_or_init(|| {
            Copier::new(calls, current)
                .inspect_err(|error| tracing::warn!(%error, kernel = "copy", "cuda.no_kernel"))
        });
        copier.as_ref().map_err(Clone::clone)
    }

    /// The kernel that copies and computes digests; none if it does not load, which is logged.
    fn digesting_copier(&self, calls: &Calls, current: &Current<'_>) -> Option<&DigestingCopier> {
        let copier = self.digesting_copier.get_or_init(|| {
            let new = DigestingCopier::new(calls, current);
            let kernel = "copy_and_digest";
            new.inspect_err(|error| tracing::warn!(%error, kernel, "cuda.no_kernel"))
                .ok()
        });
        copier.as_ref()
    }

    /// Loads the kernel, unless that was done.
    pub(super) fn prepare_digesting_copier(&self, calls: &Calls, current: &Current<'_>) {
        self.digesting_copier(calls, current);
    }
}

/// Copies pieces on a stream of its own, which waits for no other, and computes digests if they are wanted and the device
/// can. `on_copied` is called once the bytes and the report are there, or with `false` after an error of the device's.
///
/// # Errors
/// The driver's error, or there are more [chunks](Chunks::CAP): nothing is copied, and `on_copied` is not called.
///
/// # Safety
/// Sources and destinations must be memory that this device can reach, until `on_copied` is called. No piece may overlap
/// another's destination.
pub(crate) unsafe fn copy_pieces(
    ordinal: u32,
    pieces: impl Iterator<Item = DevicePiece>,
    report: &Arc<CopyReport>,
    on_copied: OnCopied,
) -> Result<(), CudaError> {
    let driver = driver()?;
    let (current, device) = driver.enter(ordinal)?;
    let (calls, report) = (&driver.calls, Arc::clone(report));
    if let Some(block_bytes) = report.block_bytes
        && let Some(copier) = device.digesting_copier(calls, &current)
    {
        let report = (report, block_bytes);
        // SAFETY: the caller's promise is the same.
        return unsafe { copier.launch(calls, &current, pieces, report, on_copied) };
    }
    let copier = device.copier(calls, &current)?;
    // SAFETY: the caller's promise is the same.
    unsafe { copier.launch(calls, &current, pieces, report, on_copied) }
}
