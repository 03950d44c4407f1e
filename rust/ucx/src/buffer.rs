//! Memory that UCX may access: [`Buffer`], a range with its owner.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use crate::cuda::{self, CudaError, Current, StagedWrites};
use crate::shared_bytes::SharedBytes;
use crate::sys;

/// The memory in which a range lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of the CPU.
    Host,
    /// Memory of an NVIDIA GPU.
    Cuda {
        /// The ordinal of the GPU among those that the process sees.
        device: u32,
    },
}

impl MemoryKind {
    pub(crate) fn as_ucs(self) -> i32 {
        match self {
            Self::Host => sys::UCS_MEMORY_TYPE_HOST,
            Self::Cuda { .. } => sys::UCS_MEMORY_TYPE_CUDA,
        }
    }

    /// The CUDA context that UCX needs in the calling thread for such memory.
    pub(crate) fn enter(self) -> Option<Current<'static>> {
        match self {
            Self::Host => None,
            Self::Cuda { device } => cuda::enter_or_log(device),
        }
    }
}

/// A range of memory, with the owner that keeps it allocated.
///
/// Like all memory open to remote access, its bytes can change while they are read: between the
/// post of a get and its `Done`, and whenever its user or a peer with the key writes. Nothing here makes
/// a reference to them. Clones share the owner.
#[derive(Clone)]
pub struct Buffer {
    address: usize,
    len: usize,
    kind: MemoryKind,
    is_writable: bool,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Describes memory that `owner` keeps allocated.
    ///
    /// # Safety
    /// `address .. address + len` must not wrap around, and must be valid for reads and writes from any thread until
    /// `owner` is dropped with the last clone; no Rust reference into it may exist meanwhile.
    /// Memory of kind CUDA must be of the device that the kind names, and valid
    /// so for that device.
    pub unsafe fn from_raw_parts(
        address: usize,
        len: usize,
        kind: MemoryKind,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            address,
            len,
            kind,
            is_writable: true,
            _owner: owner.into(),
        }
    }

    /// Describes memory that may only be read: it is refused as a destination.
    ///
    /// # Safety
    /// As for [`from_raw_parts`](Self::from_raw_parts), but for writes.
    pub unsafe fn read_only(
        address: usize,
        len: usize,
        kind: MemoryKind,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the caller's promise, but for writes, which the flag prevents.
        let buffer = unsafe { Self::from_raw_parts(address, len, kind, owner) };
        Self {
            is_writable: false,
            ..buffer
        }
    }

    /// Allocates `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        Self::from_vec(vec![0; len])
    }

    /// Allocates `len` zero bytes, in huge pages where the system has them: their first use costs less.
    ///
    /// # Errors
    /// The system has not so much memory.
    pub fn mapped(len: usize) -> std::io::Result<Self> {
        let mapping = Mapping::new(len)?;
        Ok(Self {
            address: mapping.address,
            len,
            kind: MemoryKind::Host,
            is_writable: true,
            _owner: Arc::new(mapping),
        })
    }

    /// Has the kernel make all pages of host memory that may be written, whose content stays. Otherwise the first copy
    /// into a page waits for it, which takes longer than the copy.
    ///
    /// # Errors
    /// The kernel refuses (before Linux 5.14), or has no memory left.
    pub fn make_pages(&self) -> std::io::Result<()> {
        let start = self.writable_range(0, self.len);
        let Some(start) = start.filter(|_| self.kind == MemoryKind::Host && self.len > 0) else {
            return Ok(());
        };
        let before = start as usize % page_bytes();
        // SAFETY: the pages of memory that is valid for writes; what they hold is not changed.
        let made = unsafe {
            let first = start.wrapping_byte_sub(before).cast();
            libc::madvise(first, before + self.len, libc::MADV_POPULATE_WRITE)
        };
        if made == 0 {
            return Ok(());
        }
        Err(std::io::Error::last_os_error())
    }

    /// The first `len` bytes, if there are so many. They keep `owner` alive too: it is dropped with the last clone.
    #[must_use]
    pub fn first(&self, len: usize, owner: Box<dyn Any + Send + Sync>) -> Option<Self> {
        (len <= self.len).then(|| Self {
            address: self.address,
            len,
            kind: self.kind,
            is_writable: self.is_writable,
            _owner: Arc::new((owner, self.clone())),
        })
    }

    /// Takes over the bytes without a copy.
    pub fn from_vec(mut bytes: Vec<u8>) -> Self {
        let address = bytes.as_mut_ptr().expose_provenance();
        Self {
            address,
            len: bytes.len(),
            kind: MemoryKind::Host,
            is_writable: true,
            _owner: Arc::new(bytes),
        }
    }

    /// Address of the range's first byte.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory in which it lies.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Copies `data` to `offset`; false when it does not fit, the memory may only be read, or the CUDA driver could not
    /// copy it.
    ///
    /// In CUDA memory, too, every stream sees the bytes when this returns. It waits for no stream: it overtakes work that
    /// the caller's own stream has queued.
    pub fn write(&self, offset: usize, data: &[u8]) -> bool {
        self.copy_from(offset, data.into())
    }

    /// Copies bytes that others may change to `offset`, as [`write`](Self::write) does.
    pub fn copy_from(&self, offset: usize, data: SharedBytes<'_>) -> bool {
        match self.kind {
            MemoryKind::Host => self.write_host(offset, data),
            MemoryKind::Cuda { device } => self.write_cuda(device, offset, data),
        }
    }

    fn write_cuda(&self, device: u32, offset: usize, data: SharedBytes<'_>) -> bool {
        let Some(to) = self.writable_range(offset, data.len()) else {
            return false;
        };
        // SAFETY: the range is in bounds, and memory of this device while the owner lives, by the contract of
        // from_raw_parts.
        let copied = unsafe { cuda::copy(device, to.addr() as u64, data) };
        copied
            .inspect_err(|error| tracing::error!(%error, device, "cuda.copy_failed"))
            .is_ok()
    }

    fn write_host(&self, offset: usize, data: SharedBytes<'_>) -> bool {
        let Some(target) = self.host_range(offset, data.len()) else {
            return false;
        };
        if !self.is_writable {
            return false;
        }
        // SAFETY: the range is in bounds, and valid for writes while the owner lives, by the
        // contract of from_raw_parts; `copy` allows that `data` overlaps it.
        unsafe { std::ptr::copy(data.as_ptr(), target, data.len()) };
        true
    }

    /// Calls `take` with the bytes of these ranges of CUDA memory, offsets and lengths, in their order and a chunk at a time,
    /// until it returns false. While it uses one chunk, the GPU copies the next ones into page-locked memory. It waits for
    /// no stream.
    ///
    /// # Errors
    /// The driver's error, the buffer is no CUDA memory, or a range is not within it; `take` may have had the first bytes.
    pub fn read_staged(
        &self,
        ranges: &[(usize, usize)],
        take: &mut dyn FnMut(SharedBytes<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let address = |&(offset, len): &(usize, usize)| {
            let from = self.range(offset, len)?;
            Some((from.addr() as u64, len))
        };
        let ranges: Option<Vec<_>> = ranges.iter().map(address).collect();
        let (Some(ranges), MemoryKind::Cuda { device }) = (ranges, self.kind) else {
            return Err(CudaError::new("a range that is not of this GPU memory"));
        };
        // SAFETY: the ranges are in bounds, and memory of this device while the owner lives, by the contract of
        // from_raw_parts.
        unsafe { cuda::read_staged(device, &ranges, take) }
    }

    /// The bytes at `offset`, unless out of range or not in the CPU's memory.
    pub fn bytes(&self, offset: usize, len: usize) -> Option<SharedBytes<'_>> {
        let start = self.host_range(offset, len)?;
        // SAFETY: the range is in bounds, initialised, and valid for reads while the owner, and with it
        // `&self`, lives.
        Some(unsafe { SharedBytes::new(start, len) })
    }

    /// A copy of the bytes at `offset`, in any kind of memory; none if they are out of range, or the CUDA driver could not
    /// copy them. It waits for no stream.
    pub fn to_vec(&self, offset: usize, len: usize) -> Option<Vec<u8>> {
        let MemoryKind::Cuda { device } = self.kind else {
            return self.bytes(offset, len).map(SharedBytes::to_vec);
        };
        let from = self.range(offset, len)?.addr() as u64;
        // SAFETY: the range is in bounds, and memory of this device while the owner lives, by the contract of
        // from_raw_parts.
        let copied = unsafe { cuda::read(device, from, len) };
        copied
            .inspect_err(|error| tracing::error!(%error, device, "cuda.copy_failed"))
            .ok()
    }

    /// A pointer to `offset`, when `len` bytes follow it. Good for any kind of memory.
    pub(crate) fn range(&self, offset: usize, len: usize) -> Option<*mut c_void> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| std::ptr::with_exposed_provenance_mut(self.address + offset))
    }

    /// The same for a destination; none in memory that may only be read.
    pub(crate) fn writable_range(&self, offset: usize, len: usize) -> Option<*mut c_void> {
        self.range(offset, len).filter(|_| self.is_writable)
    }

    fn host_range(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if self.kind != MemoryKind::Host {
            return None;
        }
        let start = self.range(offset, len)?.cast::<u8>();
        // An empty range may come with any address; slices and copies need a non-null one.
        Some(if len == 0 {
            NonNull::dangling().as_ptr()
        } else {
            start
        })
    }
}

/// Writes into a buffer in CUDA memory, which are in place after [`finish`](Self::finish). While the GPU copies earlier bytes
/// out of page-locked memory, the CPU puts the next ones there.
#[derive(Debug)]
pub struct DeviceWrites {
    staged: StagedWrites,
    buffer: Buffer,
}

impl DeviceWrites {
    /// Begins to write; none into host memory.
    pub fn begin(buffer: &Buffer) -> Option<Self> {
        let MemoryKind::Cuda { device } = buffer.kind else {
            return None;
        };
        Some(Self {
            staged: StagedWrites::new(device),
            buffer: buffer.clone(),
        })
    }

    /// Writes `data` to `offset`. Its bytes may change when this returns. It waits for no stream.
    ///
    /// # Errors
    /// The bytes do not fit, the memory may only be read, or the driver's error, also after an earlier one.
    pub fn write(&mut self, offset: usize, data: SharedBytes<'_>) -> Result<(), CudaError> {
        let to = self.buffer.writable_range(offset, data.len());
        let to = to.ok_or_else(|| CudaError::new("a range that must not be written"))?;
        // SAFETY: the range is in bounds, and memory of this device while the owner lives, by the contract of
        // from_raw_parts; `drop` keeps the owner until the GPU copies no more.
        unsafe { self.staged.write(to.addr() as u64, data) }
    }

    /// Waits until all of it is in place, for every stream to see.
    ///
    /// # Errors
    /// The driver's error, also that of an earlier write.
    pub fn finish(&mut self) -> Result<(), CudaError> {
        self.staged.finish()
    }
}

impl Drop for DeviceWrites {
    fn drop(&mut self) {
        if let Err(error) = self.staged.settle() {
            tracing::error!(buffer = ?self.buffer, %error, "memory.leaked");
            // The GPU may write into it yet.
            std::mem::forget(self.buffer.clone());
        }
    }
}

fn page_bytes() -> usize {
    // SAFETY: takes a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// An anonymous mapping.
struct Mapping {
    address: usize,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> std::io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping where the kernel likes it: nothing that exists is changed.
        let mapped = unsafe { libc::mmap(null_mut(), len, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: advice on the mapping just made; a kernel without huge pages refuses it, which changes nothing.
        unsafe { libc::madvise(mapped, len, libc::MADV_HUGEPAGE) };
        let address = mapped.expose_provenance();
        Ok(Self { address, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: mapped by `new` with this length, and unmapped once, here; its buffer is gone.
        unsafe { libc::munmap(start, self.len) };
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_and_bytes_stay_in_bounds() {
        let buffer = Buffer::zeroed(8);
        assert!(buffer.write(5, b"abc"));
        assert_eq!(buffer.bytes(4, 4).unwrap().to_vec(), b"\0abc");
        assert!(!buffer.write(6, b"abc"));
        assert!(!buffer.write(usize::MAX, b"abc"));
        assert_eq!(buffer.bytes(8, 0).unwrap().to_vec(), []);
        assert!(buffer.bytes(9, 0).is_none());
        assert!(buffer.bytes(1, usize::MAX).is_none());
    }

    #[test]
    fn pages_that_were_made_have_their_content_and_are_not_faulted_in_again() {
        let faults = || {
            let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
            // SAFETY: writes what it is given.
            unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
            // SAFETY: all zero bytes are a value, too.
            unsafe { usage.assume_init() }.ru_minflt
        };
        let mapped = Buffer::mapped(5 << 20).unwrap();
        assert!(mapped.write(0, b"kept"));
        mapped.make_pages().unwrap();
        let before = faults();
        for page in (1..5 << 20).step_by(page_bytes()).skip(1) {
            assert!(mapped.write(page, b"x"));
        }
        assert!(faults() - before < 9, "{}", faults() - before);
        assert_eq!(mapped.bytes(0, 4).unwrap().to_vec(), b"kept");
    }

    #[test]
    fn mapped_memory_is_zero_and_can_be_written() {
        let buffer = Buffer::mapped(3 << 20).unwrap();
        assert_eq!(buffer.bytes(3 << 20, 0).unwrap().to_vec(), []);
        assert!(
            buffer
                .bytes(0, 3 << 20)
                .unwrap()
                .to_vec()
                .iter()
                .all(|byte| *byte == 0)
        );
        assert!(buffer.write((3 << 20) - 2, b"kv"));
    }

    #[test]
    fn more_memory_than_the_system_has_is_an_error() {
        assert!(Buffer::mapped(usize::MAX / 2).is_err());
    }

    #[test]
    fn the_first_bytes_keep_the_buffer_and_their_own_owner() {
        let (owner, whole) = (Arc::new(()), Buffer::from_vec(b"kvpipe".to_vec()));
        let first = whole.first(2, Box::new(Arc::clone(&owner))).unwrap();
        drop(whole);
        assert_eq!(first.bytes(0, 2).unwrap().to_vec(), b"kv");
        assert!(first.bytes(0, 3).is_none());
        let clone = first.clone();
        drop(first);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert!(Buffer::zeroed(4).first(5, Box::new(())).is_none());
    }

    #[test]
    fn cuda_memory_is_not_touched_by_the_cpu() {
        let kind = MemoryKind::Cuda { device: 0 };
        // SAFETY: never dereferenced: the kind forbids it, which is what this test is about.
        let buffer = unsafe { Buffer::from_raw_parts(4096, 64, kind, Box::new(())) };
        assert!(!buffer.write(64, b"x"));
        assert!(buffer.bytes(0, 1).is_none());
        assert!(buffer.range(0, 64).is_some());
    }

    #[test]
    fn memory_that_may_only_be_read_is_no_destination() {
        static BYTES: &[u8] = b"kvpipe";
        let address = BYTES.as_ptr().expose_provenance();
        // SAFETY: a static is valid for reads for ever.
        let buffer = unsafe { Buffer::read_only(address, 6, MemoryKind::Host, Box::new(())) };
        assert_eq!(buffer.bytes(0, 6).unwrap().to_vec(), BYTES);
        let first = buffer.first(2, Box::new(())).unwrap();
        for buffer in [buffer, first] {
            assert!(!buffer.write(0, b"x"));
            assert!(buffer.writable_range(0, 1).is_none());
        }
    }

    #[test]
    fn buffer_from_vec_keeps_its_bytes() {
        let buffer = Buffer::from_vec(b"kv".to_vec());
        assert_eq!(buffer.bytes(0, 2).unwrap().to_vec(), b"kv");
        assert!(Buffer::from_vec(Vec::new()).is_empty());
    }
}
