//! The numbers of notifications between two peers. Both sides keep to one window, so that neither can be made to
//! hold more than it allows: a sender numbers in the order of the calls what the window has room for, a receiver
//! delivers in the order of the numbers.

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Error, Result};
use crate::work::Completer;

/// Longest tag.
pub const TAG_CAP: usize = 64 << 10;
/// Numbers that were given and not taken.
pub(super) const WINDOW: u64 = 256;
/// Bytes of their tags.
pub(super) const WINDOW_BYTES: usize = 1 << 20;

/// # Errors
/// The tag is too long.
pub(super) fn check_tag(tag: &[u8]) -> Result<()> {
    if tag.len() <= TAG_CAP {
        return Ok(());
    }
    Err(Error::Config(format!(
        "a notification of {} bytes, at most {TAG_CAP} are possible; send what is longer as blocks",
        tag.len()
    )))
}

/// What waits for its number.
#[derive(Debug)]
pub(super) enum Notice {
    /// A tag of its own.
    Tag(Vec<u8>, Completer<()>),
    /// The transfer of this id, whose tag has this length.
    Transfer(u64, usize),
}

impl Notice {
    fn len(&self) -> usize {
        match self {
            Self::Tag(tag, _) => tag.len(),
            Self::Transfer(_, len) => *len,
        }
    }
}

/// The sender's side.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Notice>,
    next: u64,
    /// The peer has everything before this.
    queued: u64,
    /// And its user has taken everything before this.
    taken: u64,
    /// Lengths from `taken` on.
    lens: VecDeque<usize>,
    held: usize,
    sent: VecDeque<(u64, Completer<()>)>,
}

impl Outbox {
    pub(super) fn push(&mut self, notice: Notice) {
        self.waiting.push_back(notice);
    }

    /// The next that may go, with its number.
    pub(super) fn pop(&mut self) -> Option<(u64, Notice)> {
        let len = self.waiting.front()?.len();
        if self.next - self.taken >= WINDOW || self.held + len > WINDOW_BYTES {
            return None;
        }
        self.lens.push_back(len);
        self.held += len;
        self.next += 1;
        Some((self.next - 1, self.waiting.pop_front()?))
    }

    /// A tag was sent; its work ends when the peer has it.
    pub(super) fn sent(&mut self, number: u64, completer: Completer<()>) {
        self.sent.push_back((number, completer));
    }

    /// What the peer says it has.
    ///
    /// # Errors
    /// It cannot be true.
    pub(super) fn noted(&mut self, queued: u64, taken: u64) -> Result<()> {
        if queued < self.queued || taken < self.taken || taken > queued || queued > self.next {
            return Err(Error::protocol(format_args!(
                "{queued} notifications acknowledged and {taken} taken, of {}",
                self.next
            )));
        }
        let num_taken = (taken - self.taken) as usize;
        self.held -= self.lens.drain(..num_taken).sum::<usize>();
        (self.queued, self.taken) = (queued, taken);
        while self
            .sent
            .front()
            .is_some_and(|(number, _)| *number < queued)
        {
            if let Some((_, completer)) = self.sent.pop_front() {
                completer.complete(Ok(()));
            }
        }
        Ok(())
    }

    /// The peer is gone: ends the works of tags.
    pub(super) fn fail(self, error: &Error) {
        for (_, completer) in self.sent {
            completer.complete(Err(error.clone()));
        }
        for notice in self.waiting {
            if let Notice::Tag(_, completer) = notice {
                completer.complete(Err(error.clone()));
            }
        }
    }
}

/// The receiver's side.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Everything before this was delivered or void.
    next: u64,
    /// Beyond it: what came, or that it will not come.
    early: BTreeMap<u64, Option<Vec<u8>>>,
    /// Delivered and not taken: number and length.
    delivered: VecDeque<(u64, usize)>,
    held: usize,
    said: (u64, u64),
}

impl Arrivals {
    fn taken(&self) -> u64 {
        let first = self.delivered.front();
        first.map_or(self.next, |(number, _)| *number)
    }

    /// A number has come, with a tag or as void.
    ///
    /// # Errors
    /// It has come before, or is outside the window.
    pub(super) fn arrive(&mut self, number: u64, tag: Option<Vec<u8>>) -> Result<()> {
        let len = tag.as_ref().map_or(0, Vec::len);
        let is_new = number >= self.next && !self.early.contains_key(&number);
        let fits = number.saturating_sub(self.taken()) < WINDOW;
        if !is_new || !fits || len > TAG_CAP || self.held + len > WINDOW_BYTES {
            return Err(Error::protocol(format_args!(
                "notification {number} of {len} bytes when {} is next and {} bytes wait",
                self.next, self.held
            )));
        }
        self.held += len;
        self.early.insert(number, tag);
        Ok(())
    }

    /// What can be delivered now, one at a time: its number and tag.
    pub(super) fn pop(&mut self) -> Option<(u64, Vec<u8>)> {
        while let Some(tag) = self.early.remove(&self.next) {
            let number = self.next;
            self.next += 1;
            if let Some(tag) = tag {
                self.delivered.push_back((number, tag.len()));
                return Some((number, tag));
            }
        }
        None
    }

    /// The user has taken everything before `upto`.
    pub(super) fn take(&mut self, upto: u64) {
        let num_taken = self.delivered.partition_point(|(number, _)| *number < upto);
        self.held -= self
            .delivered
            .drain(..num_taken)
            .map(|(_, len)| len)
            .sum::<usize>();
    }

    /// What the sender should be told, if it was told something else.
    pub(super) fn note(&mut self) -> Option<(u64, u64)> {
        let now = (self.next, self.taken());
        (now != self.said).then(|| {
            self.said = now;
            now
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::work;

    fn arrive(arrivals: &mut Arrivals, number: u64, tag: Option<&[u8]>) -> Result<Vec<Vec<u8>>> {
        arrivals.arrive(number, tag.map(<[u8]>::to_vec))?;
        let delivered = std::iter::from_fn(|| arrivals.pop());
        Ok(delivered.map(|(_, tag)| tag).collect())
    }

    #[test]
    fn what_comes_early_waits_for_what_is_before_it() {
        let mut arrivals = Arrivals::default();
        assert!(arrive(&mut arrivals, 2, Some(b"c")).unwrap().is_empty());
        assert_eq!(arrive(&mut arrivals, 0, Some(b"a")).unwrap(), [b"a"]);
        assert_eq!(arrive(&mut arrivals, 1, None).unwrap(), [b"c"]);
        assert_eq!(arrivals.note(), Some((3, 0)));
        arrivals.take(3);
        assert_eq!(arrivals.note(), Some((3, 3)));
        assert_eq!(arrivals.note(), None);
    }

    #[test]
    fn what_is_not_delivered_is_not_acknowledged() {
        let mut arrivals = Arrivals::default();
        for number in 0..2 {
            arrivals.arrive(number, Some(b"tag".to_vec())).unwrap();
        }
        assert_eq!(arrivals.note(), None);
        assert_eq!(arrivals.pop(), Some((0, b"tag".to_vec())));
        assert_eq!(arrivals.note(), Some((1, 0)));
    }

    #[test]
    fn a_number_comes_once_and_within_the_window() {
        let mut arrivals = Arrivals::default();
        arrive(&mut arrivals, 0, None).unwrap();
        assert!(arrive(&mut arrivals, 0, Some(b"a")).is_err());
        arrive(&mut arrivals, 2, Some(b"a")).unwrap();
        assert!(arrive(&mut arrivals, 2, Some(b"a")).is_err());
        assert!(arrive(&mut arrivals, 1 + WINDOW, Some(b"a")).is_err());
        assert!(arrive(&mut arrivals, u64::MAX, Some(b"a")).is_err());
        assert!(arrive(&mut arrivals, 3, Some(&vec![0; TAG_CAP + 1])).is_err());
        assert!(arrive(&mut arrivals, WINDOW, Some(b"a")).is_ok());
    }

    #[test]
    fn a_sender_that_keeps_its_window_is_never_refused() {
        let (mut outbox, mut arrivals) = (Outbox::default(), Arrivals::default());
        for _ in 0..4 * WINDOW {
            outbox.push(Notice::Transfer(0, TAG_CAP / 3));
        }
        let mut num_sent = 0;
        while num_sent < 4 * WINDOW {
            while let Some((number, notice)) = outbox.pop() {
                let tag = Some(vec![0; notice.len()]);
                arrivals.arrive(number, tag).unwrap();
                arrivals.pop().unwrap();
                num_sent += 1;
            }
            assert!(arrivals.held <= WINDOW_BYTES);
            arrivals.take(arrivals.next);
            let (queued, taken) = arrivals.note().unwrap();
            outbox.noted(queued, taken).unwrap();
        }
    }

    #[test]
    fn a_tag_is_done_when_the_peer_has_it_and_fails_when_the_peer_is_gone() {
        let mut outbox = Outbox::default();
        let works = [0, 1, 2].map(|_| {
            let (tag, completer) = work();
            outbox.push(Notice::Tag(b"tag".to_vec(), completer));
            tag
        });
        for _ in 0..2 {
            let Some((number, Notice::Tag(_, completer))) = outbox.pop() else {
                panic!("there is room");
            };
            outbox.sent(number, completer);
        }
        outbox.noted(1, 0).unwrap();
        let lost = Error::lost("a", "gone");
        outbox.fail(&lost);
        let results = works.map(|tag| tag.result());
        let failed = Some(Err(lost));
        assert_eq!(results, [Some(Ok(())), failed.clone(), failed]);
    }

    #[test]
    fn acknowledgements_that_cannot_be_true_are_errors() {
        for (queued, taken) in [(3, 0), (2, 3), (u64::MAX, 0), (0, 0), (1, 0)] {
            let mut outbox = Outbox::default();
            for _ in 0..2 {
                outbox.push(Notice::Transfer(0, 1));
                outbox.pop().unwrap();
            }
            outbox.noted(2, 1).unwrap();
            assert!(outbox.noted(queued, taken).is_err(), "{queued} {taken}");
        }
    }
}
