//! The frame of a stream: a header of 40 bytes, then the codec's sections one after the other.
//!
//! | bytes | field, little-endian |
//! |---|---|
//! | 0-3 | magic `KVSD` |
//! | 4 | version |
//! | 5 | codec |
//! | 6-7 | 0 |
//! | 8-15 | digest of dtype and shape |
//! | 16-23 | bytes of the chunk |
//! | 24-31 | bytes of the sections |
//! | 32-39 | CRC-64/NVME of the sections, then of bytes 0 to 31 |

use crc_fast::{CrcAlgorithm, Digest};

use crate::{Codec, Error, Layout, Result};

const MAGIC: [u8; 4] = *b"KVSD";
const VERSION: u8 = 1;
const CHECKED_BYTES: usize = 32;
pub(crate) const HEADER_BYTES: usize = CHECKED_BYTES + 8;

/// Memory that is read by copies, because others may write to it meanwhile.
pub trait Source {
    /// Its size in bytes.
    fn len(&self) -> usize;

    /// True if it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces the content of `into` by `num_bytes` from `offset`; false when these are not all within.
    fn read(&self, offset: usize, num_bytes: usize, into: &mut Vec<u8>) -> bool;
}

/// Memory that is written by copies.
pub trait Sink {
    /// Its size in bytes.
    fn len(&self) -> usize;

    /// True if it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `data` to `offset`; false when it does not fit.
    fn write(&mut self, offset: usize, data: &[u8]) -> bool;
}

impl Source for &[u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn read(&self, offset: usize, num_bytes: usize, into: &mut Vec<u8>) -> bool {
        let end = offset.checked_add(num_bytes);
        let Some(bytes) = end.and_then(|end| self.get(offset..end)) else {
            return false;
        };
        into.clear();
        into.extend_from_slice(bytes);
        true
    }
}

impl Sink for &mut [u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let end = offset.checked_add(data.len());
        let Some(place) = end.and_then(|end| self.get_mut(offset..end)) else {
            return false;
        };
        place.copy_from_slice(data);
        true
    }
}

/// The header up to the checksum.
fn header(codec: Codec, layout: &Layout, payload_bytes: usize) -> [u8; CHECKED_BYTES] {
    let mut header = [0; CHECKED_BYTES];
    header[..4].copy_from_slice(&MAGIC);
    header[4] = VERSION;
    header[5] = codec as u8;
    header[8..16].copy_from_slice(&layout.digest().to_le_bytes());
    header[16..24].copy_from_slice(&(layout.num_bytes() as u64).to_le_bytes());
    header[24..].copy_from_slice(&(payload_bytes as u64).to_le_bytes());
    header
}

/// Appends sections to a stream.
pub(crate) struct Writer<'a, S> {
    sink: &'a mut S,
    offset: usize,
    digest: Digest,
}

impl<'a, S: Sink> Writer<'a, S> {
    pub(crate) fn new(sink: &'a mut S) -> Self {
        Self {
            sink,
            offset: HEADER_BYTES,
            digest: Digest::new(CrcAlgorithm::Crc64Nvme),
        }
    }

    pub(crate) fn append(&mut self, section: &[u8]) -> Result<()> {
        self.digest.update(section);
        self.write(self.offset, section)?;
        self.offset += section.len();
        Ok(())
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.sink.write(offset, bytes) {
            return Ok(());
        }
        let len = self.sink.len();
        Err(Error::Config(format!(
            "the output of {len} bytes is read-only, or ends before the stream"
        )))
    }

    /// Writes the header, and returns the size of the stream.
    pub(crate) fn finish(mut self, codec: Codec, layout: &Layout) -> Result<usize> {
        let header = header(codec, layout, self.offset - HEADER_BYTES);
        self.digest.update(&header);
        let sum = self.digest.finalize();
        self.write(0, &header)?;
        self.write(CHECKED_BYTES, &sum.to_le_bytes())?;
        Ok(self.offset)
    }
}

/// Reads sections of a stream.
pub(crate) struct Reader<'a, S> {
    source: &'a S,
    offset: usize,
    digest: Digest,
    header: [u8; CHECKED_BYTES],
    expected: [u8; 8],
}

pub(crate) fn corrupt<T>(why: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corrupt(format!("stored KV is corrupt: {why}")))
}

impl<'a, S: Source> Reader<'a, S> {
    /// Checks the header, except for the checksum.
    pub(crate) fn new(source: &'a S, codec: Codec, layout: &Layout) -> Result<Self> {
        let mut found = Vec::new();
        let len = source.len();
        if !source.read(0, HEADER_BYTES, &mut found) {
            return corrupt(format_args!("{len} bytes are less than a header"));
        }
        let header = header(codec, layout, len - HEADER_BYTES);
        let fields = [
            ("magic", 0..4),
            ("version", 4..5),
            ("serde", 5..6),
            ("reserved field", 6..8),
            ("layout", 8..16),
            ("size of the chunk", 16..24),
            ("size of the stream", 24..CHECKED_BYTES),
        ];
        for (name, range) in fields {
            if found[range.clone()] != header[range] {
                return corrupt(format_args!("its {name} is another's"));
            }
        }
        let mut expected = [0; 8];
        expected.copy_from_slice(&found[CHECKED_BYTES..]);
        Ok(Self {
            source,
            offset: HEADER_BYTES,
            digest: Digest::new(CrcAlgorithm::Crc64Nvme),
            header,
            expected,
        })
    }

    /// Replaces the content of `section` by the next bytes.
    pub(crate) fn read(&mut self, num_bytes: usize, section: &mut Vec<u8>) -> Result<()> {
        if !self.source.read(self.offset, num_bytes, section) {
            return corrupt("it ends too early");
        }
        self.digest.update(section);
        self.offset += num_bytes;
        Ok(())
    }

    /// Checks that the bytes read are all that had been written, and the same.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.digest.update(&self.header);
        if self.digest.finalize().to_le_bytes() == self.expected {
            Ok(())
        } else {
            corrupt("its checksum differs")
        }
    }
}
