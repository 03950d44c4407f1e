//! Copies of many pieces of GPU memory by one launch of a kernel. A copy of the CUDA driver's own costs several
//! microseconds for each piece, whatever its size.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{
    CUDA_SUCCESS, CUdeviceptr, CUfunction, CUresult, CUstream, Calls, CudaError, Current, Device,
    driver,
};

const PTX: &str = concat!(include_str!("copy_chunks.ptx"), "\0");
const ENTRY: &CStr = c"kvpipe_copy_chunks";
/// Threads of a thread block, and most thread blocks of a launch: enough for the bandwidth of the memory, and few enough
/// that kernels of a model run beside it.
const NUM_THREADS: u32 = 512;
const THREAD_BLOCKS_CAP: u32 = 128;
/// A chunk is what a thread block copies at a time.
const CHUNK_BYTES: usize = 32 << 10;
/// Most chunks of one launch.
pub(crate) const CHUNKS_CAP: usize = 8192;
/// Copies of several transfers overlap: a stream waits for the report of each.
const NUM_STREAMS: usize = 4;
const CU_STREAM_NON_BLOCKING: u32 = 1;
const CU_MEMHOSTALLOC_PORTABLE_DEVICEMAP: u32 = 1 | 2;

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

/// A device's kernel, with streams of its own. All of it lives as long as the process.
pub(super) struct Copier {
    function: CUfunction,
    streams: [CUstream; NUM_STREAMS],
    num_launches: AtomicUsize,
    /// Lists of chunks that no launch uses.
    free_lists: Mutex<Vec<ChunkList>>,
}

// SAFETY: handles of the driver, which any thread may use; none is ever destroyed.
unsafe impl Send for Copier {}
// SAFETY: as for Send.
unsafe impl Sync for Copier {}

/// Page-locked memory for [`CHUNKS_CAP`] chunks, which the kernel reads. It is never freed.
struct ChunkList(*mut Chunk);

// SAFETY: one owner at a time uses the memory.
unsafe impl Send for ChunkList {}

/// A copy under way. Its callback and the thread that launches it share it.
struct Launch {
    copier: &'static Copier,
    /// None once it has ended.
    parts: Mutex<Option<(ChunkList, OnCopied)>>,
}

impl Launch {
    /// Ends it; a second call does nothing.
    fn end(&self, is_copied: bool) {
        let parts = self.parts.lock();
        let parts = parts.unwrap_or_else(PoisonError::into_inner).take();
        if let Some((list, on_copied)) = parts {
            self.copier.give_back(list);
            on_copied(is_copied);
        }
    }
}

impl Copier {
    /// Loads the kernel into the current context.
    pub(super) fn new(calls: &Calls, _current: &Current<'_>) -> Result<Self, CudaError> {
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: a context is current, and the text ends in NUL.
        let code = unsafe { (calls.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) };
        calls.check(code, "cuModuleLoadData")?;
        // SAFETY: the module was just loaded.
        let code =
            unsafe { (calls.cuModuleGetFunction)(&raw mut function, module, ENTRY.as_ptr()) };
        calls.check(code, "cuModuleGetFunction")?;
        let mut streams = [null_mut(); NUM_STREAMS];
        for stream in &mut streams {
            // SAFETY: `stream` is a valid place.
            let code = unsafe { (calls.cuStreamCreate)(stream, CU_STREAM_NON_BLOCKING) };
            calls.check(code, "cuStreamCreate")?;
        }
        let copier = Self {
            function,
            streams,
            num_launches: AtomicUsize::new(0),
            free_lists: Mutex::default(),
        };
        // Later allocations would wait for kernels that run.
        for _ in 0..NUM_STREAMS {
            copier.give_back(Self::new_list(calls)?);
        }
        Ok(copier)
    }

    fn new_list(calls: &Calls) -> Result<ChunkList, CudaError> {
        let mut list = null_mut();
        let num_bytes = CHUNKS_CAP * size_of::<Chunk>();
        let flags = CU_MEMHOSTALLOC_PORTABLE_DEVICEMAP;
        // SAFETY: a context is current, and `list` is a valid place.
        let code = unsafe { (calls.cuMemHostAlloc)(&raw mut list, num_bytes, flags) };
        calls.check(code, "cuMemHostAlloc")?;
        Ok(ChunkList(list.cast()))
    }

    fn acquire_list(&self, calls: &Calls) -> Result<ChunkList, CudaError> {
        let free = self.free_lists.lock();
        if let Some(list) = free.unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(list);
        }
        Self::new_list(calls)
    }

    fn give_back(&self, list: ChunkList) {
        let free = self.free_lists.lock();
        free.unwrap_or_else(PoisonError::into_inner).push(list);
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
        _current: &Current<'_>,
        pieces: &[DevicePiece],
        on_copied: OnCopied,
    ) -> Result<(), CudaError> {
        let list = self.acquire_list(calls)?;
        // SAFETY: the list has room for so many, and no other thread uses it.
        let num_chunks = unsafe { fill(&list, pieces) };
        let number = self.num_launches.fetch_add(1, Ordering::Relaxed);
        let stream = self.streams[number % NUM_STREAMS];
        let (mut chunks, mut num) = (list.0 as CUdeviceptr, num_chunks);
        let mut parameters = [(&raw mut chunks).cast(), (&raw mut num).cast::<c_void>()];
        let num_blocks = num_chunks.clamp(1, THREAD_BLOCKS_CAP);
        // SAFETY: a context is current, the kernel has these two parameters, and the list lives until the callback.
        let code = unsafe {
            (calls.cuLaunchKernel)(
                self.function,
                num_blocks,
                1,
                1,
                NUM_THREADS,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        if let Err(error) = calls.check(code, "cuLaunchKernel") {
            self.give_back(list);
            return Err(error);
        }
        let launch = Arc::new(Launch {
            copier: self,
            parts: Mutex::new(Some((list, on_copied))),
        });
        let shared = Arc::into_raw(Arc::clone(&launch)).cast_mut().cast();
        // Unlike a function of cuLaunchHostFunc, a callback is called after an error too.
        // SAFETY: our stream; the callback owns `shared`.
        let code = unsafe { (calls.cuStreamAddCallback)(stream, on_ended, shared, 0) };
        if calls.check(code, "cuStreamAddCallback").is_err() {
            // The callback's share is leaked, lest it is called nevertheless.
            // SAFETY: our stream.
            launch.end(unsafe { calls.synchronize(stream) }.is_ok());
        }
        Ok(())
    }
}

/// Writes the chunks of these pieces; their number.
///
/// # Safety
/// There are no more than [`CHUNKS_CAP`], and no other thread uses the list.
unsafe fn fill(list: &ChunkList, pieces: &[DevicePiece]) -> u32 {
    let mut num_chunks = 0;
    for &(to, from, len) in pieces {
        for at in (0..len).step_by(CHUNK_BYTES) {
            let num_bytes = (len - at).min(CHUNK_BYTES) as u64;
            let at = at as u64;
            let (to, from) = (to + at, from + at);
            let chunk = Chunk {
                to,
                from,
                num_bytes,
            };
            // SAFETY: the caller's promise.
            let place = unsafe { list.0.add(num_chunks) };
            // SAFETY: the same.
            unsafe { place.write(chunk) };
            num_chunks += 1;
        }
    }
    num_chunks as u32
}

/// The CUDA driver's callback after a launch.
unsafe extern "C" fn on_ended(_stream: CUstream, code: CUresult, launch: *mut c_void) {
    // SAFETY: the share that `Copier::launch` gave with this callback, which is called once.
    let launch = unsafe { Arc::from_raw(launch.cast_const().cast::<Launch>()) };
    launch.end(code == CUDA_SUCCESS);
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
                .inspect_err(|error| tracing::warn!(%error, "cuda.no_kernel"))
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
