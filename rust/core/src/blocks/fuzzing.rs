//! What fuzz targets reach of an agent: its rounds, and what its messages are read with.

use super::Agent;
use super::messages::{
    Offered, RemoteRegions, checksums, ids, read_checksums, read_ids, read_ready_blocks,
    ready_blocks, reason, regions,
};
use super::metadata::Metadata;
use crate::handoff::ReadyBlock;
use crate::net::codec::{Reader, Writer};
use crate::reactor::manual::Round;
use crate::transfer::region::{Pieces, RemoteRegion};

impl Agent {
    pub(crate) fn round(&self) -> Round {
        self.reactor.round()
    }
}

pub(crate) fn regions_frame(all: &[RemoteRegion]) -> Vec<u8> {
    regions(all)
}

pub(crate) fn ids_payload(numbers: &[u32]) -> Vec<u8> {
    ids(numbers)
}

pub(crate) fn final_payload(blocks: &[ReadyBlock]) -> Vec<u8> {
    ready_blocks(blocks)
}

pub(crate) fn checksums_payload(all: &[u64]) -> Vec<u8> {
    checksums(all)
}

/// What can be read is written as it was.
pub(crate) fn decode(kind: u8, bytes: &[u8]) {
    match kind {
        0 => {
            if let Ok(read) = RemoteRegions::read(Reader::new(bytes)) {
                assert_eq!(regions(&read.0)[1..], *bytes);
            }
        }
        1 => offered(bytes),
        2 => {
            if let Ok(read) = read_ids(bytes) {
                assert_eq!(ids(&read), bytes);
            }
        }
        3 => {
            if let Ok(read) = read_ready_blocks(bytes) {
                assert_eq!(ready_blocks(&read), bytes);
            }
        }
        4 => {
            if let Ok(read) = reason(bytes) {
                assert_eq!(Writer::default().str(&read).finish(), bytes);
            }
        }
        5 => {
            if let Ok(read) = read_checksums(bytes) {
                assert_eq!(checksums(&read), bytes);
            }
        }
        _ => {
            if let Ok(read) = Metadata::from_bytes(bytes) {
                assert_eq!(read.to_bytes(), bytes);
            }
        }
    }
}

/// An offer's header, with its length in front, and its payload.
fn offered(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let Ok(header) = reader.bytes(1 << 10) else {
        return;
    };
    let payload = reader.rest();
    let Ok(read) = Offered::read(Reader::new(header), payload) else {
        return;
    };
    let pieces = Pieces {
        runs: Vec::new(),
        to_ids: read.to_ids,
        from_ids: read.from_ids,
        num_bytes: 0,
    };
    let notice = read
        .notice
        .as_ref()
        .map(|(number, tag)| (*number, &tag[..]));
    let who = (read.offer, read.to, read.from);
    let written = Offered::write(Writer::default(), who, &pieces, read.is_checksummed, notice);
    assert_eq!(
        (written.0.finish(), written.1),
        (header.to_vec(), payload.to_vec())
    );
}
