//! Workers that were dropped before UCX was done with what was asked of them: an endpoint that is not connected cannot be
//! closed, and the network may take minutes to say that it never will be. They are worked on whenever a worker is made,
//! and end when they can, so that a program that tries again and again does not run out of descriptors.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::worker::Worker;

static PARKED: Mutex<Vec<Parked>> = Mutex::new(Vec::new());
/// By which leak checkers see what is left alive on purpose.
static LEFT: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

struct Parked(ManuallyDrop<Worker>);

// SAFETY: a parked worker has no keys and no placer; all else that shares its Rc (operations, endpoints, events) is reached
// through it only, by whoever holds the lock, so that threads have it one after the other, as UCX's SERIALIZED mode wants.
// One that is left alive is not used at all.
unsafe impl Send for Parked {}

fn lock(workers: &Mutex<Vec<Parked>>) -> MutexGuard<'_, Vec<Parked>> {
    workers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a worker that nobody else reaches.
pub(crate) fn park(worker: Worker) {
    lock(&PARKED).push(Parked(ManuallyDrop::new(worker)));
}

/// Keeps a worker for ever that somebody on its thread may still reach.
pub(crate) fn leave_alive(worker: Worker) {
    lock(&LEFT).push(Parked(ManuallyDrop::new(worker)));
}

/// Lets parked workers go on; those that are done end.
pub(crate) fn work_on() {
    let is_done = |parked: &mut Parked| {
        parked.0.progress();
        parked.0.discard_events();
        parked.0.is_settled()
    };
    let done: Vec<Parked> = lock(&PARKED).extract_if(.., is_done).collect();
    for parked in done {
        drop(ManuallyDrop::into_inner(parked.0));
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicPtr, Ordering};

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
        assert_eq!(worker.end(), 1);
        assert_eq!(Arc::strong_count(&owner), 2, "its owner was let go");
    }

    #[test]
    fn a_worker_whose_reads_have_ended_tells_of_none() {
        let Some(context) = context() else { return };
        assert_eq!(Worker::new(&context).expect("worker").end(), 0);
    }
}
