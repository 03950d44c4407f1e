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
