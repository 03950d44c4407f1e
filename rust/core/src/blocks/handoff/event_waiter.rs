//! Waits for events of a device, in order, on a thread of its own, and then runs their continuations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpipe_ucx::CudaEvent;

use crate::error::{Error, Result};
use crate::process::{Process, Thread};
use crate::sync::lock;

/// Most time that a close waits for the current event. A device that computes needs milliseconds; one that hangs must
/// not hang the close.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// Work of a device that has to be completed before something else begins.
pub trait DeviceEvent: Send + Sync {
    /// Sleeps until the work is completed.
    ///
    /// # Errors
    /// The state of the device's work is unknown, for this reason.
    fn wait(&self) -> std::result::Result<(), String>;
}

impl DeviceEvent for CudaEvent {
    fn wait(&self) -> std::result::Result<(), String> {
        Self::wait(self).map_err(|error| error.to_string())
    }
}

/// Called with how an event ended.
type Then = Box<dyn FnOnce(std::result::Result<(), String>) + Send>;

struct Waiting {
    event: Arc<dyn DeviceEvent>,
    then: Then,
}

/// The thread and its queue. The first event starts the thread.
pub(in crate::blocks) struct EventWaiter {
    process: Process,
    running: Mutex<Option<Running>>,
    is_closing: Arc<AtomicBool>,
}

struct Running {
    queue: Sender<Waiting>,
    thread: Thread,
    ended: Receiver<()>,
}

impl EventWaiter {
    pub(in crate::blocks) fn new() -> Self {
        Self {
            process: Process::this(),
            running: Mutex::default(),
            is_closing: Arc::default(),
        }
    }

    /// # Errors
    /// `Closed`: it was closed, or this process is a fork of the one that made it.
    pub(super) fn check(&self) -> Result<()> {
        self.process.check()?;
        if self.is_closing.load(Ordering::Acquire) {
            return Err(Error::Closed("the agent was closed".to_owned()));
        }
        Ok(())
    }

    /// Calls `then` on the thread once the event, and all events before it, are completed or have failed. Without a thread it
    /// fails at once. After a close `then` is not called.
    pub(super) fn after(&self, event: Arc<dyn DeviceEvent>, then: Then) {
        let mut running = lock(&self.running);
        if self.is_closing.load(Ordering::Acquire) {
            return;
        }
        if running.is_none() {
            match Running::start(Arc::clone(&self.is_closing)) {
                Ok(started) => *running = Some(started),
                Err(error) => {
                    drop(running);
                    return then(Err(error.to_string()));
                }
            }
        }
        let waiting = Waiting { event, then };
        let sent = running.as_ref().map(|running| running.queue.send(waiting));
        drop(running);
        if let Some(Err(unsent)) = sent {
            let text = "the thread that waits for events of the device has ended";
            (unsent.0.then)(Err(text.to_owned()));
        }
    }

    /// Ends the thread. Events that are still waited for are forgotten.
    pub(in crate::blocks) fn close(&self) {
        if self.process.check().is_err() {
            return;
        }
        let running = {
            let mut running = lock(&self.running);
            self.is_closing.store(true, Ordering::Release);
            running.take()
        };
        let Some(running) = running else {
            return;
        };
        drop(running.queue);
        match running.ended.recv_timeout(CLOSE_WITHIN) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!("event.pending the device has not completed its work");
            }
            _ => running.thread.join(),
        }
    }
}

impl Drop for EventWaiter {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for EventWaiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventWaiter").finish_non_exhaustive()
    }
}

impl Running {
    fn start(is_closing: Arc<AtomicBool>) -> Result<Self> {
        let (queue, waiting) = channel::<Waiting>();
        let (alive, ended) = channel();
        let thread = Thread::spawn("kvpipe-events", move || {
            let _alive: Sender<()> = alive;
            for Waiting { event, then } in waiting {
                if is_closing.load(Ordering::Acquire) {
                    return;
                }
                let completed = event.wait();
                if is_closing.load(Ordering::Acquire) {
                    return;
                }
                then(completed);
            }
        })?;
        Ok(Self {
            queue,
            thread,
            ended,
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
