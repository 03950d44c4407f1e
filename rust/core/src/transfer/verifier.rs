//! Checksums of the units of a transfer: a source computes them, a destination compares what has come with them, as
//! close behind the read as it gets, while the bytes are in the cache.

use kvpipe_ucx::Buffer;

use super::cursor::Cursor;
use super::region::{Pieces, Run};
use crate::checksum::{self, RunningChecksum};

/// Which offset of a run is that of the memory that is hashed.
pub(super) type Side = fn(&Run) -> u64;

/// The units of a sequence of bytes, and where they lie in memory.
pub(super) struct Units<'a> {
    pub(super) buffer: &'a Buffer,
    pub(super) runs: &'a [Run],
    pub(super) side: Side,
    pub(super) num_bytes: u64,
    pub(super) unit_bytes: u64,
}

/// Computes the checksum of one unit after the other, as far as a slice of work goes.
#[derive(Debug, Default)]
pub(super) struct UnitHasher {
    cursor: Cursor,
    /// Bytes of all units that are behind, and of the current one.
    num_hashed: u64,
    num_in_unit: u64,
    running: RunningChecksum,
}

impl UnitHasher {
    pub(super) fn num_hashed(&self) -> u64 {
        self.num_hashed
    }

    /// Goes on to the byte `end` of the sequence for at most `budget` bytes, which are taken from it; the checksum of
    /// the unit that is complete then. None when `end` or the budget was met first.
    pub(super) fn next(&mut self, units: &Units<'_>, end: u64, budget: &mut u64) -> Option<u64> {
        while self.num_hashed < end && *budget > 0 {
            let unit = units
                .unit_bytes
                .min(units.num_bytes - (self.num_hashed - self.num_in_unit));
            let cap = (unit - self.num_in_unit)
                .min(end - self.num_hashed)
                .min(*budget);
            let run = self.cursor.piece(units.runs, cap)?;
            let offset = (units.side)(&run) as usize;
            let bytes = units
                .buffer
                .bytes(offset, run.len as usize)
                .unwrap_or_default();
            self.cursor.advance(units.runs, run.len);
            self.num_hashed += run.len;
            *budget -= run.len;
            if run.len == unit {
                return Some(checksum::of(bytes));
            }
            self.running.add(bytes);
            self.num_in_unit += run.len;
            if self.num_in_unit == unit {
                self.num_in_unit = 0;
                return Some(std::mem::take(&mut self.running).get());
            }
        }
        None
    }
}

/// What is known of the units of a transfer, at its destination.
#[derive(Debug, Default)]
pub(super) struct Verifier {
    /// Checksums of the first units: the source's, and those of what is here.
    theirs: Vec<u64>,
    ours: Vec<u64>,
    num_compared: usize,
    /// The first unit that differs from its checksum.
    corrupt: Option<usize>,
    hasher: UnitHasher,
}

impl Verifier {
    /// With the checksums of the source that are known already.
    pub(super) fn new(theirs: Vec<u64>) -> Self {
        Self {
            theirs,
            ..Self::default()
        }
    }

    /// Number of the source's checksums that are known.
    pub(super) fn num_known(&self) -> u64 {
        self.theirs.len() as u64
    }

    /// The source's checksums of the next units.
    pub(super) fn receive(&mut self, checksums: &[u64]) {
        self.theirs.extend(checksums);
        self.compare();
    }

    /// Whether bytes are here that have not been hashed.
    pub(super) fn has_work(&self, num_here: u64) -> bool {
        self.hasher.num_hashed() < num_here
    }

    /// Hashes at most `budget` bytes of the first `num_here`.
    pub(super) fn hash(
        &mut self,
        buffer: &Buffer,
        pieces: &Pieces,
        num_here: u64,
        mut budget: u64,
    ) {
        let units = Units {
            buffer,
            runs: &pieces.runs,
            side: |run| run.to,
            num_bytes: pieces.num_bytes,
            unit_bytes: pieces.unit_bytes,
        };
        while let Some(checksum) = self.hasher.next(&units, num_here, &mut budget) {
            self.ours.push(checksum);
        }
        self.compare();
    }

    fn compare(&mut self) {
        let num_known = self.ours.len().min(self.theirs.len());
        let known = self.num_compared..num_known;
        let differs = |index: &usize| self.ours.get(*index) != self.theirs.get(*index);
        self.corrupt = self.corrupt.or_else(|| known.clone().find(differs));
        self.num_compared = num_known;
    }

    /// Whether every unit has been compared.
    pub(super) fn is_done(&self, pieces: &Pieces) -> bool {
        self.num_compared as u64 == pieces.num_units()
    }

    /// The first unit that differs from its checksum.
    pub(super) fn corrupt(&self) -> Option<usize> {
        self.corrupt
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::region::{Layout, coalesce};

    /// Blocks of 8 bytes with gaps, and a buffer that holds them.
    fn blocks() -> (Buffer, Pieces) {
        let buffer = Buffer::from_vec((0..64).collect());
        let layout = Layout::new(64, 8, 16).unwrap();
        let pieces = coalesce((&layout, &[0, 2, 3]), (&layout, &[0, 1, 2])).unwrap();
        (buffer, pieces)
    }

    fn checksums(buffer: &Buffer) -> Vec<u64> {
        let of = |at| checksum::of(buffer.bytes(at, 8).unwrap());
        [0, 32, 48].map(of).to_vec()
    }

    /// What a verifier says that hashes slices of `budget` bytes as they come, `step` bytes at a time.
    fn verify(theirs: &[u64], step: u64, budget: u64) -> Option<usize> {
        let (buffer, pieces) = blocks();
        let mut verifier = Verifier::new(theirs[..1].to_vec());
        let mut num_here = 0;
        while num_here < pieces.num_bytes {
            num_here = pieces.num_bytes.min(num_here + step);
            while verifier.has_work(num_here) {
                verifier.hash(&buffer, &pieces, num_here, budget);
            }
            assert!(!verifier.is_done(&pieces), "checksums are missing");
        }
        verifier.receive(&theirs[1..]);
        assert!(verifier.is_done(&pieces));
        verifier.corrupt()
    }

    #[test]
    fn units_match_their_checksums_however_they_come() {
        let theirs = checksums(&blocks().0);
        for (step, budget) in [(24, 24), (1, 1), (3, 2), (8, 8), (24, 5), (5, 100)] {
            assert_eq!(verify(&theirs, step, budget), None, "{step} {budget}");
        }
    }

    #[test]
    fn the_first_unit_that_differs_is_named() {
        for first in 0..3 {
            let mut theirs = checksums(&blocks().0);
            for checksum in &mut theirs[first..] {
                *checksum ^= 1;
            }
            assert_eq!(verify(&theirs, 3, 2), Some(first));
        }
    }

    #[test]
    fn the_last_unit_of_a_buffer_may_be_shorter() {
        let (buffer, pieces) = (Buffer::from_vec(vec![7; 20]), Pieces::whole(20, 8));
        let theirs = [8, 8, 4].map(|len| checksum::of(&vec![7; len])).to_vec();
        let mut verifier = Verifier::new(theirs);
        verifier.hash(&buffer, &pieces, 20, 100);
        assert!(verifier.is_done(&pieces));
        assert_eq!(verifier.corrupt(), None);
    }
}
