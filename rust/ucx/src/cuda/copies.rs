//! Copies of many pieces of GPU memory by one launch of a kernel. A copy of the CUDA driver's own costs several
//! microseconds for each piece, whatever its size.

use super::kernel::{Code, ITEMS_CAP, Kernel, Report};
use super::{CUdeviceptr, Calls, CudaError, Current, Device, driver};

const CODE: Code = Code {
    ptx: concat!(include_str!("copy_chunks.ptx"), "\0"),
    entry: c"kvpipe_copy_chunks",
};
/// A chunk is what a thread block copies at a time.
const CHUNK_BYTES: usize = 32 << 10;
/// Most chunks of one launch.
pub(crate) const CHUNKS_CAP: usize = ITEMS_CAP;

/// A part of a piece, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) to: CUdeviceptr,
    pub(super) from: CUdeviceptr,
    pub(super) num_bytes: u64,
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
        Kernel::new(calls, current, CODE).map(Self)
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
        pieces: &[DevicePiece],
        on_copied: OnCopied,
    ) -> Result<(), CudaError> {
        let chunks = chunks(pieces);
        let on_ended = move |chunks: Option<&[Chunk]>| -> Report {
            let is_copied = chunks.is_some();
            Box::new(move || on_copied(is_copied))
        };
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(calls, current, &chunks, Box::new(on_ended)) }.map(drop)
    }
}

/// The chunks of these pieces.
fn chunks(pieces: &[DevicePiece]) -> Vec<Chunk> {
    let mut chunks = Vec::with_capacity(pieces.len());
    for &(to, from, len) in pieces {
        let parts = (0..len).step_by(CHUNK_BYTES);
        chunks.extend(parts.map(|at| Chunk {
            to: to + at as u64,
            from: from + at as u64,
            num_bytes: (len - at).min(CHUNK_BYTES) as u64,
        }));
    }
    chunks
}

/// Number of these lengths, from the first one on, that one launch copies.
pub(crate) fn num_pieces_of_launch(lens: impl Iterator<Item = usize>) -> usize {
    let mut num_chunks = 0;
    lens.take_while(|len| {
        num_chunks += len.div_ceil(CHUNK_BYTES);
        num_chunks <= CHUNKS_CAP
    })
    .count()
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
}

/// Copies pieces on a stream of its own, which waits for no other. `on_copied` is called once they are there, or with
/// `false` after an error of the device's.
///
/// # Errors
/// The driver's error: nothing is copied, and `on_copied` is not called.
///
/// # Safety
/// Sources and destinations must be memory that this device can reach, until `on_copied` is called. No piece may overlap
/// another's destination. One launch copies all of them ([`num_pieces_of_launch`]).
pub(crate) unsafe fn copy_pieces(
    ordinal: u32,
    pieces: &[DevicePiece],
    on_copied: OnCopied,
) -> Result<(), CudaError> {
    let driver = driver()?;
    let (current, device) = driver.enter(ordinal)?;
    let copier = device.copier(&driver.calls, &current)?;
    // SAFETY: the caller's promise is the same.
    unsafe { copier.launch(&driver.calls, &current, pieces, on_copied) }
}
