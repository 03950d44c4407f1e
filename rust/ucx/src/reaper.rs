//! What is left of a worker that was dropped before UCX was done with what was asked of it: an endpoint that is not connected
//! cannot be closed, nor one over TCP whose peer does not read, and the network may take minutes to give up; a device may keep
//! a read of a peer that is gone. Such a worker gets a thread of its own, which sleeps until there is something to do and ends
//! with the worker, so that memory and descriptors are given back as soon as UCX lets go of them.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{Timespec, epoll};

use crate::worker::{Inner, Worker};

/// Longest sleep of a thread that has such a worker. UCX has lost wake-ups in the past.
const LONGEST_SLEEP: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Workers that nobody works on any more, by which leak checkers see what is left alive on purpose.
static LEFT: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

/// What is left of a worker, if anything. Once this is dropped, it is worked on until UCX is done with it. Not if somebody has
/// keys of the worker then: drop them first.
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
        let parked = Parked(ManuallyDrop::new(Worker {
            inner: ManuallyDrop::new(inner),
        }));
        if num_keys > 0 {
            return parked.leave();
        }
        parked.work_on(Arc::clone(&self.num_reads));
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
struct Parked(ManuallyDrop<Worker>);

// SAFETY: a parked worker is not among those that `leave` takes, which are not used at all, unless nobody has keys of it; it
// has no placer; all else that shares its Rc (operations, endpoints, events) is reached through it only. So one thread has all
// of it, after the one that had it before, as UCX's SERIALIZED mode wants.
unsafe impl Send for Parked {}

impl Parked {
    /// Keeps it for ever: somebody on its thread may still reach it, or there is no other thread.
    fn leave(self) {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.push(self);
    }

    fn work_on(self, num_reads: Arc<AtomicUsize>) {
        // In a place that outlives a thread that cannot be made.
        let place = Arc::new(Mutex::new(Some(self)));
        let in_thread = Arc::clone(&place);
        let take = |place: &Mutex<Option<Self>>| {
            place.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let spawned = std::thread::Builder::new()
            .name("kvpipe-rest".to_owned())
            .spawn(move || {
                if let Some(parked) = take(&in_thread) {
                    parked.run(&num_reads);
                }
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "worker.has_no_thread");
            if let Some(parked) = take(&place) {
                parked.leave();
            }
        }
    }

    /// Works until UCX is done.
    fn run(self, num_reads: &AtomicUsize) {
        let bell = match Bell::new(&self.0) {
            Ok(bell) => bell,
            Err(error) => {
                tracing::warn!(%error, "worker.has_no_bell");
                return self.leave();
            }
        };
        loop {
            let has_worked = self.0.progress() > 0;
            self.0.discard_events();
            // After the events, with which the memory is given back.
            num_reads.store(self.0.inner.state.writes.get(), Ordering::Release);
            if self.0.is_settled() {
                return drop(ManuallyDrop::into_inner(self.0));
            }
            // What keeps UCX from being slept on otherwise is no reason to spin.
            let has_more = self.0.arm().is_ok_and(|is_armed| !is_armed);
            if !has_worked && !has_more {
                bell.wait();
            }
        }
    }
}

/// Rings when there is something new to progress. UCX's own descriptor stays readable while an endpoint waits for its connection
/// (1.22, TCP), although there is nothing to do.
struct Bell(OwnedFd);

impl Bell {
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
        let mut rung = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        // A signal ends it, which does no harm.
        let _ = epoll::wait(&self.0, &mut rung, Some(&LONGEST_SLEEP));
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::AtomicPtr;

    use super::*;
    use crate::request::{Attributes, Keep, post};
    use crate::rma::{KeyUse, Write};
    use crate::sys::ucp_request_param_t;
    use crate::{Buffer, Config, Context, Library, MemoryKind, Search};

    /// By which leak checkers see the read, as by UCX.
    static READ: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());

    #[allow(clippy::print_stderr, reason = "a skipped test says why")]
    fn context() -> Option<Arc<Context>> {
        let search = Search {
            explicit: std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from),
            wheel_dir: None,
        };
        let library = Library::load(&search)
            .map_err(|error| eprintln!("skipped: {error}"))
            .ok()?;
        Some(Context::new(library, &Config::new()).expect("context"))
    }

    /// Posts a read into `buffer` that UCX is said to have begun, and that never ends.
    fn read_for_ever(context: &Arc<Context>, worker: &Worker, buffer: Buffer) {
        let memory = context.register(buffer).expect("register");
        let address = worker.address().expect("address");
        let endpoint = worker.connect(&address).expect("connect");
        let packed = memory.pack_rkey().expect("pack");
        let key = worker
            .unpack_rkey(endpoint, &packed, MemoryKind::Host)
            .expect("unpack");
        let keep = Keep::Rma {
            _memory: memory,
            _key: KeyUse::new(&key.key),
            _write: Some(Write::new(&worker.inner.state)),
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
    fn memory_of_a_read_that_does_not_end_is_told_of_and_kept() {
        let Some(context) = context() else { return };
        let (worker, owner) = (Worker::new(&context).expect("worker"), Arc::new(()));
        let buffer = Buffer::zeroed(64).first(64, Box::new(Arc::clone(&owner)));
        read_for_ever(&context, &worker, buffer.expect("64 bytes"));
        let num_reads = Arc::default();
        drop(worker.end(Arc::clone(&num_reads)));
        assert_eq!(num_reads.load(Ordering::Acquire), 1);
        assert_eq!(Arc::strong_count(&owner), 2, "its owner was let go");
    }

    #[test]
    fn a_worker_whose_reads_have_ended_tells_of_none() {
        let Some(context) = context() else { return };
        let num_reads = Arc::new(AtomicUsize::new(7));
        let rest = Worker::new(&context)
            .expect("worker")
            .end(Arc::clone(&num_reads));
        assert!(rest.worker.is_none());
        assert_eq!(num_reads.load(Ordering::Acquire), 0);
    }
}
