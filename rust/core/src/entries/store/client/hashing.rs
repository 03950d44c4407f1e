//! The checksum of a value that is written: of its bytes, then its record. The client computes it by slices, while the server
//! reads the bytes and computes its own.

use kvpipe_ucx::Buffer;

use crate::checksum::RunningChecksum;

/// Bytes that are hashed in one go, which sockets and transfers wait for: less than a millisecond.
const SLICE: usize = 4 << 20;

/// The checksum of the first bytes of a value.
#[derive(Debug, Default)]
pub(super) struct ValueHasher {
    num_hashed: usize,
    running: RunningChecksum,
}

impl ValueHasher {
    /// Hashes a slice of `buffer` up to `end`, where `start` bytes of the value are before the buffer; true at the end.
    pub(super) fn run_slice(&mut self, buffer: &Buffer, start: usize, end: usize) -> bool {
        let at = self.num_hashed - start;
        let len = SLICE.min(end - at);
        if let Some(bytes) = buffer.bytes(at, len) {
            self.running.add(bytes);
        }
        self.num_hashed += len;
        at + len == end
    }

    /// The checksum with a record at the end.
    pub(super) fn finish(mut self, record: &[u8]) -> u64 {
        self.running.add(record.into());
        self.running.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;

    #[test]
    fn a_value_in_several_buffers_has_the_checksum_of_one() {
        let value: Vec<u8> = (0..SLICE * 2 + 9).map(|at| (at % 251) as u8).collect();
        for cut in [0, 1, SLICE, SLICE + 5, value.len()] {
            let mut hasher = ValueHasher::default();
            let parts = [&value[..cut], &value[cut..]];
            let mut start = 0;
            for part in parts {
                let buffer = Buffer::from_vec(part.to_vec());
                while !hasher.run_slice(&buffer, start, part.len()) {}
                start += part.len();
            }
            let whole = [&value[..], b"record"].concat();
            assert_eq!(hasher.finish(b"record"), checksum::of(&whole));
        }
    }
}
