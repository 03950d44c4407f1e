//! Copies from a peer's GPU memory that is mapped here (CUDA IPC) into GPU memory of ours, by a kernel instead of UCX.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::buffer::MemoryKind;
use crate::cuda::{self, DevicePiece};
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
    /// Comes back with `Done`.
    pub token: Token,
}

impl DeviceCopy<'_> {
    /// No copy has more pieces.
    pub const PIECES_CAP: usize = cuda::CHUNKS_CAP;

    /// Number of these lengths, from the first one on, that one copy can have.
    pub fn num_pieces(lens: impl Iterator<Item = usize>) -> usize {
        cuda::num_pieces_of_launch(lens)
    }

    /// The addresses that the peer's memory has here, if all of it is in one mapping.
    fn mapped(&self, worker: &Worker) -> Option<Vec<DevicePiece>> {
        let first = self.pieces.iter().map(|piece| piece.from).min()?;
        let ends = self.pieces.iter();
        let ends = ends.map(|piece| piece.from.checked_add(piece.len as u64));
        let past = ends.collect::<Option<Vec<_>>>()?.into_iter().max()?;
        let here = worker.mapping(self.rkey, first)? as u64;
        if cuda::is_of_one_range(here, past - first) != Ok(true) {
            return None;
        }
        let buffer = self.local.buffer();
        let address = |piece: &Piece| {
            let to = buffer.writable_range(piece.to, piece.len)?;
            Some((to as u64, here + (piece.from - first), piece.len))
        };
        self.pieces.iter().map(address).collect()
    }
}

impl Worker {
    /// Copies pieces of a peer's GPU memory by one launch of a kernel. `Done` means that the bytes are there.
    ///
    /// # Errors
    /// `UCS_ERR_UNSUPPORTED` when the memory is not mapped here, not all in one mapping, or cannot be copied by a kernel:
    /// [`get`](Self::get) may still read it. `UCS_ERR_INVALID_PARAM` for memory of another context, a key of another
    /// endpoint, or too many pieces; `UCS_ERR_NOT_CONNECTED` or the endpoint's failure. No `Done` follows an error.
    pub fn copy(&self, endpoint: EndpointId, copy: DeviceCopy<'_>) -> Result<(), Status> {
        const CALL: &str = "cuLaunchKernel";
        let unsupported = Status::new(sys::UCS_ERR_UNSUPPORTED, CALL);
        let MemoryKind::Cuda { device } = copy.local.buffer().kind() else {
            return Err(unsupported);
        };
        let key = &copy.rkey.key;
        let fitting = DeviceCopy::num_pieces(copy.pieces.iter().map(|piece| piece.len));
        if !key.is_of(endpoint)
            || !self.inner.is_of_context(copy.local)
            || fitting < copy.pieces.len()
        {
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
        // one launch has so many pieces; destinations that overlap would harm their own bytes only.
        let launched = unsafe { cuda::copy_pieces(device, &pieces, on_copied) };
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
