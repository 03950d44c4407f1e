//! Copies from a peer's GPU memory that is mapped here (CUDA IPC) into GPU memory of ours, by a kernel instead of UCX.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::buffer::{Buffer, MemoryKind};
use crate::cuda::{self, CopyReport, CudaError, DevicePiece};
use crate::endpoint::EndpointId;
use crate::exit_gate::Inside;
use crate::memory::Memory;
use crate::process_vm::Piece;
use crate::request::{self, Keep, Op, Token};
use crate::rma::{KeyUse, RemoteKey, Write};
use crate::status::Status;
use crate::sys;
use crate::worker::{Inner, Worker};

/// UCX (1.22) unmaps the memory of a peer process with the first endpoint to it that goes, whichever worker's that is, and
/// in any call that makes progress, maps, or ends something. A kernel that is launched then would read what is not mapped:
/// CUDA would fail for the rest of this process. So such calls share this lock, and a launch has it alone. Memory under a
/// kernel that runs is left to CUDA, which is to wait for it.
static MAPPINGS: RwLock<()> = RwLock::new(());

/// Calls what may unmap memory of peers, if a GPU is used at all. Such calls must not be nested.
pub(crate) fn may_unmap<T>(uses_gpu: bool, call: impl FnOnce() -> T) -> T {
    let _shared = uses_gpu.then(|| MAPPINGS.read().unwrap_or_else(PoisonError::into_inner));
    call()
}

/// Pieces to be copied from a peer's GPU memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCopy<'a> {
    /// The destination.
    pub local: &'a Arc<Memory>,
    /// The pieces, which come from addresses in the peer's process. No destination overlaps another.
    pub pieces: &'a [Piece],
    /// The peer's key.
    pub rkey: &'a RemoteKey,
    /// Gets the end, and digests of what is copied, if they are wanted.
    pub report: &'a Arc<CopyReport>,
    /// Comes back with `Done`.
    pub token: Token,
}

impl DeviceCopy<'_> {
    /// The addresses of the pieces here, if all of the peer's memory is in one mapping.
    fn mapped(&self, worker: &Worker) -> Option<impl Iterator<Item = DevicePiece>> {
        let (from, to) = Extent::of(self.pieces)?;
        let here = worker.mapping(self.rkey, from.start)? as u64;
        if cuda::is_of_one_range(here, from.end - from.start) != Ok(true) {
            return None;
        }
        addresses(self.pieces, self.local.buffer(), (from.start, here), to)
    }
}

/// A range of addresses or offsets.
#[derive(Clone, Copy)]
struct Extent {
    start: u64,
    end: u64,
}

impl Extent {
    /// The sources and the destinations of pieces; none if there are none, or they end behind all memory.
    fn of(pieces: &[Piece]) -> Option<(Self, Self)> {
        let first = pieces.first()?;
        let whole = |start| Self { start, end: start };
        let (mut from, mut to) = (whole(first.from), whole(first.to as u64));
        for piece in pieces {
            for (extent, start) in [(&mut from, piece.from), (&mut to, piece.to as u64)] {
                let end = start.checked_add(piece.len as u64)?;
                *extent = Self {
                    start: extent.start.min(start),
                    end: extent.end.max(end),
                };
            }
        }
        Some((from, to))
    }
}

/// The addresses of pieces in a destination, and in the memory whose peer's address `theirs` is `ours` here; none if they
/// are not inside of the destination.
fn addresses(
    pieces: &[Piece],
    local: &Buffer,
    (theirs, ours): (u64, u64),
    to: Extent,
) -> Option<impl Iterator<Item = DevicePiece>> {
    let base = local.writable_range(0, usize::try_from(to.end).ok()?)?;
    let base = base.addr() as u64;
    let pieces = pieces.iter();
    Some(pieces.map(move |piece| {
        let from = ours + (piece.from - theirs);
        (base + piece.to as u64, from, piece.len)
    }))
}

/// Copies pieces between buffers of this process on the GPU of `to`, by the kernel that copies a peer's memory. `from` of a
/// piece is an address. `on_copied` is called when it has ended, with true if the bytes are there; it runs on a thread of the
/// CUDA driver's, and must not call CUDA.
///
/// # Errors
/// The driver's error, or pieces that are not inside of both: nothing is copied, and `on_copied` is not called.
///
/// # Safety
/// Both buffers live until `on_copied` is called. No piece overlaps another's destination.
pub unsafe fn copy_between(
    from: &Buffer,
    to: &Buffer,
    pieces: &[Piece],
    report: &Arc<CopyReport>,
    on_copied: Box<dyn FnOnce(bool) + Send>,
) -> Result<(), CudaError> {
    let outside = || CudaError::new("pieces that are not inside of two buffers of GPUs");
    let (MemoryKind::Cuda { device: source }, MemoryKind::Cuda { device }) =
        (from.kind(), to.kind())
    else {
        return Err(outside());
    };
    let (theirs, ours) = Extent::of(pieces).ok_or_else(outside)?;
    let start = from.address() as u64;
    let is_inside = start <= theirs.start && theirs.end - start <= from.len() as u64;
    let pieces = addresses(pieces, to, (start, start), ours).filter(|_| is_inside);
    let pieces = pieces.ok_or_else(outside)?;
    cuda::reach(device, source)?;
    // SAFETY: all pieces are inside of both, which the device reaches; the rest is the caller's promise.
    unsafe { cuda::copy_pieces(device, pieces, report, on_copied) }
}

impl Worker {
    /// Copies pieces of a peer's GPU memory by one launch of a kernel. `Done` means that the bytes are there.
    ///
    /// # Errors
    /// `UCS_ERR_UNSUPPORTED` when the memory is not mapped here, not all in one mapping, cannot be copied by a kernel, or has
    /// more [chunks](crate::Chunks::CAP): [`get`](Self::get) may still read it. `UCS_ERR_INVALID_PARAM` for memory of another
    /// context, or a key of another endpoint; `UCS_ERR_NOT_CONNECTED` or the endpoint's failure. No `Done` follows an error.
    pub fn copy(&self, endpoint: EndpointId, copy: DeviceCopy<'_>) -> Result<(), Status> {
        const CALL: &str = "cuLaunchKernel";
        let unsupported = Status::new(sys::UCS_ERR_UNSUPPORTED, CALL);
        let MemoryKind::Cuda { device } = copy.local.buffer().kind() else {
            return Err(unsupported);
        };
        let key = &copy.rkey.key;
        if !key.is_of(endpoint) || !self.inner.is_of_context(copy.local) {
            return Err(Status::new(sys::UCS_ERR_INVALID_PARAM, CALL));
        }
        let endpoint = self.inner.endpoint(endpoint, CALL)?;
        endpoint.usable(CALL)?;
        self.inner.note_use(copy.local.buffer().kind());
        let keep = Keep::Get {
            _memory: Arc::clone(copy.local),
            _key: KeyUse::new(key),
            _write: Write::new(&self.inner.state),
        };
        let op = request::begin_copy(&self.inner, &endpoint, (copy.token, CALL), keep);
        let in_flight = CopyInFlight(Box::into_raw(Box::new(op)));
        if self.launch(device, copy, in_flight) {
            return Ok(());
        }
        // SAFETY: made by into_raw above, and nothing was launched that would give it back.
        let op = unsafe { Box::from_raw(in_flight.0) };
        request::withdraw_copy(&op);
        Err(unsupported)
    }

    /// Launches the kernel; false if it cannot be. Nothing unmaps memory of peers meanwhile.
    fn launch(&self, device: u32, copy: DeviceCopy<'_>, in_flight: CopyInFlight) -> bool {
        let _alone = MAPPINGS.write().unwrap_or_else(PoisonError::into_inner);
        let Some(pieces) = copy.mapped(self) else {
            return false;
        };
        let ended = Arc::clone(self.inner.ended_copies());
        let on_copied = Box::new(move |is_copied| ended.push(in_flight, is_copied));
        // SAFETY: the sources are mapped here, the destinations are memory of this device, and the operation holds both;
        // destinations that overlap would harm their own bytes only.
        let launched = unsafe { cuda::copy_pieces(device, pieces, copy.report, on_copied) };
        launched
            .inspect_err(|error| tracing::debug!(%error, "cuda.not_launched"))
            .is_ok()
    }

    /// Queues the `Done` of copies that have ended; their number.
    pub(crate) fn finish_copies(&self) -> u32 {
        let ended = self.inner.drain_ended_copies();
        let num_ended = ended.len() as u32;
        for (copy, is_copied) in ended {
            // SAFETY: made by into_raw in `copy`, and pushed once, by the launch that owned it.
            let op = unsafe { Box::from_raw(copy.0) };
            let code = if is_copied {
                sys::UCS_OK
            } else {
                sys::UCS_ERR_IO_ERROR
            };
            request::finish_copy(op, code);
        }
        num_ended
    }
}

/// A copy's operation, on its way through the CUDA driver's threads, which do not touch it.
#[derive(Clone, Copy)]
pub(crate) struct CopyInFlight(*mut Op);

// SAFETY: only the worker's thread uses the pointer, which it made and gets back.
unsafe impl Send for CopyInFlight {}

/// Copies that have ended, from the CUDA driver's threads to the worker's.
pub(crate) struct EndedCopies {
    ended: Mutex<Vec<(CopyInFlight, bool)>>,
    worker: *mut sys::ucp_worker,
    signal: unsafe extern "C" fn(*mut sys::ucp_worker) -> sys::ucs_status_t,
}

// SAFETY: `ucp_worker_signal` is all that is done with the worker; it writes to an eventfd.
unsafe impl Send for EndedCopies {}
// SAFETY: as for Send.
unsafe impl Sync for EndedCopies {}

impl EndedCopies {
    pub(crate) fn new(inner: &Inner) -> Self {
        Self {
            ended: Mutex::default(),
            worker: inner.as_ptr(),
            signal: inner.api().ucp_worker_signal,
        }
    }

    fn push(&self, copy: CopyInFlight, is_copied: bool) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push((copy, is_copied));
        // A process that exits needs no wake-up.
        let Some(_inside) = Inside::try_enter() else {
            return;
        };
        // SAFETY: the copy's operation holds the worker, and its thread gets the operation only after this lock.
        let code = unsafe { (self.signal)(self.worker) };
        if code != sys::UCS_OK {
            tracing::error!(code, "worker.not_woken");
        }
    }

    fn drain(&self) -> Vec<(CopyInFlight, bool)> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *ended)
    }
}

impl Inner {
    /// Queue of this worker's copies that have ended.
    fn ended_copies(&self) -> &Arc<EndedCopies> {
        self.copies.get_or_init(|| Arc::new(EndedCopies::new(self)))
    }

    fn drain_ended_copies(&self) -> Vec<(CopyInFlight, bool)> {
        self.copies
            .get()
            .map_or_else(Vec::new, |copies| copies.drain())
    }
}
