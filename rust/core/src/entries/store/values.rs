//! Values as callers of a client see them.

use std::sync::Arc;

use kvpipe_ucx::{Buffer, PIECES_CAP, Piece, ProcessVmReader};

#[cfg(doc)]
use super::StoreClient;
use crate::checksum::RunningChecksum;
use crate::entries::messages::{Carried, Page};

/// Bytes that are read in one go before they are hashed: as many as a core's own cache still has then.
const SLICE: usize = 1 << 20;

/// A value that a client may read, until it [releases](StoreClient::release) the operation.
#[derive(Debug)]
pub struct OpenedValue {
    /// The select or take that holds it.
    pub operation: u64,
    /// Size of its bytes.
    pub num_bytes: u64,
    /// Record that was committed with them.
    pub record: Vec<u8>,
    pub(super) checksum: u64,
    pub(super) bytes: Carried<'static>,
    /// The server's process, if its memory is read by calls of our own, and where the value is in it.
    pub(super) process: Option<(Arc<ProcessVmReader>, u64)>,
}

impl OpenedValue {
    pub(super) fn new(operation: u64, checksum: u64, record: &[u8], bytes: Carried<'_>) -> Self {
        Self {
            operation,
            num_bytes: bytes.len(),
            record: record.to_vec(),
            checksum,
            bytes: bytes.into_owned(),
            process: None,
        }
    }

    /// Reads the bytes into `parts`, one after the other, on the thread of the caller, if they are in the memory of a process
    /// of this host that it may read. Returns their checksum, if they match that of the commit; otherwise the content of the
    /// parts is undefined, and [`StoreClient::read`] tells why.
    pub fn read_parts(&self, parts: &[Buffer]) -> Option<u64> {
        let (process, address) = self.process.as_ref()?;
        let num_bytes: usize = parts.iter().map(Buffer::len).sum();
        if num_bytes as u64 != self.num_bytes {
            return None;
        }
        let mut checksum = RunningChecksum::default();
        let mut pieces = PartsCursor::of(parts, *address);
        loop {
            let slice = pieces.next_slice();
            if slice.is_empty() {
                break;
            }
            process.read_scattered(&slice).ok()?;
            for (part, piece) in slice {
                checksum.add(part.bytes(piece.to, piece.len)?);
            }
        }
        let of_bytes = checksum.get();
        checksum.add(self.record[..].into());
        (checksum.get() == self.checksum).then_some(of_bytes)
    }
}

/// The next bytes of a value, and where they go.
struct PartsCursor<'a> {
    parts: &'a [Buffer],
    /// Of the first part, what has been given out.
    begun: usize,
    from: u64,
}

impl<'a> PartsCursor<'a> {
    fn of(parts: &'a [Buffer], from: u64) -> Self {
        Self {
            parts,
            begun: 0,
            from,
        }
    }

    /// The pieces that are read together; none at the end.
    fn next_slice(&mut self) -> Vec<(&'a Buffer, Piece)> {
        let (mut slice, mut num_bytes) = (Vec::new(), 0);
        while slice.len() < PIECES_CAP
            && num_bytes < SLICE
            && let Some((part, rest)) = self.parts.split_first()
        {
            let len = (part.len() - self.begun).min(SLICE - num_bytes);
            let (to, from) = (self.begun, self.from);
            if len > 0 {
                slice.push((part, Piece { to, from, len }));
            }
            num_bytes += len;
            self.from += len as u64;
            self.begun += len;
            if self.begun == part.len() {
                (self.parts, self.begun) = (rest, 0);
            }
        }
        slice
    }
}

/// A value in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedValue {
    /// Its name.
    pub key: Vec<u8>,
    /// Size of its bytes.
    pub num_bytes: u64,
    /// True if a take holds it.
    pub is_leased: bool,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValuePage {
    /// Some of the values.
    pub values: Vec<ListedValue>,
    /// After which value the next page begins; `None` at the end.
    pub next: Option<u64>,
}

impl ValuePage {
    pub(super) fn new(page: Page) -> Self {
        let values = page.values.into_iter().map(|value| ListedValue {
            key: value.key.to_vec(),
            num_bytes: value.num_bytes,
            is_leased: value.is_leased,
        });
        Self {
            values: values.collect(),
            next: page.next,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;

    const RECORD: &[u8] = b"record";

    /// A value of this process, which has a pid too.
    fn opened(bytes: &Buffer) -> OpenedValue {
        let all = bytes.bytes(0, bytes.len()).unwrap().to_vec();
        let checksum = checksum::of(&[&all[..], RECORD].concat());
        let found = ProcessVmReader::find(std::process::id(), bytes.address() as u64, 1, |_| true);
        OpenedValue {
            process: Some((Arc::new(found.unwrap()), bytes.address() as u64)),
            ..OpenedValue::new(1, checksum, RECORD, Carried::Inline(all.into()))
        }
    }

    #[test]
    fn a_value_is_read_into_parts_of_any_size_and_all_of_it_has_its_checksum() {
        let bytes: Vec<u8> = (0..2 * SLICE + 9).map(|at| (at % 251) as u8).collect();
        let written = Buffer::from_vec(bytes.clone());
        let value = opened(&written);
        for sizes in [
            vec![bytes.len()],
            vec![0, 1, SLICE, 0, SLICE + 8],
            vec![SLICE - 1, 2, SLICE + 8],
            [
                vec![1; 2 * PIECES_CAP],
                vec![2 * SLICE + 9 - 2 * PIECES_CAP],
            ]
            .concat(),
        ] {
            let parts: Vec<_> = sizes.iter().map(|size| Buffer::zeroed(*size)).collect();
            assert_eq!(value.read_parts(&parts), Some(checksum::of(&bytes)));
            let read = parts
                .iter()
                .map(|part| part.bytes(0, part.len()).unwrap().to_vec());
            assert!(read.collect::<Vec<_>>().concat() == bytes, "{sizes:?}");
        }
        for size in [bytes.len() - 1, bytes.len() + 1] {
            assert_eq!(value.read_parts(&[Buffer::zeroed(size)]), None);
        }
    }

    #[test]
    fn a_value_that_has_changed_is_not_read_into_parts() {
        let bytes = Buffer::from_vec(vec![7; SLICE + 9]);
        let value = opened(&bytes);
        assert!(bytes.write(SLICE + 8, b"8"));
        assert_eq!(value.read_parts(&[Buffer::zeroed(SLICE + 9)]), None);
    }

    #[test]
    fn a_value_that_no_call_can_read_is_not_read_into_parts() {
        let value = OpenedValue {
            process: None,
            ..opened(&Buffer::zeroed(9))
        };
        assert_eq!(value.read_parts(&[Buffer::zeroed(9)]), None);
    }
}
