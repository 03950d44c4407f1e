//! The database on disk: values by their number, in pieces, and what is known of each. A commit is durable when it returns,
//! and whole: a process that is killed leaves the last one.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use kvpipe_ucx::Buffer;
use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata, StorageError,
    TableDefinition, WriteTransaction,
};

use super::super::content::footprint;
use super::super::state::{EntryId, KeptEntry};
use super::super::{KEY_CAP, RECORD_CAP};
use super::SavedValue;
use crate::checksum::{self, RunningChecksum};
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

const FILE: &str = "kvpipe-store.redb";
const FORMAT: u64 = 1;
/// Bytes of a piece. The database rounds what it allocates up to a power of two; this and its bookkeeping are just below 1
/// MiB.
const PIECE: usize = (1 << 20) - (4 << 10);
/// Memory that the database itself may use.
const CACHE_BYTES: usize = 32 << 20;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const VALUES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("values");
const PIECES: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("pieces");

/// Metadata of a value: everything but its bytes.
struct Row {
    checksum: u64,
    num_bytes: u64,
    key: Vec<u8>,
    record: Vec<u8>,
}

impl Row {
    fn of(value: &SavedValue) -> Vec<u8> {
        let facts = Writer::default()
            .u64(value.checksum)
            .u64(value.buffer.len() as u64)
            .bytes(&value.key)
            .bytes(&value.record)
            .finish();
        let checksum = checksum::of(&facts);
        Writer::default().u64(checksum).raw(&facts).finish()
    }

    /// # Errors
    /// `Corrupt`: it is not what was written.
    fn read(row: &[u8]) -> Result<Self> {
        let changed = || damaged("what is known of a value has changed on disk");
        let mut reader = Reader::new(row);
        let sum = reader.u64().map_err(|_| changed())?;
        let facts = reader.rest();
        if sum != checksum::of(facts) {
            return Err(changed());
        }
        Self::decode(Reader::new(facts)).map_err(|_| changed())
    }

    fn decode(mut facts: Reader<'_>) -> Result<Self> {
        Ok(Self {
            checksum: facts.u64()?,
            num_bytes: facts.u64()?,
            key: facts.bytes(KEY_CAP)?.to_vec(),
            record: facts.bytes(RECORD_CAP)?.to_vec(),
        })
    }
}

fn damaged(text: &str) -> Error {
    Error::Corrupt(text.to_owned())
}

fn failed(error: impl Into<redb::Error>) -> Error {
    match error.into() {
        redb::Error::Corrupted(text) => damaged(&text),
        error => Error::Unavailable(format!("the store's disk failed: {error}")),
    }
}

/// An open database. Any thread may read; one writes.
#[derive(Debug)]
pub(super) struct ValueDatabase {
    file: PathBuf,
    database: Database,
}

impl ValueDatabase {
    /// Opens the database in a directory, or makes both.
    ///
    /// # Errors
    /// `Config`, with the remedy: it cannot be used.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        let file = directory.join(FILE);
        std::fs::create_dir_all(directory).map_err(|error| {
            let directory = directory.display();
            Error::Config(format!("the directory {directory} cannot be used: {error}"))
        })?;
        let opened = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create(&file);
        let database = opened.map_err(|error| refusal(&file, &error))?;
        let this = Self { file, database };
        this.check_format()?;
        Ok(this)
    }

    /// Checks the format, and writes it into a new file.
    fn check_format(&self) -> Result<()> {
        let file = self.file.display();
        let write = self.begin_change()?;
        {
            let mut meta = write.open_table(META).map_err(failed)?;
            let found = meta.get("format").map_err(failed)?.map(|it| it.value());
            match found {
                None => drop(meta.insert("format", FORMAT).map_err(failed)?),
                Some(FORMAT) => return Ok(()),
                Some(other) => {
                    return Err(Error::Config(format!(
                        "{file} has format {other}, of another version of kvpipe; this one reads format {FORMAT}: use \
                         another directory, or delete the file, and prompts are computed again"
                    )));
                }
            }
            write.open_table(VALUES).map_err(failed)?;
            write.open_table(PIECES).map_err(failed)?;
        }
        write.commit().map_err(failed)
    }

    /// All values, and the numbers of those that are damaged.
    pub(super) fn values(&self) -> Result<(Vec<KeptEntry>, Vec<EntryId>)> {
        let read = self.database.begin_read().map_err(failed)?;
        let values = read.open_table(VALUES).map_err(failed)?;
        let mut kept = Vec::with_capacity(values.len().map_err(failed)? as usize);
        let mut damaged = Vec::new();
        for entry in values.iter().map_err(failed)? {
            let (id, row) = entry.map_err(failed)?;
            let id = id.value();
            match Row::read(row.value()) {
                Ok(row) => kept.push(KeptEntry {
                    id,
                    num_bytes: row.num_bytes,
                    num_record: row.record.len() as u64,
                    footprint: footprint(&row.key, row.num_bytes) + row.record.len() as u64,
                    key: row.key.into(),
                }),
                Err(_) => damaged.push(id),
            }
        }
        Ok((kept, damaged))
    }

    fn begin_change(&self) -> Result<WriteTransaction> {
        let mut write = self.database.begin_write().map_err(failed)?;
        // A start after a kill reads the whole file, if the last change was without it.
        write.set_quick_repair(true);
        Ok(write)
    }

    /// Erases values and then saves others, all or nothing.
    pub(super) fn change(&self, erased: &[EntryId], saved: &[SavedValue]) -> Result<()> {
        let write = self.begin_change()?;
        {
            let mut values = write.open_table(VALUES).map_err(failed)?;
            let mut pieces = write.open_table(PIECES).map_err(failed)?;
            for &id in erased {
                values.remove(id).map_err(failed)?;
                pieces
                    .retain_in((id, 0)..=(id, u32::MAX), |_, _| false)
                    .map_err(failed)?;
            }
            for value in saved {
                let (id, buffer) = (value.id, &value.buffer);
                values.insert(id, &Row::of(value)[..]).map_err(failed)?;
                for (number, at) in (0..buffer.len()).step_by(PIECE).enumerate() {
                    let len = PIECE.min(buffer.len() - at);
                    let bytes = buffer.bytes(at, len);
                    let bytes = bytes.ok_or_else(|| damaged("its bytes are not in this memory"))?;
                    let place = (id, number as u32);
                    let piece = pieces.insert_reserve(place, len as _);
                    bytes.copy_to(piece.map_err(failed)?.as_mut());
                }
            }
        }
        write.commit().map_err(failed)
    }

    /// Reads a value into memory of its size; returns its record and checksum, which its bytes match.
    pub(super) fn load(&self, id: EntryId, buffer: &Buffer) -> Result<(Box<[u8]>, u64)> {
        let read = self.database.begin_read().map_err(failed)?;
        let values = read.open_table(VALUES).map_err(failed)?;
        let row = values.get(id).map_err(failed)?;
        let row = row.ok_or_else(|| damaged("a value is not on disk any more"))?;
        let row = Row::read(row.value())?;
        let (mut at, mut running) = (0, RunningChecksum::default());
        let pieces = read.open_table(PIECES).map_err(failed)?;
        for entry in pieces.range((id, 0)..=(id, u32::MAX)).map_err(failed)? {
            let (_, piece) = entry.map_err(failed)?;
            let piece = piece.value();
            if !buffer.write(at, piece) {
                return Err(damaged("a value has grown on disk"));
            }
            running.add(piece.into());
            at += piece.len();
        }
        running.add((&row.record[..]).into());
        if at != buffer.len() || running.get() != row.checksum {
            return Err(damaged("a value has changed on disk"));
        }
        Ok((row.record.into(), row.checksum))
    }
}

/// The error for a file that cannot be opened.
fn refusal(file: &Path, error: &DatabaseError) -> Error {
    let shown = file.display();
    Error::Config(match error {
        DatabaseError::DatabaseAlreadyOpen => {
            format!("another store server uses {shown}: give each its own directory")
        }
        DatabaseError::Storage(StorageError::Io(error)) if !is_damage(error) => {
            format!("{shown} cannot be used: {error}")
        }
        _ => return Error::Config(damaged_file(file.parent().unwrap_or(file), error)),
    })
}

/// True if a file's contents are the cause: what it should have is not there, or is something else.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    matches!(error.kind(), InvalidData | UnexpectedEof)
}

/// Error of a file that no store has written so.
pub(super) fn damaged_file(directory: &Path, error: &dyn Display) -> String {
    let file = directory.join(FILE);
    format!(
        "{} is damaged, or not of a kvpipe store ({error}): use another directory, or delete the file, and prompts are \
         computed again",
        file.display()
    )
}

#[cfg(test)]
mod tests;
