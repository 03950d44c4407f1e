//! The checksum of everything that is moved: CRC-64/NVME. With AVX-512 it runs at 58 to 69 GB/s over bytes in the
//! cache, XXH3 at 20 to 36 (docs/benchmarks.md), so that reading memory is what costs.

use std::sync::LazyLock;

use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use kvpipe_ucx::SharedBytes;

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// The checksum of some bytes.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    checksum(ALGORITHM, bytes)
}

/// The checksum of bytes that others may change: of what is there while each of them is read, once.
#[must_use]
pub fn of_shared(bytes: SharedBytes<'_>) -> u64 {
    let mut running = RunningChecksum::default();
    running.add(bytes);
    running.get()
}

/// The checksum of bytes from those of their beginning and of the `len` bytes after it.
#[must_use]
pub fn joined(beginning: u64, rest: u64, len: u64) -> u64 {
    checksum_combine(ALGORITHM, beginning, rest, len)
}

/// Moves checksums over bytes of one length, so that those of parts give that of the whole.
#[derive(Debug)]
pub(crate) struct Shift(Box<[[u64; 256]; 8]>);

impl Shift {
    /// Over `len` bytes. Computed once for a length: it takes a thousandth of a second.
    pub(crate) fn over(len: u64) -> Self {
        // A checksum moves as the sum of its bits.
        let bits: Vec<u64> = (0..u64::BITS).map(|bit| joined(1 << bit, 0, len)).collect();
        let of_byte = |at: usize, byte: usize| {
            let bits = bits[8 * at..8 * at + 8].iter().enumerate();
            let set = bits.filter(|(bit, _)| byte >> bit & 1 == 1);
            set.fold(0, |sum, (_, moved)| sum ^ moved)
        };
        let mut table = Box::new([[0; 256]; 8]);
        for (at, row) in table.iter_mut().enumerate() {
            for (byte, moved) in row.iter_mut().enumerate() {
                *moved = of_byte(at, byte);
            }
        }
        Self(table)
    }

    /// The checksum of a beginning and of the bytes behind it, which have the checksum `rest`.
    pub(crate) fn join(&self, beginning: u64, rest: u64) -> u64 {
        let bytes = beginning.to_le_bytes();
        let moved = self
            .0
            .iter()
            .zip(bytes)
            .map(|(row, byte)| row[usize::from(byte)]);
        moved.fold(rest, |sum, moved| sum ^ moved)
    }
}

/// A checksum that is computed in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RunningChecksum {
    state: u64,
}

impl Default for RunningChecksum {
    fn default() -> Self {
        Self {
            state: Digest::new(ALGORITHM).get_state(),
        }
    }
}

impl RunningChecksum {
    pub(crate) fn add(&mut self, bytes: SharedBytes<'_>) {
        self.state = bytes.update_crc64(self.state);
    }

    /// Adds the bytes of a number, the lowest first. The crate takes several times as long for so few.
    pub(crate) fn add_number(&mut self, number: u64) {
        static OVER_A_NUMBER: LazyLock<Shift> =
            LazyLock::new(|| Shift::over(size_of::<u64>() as u64));
        self.state = OVER_A_NUMBER.join(self.state ^ number, 0);
    }

    /// Adds bytes of which the digest is known: their CRC from the state 0, not inverted. `over` is over their number.
    pub(crate) fn add_digest(&mut self, over: &Shift, digest: u64) {
        self.state = over.join(self.state, digest);
    }

    pub(crate) fn get(self) -> u64 {
        !self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_catalogues_crc64_nvme() {
        assert_eq!(of(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(of_shared(b"123456789"[..].into()), of(b"123456789"));
    }

    #[test]
    fn a_joined_checksum_is_that_of_all_bytes() {
        assert_eq!(joined(of(b"1234"), of(b"56789"), 5), of(b"123456789"));
        assert_eq!(joined(of(b""), of(b"123456789"), 9), of(b"123456789"));
        assert_ne!(joined(of(b"1234"), of(b"56788"), 5), of(b"123456789"));
    }

    #[test]
    fn a_shift_joins_as_checksums_of_any_bytes_are_joined() {
        for len in [1, 5, 4096, 100_003] {
            let shift = Shift::over(len);
            for (beginning, rest) in [(0, 0), (of(b"1234"), of(b"56789")), (u64::MAX, 1 << 63)] {
                assert_eq!(shift.join(beginning, rest), joined(beginning, rest, len));
            }
        }
    }

    #[test]
    fn a_digest_is_added_as_its_bytes() {
        for bytes in [&b"56789abc"[..], &[7; 4096], b""] {
            let mut running = RunningChecksum::default();
            running.add(b"1234"[..].into());
            let digest = SharedBytes::from(bytes).update_crc64(0);
            running.add_digest(&Shift::over(bytes.len() as u64), digest);
            running.add(b"de"[..].into());
            assert_eq!(running.get(), of(&[b"1234", bytes, b"de"].concat()));
        }
    }

    #[test]
    fn a_number_is_added_as_its_bytes() {
        let mut running = RunningChecksum::default();
        running.add(b"1234"[..].into());
        running.add_number(u64::from_le_bytes(*b"56789abc"));
        running.add(b"de"[..].into());
        assert_eq!(running.get(), of(b"123456789abcde"));
    }
}
