//! Progresses workers that were dropped before UCX had ended all their operations. An endpoint that is not connected cannot
//! be closed, and the network may take minutes to give up. A device may keep a read of a peer that has ended. Such a worker
//! gets a thread of its own, which sleeps until there is something to progress and ends with the worker. So memory and
//! descriptors are freed as soon as UCX releases them.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{Timespec, epoll};

use crate::worker::{Inner, Worker};

/// Longest sleep of a reaper's thread. UCX has lost wake-ups in the past.
const SLEEP_CAP: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Workers that are kept for ever and not progressed. Leak checkers find them here.
static LEAKED: Mutex<Vec<UnendedWorker>> = Mutex::new(Vec::new());

/// A worker that has not ended, if it has not. Dropping the reaper starts the thread that progresses it. Keys of the worker
/// have to be dropped before: a worker with keys is leaked instead.
pub struct Reaper {
    worker: Option<Rc<Inner>>,
    num_reads: Arc<AtomicUsize>,
}

impl Reaper {
    pub(crate) fn new(worker: Option<Rc<Inner>>, num_reads: Arc<AtomicUsize>) -> Self {
        Self { worker, num_reads }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        let Some(inner) = self.worker.take() else {
            return;
        };
        let state = &inner.state;
        let (outstanding, leaving) = (state.outstanding.get(), state.leaving.get());
        let num_keys = state.keys.get();
        tracing::info!(outstanding, leaving, num_keys, "worker.left_alive");
        let worker = UnendedWorker(ManuallyDrop::new(Worker {
            inner: ManuallyDrop::new(inner),
        }));
        if num_keys > 0 {
            return worker.leak();
        }
        worker.spawn(Arc::clone(&self.num_reads));
    }
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reaper")
            .field("is_empty", &self.worker.is_none())
            .field("num_reads", &self.num_reads)
            .finish()
    }
}

/// A worker that is not dropped by accident.
struct UnendedWorker(ManuallyDrop<Worker>);

// SAFETY: a worker with keys is leaked and not used at all. Any other has no placer, and all else that shares its Rc
// (operations, endpoints, events) is reached through it only. So one thread at a time has all of it, as UCX's SERIALIZED mode
// requires.
unsafe impl Send for UnendedWorker {}

impl UnendedWorker {
    /// Keeps it for ever: a key on its thread may still reach it, or the system gives no thread.
    fn leak(self) {
        let mut leaked = LEAKED.lock().unwrap_or_else(PoisonError::into_inner);
        leaked.push(self);
    }

    fn spawn(self, num_reads: Arc<AtomicUsize>) {
        // A failed spawn drops its closure: the worker stays here.
        let place = Arc::new(Mutex::new(Some(self)));
        let in_thread = Arc::clone(&place);
        let take = |place: &Mutex<Option<Self>>| {
            place.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let spawned = std::thread::Builder::new()
            .name("kvpipe-reaper".to_owned())
            .spawn(move || {
                if let Some(worker) = take(&in_thread) {
                    worker.run(&num_reads);
                }
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "worker.has_no_thread");
            if let Some(worker) = take(&place) {
                worker.leak();
            }
        }
    }

    /// Progresses the worker until UCX has ended all operations.
    fn run(self, num_reads: &AtomicUsize) {
        let wakeups = match Wakeups::new(&self.0) {
            Ok(wakeups) => wakeups,
            Err(error) => {
                tracing::warn!(%error, "worker.has_no_epoll");
                return self.leak();
            }
        };
        loop {
            let has_worked = self.0.progress() > 0;
            self.0.discard_events();
            // After the events, which drop the memory.
            num_reads.store(self.0.inner.state.writes.get(), Ordering::Release);
            if self.0.is_settled() {
                return drop(ManuallyDrop::into_inner(self.0));
            }
            // An error of `arm` is no reason to spin.
            let has_more = self.0.arm().is_ok_and(|is_armed| !is_armed);
            if !has_worked && !has_more {
                wakeups.wait();
            }
        }
    }
}

/// Wakes when there is something new to progress. UCX's own descriptor stays readable while an endpoint waits for its
/// connection (1.22, TCP), although there is nothing to do.
struct Wakeups(OwnedFd);

impl Wakeups {
    fn new(worker: &Worker) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(
            &epoll,
            worker.event_fd(),
            epoll::EventData::new_u64(0),
            flags,
        )?;
        Ok(Self(epoll))
    }

    fn wait(&self) {
        let mut woken = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        // A signal ends it, which does no harm.
        let _ = epoll::wait(&self.0, &mut woken, Some(&SLEEP_CAP));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicPtr;

    use super::*;
    use crate::context::tests::context;
    use crate::request::{Attributes, Keep, post};
    use crate::rma::{KeyUse, Write};
    use crate::sys::ucp_request_param_t;
    use crate::{Buffer, Context, MemoryKind};

    /// Leak checkers find the read here, as in UCX.
    static READ: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());

    /// Posts a read into `buffer` that UCX is said to have begun, and that never ends.
    fn read_for_ever(context: &Arc<Context>, worker: &Worker, buffer: Buffer) {
        let memory = context.register(buffer).expect("register");
        let address = worker.address().expect("address");
        // SAFETY: a worker's own address.
        let endpoint = unsafe { worker.connect(&address) }.expect("connect");
        let packed = memory.pack_rkey().expect("pack");
        let key = worker
            .unpack_rkey(endpoint, &packed, MemoryKind::Host)
            .expect("unpack");
        let keep = Keep::Get {
            _memory: memory,
            _key: KeyUse::new(&key.key),
            _write: Write::new(&worker.inner.state),
        };
        let endpoint = worker.inner.endpoint(endpoint, "get").expect("endpoint");
        let attributes = Attributes::default();
        let begun = |param: &ucp_request_param_t| {
            READ.store(param.user_data, Ordering::Relaxed);
            std::ptr::without_provenance_mut(64)
        };
        post(
            &worker.inner,
            &endpoint,
            (1, "get"),
            keep,
            &attributes,
            begun,
        )
        .expect("post");
    }

    #[test]
    fn memory_of_a_read_that_does_not_end_is_counted_and_kept() {
        let Some(context) = context() else { return };
        let (worker, owner) = (Worker::new(&context).expect("worker"), Arc::new(()));
        let buffer = Buffer::zeroed(64).first(64, Box::new(Arc::clone(&owner)));
        read_for_ever(&context, &worker, buffer.expect("64 bytes"));
        let num_reads = Arc::default();
        drop(worker.end(Arc::clone(&num_reads)));
        assert_eq!(num_reads.load(Ordering::Acquire), 1);
        assert_eq!(Arc::strong_count(&owner), 2, "its owner was dropped");
    }

    #[test]
    fn a_worker_whose_reads_have_ended_counts_none() {
        let Some(context) = context() else { return };
        let num_reads = Arc::new(AtomicUsize::new(7));
        let reaper = Worker::new(&context)
            .expect("worker")
            .end(Arc::clone(&num_reads));
        assert!(reaper.worker.is_none());
        assert_eq!(num_reads.load(Ordering::Acquire), 0);
    }
}
