//! Memory for received tensors that is used again, registered or plain. Every page of a fresh allocation costs a page fault
//! when it is written: a tensor of 64 MiB took seven times as long. Pooled memory has been written and registered before.

use std::borrow::Borrow;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use kvpipe_ucx::Buffer;

use super::Memory;
use crate::clock;
use crate::error::{Error, Result};
use crate::process::Process;
use crate::sync::lock;

/// Most free bytes that a pool keeps; the system gets back the rest at once.
const BYTES_CAP: usize = 1 << 30;
/// Time for which a pool keeps unused memory.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Sizes are rounded up to a multiple of it: the size of a huge page.
const GRAIN: usize = 2 << 20;

/// Refuses a size that this machine could never hold. A peer names the sizes of its tensors, and a system that
/// overcommits would hand out any.
///
/// # Errors
/// `Exhausted`: `len` is more than the machine's memory.
pub(crate) fn check_len(len: usize) -> Result<()> {
    let machine_bytes = {
        let info = rustix::system::sysinfo();
        (info.totalram as u64).saturating_mul(info.mem_unit.into())
    };
    if len as u64 <= machine_bytes {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "a tensor of {len} bytes is larger than the memory of the machine that would receive it, {machine_bytes} bytes: \
         send it in parts"
    )))
}

/// A pool of registered memory, or of plain buffers. Clones share it.
#[derive(Debug)]
pub(crate) struct Pool<M: Borrow<Buffer> = Memory>(Arc<FreeList<M>>);

/// Unused memory, with the time at which it came back, the oldest first.
type FreeList<M> = Mutex<Vec<(Arc<M>, Instant)>>;

impl<M: Borrow<Buffer>> Clone for Pool<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M: Borrow<Buffer>> Default for Pool<M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<M: Borrow<Buffer> + Send + Sync + 'static> Pool<M> {
    /// Number of unused pieces of memory.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Memory of at least `len` bytes, with any content. `make` gets what the pool does not have from a fresh buffer.
    ///
    /// # Errors
    /// The machine or the system has no such memory (`Exhausted`), or the transport cannot register it.
    pub(crate) fn acquire(
        &self,
        len: usize,
        make: impl FnOnce(Buffer) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        self.acquire_within(len, len.saturating_mul(2).max(GRAIN), make)
    }

    /// As [`acquire`](Self::acquire), but memory of the pool only if a fresh one would have its size.
    ///
    /// # Errors
    /// As of [`acquire`](Self::acquire).
    pub(crate) fn acquire_exact(
        &self,
        len: usize,
        make: impl FnOnce(Buffer) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        self.acquire_within(len, fresh_size(len), make)
    }

    fn acquire_within(
        &self,
        len: usize,
        most: usize,
        make: impl FnOnce(Buffer) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        if let Some(memory) = remove_fitting(&mut lock(&self.0), len..=most) {
            return Ok(memory);
        }
        check_len(len)?;
        let capacity = fresh_size(len);
        let fresh = Buffer::mapped(capacity).map_err(|error| {
            Error::Exhausted(format!("no memory for a tensor of {len} bytes ({error})"))
        })?;
        make(fresh)
    }

    /// The first `len` bytes as a buffer; dropping the buffer brings the memory back.
    pub(crate) fn lend(&self, memory: Arc<M>, len: usize) -> Option<Buffer> {
        let buffer: Buffer = (*memory).borrow().clone();
        let lease = PooledLease {
            memory: Some(memory),
            pool: Arc::downgrade(&self.0),
            process: Process::this(),
        };
        buffer.first(len, Box::new(lease))
    }

    /// Frees memory that has been idle for too long, and returns the next deadline.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let mut free = lock(&self.0);
        let num_expired = free.partition_point(|(_, since)| *since + IDLE_TIMEOUT <= now);
        let expired: Vec<_> = free.drain(..num_expired).collect();
        let next = free.first().map(|(_, since)| *since + IDLE_TIMEOUT);
        drop(free);
        drop(expired); // deregisters without the lock
        next
    }
}

/// Size of the allocation for `len` bytes.
fn fresh_size(len: usize) -> usize {
    len.checked_next_multiple_of(GRAIN).unwrap_or(len)
}

/// Removes the smallest memory whose size is one of these.
fn remove_fitting<M: Borrow<Buffer>>(
    free: &mut Vec<(Arc<M>, Instant)>,
    fitting: RangeInclusive<usize>,
) -> Option<Arc<M>> {
    let sizes = free.iter().map(|(memory, _)| size(memory)).enumerate();
    let (at, _) = sizes
        .filter(|(_, size)| fitting.contains(size))
        .min_by_key(|(_, size)| *size)?;
    Some(free.remove(at).0)
}

fn size<M: Borrow<Buffer>>(memory: &Arc<M>) -> usize {
    let buffer: &Buffer = (**memory).borrow();
    buffer.len()
}

/// The owner of a buffer from a pool: brings the memory back when it is dropped.
#[derive(Debug)]
struct PooledLease<M: Borrow<Buffer>> {
    memory: Option<Arc<M>>,
    pool: Weak<FreeList<M>>,
    process: Process,
}

impl<M: Borrow<Buffer>> Drop for PooledLease<M> {
    fn drop(&mut self) {
        let memory = self.memory.take();
        if self.process.check().is_err() {
            return std::mem::forget(memory); // it is the parent's, as is UCX
        }
        // A surplus is dropped, and so deregistered, without the lock.
        let (Some(memory), Some(pool)) = (memory, self.pool.upgrade()) else {
            return;
        };
        let mut free = lock(&pool);
        let num_bytes: usize = free.iter().map(|(memory, _)| size(memory)).sum();
        if num_bytes + size(&memory) <= BYTES_CAP {
            free.push((memory, clock::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 1 << 10;

    fn num_free(pool: &Pool<Buffer>) -> usize {
        lock(&pool.0).len()
    }

    fn take(pool: &Pool<Buffer>) -> Arc<Buffer> {
        let memory = pool.acquire(LEN, |buffer| Ok(Arc::new(buffer)));
        memory.expect("memory")
    }

    #[test]
    fn memory_comes_back_when_its_buffer_is_dropped() {
        let pool = Pool::<Buffer>::default();
        let memory = take(&pool);
        let received = pool.lend(memory, LEN);
        assert_eq!(num_free(&pool), 0);
        drop(received);
        assert_eq!(num_free(&pool), 1);
    }

    #[test]
    fn memory_that_the_machine_does_not_have_is_refused_before_it_is_asked_for() {
        let len = 1 << 46;
        let taken = Pool::<Buffer>::default().acquire(len, |_| unreachable!("it was allocated"));
        let error = taken.expect_err("64 TiB").to_string();
        assert!(error.contains("70368744177664 bytes is larger"), "{error}");
    }

    #[test]
    fn a_buffer_from_before_a_fork_is_dropped_in_the_child_without_the_pool() {
        let pool = Pool::<Buffer>::default();
        let lease = PooledLease {
            memory: Some(take(&pool)),
            pool: Arc::downgrade(&pool.0),
            process: Process::another(),
        };
        drop(lease);
        assert_eq!(num_free(&pool), 0);
    }
}
