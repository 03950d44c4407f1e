//! A trace of handoffs in Chrome's trace format, which Perfetto and `chrome://tracing` load. All processes of a host may
//! write to one file: each appends whole lines, and the format allows the closing bracket to be missing. Times are those of
//! `CLOCK_MONOTONIC`, which processes share. Tracing only queues a line; a thread writes it [`WRITE_DELAY`] later.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};
use crate::ids::HandoffId;
use crate::process::Thread;

/// Lines come in bursts from threads that compute. Waking the writer for each line would take CPU from these threads.
const WRITE_DELAY: Duration = Duration::from_millis(50);

/// The thread that a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Track {
    /// The engine's thread, on which the connector's hooks run.
    Engine = 1,
    /// The thread that runs the reactor.
    Reactor = 2,
}

/// The trace of a process; off by default. Clones share the file.
#[derive(Debug, Clone, Default)]
pub struct Trace(Option<Arc<TraceWriter>>);

#[derive(Debug)]
struct TraceWriter {
    lines: Option<Sender<String>>,
    thread: Option<Thread>,
    num_overlapping: AtomicU64,
    zero: Instant,
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        drop(self.lines.take());
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

impl Trace {
    /// Appends to a file, to which other processes may write. `process` is this process's name in the trace.
    ///
    /// # Errors
    /// The file cannot be written, or the system gives no thread.
    pub fn to_file(path: &Path, process: &str) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::Config(format!(
                "trace {} cannot be written: {error}",
                path.display()
            ))
        };
        let file = open(path).map_err(failed)?;
        let (lines, queue) = channel();
        let thread = Thread::spawn("kvpipe-trace", move || write(file, &queue))?;
        let trace = Self(Some(Arc::new(TraceWriter {
            lines: Some(lines),
            thread: Some(thread),
            num_overlapping: AtomicU64::new(0),
            zero: zero(),
        })));
        trace.introduce("process_name", Track::Engine, process);
        trace.introduce("thread_name", Track::Engine, "vLLM");
        trace.introduce("thread_name", Track::Reactor, "kvpipe");
        Ok(trace)
    }

    /// True if anything is traced.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The current time, for the beginning of a span; zero when nothing is traced.
    pub fn now(&self) -> Duration {
        self.0
            .as_ref()
            .map_or(Duration::ZERO, |writer| writer.zero.elapsed())
    }

    /// Traces an instant of a handoff.
    pub fn instant(&self, track: Track, name: &str, handoff: &HandoffId, facts: &[(&str, u64)]) {
        if self.is_on() {
            let rest = format!(r#""ph":"i","s":"t",{}"#, at(track, self.now()));
            self.event(name, &rest, handoff, facts);
        }
    }

    /// Traces a span that ends now and overlaps with no other span of its track.
    pub fn span(
        &self,
        track: Track,
        name: &str,
        handoff: &HandoffId,
        began: Duration,
        facts: &[(&str, u64)],
    ) {
        if self.is_on() {
            let took = micros(self.now().saturating_sub(began));
            let rest = format!(r#""ph":"X","dur":{took},{}"#, at(track, began));
            self.event(name, &rest, handoff, facts);
        }
    }

    /// Traces a span, from its beginning to its end, that may overlap with others of its name.
    pub fn overlapping(
        &self,
        handoff: &HandoffId,
        (name, began, ended): (&str, Instant, Instant),
        facts: &[(&str, u64)],
    ) {
        let Some(writer) = &self.0 else { return };
        let id = writer.num_overlapping.fetch_add(1, Ordering::Relaxed);
        for (phase, instant) in [("b", began), ("e", ended)] {
            let time = instant.duration_since(writer.zero);
            let rest = format!(r#""ph":"{phase}","id":{id},{}"#, at(Track::Reactor, time));
            self.event(name, &rest, handoff, facts);
        }
    }

    fn event(&self, name: &str, rest: &str, handoff: &HandoffId, facts: &[(&str, u64)]) {
        let mut line = format!(r#"{{"name":"{name}","cat":"handoff",{rest},"args":{{"handoff":""#);
        for byte in handoff {
            let _ = write!(line, "{byte:02x}");
        }
        line.push('"');
        for (fact, value) in facts {
            let _ = write!(line, r#","{fact}":{value}"#);
        }
        line.push_str("}},\n");
        self.queue(line);
    }

    fn introduce(&self, what: &str, track: Track, name: &str) {
        let plain = |c: char| !c.is_control() && c != '"' && c != '\\';
        let name: String = name.chars().filter(|c| plain(*c)).collect();
        let at = at(track, self.now());
        self.queue(format!(
            r#"{{"name":"{what}","ph":"M",{at},"args":{{"name":"{name}"}}}},{}"#,
            '\n'
        ));
    }

    fn queue(&self, line: String) {
        if let Some(lines) = self.0.as_ref().and_then(|writer| writer.lines.as_ref()) {
            // The writer has ended because the file could not be written. A trace is not worth a failure.
            let _ = lines.send(line);
        }
    }
}

/// Opens the file. The first process that does begins the list.
fn open(path: &Path) -> std::io::Result<File> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    file.lock()?;
    if file.metadata()?.len() == 0 {
        file.write_all(b"[\n")?;
    }
    file.unlock()?;
    Ok(file)
}

/// Writes lines until the queue ends or a write fails.
fn write(mut file: File, queue: &Receiver<String>) {
    while let Ok(first) = queue.recv() {
        std::thread::sleep(WRITE_DELAY);
        let lines: String = std::iter::once(first).chain(queue.try_iter()).collect();
        if let Err(error) = file.write_all(lines.as_bytes()) {
            tracing::warn!(%error, "trace.ended");
            return;
        }
    }
}

/// Zero of `CLOCK_MONOTONIC`. All times of a process are counted from one, so that they keep their order and distances.
/// Each look at both clocks is late by what comes between them: the earliest is the truest.
fn zero() -> Instant {
    let looks = (0..8).filter_map(|_| {
        let time = clock_gettime(ClockId::Monotonic);
        let time = Duration::new(
            time.tv_sec.unsigned_abs(),
            time.tv_nsec.unsigned_abs() as u32,
        );
        Instant::now().checked_sub(time)
    });
    looks.min().unwrap_or_else(Instant::now)
}

fn micros(time: Duration) -> String {
    format!("{}.{:03}", time.as_micros(), time.subsec_nanos() % 1000)
}

fn at(track: Track, time: Duration) -> String {
    let (pid, tid, ts) = (std::process::id(), track as u8, micros(time));
    format!(r#""pid":{pid},"tid":{tid},"ts":{ts}"#)
}

#[cfg(test)]
mod tests;
