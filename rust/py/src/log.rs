//! Events of `tracing` as records of Python's `logging`. An event is formatted where it happens and queued, without the GIL
//! and whatever locks that thread holds: it waits for no thread of Python's. Python's threads forward the queue, in the
//! calls that also release memory, and when the interpreter exits.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
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

/// The queue of this process. A forked child has another one: nobody there may unlock its parent's.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(null_mut());

#[derive(Default)]
struct Queue {
    /// Whether there may be records. Forwarding reads this before it locks the queue.
    has_records: AtomicBool,
    queued: Mutex<Queued>,
}

#[derive(Default)]
struct Queued {
    records: VecDeque<LogRecord>,
    num_lost: usize,
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
        let mut queued = self.queued.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_records.store(true, Ordering::Relaxed);
        if queued.records.len() < RECORDS_CAP {
            queued.records.push_back(record);
        } else {
            queued.num_lost += 1;
        }
    }

    fn drain(&self) -> Option<Queued> {
        if !self.has_records.load(Ordering::Relaxed) {
            return None;
        }
        let mut queued = self.queued.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_records.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut *queued))
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

/// Hands queued events to Python's `logging`; how many. Without any it reads one flag.
#[pyfunction]
pub(crate) fn forward_log(py: Python<'_>) -> usize {
    let Some(queued) = Queue::of_process().and_then(Queue::drain) else {
        return 0;
    };
    let num_records = queued.records.len();
    if let Err(error) = log(py, queued) {
        error.write_unraisable(py, None);
    }
    num_records
}

fn log(py: Python<'_>, Queued { records, num_lost }: Queued) -> PyResult<()> {
    let get_logger = py.import("logging")?.getattr("getLogger")?;
    for record in records {
        let logger = get_logger.call1((record.logger,))?;
        logger.call_method1("log", (record.level, "%s", record.text))?;
    }
    if num_lost > 0 {
        let logger = get_logger.call1(("kvpipe",))?;
        logger.call_method1("warning", ("log.overflow num_lost=%s", num_lost))?;
    }
    read_level(py)
}

/// Reads the level of the logger `kvpipe`.
pub(crate) fn read_level(py: Python<'_>) -> PyResult<()> {
    let logger = py
        .import("logging")?
        .call_method1("getLogger", ("kvpipe",))?;
    let level: i64 = logger.call_method0("getEffectiveLevel")?.extract()?;
    let level = u8::try_from(level.max(0)).unwrap_or(u8::MAX);
    if LEVEL.swap(level, Ordering::Relaxed) != level {
        tracing::callsite::rebuild_interest_cache();
    }
    Ok(())
}

#[pyfunction]
fn renew_log() {
    Queue::renew();
}

/// Begins to forward events; once for each process that imports the extension.
pub(crate) fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    if Queue::of_process().is_some() {
        return Ok(());
    }
    Queue::renew();
    read_level(py)?;
    // Refused only if this extension has set one before.
    let _ = tracing::subscriber::set_global_default(PythonLogging);
    // After the import of `logging` above, whose own handler then runs later.
    let forward = pyo3::wrap_pyfunction!(forward_log, py)?;
    py.import("atexit")?.call_method1("register", (forward,))?;
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", pyo3::wrap_pyfunction!(renew_log, py)?)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
