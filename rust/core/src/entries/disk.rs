//! A directory as the disk tier of a store, and the threads that write and read it. The reactor sends jobs, and is woken by
//! reports.
//!
//! One thread writes, in the order of the jobs; several read. After a failure the database is opened again.

mod database;
mod threads;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Mutex};

use kvpipe_ucx::Buffer;

use super::content::{Content, Description};
use super::state::{EntryId, KeptEntry, Key};
use crate::error::{Error, Result};
use crate::process::Thread;
use crate::reactor::Waker;
use crate::sync::lock;
use database::ValueDatabase;
use threads::SharedDatabase;

/// Threads that read. Disks serve several reads at once.
const NUM_READERS: usize = 4;

/// A value on its way to the disk.
#[derive(Debug)]
pub(super) struct SavedValue {
    pub(super) id: EntryId,
    pub(super) key: Key,
    pub(super) buffer: Buffer,
    pub(super) record: Box<[u8]>,
    /// Of the bytes and then the record.
    pub(super) checksum: u64,
}

/// A job of the thread that writes; jobs are done in order.
#[derive(Debug)]
enum WriteJob {
    Save(SavedValue),
    Erase(EntryId),
    /// Reports when everything before it is durable.
    Sync(u64),
}

#[derive(Debug)]
struct LoadJob {
    id: EntryId,
    buffer: Buffer,
}

/// Outcome of a job.
#[derive(Debug)]
pub(super) enum DiskReport {
    Saved(EntryId, bool),
    /// Durably.
    Erased(EntryId),
    /// The record, and the checksum of the bytes with it.
    Loaded(EntryId, Result<(Box<[u8]>, u64)>),
    Synced(u64, Result<()>),
}

/// Reports on their way to the reactor.
#[derive(Debug, Clone, Default)]
pub(super) struct Reports(Arc<Mutex<VecDeque<DiskReport>>>);

impl Reports {
    pub(super) fn next(&self) -> Option<DiskReport> {
        lock(&self.0).pop_front()
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    fn add(&self, report: DiskReport) {
        lock(&self.0).push_back(report);
    }
}

/// The reactor's end of a disk. When it is dropped, the threads do what was sent, and end.
#[derive(Debug)]
pub(super) struct Disk {
    writes: Sender<WriteJob>,
    loads: Sender<LoadJob>,
    pub(super) reports: Reports,
    pub(super) capacity_bytes: u64,
}

impl Disk {
    /// Saves the value with this content.
    pub(super) fn save(&self, id: EntryId, key: Key, content: &Content) {
        if let Content {
            parts,
            description: Description::Record(record),
            checksum: Some(checksum),
        } = content
            && let [part] = &parts[..]
        {
            self.write(WriteJob::Save(SavedValue {
                id,
                key,
                buffer: part.buffer.clone(),
                record: record.clone(),
                checksum: *checksum,
            }));
        }
    }

    pub(super) fn erase(&self, id: EntryId) {
        self.write(WriteJob::Erase(id));
    }

    pub(super) fn sync(&self, token: u64) {
        self.write(WriteJob::Sync(token));
    }

    /// A thread that has ended, by a panic that it has logged, fails its jobs.
    fn write(&self, job: WriteJob) {
        if let Err(SendError(job)) = self.writes.send(job) {
            match job {
                WriteJob::Save(value) => self.reports.add(DiskReport::Saved(value.id, false)),
                WriteJob::Erase(_) => {}
                WriteJob::Sync(token) => {
                    self.reports.add(DiskReport::Synced(token, Err(closed())));
                }
            }
        }
    }

    pub(super) fn load(&self, id: EntryId, buffer: Buffer) {
        if self.loads.send(LoadJob { id, buffer }).is_err() {
            self.reports.add(DiskReport::Loaded(id, Err(closed())));
        }
    }
}

/// A disk that was opened, and its threads' ends of the queues.
#[derive(Debug)]
pub(super) struct OpenedDisk {
    database: SharedDatabase,
    write_jobs: Receiver<WriteJob>,
    load_jobs: Receiver<LoadJob>,
    reports: Reports,
}

impl OpenedDisk {
    /// Opens a directory, and returns what is there.
    ///
    /// # Errors
    /// `Config`: it cannot be used.
    pub(super) fn open(
        directory: &Path,
        capacity_bytes: u64,
    ) -> Result<(Self, Disk, Vec<KeptEntry>)> {
        let (database, kept) = guarded(|| {
            let database = ValueDatabase::open(directory)?;
            let (kept, damaged) = database.values()?;
            if !damaged.is_empty() {
                let num_damaged = damaged.len();
                tracing::warn!(num_damaged, "store.disk_damaged");
                database.change(&damaged, &[])?;
            }
            Ok((database, kept))
        })
        .map_err(|error| match error {
            Error::Config(_) => error,
            other => Error::Config(database::damaged_file(directory, &other)),
        })?;
        let (writes, write_jobs) = channel();
        let (loads, load_jobs) = channel();
        let reports = Reports::default();
        let opened = Self {
            database: SharedDatabase::new(directory, database),
            write_jobs,
            load_jobs,
            reports: reports.clone(),
        };
        let disk = Disk {
            writes,
            loads,
            reports,
            capacity_bytes,
        };
        Ok((opened, disk, kept))
    }

    /// Starts the threads, which wake the reactor. They end when its end is dropped.
    ///
    /// # Errors
    /// `Exhausted`: the system gives no thread.
    pub(super) fn start(self, waker: &Waker) -> Result<Vec<Thread>> {
        let reporter = threads::Reporter {
            reports: self.reports,
            waker: waker.clone(),
        };
        let writer = threads::DiskWriter::new(self.database.clone());
        let (jobs, to) = (self.write_jobs, reporter.clone());
        let writer = Thread::spawn("kvpipe-disk-w", move || writer.run(&jobs, &to))?;
        let mut threads = vec![writer];
        let jobs = Arc::new(Mutex::new(self.load_jobs));
        for _ in 0..NUM_READERS {
            let (jobs, reporter) = (Arc::clone(&jobs), reporter.clone());
            let database = self.database.clone();
            let read = move || threads::read(&database, &jobs, &reporter);
            threads.push(Thread::spawn("kvpipe-disk-r", read)?);
        }
        Ok(threads)
    }
}

/// A damaged file must not take the process with it: the library may panic over one.
fn guarded<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let text = "the library that reads and writes the store's disk panicked";
        Err(Error::Corrupt(text.to_owned()))
    })
}

fn closed() -> Error {
    Error::Unavailable("the store's disk has failed, and is tried again later".to_owned())
}
