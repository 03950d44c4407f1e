//! Events of `tracing` for Python's `logging`. An event is formatted where it happens and queued, without the GIL and whatever
//! locks that thread holds: it waits for no thread of Python's. The thread of `kvpipe._log` logs what is queued.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustix::event::{EventfdFlags, eventfd};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Most records that wait; later ones are counted only.
const RECORDS_CAP: usize = 1024;

/// Of Python's logging.
const DEBUG: u8 = 10;
const INFO: u8 = 20;
const WARNING: u8 = 30;
const ERROR: u8 = 40;

/// The level of the logger `kvpipe`, as it was last seen. Warnings and errors pass in any case.
static LEVEL: AtomicU8 = AtomicU8::new(WARNING);

/// The queue of this process. A forked child has another one: it has no thread that would unlock its parent's.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(null_mut());

#[derive(Default)]
struct Queue {
    queued: Mutex<Queued>,
}

#[derive(Default)]
struct Queued {
    records: VecDeque<LogRecord>,
    num_lost: usize,
    /// Wakes the thread that forwards; none yet.
    wake: Option<OwnedFd>,
}

struct LogRecord {
    level: u8,
    logger: String,
    text: String,
}

impl Queue {
    fn renew() {
        QUEUE.store(Box::leak(Box::default()), Ordering::Release);
    }

    fn of_process() -> Option<&'static Self> {
        let queue = QUEUE.load(Ordering::Acquire);
        #[allow(unsafe_code)]
        // SAFETY: null, or a queue that was leaked.
        unsafe {
            queue.as_ref()
        }
    }

    fn push(&self, record: LogRecord) {
        let mut queued = self.lock();
        if queued.records.len() < RECORDS_CAP {
            queued.records.push_back(record);
        } else {
            queued.num_lost += 1;
        }
        queued.wake_forwarding();
    }

    fn lock(&self) -> MutexGuard<'_, Queued> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queued {
    fn wake_forwarding(&self) {
        if let Some(wake) = &self.wake {
            // Fails only when the counter is full, and then the thread wakes in any case.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }
}

struct PythonLogging;

impl Subscriber for PythonLogging {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level = level_of(*metadata.level());
        metadata.is_event() && level >= LEVEL.load(Ordering::Relaxed).min(WARNING)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let record = LogRecord {
            level: level_of(*metadata.level()),
            logger: logger_of(metadata.target()),
            text: text.message + &text.fields,
        };
        if let Some(queue) = Queue::of_process() {
            queue.push(record);
        }
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

fn level_of(level: Level) -> u8 {
    match level {
        Level::ERROR => ERROR,
        Level::WARN => WARNING,
        Level::INFO => INFO,
        Level::DEBUG | Level::TRACE => DEBUG,
    }
}

/// `kvpipe_core::reactor` is the logger `kvpipe.core.reactor`.
fn logger_of(target: &str) -> String {
    target.replacen("kvpipe_", "kvpipe.", 1).replace("::", ".")
}

/// An event as one line: its name, then `key=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = write!(self.fields, " {}={value}", field.name());
    }
}

/// Begins to forward events, if this process does not yet.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    py.import("kvpipe._log")?.call_method0("begin")?;
    Ok(())
}

/// The descriptor that is readable after a record has been queued, for the first caller in a process: the thread that
/// forwards waits for it. This queue keeps it open.
#[pyfunction]
pub(crate) fn begin_log(level: i64) -> PyResult<Option<RawFd>> {
    set_level(level);
    let Some(queue) = Queue::of_process() else {
        return Ok(None);
    };
    let mut queued = queue.lock();
    if queued.wake.is_some() {
        return Ok(None);
    }
    let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
    let descriptor = wake.as_raw_fd();
    queued.wake = Some(wake);
    if !queued.records.is_empty() {
        queued.wake_forwarding();
    }
    Ok(Some(descriptor))
}

/// Takes what is queued: `(level, logger, text)` of each record, and how many records were lost. Calls nothing of Python's:
/// a daemon thread that waits for the GIL when the interpreter ends must not be in here.
#[pyfunction]
pub(crate) fn drain_log(level: i64) -> (Vec<(u8, String, String)>, usize) {
    set_level(level);
    let Some(queue) = Queue::of_process() else {
        return (Vec::new(), 0);
    };
    let (records, num_lost) = {
        let mut queued = queue.lock();
        let records = std::mem::take(&mut queued.records);
        (records, std::mem::take(&mut queued.num_lost))
    };
    let records = records.into_iter();
    let records = records.map(|record| (record.level, record.logger, record.text));
    (records.collect(), num_lost)
}

/// Takes over the level of the logger `kvpipe`.
fn set_level(level: i64) {
    let level = u8::try_from(level.max(0)).unwrap_or(u8::MAX);
    if LEVEL.swap(level, Ordering::Relaxed) != level {
        tracing::callsite::rebuild_interest_cache();
    }
}

#[pyfunction]
fn renew_log() {
    Queue::renew();
}

/// Begins to queue events; once for each process that imports the extension.
pub(crate) fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    if Queue::of_process().is_some() {
        return Ok(());
    }
    Queue::renew();
    // Refused only if this extension has set one before.
    let _ = tracing::subscriber::set_global_default(PythonLogging);
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", pyo3::wrap_pyfunction!(renew_log, py)?)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
