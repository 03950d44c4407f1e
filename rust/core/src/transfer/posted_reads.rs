//! The reads of a transfer that UCX has in flight, and the tokens that name them.

use std::collections::VecDeque;

/// Bits of a read's token that hold its number; the rest is the transfer.
const NUMBER_BITS: u32 = 20;
/// Most reads of a transfer that are remembered.
const READS_CAP: usize = 1 << NUMBER_BITS;

/// The token of a read: which transfer it is of, and its number.
fn read_token(transfer: u64, number: u64) -> u64 {
    (transfer << NUMBER_BITS) | (number % READS_CAP as u64)
}

/// The transfer and the number.
pub(super) fn split_token(token: u64) -> (u64, u64) {
    (token >> NUMBER_BITS, token % READS_CAP as u64)
}

/// Reads in the order in which they were posted.
#[derive(Debug, Default)]
pub(super) struct PostedReads {
    /// Length, and whether it has ended; the first one has not.
    reads: VecDeque<(u64, bool)>,
    /// The number of the first of them.
    first: u64,
    /// Bytes at the start of the sequence that are here.
    pub(super) placed_bytes: u64,
}

impl PostedReads {
    /// The number of the next read.
    fn next_number(&self) -> u64 {
        self.first + self.reads.len() as u64
    }

    /// The token of the next read, of a transfer with this id.
    pub(super) fn next_token(&self, transfer: u64) -> u64 {
        read_token(transfer, self.next_number())
    }

    /// True if no read is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// True if another read would have no number of its own.
    pub(super) fn is_full(&self) -> bool {
        self.reads.len() == READS_CAP
    }

    /// Adds a read and returns its number.
    pub(super) fn post(&mut self, len: u64) -> u64 {
        let number = self.next_number();
        self.reads.push_back((len, false));
        number
    }

    /// A read has ended; its length. None when no such read is in flight.
    pub(super) fn end(&mut self, number: u64) -> Option<u64> {
        let index = number.wrapping_sub(self.first) % READS_CAP as u64;
        let read = self.reads.get_mut(index as usize);
        let (len, has_ended) = read.filter(|(_, has_ended)| !has_ended)?;
        *has_ended = true;
        let len = *len;
        while let Some(&(len, true)) = self.reads.front() {
            self.reads.pop_front();
            self.placed_bytes += len;
            self.first += 1;
        }
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_transfer_and_its_read() {
        for (transfer, number) in [(1, 0), (7, 5), (1 << 40, READS_CAP as u64 - 1)] {
            let token = read_token(transfer, number);
            assert_eq!(split_token(token), (transfer, number));
            assert!(token < 1 << 62, "the marks of messages are free");
        }
    }

    #[test]
    fn bytes_are_here_when_all_reads_before_them_have_ended() {
        let mut posted = PostedReads::default();
        let numbers = [10, 20, 30].map(|len| posted.post(len));
        assert_eq!(posted.end(numbers[1]), Some(20));
        assert_eq!(posted.placed_bytes, 0);
        assert_eq!(posted.end(numbers[1]), None, "it has ended before");
        assert_eq!(posted.end(numbers[0]), Some(10));
        assert_eq!(posted.placed_bytes, 30);
        assert!(!posted.reads.is_empty(), "one is in flight");
        assert_eq!(posted.end(numbers[2]), Some(30));
        assert!(posted.reads.is_empty());
        assert_eq!(posted.placed_bytes, 60);
        assert_eq!(posted.end(numbers[2]), None);
    }

    #[test]
    fn numbers_of_reads_may_go_round() {
        let mut posted = PostedReads::default();
        for _ in 0..READS_CAP + 3 {
            let (_, number) = split_token(read_token(1, posted.post(1)));
            assert_eq!(posted.end(number), Some(1));
        }
        assert_eq!(posted.placed_bytes, READS_CAP as u64 + 3);
    }
}
