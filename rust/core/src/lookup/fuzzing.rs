//! What fuzz targets reach of a lookup buffer: what its messages are read with.

use super::messages::{read_refusal, read_select, write_refusal, write_select};
use super::transfer::EntryTransfer;
use crate::net::codec::Reader;

/// What can be read is written as it was.
pub(crate) fn decode(kind: u8, bytes: &[u8]) {
    match kind {
        0 => {
            if let Ok((query, timeout)) = read_select(bytes) {
                assert_eq!(write_select(&query, timeout), bytes);
            }
        }
        1 => {
            if let Ok(error) = read_refusal(bytes) {
                // Kinds of later versions are read as the kind that says least.
                let written = write_refusal(&error);
                assert_eq!((&written[1..], written[0] <= 3), (&bytes[1..], true));
            }
        }
        _ => {
            if let Ok(entry) = EntryTransfer::read(Reader::new(bytes)) {
                entry.entry_bytes(&[]);
            }
        }
    }
}
