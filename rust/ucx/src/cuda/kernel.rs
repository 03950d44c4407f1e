//! A kernel of ours on a device, which works off lists of items.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{
    CU_STREAM_NON_BLOCKING, CUDA_SUCCESS, CUdeviceptr, CUfunction, CUresult, CUstream, Calls,
    CudaError, Current,
};

/// Most items of one launch.
pub(crate) const ITEMS_CAP: usize = 8192;
/// In an item until the kernel has written its digest: one that is left out differs, which zeros would not from 0.
pub(super) const NO_DIGEST: u64 = u64::MAX;
/// Threads of a thread block, and most thread blocks of a launch: enough for the bandwidth of the memory, and few enough
/// that kernels of a model run beside it.
pub(super) const NUM_THREADS: u32 = 512;
const THREAD_BLOCKS_CAP: u32 = 128;
/// Work of several transfers overlaps: a stream waits for the report of each.
const NUM_STREAMS: usize = 4;
const CU_MEMHOSTALLOC_PORTABLE_DEVICEMAP: u32 = 1 | 2;

/// A kernel in PTX, which ends in NUL. Its parameters are the address of a list of items, and their number.
#[derive(Clone, Copy)]
pub(super) struct Code {
    pub(super) ptx: &'static str,
    pub(super) entry: &'static CStr,
}

/// Called when a launch has ended, with its items as the kernel has left them, or none after an error of the device's. What
/// it returns is called once the list can be used again. Both run on a thread of the CUDA driver's, and must not call CUDA.
pub(super) type OnEnded<T> = Box<dyn FnOnce(Option<&[T]>) -> Report + Send>;
pub(super) type Report = Box<dyn FnOnce()>;

/// A device's kernel, with streams of its own. All of it lives as long as the process.
pub(super) struct Kernel<T> {
    function: CUfunction,
    /// Streams for lists that are made later.
    streams: [CUstream; NUM_STREAMS],
    num_lists: AtomicUsize,
    /// Lists of items that no launch uses.
    free_lists: Mutex<Vec<ItemList<T>>>,
}

// SAFETY: handles of the driver, which any thread may use; none is ever destroyed.
unsafe impl<T: Send> Send for Kernel<T> {}
// SAFETY: as for Send.
unsafe impl<T: Send> Sync for Kernel<T> {}

/// Page-locked memory for [`ITEMS_CAP`] items, which the kernel reads and writes. It is never freed.
struct ItemList<T> {
    items: *mut T,
    /// Launches with this list run here. The first lists have each a stream of their own.
    stream: CUstream,
}

// SAFETY: one owner at a time uses the memory.
unsafe impl<T: Send> Send for ItemList<T> {}

/// A launch under way. Its callback and the thread that launches it share it.
struct Launch<T: 'static> {
    kernel: &'static Kernel<T>,
    /// None once it has ended.
    parts: Mutex<Option<Launched<T>>>,
}

/// A list and the number of its items, and what is called at the end.
type Launched<T> = (ItemList<T>, usize, OnEnded<T>);

impl<T: Copy> Launch<T> {
    /// Ends it; a second call does nothing.
    fn end(&self, has_succeeded: bool) {
        if let Some((list, num_items, on_ended)) = self.take() {
            let items = has_succeeded.then(|| {
                // SAFETY: the list has so many items, and the GPU uses it no more.
                unsafe { std::slice::from_raw_parts(list.items, num_items) }
            });
            let report = on_ended(items);
            // The next launch, which the report may lead to, finds it.
            self.kernel.give_back(list);
            report();
        }
    }

    /// Ends it, although the kernel may run yet: the list is never used again.
    fn abandon(&self) {
        if let Some((_, _, on_ended)) = self.take() {
            on_ended(None)();
        }
    }

    fn take(&self) -> Option<Launched<T>> {
        let parts = self.parts.lock();
        parts.unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T: Copy + Send> Kernel<T> {
    /// Loads the kernel into the current context.
    pub(super) fn new(
        calls: &Calls,
        _current: &Current<'_>,
        code: Code,
    ) -> Result<Self, CudaError> {
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: a context is current, and the text ends in NUL.
        let loaded = unsafe { (calls.cuModuleLoadData)(&raw mut module, code.ptx.as_ptr().cast()) };
        calls.check(loaded, "cuModuleLoadData")?;
        let entry = code.entry.as_ptr();
        // SAFETY: the module was just loaded.
        let found = unsafe { (calls.cuModuleGetFunction)(&raw mut function, module, entry) };
        calls.check(found, "cuModuleGetFunction")?;
        let mut streams = [null_mut(); NUM_STREAMS];
        for stream in &mut streams {
            // SAFETY: `stream` is a valid place.
            let made = unsafe { (calls.cuStreamCreate)(stream, CU_STREAM_NON_BLOCKING) };
            calls.check(made, "cuStreamCreate")?;
        }
        let kernel = Self {
            function,
            streams,
            num_lists: AtomicUsize::new(0),
            free_lists: Mutex::default(),
        };
        // Later allocations would wait for kernels that run.
        for _ in 0..NUM_STREAMS {
            kernel.give_back(kernel.new_list(calls)?);
        }
        Ok(kernel)
    }

    fn new_list(&self, calls: &Calls) -> Result<ItemList<T>, CudaError> {
        let mut items = null_mut();
        let num_bytes = ITEMS_CAP * size_of::<T>();
        let flags = CU_MEMHOSTALLOC_PORTABLE_DEVICEMAP;
        // SAFETY: a context is current, and `items` is a valid place.
        let code = unsafe { (calls.cuMemHostAlloc)(&raw mut items, num_bytes, flags) };
        calls.check(code, "cuMemHostAlloc")?;
        let number = self.num_lists.fetch_add(1, Ordering::Relaxed);
        Ok(ItemList {
            items: items.cast(),
            stream: self.streams[number % NUM_STREAMS],
        })
    }

    fn acquire_list(&self, calls: &Calls) -> Result<ItemList<T>, CudaError> {
        let free = self.free_lists.lock();
        if let Some(list) = free.unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(list);
        }
        self.new_list(calls)
    }

    /// Launches the kernel on one of its streams, which waits for no stream of others, and has `on_ended` called when it
    /// has ended. Returns the stream.
    ///
    /// # Errors
    /// The driver's error, or there are more than [`ITEMS_CAP`] items: nothing is launched, and `on_ended` is not called.
    ///
    /// # Safety
    /// The kernel may work off these items until `on_ended` is called.
    pub(super) unsafe fn launch(
        &'static self,
        calls: &Calls,
        _current: &Current<'_>,
        items: impl Iterator<Item = T>,
        on_ended: OnEnded<T>,
    ) -> Result<CUstream, CudaError> {
        let list = self.acquire_list(calls)?;
        let mut len = 0;
        for item in items {
            if len == ITEMS_CAP {
                self.give_back(list);
                let text = format!("a launch has at most {ITEMS_CAP} items");
                return Err(CudaError(text));
            }
            let place = list.items.wrapping_add(len);
            // SAFETY: the list has room for so many, and no other thread uses it.
            unsafe { place.write(item) };
            len += 1;
        }
        let stream = list.stream;
        let (mut address, mut num) = (list.items as CUdeviceptr, len as u32);
        let num_blocks = num.clamp(1, THREAD_BLOCKS_CAP);
        let mut parameters = [(&raw mut address).cast(), (&raw mut num).cast::<c_void>()];
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
            kernel: self,
            parts: Mutex::new(Some((list, len, on_ended))),
        });
        let shared = Arc::into_raw(Arc::clone(&launch)).cast_mut().cast();
        // Unlike a function of cuLaunchHostFunc, a callback is called after an error too.
        // SAFETY: our stream; the callback owns `shared`.
        let code = unsafe { (calls.cuStreamAddCallback)(stream, call_back::<T>, shared, 0) };
        if calls.check(code, "cuStreamAddCallback").is_err() {
            // The callback's share is leaked, lest it is called nevertheless.
            // SAFETY: our stream.
            match unsafe { calls.synchronize(stream) } {
                Ok(()) => launch.end(true),
                Err(_) => launch.abandon(),
            }
        }
        Ok(stream)
    }
}

impl<T> Kernel<T> {
    /// Number of lists that no launch uses.
    #[cfg(test)]
    pub(super) fn num_free(&self) -> usize {
        self.free_lists.lock().unwrap().len()
    }

    fn give_back(&self, list: ItemList<T>) {
        let free = self.free_lists.lock();
        free.unwrap_or_else(PoisonError::into_inner).push(list);
    }
}

/// The CUDA driver's callback after a launch.
unsafe extern "C" fn call_back<T: Copy + 'static>(
    _stream: CUstream,
    code: CUresult,
    launch: *mut c_void,
) {
    // SAFETY: the share that `Kernel::launch` gave with this callback, which is called once.
    let launch = unsafe { Arc::from_raw(launch.cast_const().cast::<Launch<T>>()) };
    launch.end(code == CUDA_SUCCESS);
}
