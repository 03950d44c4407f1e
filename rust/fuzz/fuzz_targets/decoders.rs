//! Also counts memory: what a decoder takes is bounded by what it is given.
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a decoder may hold for each byte that it is given, with those of its message written again, and besides.
const PER_BYTE: usize = 32;
const BESIDES: usize = 64 << 10;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: passes every call on to the system's allocator as it came, and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; what is freed came from `alloc`, and so from the system.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    kvpipe_fuzz_harness::decoders(bytes);
    let taken = MOST.load(Ordering::Relaxed) - before;
    let allowed = PER_BYTE * bytes.len() + BESIDES;
    assert!(
        taken <= allowed,
        "{taken} bytes for a message of {}",
        bytes.len()
    );
});
