//! The thread that writes, on a directory that can be made unusable: a database that was closed and cannot be opened again.

use std::path::Path;

use kvpipe_ucx::Buffer;

use super::*;
use crate::checksum;

struct Disk {
    writer: DiskWriter,
    directory: PathBuf,
}

impl Disk {
    fn new(name: &str) -> Self {
        let name = format!("kvpipe-writer-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&directory);
        let database = ValueDatabase::open(&directory).expect("made");
        let writer = DiskWriter::new(SharedDatabase::new(&directory, database));
        Self { writer, directory }
    }

    fn away(&self) -> PathBuf {
        self.directory.with_extension("away")
    }

    /// Closes the database, and has a file where its directory was.
    fn fail(&self) {
        *self.writer.database.opened.write().expect("lock") = None;
        std::fs::rename(&self.directory, self.away()).expect("moved");
        std::fs::write(&self.directory, b"").expect("written");
    }

    fn mend(&self) {
        std::fs::remove_file(&self.directory).expect("removed");
        std::fs::rename(self.away(), &self.directory).expect("moved");
    }

    fn write(&mut self, jobs: impl IntoIterator<Item = WriteJob>) -> Vec<DiskReport> {
        let mut batch = Batch::default();
        jobs.into_iter().for_each(|job| batch.add(job));
        self.writer.write(batch)
    }

    fn kept(&self) -> Vec<EntryId> {
        let (kept, _) = self
            .writer
            .database
            .run(ValueDatabase::values)
            .expect("values");
        kept.into_iter().map(|value| value.id).collect()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let remove =
            |path: &Path| std::fs::remove_dir_all(path).or_else(|_| std::fs::remove_file(path));
        let _ = remove(&self.directory);
        let _ = remove(&self.away());
    }
}

fn save(id: EntryId) -> WriteJob {
    WriteJob::Save(SavedValue {
        id,
        key: id.to_le_bytes()[..].into(),
        buffer: Buffer::from_vec(vec![1; 10]),
        record: [].into(),
        checksum: checksum::of(&[1; 10]),
    })
}

/// Reports as text: what they say, without the errors.
fn shown(reports: Vec<DiskReport>) -> Vec<String> {
    let shown = reports.into_iter().map(|report| match report {
        DiskReport::Synced(token, outcome) => format!("synced {token} {}", outcome.is_ok()),
        DiskReport::Saved(id, is_kept) => format!("saved {id} {is_kept}"),
        DiskReport::Erased(id) => format!("erased {id}"),
        DiskReport::Loaded(id, _) => format!("loaded {id}"),
    });
    shown.collect()
}

#[test]
fn a_batch_is_on_disk_when_it_is_reported_without_what_it_erases_itself() {
    let mut disk = Disk::new("batch");
    let jobs = [
        save(1),
        save(2),
        WriteJob::Erase(1),
        WriteJob::Sync(7),
        save(3),
    ];
    let reports = [
        "saved 2 true",
        "saved 3 true",
        "saved 1 true",
        "erased 1",
        "synced 7 true",
    ];
    assert_eq!(shown(disk.write(jobs)), reports);
    assert_eq!(disk.kept(), [2, 3]);
}

#[test]
fn erasures_that_failed_are_done_with_the_next_batch_and_no_answer_says_so_before() {
    let mut disk = Disk::new("erasures");
    disk.write([save(1), save(2), save(3)]);
    disk.fail();
    let failed = disk.write([WriteJob::Erase(1), WriteJob::Sync(1), save(4)]);
    assert_eq!(shown(failed), ["saved 4 false", "synced 1 false"]);
    let failed = disk.write([WriteJob::Sync(2)]);
    assert_eq!(shown(failed), ["synced 2 false"]);
    disk.mend();
    // The database is opened by the first that fails for want of it.
    let mended = shown(disk.write([WriteJob::Erase(2), WriteJob::Sync(3)]));
    assert_eq!(
        mended,
        ["erased 1", "erased 4", "erased 2", "synced 3 true"]
    );
    assert_eq!(disk.kept(), [3]);
    assert_eq!(shown(disk.write([save(5)])), ["saved 5 true"]);
    assert_eq!(disk.kept(), [3, 5]);
}

#[test]
fn a_save_that_failed_is_erased_in_case_that_it_is_on_disk_all_the_same() {
    let mut disk = Disk::new("saves");
    // As if a change had failed at its very end: the value is there.
    disk.write([save(1)]);
    disk.fail();
    assert_eq!(shown(disk.write([save(1)])), ["saved 1 false"]);
    disk.mend();
    assert_eq!(
        shown(disk.write([WriteJob::Sync(1)])),
        ["erased 1", "synced 1 true"]
    );
    assert_eq!(disk.kept(), Vec::<EntryId>::new());
}

#[test]
fn a_load_opens_a_database_that_failed_and_leaves_what_it_cannot_read() {
    let mut disk = Disk::new("loads");
    disk.write([save(1)]);
    disk.fail();
    let buffer = Buffer::zeroed(10);
    let failed = disk.writer.database.load(1, &buffer);
    assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
    disk.mend();
    let loaded = disk.writer.database.load(1, &buffer);
    assert_eq!(loaded, Ok(([].into(), checksum::of(&[1; 10]))));
}
