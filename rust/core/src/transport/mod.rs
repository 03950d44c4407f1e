//! Reads of a peer's memory: `process_vm_readv` on one host, and UCX where there are RDMA devices or a CUDA driver; or
//! UCX's in-memory twin for reactors of one process.
//!
//! UCX and its twin offer the same to a data plane: a worker for one thread with endpoints, reads of remote memory, and a
//! file descriptor to sleep on. The types here choose between the two by one branch a call.

mod data_path;
mod devices;
mod host;
mod memory;
mod pool;
mod ucx;

use std::borrow::Borrow;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvpipe_ucx::{
    Buffer, CopyReport, Domains, EndpointId, EndpointProgress, Event, Lane, LanesError, MemoryKind,
    Piece, Reaper, Search, Status, has_cuda_devices,
};

use crate::error::{Error, Result};

pub use data_path::DataPath;
pub(crate) use data_path::{is_direct, reads_host};
pub(crate) use pool::{Pool, check_len};

/// The outcome of a call of UCX.
pub(crate) type UcxResult<T> = std::result::Result<T, Status>;

/// Transport of a reactor. Peers need the same.
#[derive(Debug, Clone)]
pub enum Transport {
    /// Between hosts and processes. For RDMA and CUDA devices it needs UCX, from the library that the search finds.
    Host(Search),
    /// Between reactors of one process, without UCX.
    Memory(MemoryPath),
}

/// Data path between two reactors of one process. With UCX, the transport decides that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPath {
    /// The destination reads the source's memory, as over CMA or RDMA.
    RemoteRead,
    /// The source streams messages, as over TCP.
    Stream,
}

impl From<Search> for Transport {
    fn from(search: Search) -> Self {
        Self::Host(search)
    }
}

impl Transport {
    /// Makes the context of a reactor. Any thread may call.
    pub(crate) fn open(&self) -> Result<Context> {
        match self {
            Self::Host(search) => host::context(search),
            Self::Memory(data_path) => Ok(Context::Twin(*data_path)),
        }
    }
}

/// Makes workers, and registers memory.
#[derive(Debug)]
pub(crate) enum Context {
    /// Without UCX.
    Host {
        reads_processes: bool,
    },
    Ucx {
        context: Arc<kvpipe_ucx::Context>,
        reads_processes: bool,
    },
    Twin(MemoryPath),
}

impl Context {
    /// Makes a worker, which reads by devices; none without UCX.
    pub(crate) fn worker(&self) -> Result<Option<Worker>> {
        match self {
            Self::Host { .. } => Ok(None),
            Self::Ucx { context, .. } => Ok(Some(Worker::Ucx(kvpipe_ucx::Worker::new(context)?))),
            Self::Twin(data_path) => {
                let worker = memory::MemoryWorker::new(*data_path)?;
                Ok(Some(Worker::Twin(worker)))
            }
        }
    }

    /// True if a peer's process on this host may be read.
    pub(crate) fn reads_processes(&self) -> bool {
        match self {
            Self::Host { reads_processes }
            | Self::Ucx {
                reads_processes, ..
            } => *reads_processes,
            Self::Twin(_) => false,
        }
    }

    /// Registers memory, so that it can be read or sent from. Any thread may call; a device may take long to pin it.
    pub(crate) fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        let kind = buffer.kind();
        let memory = match self {
            Self::Host { .. } if kind != MemoryKind::Host && !has_cuda_devices() => Err(NO_DRIVER),
            Self::Host { .. } => Ok(Memory::Host(buffer)),
            Self::Ucx { context, .. } => context.register(buffer).map(Memory::Ucx),
            Self::Twin(_) => memory::TwinMemory::new(buffer).map(Memory::Twin),
        };
        let refused = |status| self.not_registered(kind, status);
        memory.map(Arc::new).map_err(refused)
    }

    fn not_registered(&self, kind: MemoryKind, status: Status) -> Error {
        Error::Unavailable(match kind {
            MemoryKind::Host => format!("cannot register memory: {status}"),
            MemoryKind::Cuda { .. } => format!(
                "CUDA memory cannot be registered with UCX {} ({status}): it needs a UCX with CUDA, which \
                 pip install 'kvpipe[ucx-cu12]' brings, and UCX_TLS, if set, must allow cuda; or copy the tensor \
                 to the CPU",
                self.describe()
            ),
        })
    }

    /// Version and path of UCX, for people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Ucx { context, .. } => ucx::describe(context),
            Self::Host { .. } | Self::Twin(_) => "none".to_owned(),
        }
    }
}

/// Registered memory. Dropping it deregisters it and only then frees the bytes.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Without UCX: nothing pins it.
    Host(Buffer),
    /// With UCX.
    Ucx(Arc<kvpipe_ucx::Memory>),
    /// In this process.
    Twin(memory::TwinMemory),
}

impl Memory {
    /// The bytes.
    pub(crate) fn buffer(&self) -> &Buffer {
        match self {
            Self::Host(buffer) => buffer,
            Self::Ucx(memory) => memory.buffer(),
            Self::Twin(memory) => memory.buffer(),
        }
    }

    /// The key by which a peer may reach this memory.
    ///
    /// # Errors
    /// The status of UCX.
    pub(crate) fn pack_rkey(&self) -> UcxResult<Vec<u8>> {
        match self {
            Self::Host(_) => Ok(Vec::new()),
            Self::Ucx(memory) => memory.pack_rkey(),
            Self::Twin(memory) => Ok(memory.pack_rkey()),
        }
    }
}

impl Borrow<Buffer> for Memory {
    fn borrow(&self) -> &Buffer {
        self.buffer()
    }
}

/// Access to a peer's memory over one endpoint.
#[derive(Debug)]
pub(crate) enum RemoteKey {
    /// Through UCX.
    Ucx(kvpipe_ucx::RemoteKey),
    /// In this process.
    Twin(memory::MemoryKey),
}

/// A read of remote memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Get<'a> {
    /// Memory that gets the bytes.
    pub local: &'a Memory,
    /// The first byte there.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
    /// The peer's address of the first one.
    pub remote: u64,
    /// Key of the peer's memory.
    pub key: &'a RemoteKey,
    /// Names the read in its `done`.
    pub token: u64,
}

/// Pieces to be copied from a peer's GPU memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceCopy<'a> {
    /// Memory that gets the bytes.
    pub local: &'a Memory,
    /// The pieces, from addresses of the peer's.
    pub pieces: &'a [Piece],
    /// Key of the peer's memory.
    pub key: &'a RemoteKey,
    /// Gets the end, and digests of what is copied, if they are wanted.
    pub report: &'a Arc<CopyReport>,
    /// Names the copy in its `done`.
    pub token: u64,
}

/// The transport of one thread.
#[derive(Debug)]
pub(crate) enum Worker {
    Ucx(kvpipe_ucx::Worker),
    Twin(memory::MemoryWorker),
}

/// The status of an operand of another transport than the worker's. A reactor has one transport only.
const FOREIGN: Status = Status {
    code: -5,
    call: "an operand of another transport",
};

/// The status of GPU memory where there is no GPU.
const NO_DRIVER: Status = Status {
    code: -22,
    call: "no CUDA driver",
};

impl Worker {
    pub(crate) fn address(&self) -> UcxResult<Vec<u8>> {
        match self {
            Self::Ucx(worker) => worker.address(),
            Self::Twin(worker) => Ok(worker.address()),
        }
    }

    /// # Safety
    /// The address is a worker's, as far as an authenticated peer can be trusted.
    #[expect(unsafe_code, reason = "UCX does not check what it parses")]
    pub(crate) unsafe fn connect(&self, address: &[u8]) -> UcxResult<EndpointId> {
        match self {
            // SAFETY: the caller's promise.
            Self::Ucx(worker) => unsafe { worker.connect(address) },
            Self::Twin(worker) => worker.connect(address),
        }
    }

    pub(crate) fn lanes(&self, endpoint: EndpointId) -> std::result::Result<Vec<Lane>, LanesError> {
        match self {
            Self::Ucx(worker) => worker.lanes(endpoint),
            Self::Twin(worker) => Ok(worker.lanes()),
        }
    }

    /// Closes an endpoint by force: its operations end with errors, and `Closed` follows.
    pub(crate) fn close(&self, endpoint: EndpointId) {
        match self {
            Self::Ucx(worker) => worker.close(endpoint),
            Self::Twin(worker) => worker.close(endpoint),
        }
    }

    /// Has the endpoint connect; its `Done` says that it has.
    pub(crate) fn flush(&self, endpoint: EndpointId, token: u64) -> UcxResult<()> {
        match self {
            Self::Ucx(worker) => worker.flush(endpoint, token),
            Self::Twin(worker) => worker.flush(endpoint, token),
        }
    }

    /// Progress of the operations of an endpoint. None once it is closed.
    pub(crate) fn progress_of(&self, endpoint: EndpointId) -> Option<EndpointProgress> {
        match self {
            Self::Ucx(worker) => worker.progress_of(endpoint),
            Self::Twin(worker) => worker.progress_of(endpoint),
        }
    }

    pub(crate) fn get(&self, endpoint: EndpointId, get: Get<'_>) -> UcxResult<()> {
        match self {
            Self::Ucx(worker) => ucx::get(worker, endpoint, get),
            Self::Twin(worker) => worker.get(endpoint, get),
        }
    }

    /// Copies pieces of a peer's GPU memory that is mapped here. After an error, `get` may still read them.
    pub(crate) fn copy(&self, endpoint: EndpointId, copy: DeviceCopy<'_>) -> UcxResult<()> {
        match self {
            Self::Ucx(worker) => ucx::copy(worker, endpoint, copy),
            Self::Twin(worker) => worker.copy(endpoint, copy),
        }
    }

    pub(crate) fn unpack_rkey(
        &self,
        endpoint: EndpointId,
        packed: &[u8],
        local: MemoryKind,
    ) -> UcxResult<RemoteKey> {
        match self {
            Self::Ucx(worker) => worker
                .unpack_rkey(endpoint, packed, local)
                .map(RemoteKey::Ucx),
            Self::Twin(_) => memory::MemoryKey::unpack(packed).map(RemoteKey::Twin),
        }
    }

    /// The transport of the lane that reads from a peer's CUDA memory into our CUDA memory, if there is one.
    pub(crate) fn reaches<'a>(
        &self,
        lanes: &'a [Lane],
        to: &Memory,
        from: (u64, &RemoteKey),
    ) -> Option<&'a str> {
        let (Self::Ucx(worker), (remote, RemoteKey::Ucx(key))) = (self, from) else {
            // The twin has one lane for all memory.
            let lane = lanes.iter().find(|lane| lane.is_rma);
            return lane
                .filter(|_| matches!(self, Self::Twin(_)))
                .map(|lane| &lane.transport[..]);
        };
        let here = to.pack_rkey().map(|key| Domains::of(&key));
        let here = (here.unwrap_or_default(), to.buffer().kind());
        worker.reaches(lanes, here, key, remote)
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Ucx(worker) => worker.event_fd(),
            Self::Twin(worker) => worker.event_fd(),
        }
    }

    /// True if it is safe to sleep on `event_fd`.
    pub(crate) fn arm(&self) -> UcxResult<bool> {
        match self {
            Self::Ucx(worker) => worker.arm(),
            Self::Twin(worker) => Ok(worker.arm()),
        }
    }

    /// Makes progress; 0 when there was nothing to do.
    pub(crate) fn progress(&self) -> u32 {
        match self {
            Self::Ucx(worker) => worker.progress(),
            Self::Twin(worker) => worker.progress(),
        }
    }

    pub(crate) fn next_event(&self) -> Option<Event> {
        match self {
            Self::Ucx(worker) => worker.next_event(),
            Self::Twin(worker) => worker.next_event(),
        }
    }

    /// Ends the worker. From now on `num_reads` counts the reads that have not ended even so: their memory is kept, and
    /// may still be written to. Once all keys are dropped, the reaper is dropped, which progresses these reads.
    pub(crate) fn end(self, num_reads: Arc<AtomicUsize>) -> Option<Reaper> {
        match self {
            Self::Ucx(worker) => Some(worker.end(num_reads)),
            Self::Twin(worker) => {
                drop(worker);
                None
            }
        }
    }

    /// Operations that have not ended.
    pub(crate) fn outstanding(&self) -> usize {
        match self {
            Self::Ucx(worker) => worker.outstanding(),
            Self::Twin(worker) => worker.outstanding(),
        }
    }
}
