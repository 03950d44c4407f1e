//! The numbers of notifications between two peers. Both sides keep to one window, so that neither can be made to
//! hold more than it allows: a sender numbers in the order of the calls what the window has room for, a receiver
//! delivers in the order of the numbers.

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Error, Result};
use crate::work::Completer;

/// Longest tag.
pub const TAG_CAP: usize = 64 << 10;
/// Most numbers that were given and not drained.
pub(super) const WINDOW: u64 = 256;
/// Most bytes of their tags.
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

/// A notification that takes a number.
#[derive(Debug)]
pub(super) enum Notice {
    /// A tag of its own.
    Tag(Vec<u8>),
    /// The transfer of this id, whose tag has this length.
    Transfer(u64, usize),
}

impl Notice {
    fn tag_len(&self) -> usize {
        match self {
            Self::Tag(tag) => tag.len(),
            Self::Transfer(_, len) => *len,
        }
    }
}

/// A number that was given.
#[derive(Debug)]
struct Numbered {
    tag_len: usize,
    /// Until the peer has the tag.
    completer: Option<Completer<()>>,
}

/// The sender's side.
#[derive(Debug, Default)]
pub(super) struct NoticeOutbox {
    /// The work of a tag of its own completes when the peer has it.
    waiting: VecDeque<(Notice, Option<Completer<()>>)>,
    /// The numbers from `drained` on.
    numbered: VecDeque<Numbered>,
    /// Bytes of their tags.
    tag_bytes: usize,
    /// The peer has everything before this number.
    received: u64,
    /// And its user has drained everything before this number.
    drained: u64,
}

impl NoticeOutbox {
    /// Notifications that wait, or that the peer has not drained.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.numbered.len()
    }

    pub(super) fn push(&mut self, notice: Notice, completer: Option<Completer<()>>) {
        self.waiting.push_back((notice, completer));
    }

    /// The number that the next notice gets.
    fn next(&self) -> u64 {
        self.drained + self.numbered.len() as u64
    }

    /// The next that may go, with its number.
    pub(super) fn pop(&mut self) -> Option<(u64, Notice)> {
        let tag_len = self.waiting.front()?.0.tag_len();
        if self.numbered.len() as u64 >= WINDOW || self.tag_bytes + tag_len > WINDOW_BYTES {
            return None;
        }
        let (number, (notice, completer)) = (self.next(), self.waiting.pop_front()?);
        self.tag_bytes += tag_len;
        self.numbered.push_back(Numbered { tag_len, completer });
        Some((number, notice))
    }

    /// Acknowledgements of the peer.
    ///
    /// # Errors
    /// It cannot be true.
    pub(super) fn noted(&mut self, received: u64, drained: u64) -> Result<()> {
        let goes_back = received < self.received || drained < self.drained;
        if goes_back || drained > received || received > self.next() {
            return Err(Error::protocol(format_args!(
                "{received} notifications acknowledged and {drained} drained, of {}",
                self.next()
            )));
        }
        let is_received = (received - self.drained) as usize;
        for numbered in self.numbered.iter_mut().take(is_received) {
            if let Some(completer) = numbered.completer.take() {
                completer.complete(Ok(()));
            }
        }
        let is_drained = (drained - self.drained) as usize;
        for numbered in self.numbered.drain(..is_drained) {
            self.tag_bytes -= numbered.tag_len;
        }
        (self.received, self.drained) = (received, drained);
        Ok(())
    }

    /// The peer is lost: ends the works of tags.
    pub(super) fn fail(self, error: &Error) {
        let numbered = self.numbered.into_iter().map(|one| one.completer);
        let waiting = self.waiting.into_iter().map(|(_, completer)| completer);
        for completer in numbered.chain(waiting).flatten() {
            completer.complete(Err(error.clone()));
        }
    }
}

/// The receiver's side.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Notifications before this were delivered or void.
    next: u64,
    /// Beyond it: what came, or that it will not come.
    early: BTreeMap<u64, Option<Vec<u8>>>,
    /// Delivered and not drained: number and length of the tag.
    delivered: VecDeque<(u64, usize)>,
    /// Bytes of the tags in `early` and `delivered`.
    tag_bytes: usize,
    /// Content of the last NOTED message.
    noted: (u64, u64),
}

impl Arrivals {
    /// Notifications that came early, or that the user has not drained.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.early.len() + self.delivered.len()
    }

    fn drained(&self) -> u64 {
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
        let fits = number.saturating_sub(self.drained()) < WINDOW;
        if !is_new || !fits || len > TAG_CAP || self.tag_bytes + len > WINDOW_BYTES {
            return Err(Error::protocol(format_args!(
                "notification {number} of {len} bytes when {} is next and {} bytes wait",
                self.next, self.tag_bytes
            )));
        }
        self.tag_bytes += len;
        self.early.insert(number, tag);
        Ok(())
    }

    /// Number and tag of the next notification that can be delivered now.
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

    /// The user has drained everything before `upto`.
    pub(super) fn drain(&mut self, upto: u64) {
        let num_drained = self.delivered.partition_point(|(number, _)| *number < upto);
        for (_, len) in self.delivered.drain(..num_drained) {
            self.tag_bytes -= len;
        }
    }

    /// Content of the next NOTED message, if it differs from the last one: the numbers before which everything has come,
    /// and was drained.
    pub(super) fn note(&mut self) -> Option<(u64, u64)> {
        let now = (self.next, self.drained());
        (std::mem::replace(&mut self.noted, now) != now).then_some(now)
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
        arrivals.drain(3);
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
        let (mut outbox, mut arrivals) = (NoticeOutbox::default(), Arrivals::default());
        for _ in 0..4 * WINDOW {
            outbox.push(Notice::Transfer(0, TAG_CAP / 3), None);
        }
        let mut num_sent = 0;
        while num_sent < 4 * WINDOW {
            while let Some((number, notice)) = outbox.pop() {
                let tag = Some(vec![0; notice.tag_len()]);
                arrivals.arrive(number, tag).unwrap();
                arrivals.pop().unwrap();
                num_sent += 1;
            }
            assert!(arrivals.tag_bytes <= WINDOW_BYTES);
            arrivals.drain(arrivals.next);
            let (received, drained) = arrivals.note().unwrap();
            outbox.noted(received, drained).unwrap();
        }
    }

    #[test]
    fn a_tag_is_done_when_the_peer_has_it_and_fails_when_the_peer_is_gone() {
        let mut outbox = NoticeOutbox::default();
        let works = [0, 1, 2].map(|_| {
            let (tag, completer) = work();
            outbox.push(Notice::Tag(b"tag".to_vec()), Some(completer));
            tag
        });
        for _ in 0..2 {
            outbox.pop().expect("there is room");
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
        for (received, drained) in [(3, 0), (2, 3), (u64::MAX, 0), (0, 0), (1, 0)] {
            let mut outbox = NoticeOutbox::default();
            for _ in 0..2 {
                outbox.push(Notice::Transfer(0, 1), None);
                outbox.pop().unwrap();
            }
            outbox.noted(2, 1).unwrap();
            assert!(
                outbox.noted(received, drained).is_err(),
                "{received} {drained}"
            );
        }
    }
}
