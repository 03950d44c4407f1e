use std::path::PathBuf;

use super::*;

/// A directory of this test, removed at its end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let name = format!("kvpipe-database-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    /// Changes a byte of the file where `found` begins.
    fn change(&self, found: &[u8]) {
        let file = self.0.join(FILE);
        let mut bytes = std::fs::read(&file).expect("file");
        let mut windows = bytes.windows(found.len());
        let at = windows.position(|window| window == found).expect("found");
        bytes[at] ^= 1;
        std::fs::write(file, bytes).expect("written");
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

fn value(id: EntryId, key: &[u8], bytes: &[u8], record: &[u8]) -> SavedValue {
    SavedValue {
        id,
        key: key.into(),
        buffer: Buffer::from_vec(bytes.to_vec()),
        record: record.into(),
        checksum: checksum::of(&[bytes, record].concat()),
    }
}

#[test]
fn values_of_any_size_are_loaded_as_they_were_saved_after_the_database_was_opened_again() {
    let directory = Directory::new("sizes");
    let sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7];
    let values: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(id, len)| value(id as u64, &[id as u8], &pattern(*len), b"record"))
        .collect();
    let database = ValueDatabase::open(&directory.0).expect("made");
    database.change(&[], &values).expect("saved");
    database.change(&[1, 99], &[]).expect("erased");
    drop(database);

    let database = ValueDatabase::open(&directory.0).expect("opened");
    let (kept, damaged) = database.values().expect("values");
    assert_eq!(damaged, []);
    let ids: Vec<_> = kept.iter().map(|value| value.id).collect();
    assert_eq!(ids, [0, 2, 3, 4, 5]);
    for value in kept {
        let len = sizes[value.id as usize];
        assert_eq!(&value.key[..], [value.id as u8]);
        assert_eq!((value.num_bytes, value.num_record), (len as u64, 6));
        let buffer = Buffer::zeroed(len);
        let (record, checksum) = database.load(value.id, &buffer).expect("loaded");
        assert_eq!(&record[..], b"record");
        assert!(buffer.bytes(0, len).expect("here") == pattern(len)[..]);
        let whole = [&pattern(len)[..], b"record"].concat();
        assert_eq!(checksum, checksum::of(&whole));
    }
    let gone = database.load(1, &Buffer::zeroed(1));
    assert!(matches!(gone, Err(Error::Corrupt(_))), "{gone:?}");
}

#[test]
fn bytes_that_changed_on_disk_are_not_loaded() {
    let directory = Directory::new("bytes");
    let database = ValueDatabase::open(&directory.0).expect("made");
    let saved = value(1, b"key", b"some bytes that are looked for", b"record");
    database.change(&[], &[saved]).expect("saved");
    drop(database);
    directory.change(b"some bytes that are looked for");
    let database = ValueDatabase::open(&directory.0).expect("opened");
    let loaded = database.load(1, &Buffer::zeroed(30));
    assert!(matches!(loaded, Err(Error::Corrupt(_))), "{loaded:?}");
}

#[test]
fn a_value_whose_key_or_record_changed_on_disk_is_damaged() {
    for changed in ["a key that is looked for", "a record that is looked for"] {
        let directory = Directory::new("row");
        let database = ValueDatabase::open(&directory.0).expect("made");
        let (key, record) = (b"a key that is looked for", b"a record that is looked for");
        let saved = [value(1, key, b"bytes", record), value(2, b"key", b"", b"")];
        database.change(&[], &saved).expect("saved");
        drop(database);
        directory.change(changed.as_bytes());
        let database = ValueDatabase::open(&directory.0).expect("opened");
        let (kept, damaged) = database.values().expect("values");
        assert_eq!((kept.len(), kept[0].id, damaged), (1, 2, vec![1]));
    }
}

#[test]
fn a_file_of_another_version_is_refused_with_the_remedy() {
    let directory = Directory::new("version");
    drop(ValueDatabase::open(&directory.0).expect("made"));
    let database = Database::open(directory.0.join(FILE)).expect("opened");
    let write = database.begin_write().expect("begun");
    let mut meta = write.open_table(META).expect("table");
    meta.insert("format", FORMAT + 1).expect("inserted");
    drop(meta);
    write.commit().expect("committed");
    drop(database);
    let refused = ValueDatabase::open(&directory.0);
    assert!(
        matches!(&refused, Err(Error::Config(text)) if text.contains("format 2") && text.contains("delete the file")),
        "{refused:?}"
    );
}
