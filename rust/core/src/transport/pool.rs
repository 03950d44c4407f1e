//! Memory for received tensors that is used again, registered or plain. Every page of a fresh allocation costs a page fault
//! when it is written: a tensor of 64 MiB took seven times as long. Pooled memory has been written and registered before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvpipe_ucx::Buffer;

use super::Memory;
use crate::error::{Error, Result};
use crate::process::Process;

/// Most free bytes that a pool keeps; the system gets back the rest at once.
const BYTES_CAP: usize = 1 << 30;
/// How long a pool keeps memory that nobody uses.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Sizes are rounded up to a multiple of it: the size of a huge page.
const GRAIN: usize = 2 << 20;

/// A pool of memory. Clones share it.
#[derive(Debug)]
pub(crate) struct Pool<M = Memory>(Arc<Mutex<FreeMemory<M>>>);

/// What a pool keeps.
pub(crate) trait Pooled: Send + Sync + 'static {
    /// The bytes.
    fn buffer(&self) -> &Buffer;
}

impl Pooled for Memory {
    fn buffer(&self) -> &Buffer {
        self.buffer()
    }
}

impl Pooled for Buffer {
    fn buffer(&self) -> &Buffer {
        self
    }
}

impl<M> Clone for Pool<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> Default for Pool<M> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(FreeMemory {
            memories: Vec::new(),
            num_bytes: 0,
        })))
    }
}

#[derive(Debug)]
struct FreeMemory<M> {
    /// With the times at which they came back, the oldest first.
    memories: Vec<(Arc<M>, Instant)>,
    num_bytes: usize,
}

fn mapped(len: usize) -> Result<Buffer> {
    let capacity = len.checked_next_multiple_of(GRAIN).unwrap_or(len);
    Buffer::mapped(capacity).map_err(|error| {
        Error::Exhausted(format!("no memory for a tensor of {len} bytes ({error})"))
    })
}

impl Pool<Memory> {
    /// Memory of at least `len` bytes, with any content. `register` registers what the pool does not have.
    ///
    /// # Errors
    /// The system has no such memory (`Exhausted`), or the transport cannot register it.
    pub(crate) fn take(
        &self,
        len: usize,
        register: impl FnOnce(Buffer) -> Result<Arc<Memory>>,
    ) -> Result<Arc<Memory>> {
        if let Some(memory) = lock(&self.0).take(len) {
            return Ok(memory);
        }
        register(mapped(len)?)
    }
}

impl Pool<Buffer> {
    /// Plain memory of at least `len` bytes.
    pub(crate) fn take_plain(&self, len: usize) -> Result<Arc<Buffer>> {
        if let Some(memory) = lock(&self.0).take(len) {
            return Ok(memory);
        }
        mapped(len).map(Arc::new)
    }
}

impl<M: Pooled> Pool<M> {
    /// The first `len` bytes as a buffer; dropping the buffer brings the memory back.
    pub(crate) fn lend(&self, memory: Arc<M>, len: usize) -> Option<Buffer> {
        let buffer = memory.buffer().clone();
        let lease = PooledLease {
            memory: Some(memory),
            pool: Arc::downgrade(&self.0),
            process: Process::this(),
        };
        buffer.first(len, Box::new(lease))
    }

    /// Frees what has been idle for too long, and returns the next deadline.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let expired = lock(&self.0).expire(now);
        drop(expired); // deregisters without the lock
        lock(&self.0)
            .memories
            .first()
            .map(|(_, since)| *since + IDLE_TIMEOUT)
    }
}

impl<M: Pooled> FreeMemory<M> {
    /// The smallest memory that fits, unless most of it would be wasted.
    fn take(&mut self, len: usize) -> Option<Arc<M>> {
        let size = |memory: &M| memory.buffer().len();
        let fits = |(_, (memory, _)): &(usize, &(Arc<M>, Instant))| {
            (len..=len.saturating_mul(2).max(GRAIN)).contains(&size(memory))
        };
        let fitting = self.memories.iter().enumerate().filter(fits);
        let (at, _) = fitting.min_by_key(|(_, (memory, _))| size(memory))?;
        let (memory, _) = self.memories.remove(at);
        self.num_bytes -= size(&memory);
        Some(memory)
    }

    fn put(&mut self, memory: Arc<M>) -> Option<Arc<M>> {
        let len = memory.buffer().len();
        if self.num_bytes + len > BYTES_CAP {
            return Some(memory);
        }
        self.num_bytes += len;
        self.memories.push((memory, Instant::now()));
        None
    }

    fn expire(&mut self, now: Instant) -> Vec<(Arc<M>, Instant)> {
        let is_late = |(_, since): &(Arc<M>, Instant)| *since + IDLE_TIMEOUT <= now;
        let num_late = self
            .memories
            .iter()
            .take_while(|free| is_late(free))
            .count();
        let expired: Vec<_> = self.memories.drain(..num_late).collect();
        let of = |(memory, _): &(Arc<M>, Instant)| memory.buffer().len();
        self.num_bytes -= expired.iter().map(of).sum::<usize>();
        expired
    }
}

/// The owner of a buffer from a pool: brings the memory back when it is dropped.
#[derive(Debug)]
struct PooledLease<M: Pooled> {
    memory: Option<Arc<M>>,
    pool: Weak<Mutex<FreeMemory<M>>>,
    process: Process,
}

impl<M: Pooled> Drop for PooledLease<M> {
    fn drop(&mut self) {
        let memory = self.memory.take();
        if self.process.check().is_err() {
            return std::mem::forget(memory); // it is the parent's, as is UCX
        }
        let Some(pool) = self.pool.upgrade() else {
            return;
        };
        let surplus = memory.and_then(|memory| lock(&pool).put(memory));
        drop(surplus); // deregisters without the lock
    }
}

fn lock<M>(free: &Mutex<FreeMemory<M>>) -> MutexGuard<'_, FreeMemory<M>> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 1 << 10;

    fn num_free(pool: &Pool<Buffer>) -> usize {
        lock(&pool.0).memories.len()
    }

    #[test]
    fn memory_comes_back_when_its_buffer_is_dropped() {
        let pool = Pool::<Buffer>::default();
        let memory = pool.take_plain(LEN).expect("memory");
        let received = pool.lend(memory, LEN);
        assert_eq!(num_free(&pool), 0);
        drop(received);
        assert_eq!(num_free(&pool), 1);
    }

    #[test]
    fn a_buffer_from_before_a_fork_is_dropped_in_the_child_without_the_pool() {
        let pool = Pool::<Buffer>::default();
        let lease = PooledLease {
            memory: Some(pool.take_plain(LEN).expect("memory")),
            pool: Arc::downgrade(&pool.0),
            process: Process::another(),
        };
        drop(lease);
        assert_eq!(num_free(&pool), 0);
    }
}
