//! The threads of a disk: one writes, several read.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kvpipe_ucx::Buffer;

use super::super::state::EntryId;
use super::database::ValueDatabase;
use super::{DiskReport, LoadJob, Reports, SavedValue, WriteJob, closed, guarded};
use crate::error::{Error, Result};
use crate::reactor::Waker;
use crate::sync::lock;

/// Bytes that are committed at once.
const BATCH_BYTES: usize = 64 << 20;

#[derive(Debug, Clone)]
pub(super) struct Reporter {
    pub(super) reports: Reports,
    pub(super) waker: Waker,
}

impl Reporter {
    fn send(&self, reports: impl IntoIterator<Item = DiskReport>) {
        for report in reports {
            self.reports.add(report);
        }
        self.waker.wake();
    }
}

/// The database of a directory, which all threads use.
#[derive(Debug, Clone)]
pub(super) struct SharedDatabase {
    directory: PathBuf,
    /// `None` while it cannot be opened.
    opened: Arc<RwLock<Option<ValueDatabase>>>,
}

impl SharedDatabase {
    pub(super) fn new(directory: &Path, opened: ValueDatabase) -> Self {
        Self {
            directory: directory.to_owned(),
            opened: Arc::new(RwLock::new(Some(opened))),
        }
    }

    fn run<T>(&self, job: impl FnOnce(&ValueDatabase) -> Result<T>) -> Result<T> {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        let database = opened.as_ref().ok_or_else(closed)?;
        guarded(|| job(database))
    }

    /// Opens the database again, as it needs after every failure.
    fn reopen(&self) {
        let mut opened = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        // Closed first: it holds a lock on its file. It writes when it is dropped.
        let _ = guarded(|| {
            drop(opened.take());
            Ok(())
        });
        match guarded(|| ValueDatabase::open(&self.directory)) {
            Ok(database) => *opened = Some(database),
            Err(error) => tracing::error!(%error, "store.disk_lost"),
        }
    }

    fn load(&self, id: EntryId, buffer: &Buffer) -> Result<(Box<[u8]>, u64)> {
        let loaded = self.run(|database| database.load(id, buffer));
        if let Err(Error::Unavailable(_)) = loaded {
            self.reopen();
            return self.run(|database| database.load(id, buffer));
        }
        loaded
    }
}

/// Loads values until the reactor's end of the queue is dropped.
pub(super) fn read(database: &SharedDatabase, jobs: &Mutex<Receiver<LoadJob>>, to: &Reporter) {
    loop {
        let job = lock(jobs).recv();
        let Ok(LoadJob { id, buffer }) = job else {
            return;
        };
        to.send([DiskReport::Loaded(id, database.load(id, &buffer))]);
    }
}

/// A batch that is committed at once: its erasures come first, which is the same, because no number is used again and a value is
/// erased after it was saved.
#[derive(Default)]
struct Batch {
    saved: Vec<SavedValue>,
    num_bytes: usize,
    erased: Vec<EntryId>,
    synced: Vec<u64>,
}

impl Batch {
    fn add(&mut self, job: WriteJob) {
        match job {
            WriteJob::Save(value) => {
                self.num_bytes += value.buffer.len();
                self.saved.push(value);
            }
            WriteJob::Erase(id) => self.erased.push(id),
            WriteJob::Sync(token) => self.synced.push(token),
        }
    }
}

pub(super) struct DiskWriter {
    database: SharedDatabase,
    /// Erasures that failed: each batch tries them again.
    unerased: Vec<EntryId>,
}

impl DiskWriter {
    pub(super) fn new(database: SharedDatabase) -> Self {
        Self {
            database,
            unerased: Vec::new(),
        }
    }

    /// Writes until the reactor's end of the queue is dropped and everything is done.
    pub(super) fn run(mut self, jobs: &Receiver<WriteJob>, to: &Reporter) {
        while let Ok(job) = jobs.recv() {
            let mut batch = Batch::default();
            batch.add(job);
            while batch.num_bytes < BATCH_BYTES
                && let Ok(job) = jobs.try_recv()
            {
                batch.add(job);
            }
            to.send(self.write(batch));
        }
    }

    fn write(&mut self, batch: Batch) -> Vec<DiskReport> {
        // A value that was erased in the same batch is not written at all.
        let unwanted: HashSet<_> = batch.erased.iter().collect();
        let is_wanted = |value: &SavedValue| !unwanted.contains(&value.id);
        let (wanted, unwanted): (Vec<_>, Vec<_>) = batch.saved.into_iter().partition(is_wanted);
        let mut erased = std::mem::take(&mut self.unerased);
        erased.extend(&batch.erased);
        let is_saved = self.change(&erased, &wanted);
        if !is_saved {
            // A change that failed at its very end is on disk all the same.
            erased.extend(wanted.iter().map(|value| value.id));
        }
        let is_erased = is_saved || self.change(&erased, &[]);
        let saved = wanted.iter().map(|value| (value.id, is_saved));
        let dropped = unwanted.iter().map(|value| (value.id, true));
        let mut reports: Vec<_> = saved
            .chain(dropped)
            .map(|(id, is_saved)| DiskReport::Saved(id, is_saved))
            .collect();
        if is_erased {
            reports.extend(erased.into_iter().map(DiskReport::Erased));
        } else {
            self.unerased = erased;
        }
        reports.extend(batch.synced.into_iter().map(|token| {
            let outcome = if is_erased { Ok(()) } else { Err(closed()) };
            DiskReport::Synced(token, outcome)
        }));
        reports
    }

    /// True if all of it is on disk.
    fn change(&mut self, erased: &[EntryId], saved: &[SavedValue]) -> bool {
        if erased.is_empty() && saved.is_empty() {
            return true;
        }
        let changed = self.database.run(|it| it.change(erased, saved));
        let Err(error) = changed else { return true };
        tracing::warn!(%error, num_values = saved.len(), "store.disk_failed");
        self.database.reopen();
        false
    }
}

#[cfg(test)]
mod tests;
