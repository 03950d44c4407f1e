//! Checksums of the units of a transfer: a source computes them, a destination compares what has come with them, as
//! close behind the read as it gets, while the bytes are in the cache. Where the owner of a transfer compares, the
//! destination computes one checksum for it.

use kvpipe_ucx::{Buffer, SharedBytes};

use super::region::{Cursor, Pieces, Run};
use super::transfer::Corruption;
use crate::checksum::RunningChecksum;

/// The comparison with checksums of the source, if it has any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksums {
    None,
    /// The pieces of a stream, but not what the destination reads itself.
    OfStream,
    All,
    /// None here: the owner compares. The completion has the checksum of these bytes before, and of all that has come.
    OfOwner(RunningChecksum),
    /// None here: the owner compares. The completion has the digests of the blocks, if a kernel has copied all of them.
    OfCopies,
}

impl Checksums {
    /// All or none.
    pub(crate) fn all_if(is_checksummed: bool) -> Self {
        if is_checksummed {
            Self::All
        } else {
            Self::None
        }
    }

    /// True if those of a stream are compared here.
    pub(super) fn compare(self) -> bool {
        matches!(self, Self::OfStream | Self::All)
    }

    /// Beginning of the checksum for an owner that compares.
    pub(super) fn of_owner(self) -> Option<RunningChecksum> {
        match self {
            Self::OfOwner(before) => Some(before),
            Self::None | Self::OfStream | Self::All | Self::OfCopies => None,
        }
    }
}

/// Computes the checksum of one unit after the other, as far as a slice of work goes.
#[derive(Debug)]
pub(super) struct UnitHasher {
    /// Selects the offset of a run in the memory that is hashed.
    side: fn(&Run) -> u64,
    cursor: Cursor,
    /// Of the current unit.
    running: RunningChecksum,
}

impl UnitHasher {
    pub(super) fn new(side: fn(&Run) -> u64) -> Self {
        Self {
            side,
            cursor: Cursor::default(),
            running: RunningChecksum::default(),
        }
    }

    pub(super) fn hashed_bytes(&self) -> u64 {
        self.cursor.bytes_behind()
    }

    /// Goes on to the byte `end` of the sequence for at most `budget` bytes, which are taken from it; the checksum of
    /// the unit that is complete then. None when `end` or the budget was met first.
    pub(super) fn next(
        &mut self,
        buffer: &Buffer,
        pieces: &Pieces,
        end: u64,
        budget: &mut u64,
    ) -> Option<RunningChecksum> {
        while self.hashed_bytes() < end && *budget > 0 {
            let hashed = self.hashed_bytes();
            let in_unit = hashed % pieces.unit_bytes;
            let unit = pieces.unit_bytes.min(pieces.num_bytes - (hashed - in_unit));
            let cap = (unit - in_unit).min(end - hashed).min(*budget);
            let run = self.cursor.piece(&pieces.runs, cap)?;
            let offset = (self.side)(&run) as usize;
            let bytes = buffer.bytes(offset, run.len as usize);
            let bytes = bytes.unwrap_or(SharedBytes::from(&[][..]));
            self.cursor.advance(&pieces.runs, run.len);
            *budget -= run.len;
            self.running.add(bytes);
            if in_unit + run.len == unit {
                return Some(std::mem::take(&mut self.running));
            }
        }
        None
    }
}

/// Adds checksums to those that are known; false unless they are the next ones of `num_units`.
pub(super) fn add_next(
    known: &mut Vec<u64>,
    num_units: u64,
    first: u64,
    checksums: &[u64],
) -> bool {
    let is_next = first == known.len() as u64 && first + checksums.len() as u64 <= num_units;
    if is_next {
        known.extend(checksums);
    }
    is_next
}

/// The checksums of a read's units: the source's, and those of what is here.
#[derive(Debug)]
pub(super) struct Verifier {
    /// As far as they are known; none where the owner compares.
    theirs: Option<Vec<u64>>,
    ours: Vec<RunningChecksum>,
    hasher: UnitHasher,
}

impl Verifier {
    /// With the checksums of the source that are known already.
    pub(super) fn new(theirs: Vec<u64>) -> Self {
        Self {
            theirs: Some(theirs),
            ours: Vec::new(),
            hasher: UnitHasher::new(|run| run.to),
        }
    }

    /// For an owner that compares, of pieces that are one unit.
    pub(super) fn of_owner(before: RunningChecksum) -> Self {
        let mut hasher = UnitHasher::new(|run| run.to);
        hasher.running = before;
        Self {
            theirs: None,
            ours: Vec::new(),
            hasher,
        }
    }

    /// Adds checksums of the source; false unless they are the next ones.
    pub(super) fn add(&mut self, pieces: &Pieces, first: u64, checksums: &[u64]) -> bool {
        let theirs = self.theirs.as_mut();
        theirs.is_some_and(|theirs| add_next(theirs, pieces.num_units(), first, checksums))
    }

    /// True if all checksums of the source are here.
    pub(super) fn is_complete(&self, pieces: &Pieces) -> bool {
        let theirs = self.theirs.as_ref();
        theirs.is_none_or(|theirs| theirs.len() as u64 == pieces.num_units())
    }

    /// True if this compares with the source's checksums.
    pub(super) fn compares(&self) -> bool {
        self.theirs.is_some()
    }

    /// True if some of the first `placed_bytes` have not been hashed.
    pub(super) fn has_work(&self, placed_bytes: u64) -> bool {
        self.hasher.hashed_bytes() < placed_bytes
    }

    /// Hashes at most `budget` bytes of the first `placed_bytes`.
    pub(super) fn hash(
        &mut self,
        buffer: &Buffer,
        pieces: &Pieces,
        placed_bytes: u64,
        mut budget: u64,
    ) {
        while let Some(checksum) = self.hasher.next(buffer, pieces, placed_bytes, &mut budget) {
            self.ours.push(checksum);
        }
    }

    /// True if both checksums of every unit are known.
    pub(super) fn is_done(&self, pieces: &Pieces) -> bool {
        self.ours.len() as u64 == pieces.num_units() && self.is_complete(pieces)
    }

    /// Checksum for the owner, once this is done.
    pub(super) fn of_all(&self) -> Option<RunningChecksum> {
        self.ours.last().copied()
    }

    /// The first unit whose checksums differ.
    pub(super) fn corruption(&self, pieces: &Pieces) -> Option<Corruption> {
        let mut pairs = self.ours.iter().zip(self.theirs.as_ref()?);
        let index = pairs.position(|(ours, theirs)| ours.get() != *theirs)?;
        Some(Corruption {
            at: index as u64 * pieces.unit_bytes,
            is_exact: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;
    use crate::transfer::region::{Layout, coalesce};

    /// Blocks of 8 bytes with gaps, and a buffer that holds them.
    fn blocks() -> (Buffer, Pieces) {
        let buffer = Buffer::from_vec((0..64).collect());
        let layout = Layout::new(64, 8, 16).unwrap();
        let pieces = coalesce((&layout, &[0, 2, 3]), (&layout, &[0, 1, 2])).unwrap();
        (buffer, pieces)
    }

    fn checksums(buffer: &Buffer) -> Vec<u64> {
        let of = |at| checksum::of_shared(buffer.bytes(at, 8).unwrap());
        [0, 32, 48].map(of).to_vec()
    }

    /// Outcome of a verifier that hashes slices of `budget` bytes as they come, `step` bytes at a time.
    fn verify(theirs: &[u64], step: u64, budget: u64) -> Option<u64> {
        let (buffer, pieces) = blocks();
        let mut verifier = Verifier::new(theirs[..1].to_vec());
        let mut placed_bytes = 0;
        while placed_bytes < pieces.num_bytes {
            placed_bytes = pieces.num_bytes.min(placed_bytes + step);
            while verifier.has_work(placed_bytes) {
                verifier.hash(&buffer, &pieces, placed_bytes, budget);
            }
            assert!(!verifier.is_done(&pieces), "checksums are missing");
        }
        assert!(verifier.add(&pieces, 1, &theirs[1..]));
        assert!(verifier.is_done(&pieces));
        verifier.corruption(&pieces).map(|corruption| corruption.at)
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
            assert_eq!(verify(&theirs, 3, 2), Some(8 * first as u64));
        }
    }

    #[test]
    fn the_last_unit_of_a_buffer_may_be_shorter() {
        let (buffer, pieces) = (Buffer::from_vec(vec![7; 20]), Pieces::whole(20, 8));
        let theirs = [8, 8, 4].map(|len| checksum::of(&vec![7; len])).to_vec();
        let mut verifier = Verifier::new(theirs);
        verifier.hash(&buffer, &pieces, 20, 100);
        assert!(verifier.is_done(&pieces));
        assert_eq!(verifier.corruption(&pieces), None);
    }
    #[test]
    fn an_owner_has_one_checksum_of_what_was_before_and_all_that_came() {
        let (buffer, pieces) = (Buffer::from_vec((0..20).collect()), Pieces::at(3, 16));
        let mut before = RunningChecksum::default();
        before.add(b"before"[..].into());
        for (step, budget) in [(16, 16), (5, 2), (1, 1)] {
            let mut verifier = Verifier::of_owner(before);
            for placed_bytes in (0..=16).step_by(step) {
                while verifier.has_work(placed_bytes) {
                    verifier.hash(&buffer, &pieces, placed_bytes, budget);
                }
            }
            verifier.hash(&buffer, &pieces, 16, 16);
            assert!(verifier.is_done(&pieces));
            let all = [b"before".to_vec(), (3..19).collect()].concat();
            assert_eq!(verifier.of_all().unwrap().get(), checksum::of(&all));
            assert_eq!(verifier.corruption(&pieces), None);
            assert!(!verifier.add(&pieces, 0, &[7]), "it asked for none");
        }
    }
}
