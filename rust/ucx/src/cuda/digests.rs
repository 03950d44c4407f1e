//! Digests of blocks of GPU memory: their CRC-64/NVME from the state 0, not inverted, of many blocks by one launch of a
//! kernel.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::kernel::{Code, ITEMS_CAP, Kernel, NO_DIGEST, Report};
use super::{CUdeviceptr, CUstream, Calls, CudaError, Current, Device, driver};
use crate::buffer::{Buffer, MemoryKind};

const CODE: Code = Code {
    ptx: concat!(include_str!("digest_blocks.ptx"), "\0"),
    entry: c"kvpipe_digest_blocks",
};

/// A block, as the kernel reads it, and its digest, which the kernel writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DigestedBlock {
    pub(super) from: CUdeviceptr,
    pub(super) num_bytes: u64,
    pub(super) digest: u64,
}

/// A device's digesting kernel.
pub(super) struct Digester(Kernel<DigestedBlock>);

impl Digester {
    /// Loads the kernel into the current context.
    pub(super) fn new(calls: &Calls, current: &Current<'_>) -> Result<Self, CudaError> {
        Kernel::new(calls, current, CODE).map(Self)
    }
}

impl Device {
    fn digester(&self, calls: &Calls, current: &Current<'_>) -> Result<&Digester, CudaError> {
        let digester = self.digester.get_or_init(|| {
            Digester::new(calls, current)
                .inspect_err(|error| tracing::warn!(%error, kernel = "digest", "cuda.no_kernel"))
        });
        digester.as_ref().map_err(Clone::clone)
    }
}

/// A block of CUDA memory.
#[derive(Clone, Debug)]
pub struct DeviceBlock {
    /// The memory in which it lies.
    pub buffer: Buffer,
    /// Its first byte there.
    pub offset: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// Called when digests are computed, or will not be. It runs on a thread of the CUDA driver's, and must not call CUDA, nor
/// drop what owns CUDA memory.
pub type OnDigested = Box<dyn FnOnce() + Send>;

/// Digests of blocks of one device that are being computed. The blocks' memory is kept until they are.
#[derive(Debug)]
pub struct Digests {
    ordinal: u32,
    stream: CUstream,
    blocks: Vec<DeviceBlock>,
    outcome: Arc<Mutex<Outcome>>,
}

/// None until the kernel has ended.
type Outcome = Option<Result<Vec<u64>, CudaError>>;

// SAFETY: a handle of the driver, which any thread may use and which is never destroyed.
unsafe impl Send for Digests {}

impl Digests {
    /// Most blocks of one launch.
    pub const BLOCKS_CAP: usize = ITEMS_CAP;

    /// Makes ready what digests of such memory need, unless that was done: the driver compiles the kernel, for which no
    /// transfer should wait.
    ///
    /// # Errors
    /// The driver's error, which is logged, too. No digest of this device's memory will be computed.
    pub fn prepare(kind: MemoryKind) -> Result<(), CudaError> {
        let MemoryKind::Cuda { device: ordinal } = kind else {
            return Ok(());
        };
        let driver = driver()?;
        let (current, device) = driver.enter(ordinal)?;
        device.prepare_digesting_copier(&driver.calls, &current);
        device.digester(&driver.calls, &current).map(drop)
    }

    /// Computes digests on a stream that waits for none of others: of the bytes that are there now, if nothing writes them.
    /// `on_digested` is called once.
    ///
    /// # Errors
    /// The driver's error, blocks that are not of one GPU, or more than [`BLOCKS_CAP`](Self::BLOCKS_CAP) of them. Nothing
    /// is computed, and `on_digested` is not called.
    pub fn begin(blocks: Vec<DeviceBlock>, on_digested: OnDigested) -> Result<Self, CudaError> {
        let kind = blocks.first().map(|block| block.buffer.kind());
        let Some(MemoryKind::Cuda { device: ordinal }) = kind else {
            return Err(CudaError::new("no blocks in the memory of a GPU"));
        };
        let driver = driver()?;
        let (current, device) = driver.enter(ordinal)?;
        let digester = device.digester(&driver.calls, &current)?;
        digester.begin((&driver.calls, &current), ordinal, blocks, on_digested)
    }

    /// The digests, in the order of the blocks, or the error of the device; none until the kernel has ended.
    #[must_use]
    pub fn get(&self) -> Option<Result<Vec<u64>, CudaError>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Digests {
    fn drop(&mut self) {
        if self.lock().is_some() {
            return;
        }
        let ended = driver().and_then(|driver| {
            let _entered = driver.enter(self.ordinal)?;
            // SAFETY: a stream of this device's context, which is current.
            unsafe { driver.calls.synchronize(self.stream) }
        });
        if let Err(error) = ended {
            tracing::error!(%error, "memory.leaked");
            // The GPU may read it yet.
            std::mem::forget(std::mem::take(&mut self.blocks));
        }
    }
}

impl Digester {
    pub(super) fn begin(
        &'static self,
        (calls, current): (&Calls, &Current<'_>),
        ordinal: u32,
        blocks: Vec<DeviceBlock>,
        on_digested: OnDigested,
    ) -> Result<Digests, CudaError> {
        let kind = MemoryKind::Cuda { device: ordinal };
        let item = |block: &DeviceBlock| {
            let buffer = Some(&block.buffer).filter(|buffer| buffer.kind() == kind);
            let start = buffer?.range(block.offset, block.len)?;
            Some(DigestedBlock {
                from: start.addr() as u64,
                num_bytes: block.len as u64,
                digest: NO_DIGEST,
            })
        };
        let items: Option<Vec<_>> = blocks.iter().map(item).collect();
        let items = items.ok_or_else(|| CudaError::new("blocks that are not all of one GPU"))?;
        let items = items.into_iter();
        let outcome = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&outcome);
        let on_ended = move |items: Option<&[DigestedBlock]>| -> Report {
            let digests = items.map(|items| items.iter().map(|item| item.digest).collect());
            let digests =
                digests.ok_or_else(|| CudaError::new("the GPU failed while it computed digests"));
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(digests);
            on_digested
        };
        // SAFETY: each block is in bounds of memory of this device, by the contract of Buffer::from_raw_parts; what is
        // returned keeps it until the kernel has ended.
        let stream = unsafe { self.0.launch(calls, current, items, Box::new(on_ended)) }?;
        Ok(Digests {
            ordinal,
            stream,
            blocks,
            outcome,
        })
    }
}
