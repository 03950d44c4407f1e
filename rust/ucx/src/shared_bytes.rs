//! Bytes that others may change while they are read: [`SharedBytes`], the view of a [`Buffer`](crate::Buffer).

mod crc64;

use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Most bytes that are copied out at once: half of a small L1 cache.
const CHUNK: usize = 16 << 10;

/// Bytes of a cache line, and what is fetched ahead.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;
#[cfg(target_arch = "x86_64")]
const PREFETCHED: usize = 8 * CACHE_LINE;

/// Bytes that a peer, a device, a user's thread or another process may write at any time.
///
/// A `&[u8]` promises the compiler that its bytes do not change, which does not hold for memory that is open to remote
/// access. This view is a raw pointer. It copies bytes out, or hashes them, and each read is one of raw memory. A read
/// during a write gives some old and some new bytes: checksums and grants decide whether they count.
///
/// The memory model is that of the Linux kernel's `READ_ONCE`, and of the crates crossbeam (`AtomicCell`) and vm-memory
/// (`VolatileSlice`): Rust has no atomic copy of bytes yet, and a copy through a raw pointer is one read of memory
/// about which the compiler knows nothing.
#[derive(Clone, Copy)]
pub struct SharedBytes<'a> {
    /// Valid for reads of `len` bytes as long as `'a`.
    start: *const u8,
    len: usize,
    _memory: PhantomData<&'a ()>,
}

impl SharedBytes<'_> {
    /// # Safety
    /// `start` must not be null, and must be valid for reads of `len` initialised bytes as long as `'a`.
    pub(crate) unsafe fn new(start: *const u8, len: usize) -> Self {
        Self {
            start,
            len,
            _memory: PhantomData,
        }
    }

    /// Number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub(crate) fn as_ptr(self) -> *const u8 {
        self.start
    }

    /// The first `num_bytes`, or all if they are fewer, and the rest.
    #[must_use]
    pub fn split_at(self, num_bytes: usize) -> (Self, Self) {
        let num_bytes = num_bytes.min(self.len);
        // SAFETY: the first of these bytes.
        let first = unsafe { Self::new(self.start, num_bytes) };
        (first, self.after(num_bytes))
    }

    /// Those after the first `num_bytes`.
    fn after(self, num_bytes: usize) -> Self {
        let num_bytes = num_bytes.min(self.len);
        // SAFETY: within these bytes, or at their end.
        unsafe { Self::new(self.start.wrapping_add(num_bytes), self.len - num_bytes) }
    }

    /// Prefetches their beginning, which is read soon. The processor fetches the rest by itself, within a page.
    pub fn prefetch(self) {
        #[cfg(target_arch = "x86_64")]
        for at in (0..self.len.min(PREFETCHED)).step_by(CACHE_LINE) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing; each x86-64 processor has it.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.start.wrapping_add(at).cast()) };
        }
    }

    /// A copy of the bytes.
    pub fn to_vec(self) -> Vec<u8> {
        let mut copied = Vec::with_capacity(self.len);
        self.append_to(&mut copied);
        copied
    }

    /// Appends a copy of the bytes to `copied`.
    pub fn append_to(self, copied: &mut Vec<u8>) {
        copied.reserve(self.len);
        let (spare, len) = (copied.spare_capacity_mut().as_mut_ptr(), copied.len());
        // SAFETY: the type promises `len` bytes to be read; as many were reserved, in memory that is only ours.
        unsafe { std::ptr::copy_nonoverlapping(self.start, spare.cast(), self.len) };
        // SAFETY: reserved above, and initialised by the copy.
        unsafe { copied.set_len(len + self.len) };
    }

    /// Copies as many of the bytes as `out` has place for.
    pub fn copy_to(self, out: &mut [u8]) {
        let len = self.len.min(out.len());
        // SAFETY: the type promises `len` bytes to be read; `out` has place for them, and is only ours.
        unsafe { std::ptr::copy_nonoverlapping(self.start, out.as_mut_ptr(), len) };
    }

    /// The state of a CRC-64/NVME, as the crate crc-fast keeps it, after these bytes.
    #[must_use]
    pub fn update_crc64(self, state: u64) -> u64 {
        crc64::update(state, self)
    }

    /// Calls with copies of the bytes, one after the other, until one returns false; whether none did.
    fn all_chunks(self, mut is_good: impl FnMut(usize, &[u8]) -> bool) -> bool {
        let mut chunk = [const { MaybeUninit::<u8>::uninit() }; CHUNK];
        let to = chunk.as_mut_ptr().cast::<u8>();
        (0..self.len).step_by(CHUNK).all(|at| {
            let len = CHUNK.min(self.len - at);
            let from = self.start.wrapping_add(at);
            // SAFETY: `len` of the bytes begin there, and `chunk` has place for them.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
            // SAFETY: just initialised, and only ours.
            is_good(at, unsafe { std::slice::from_raw_parts(to, len) })
        })
    }
}

impl<'a> From<&'a [u8]> for SharedBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is valid for reads as long as its borrow, and initialised.
        unsafe { Self::new(bytes.as_ptr(), bytes.len()) }
    }
}

impl PartialEq<[u8]> for SharedBytes<'_> {
    fn eq(&self, other: &[u8]) -> bool {
        let is_equal = |at, chunk: &[u8]| other.get(at..at + chunk.len()) == Some(chunk);
        self.len == other.len() && self.all_chunks(is_equal)
    }
}

impl std::fmt::Debug for SharedBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:p}", self.len, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_comparisons_see_every_byte() {
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5] {
            let mut bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            assert_eq!(SharedBytes::from(&bytes[..]).to_vec(), bytes);
            let same = bytes.clone();
            assert!(SharedBytes::from(&same[..]) == *bytes, "{len}");
            assert!(SharedBytes::from(&same[..]) != [&bytes[..], b"x"].concat()[..]);
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
                assert!(SharedBytes::from(&same[..]) != *bytes, "{len}");
            }
        }
    }

    #[test]
    fn bytes_are_split_within_their_length() {
        let bytes = SharedBytes::from(&b"kvpipe"[..]);
        for (at, first, rest) in [
            (0, "", "kvpipe"),
            (2, "kv", "pipe"),
            (6, "kvpipe", ""),
            (9, "kvpipe", ""),
        ] {
            let (one, other) = bytes.split_at(at);
            assert_eq!((one.to_vec(), other.to_vec()), (first.into(), rest.into()));
        }
    }

    #[test]
    fn a_copy_is_appended() {
        let mut copied = b"kv".to_vec();
        SharedBytes::from(&b"pipe"[..]).append_to(&mut copied);
        assert_eq!(copied, b"kvpipe");
    }

    #[test]
    fn a_copy_fills_what_there_is_place_for() {
        let (mut less, mut more) = ([0; 2], [b'.'; 8]);
        SharedBytes::from(&b"kvpipe"[..]).copy_to(&mut less);
        SharedBytes::from(&b"kvpipe"[..]).copy_to(&mut more);
        assert_eq!((&less, &more), (b"kv", b"kvpipe.."));
    }
}
