//! The checksum of everything that is moved: CRC-64/NVME. With AVX-512 it runs at 58 to 69 GB/s over bytes in the
//! cache, XXH3 at 20 to 36 (docs/benchmarks.md), so that reading memory is what costs.

use crc_fast::{CrcAlgorithm, Digest, checksum};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// The checksum of some bytes.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    checksum(ALGORITHM, bytes)
}

/// The checksum of `bytes` at a place: the same bytes have another checksum at another place.
pub(crate) fn bound(place: &[u8], bytes: &[u8]) -> u64 {
    let mut digest = Digest::new(ALGORITHM);
    digest.update(place);
    digest.update(bytes);
    digest.finalize()
}

/// A checksum that is computed in pieces.
#[derive(Debug)]
pub(crate) struct RunningChecksum(Digest);

impl Default for RunningChecksum {
    fn default() -> Self {
        Self(Digest::new(ALGORITHM))
    }
}

impl RunningChecksum {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_catalogues_crc64_nvme() {
        assert_eq!(of(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn a_bound_checksum_is_that_of_place_and_bytes() {
        assert_eq!(bound(b"1234", b"56789"), of(b"123456789"));
        assert_ne!(bound(b"1235", b"56789"), bound(b"1234", b"56789"));
    }
}
