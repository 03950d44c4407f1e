//! The bytes of one reservation: its parts, how far they have come, and the commit that waits for them.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::super::content::{Content, Description, Part};
use super::super::messages::Carried;
use super::super::state::Holder;
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};

/// A commit that waits for its bytes.
#[derive(Debug)]
pub(super) struct PendingCommit {
    /// The operation that gets the answer.
    pub(super) operation: u64,
    pub(super) description: Description,
    pub(super) expected: Expected,
}

/// The checksum that the bytes of a commit have to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// None: each part is verified on its way.
    Nothing,
    /// It comes when the client of a put has computed it.
    Awaited,
    Known(u64),
}

/// The bytes of a reservation.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) num_bytes: u64,
    pub(super) ttl: Option<Duration>,
    /// True if it has its space.
    pub(super) has_space: bool,
    /// Parts whose bytes are here or on their way. A reservation has one, into which its client writes.
    pub(super) parts: Vec<Part>,
    /// Parts of a put that are to come.
    pub(super) rest: VecDeque<Carried<'static>>,
    /// Bytes that are here.
    pub(super) num_written: u64,
    /// The transfer of a write.
    pub(super) transfer: Option<u64>,
    /// Of what was written.
    pub(super) checksum: RunningChecksum,
    pub(super) commit: Option<PendingCommit>,
    /// Bytes of its key.
    pub(super) num_key: usize,
    /// The client wants it no more: it is refused when it has its space.
    pub(super) is_cancelled: bool,
}

/// A write whose bytes are being read.
#[derive(Debug)]
pub(super) struct PendingWrite {
    pub(super) holder: Holder,
    pub(super) operation: u64,
    pub(super) source: u64,
    pub(super) transfer: u64,
    /// Its reservation may end before the reads: until then the memory is used for nothing else.
    pub(super) _buffer: Buffer,
}

impl Arrival {
    pub(super) fn of_reservation(num_bytes: u64, ttl: Option<Duration>) -> Self {
        Self {
            num_bytes,
            ttl,
            has_space: false,
            parts: Vec::new(),
            rest: VecDeque::new(),
            num_written: 0,
            transfer: None,
            checksum: RunningChecksum::default(),
            commit: None,
            num_key: 0,
            is_cancelled: false,
        }
    }

    pub(super) fn of_put(
        operation: u64,
        (ttl, is_hashed): (Option<Duration>, bool),
        record: Cow<'_, [u8]>,
        parts: Vec<Carried<'_>>,
    ) -> Self {
        let expected = if is_hashed {
            Expected::Awaited
        } else {
            Expected::Nothing
        };
        let commit = PendingCommit {
            operation,
            description: Description::Record(record.into()),
            expected,
        };
        let lens = parts.iter().map(Carried::len);
        let num_bytes = lens.fold(0, u64::saturating_add);
        Self {
            rest: parts.into_iter().map(Carried::into_owned).collect(),
            commit: Some(commit),
            ..Self::of_reservation(num_bytes, ttl)
        }
    }

    pub(super) fn is_put(&self, holder: Holder) -> bool {
        let commit = self.commit.as_ref();
        commit.is_some_and(|commit| commit.operation == holder.1)
    }

    /// True if the checksum of all that is written covers it.
    pub(super) fn is_hashed(&self) -> bool {
        let expected = self.commit.as_ref().map(|commit| commit.expected);
        expected != Some(Expected::Nothing)
    }

    /// True if everything is here that a commit needs.
    pub(super) fn is_complete(&self) -> bool {
        let expected = self.commit.as_ref().map(|commit| commit.expected);
        self.has_space
            && self.transfer.is_none()
            && self.rest.is_empty()
            && self.num_written == self.num_bytes
            && expected.is_some_and(|expected| expected != Expected::Awaited)
    }

    /// The content, and the operation of the commit.
    ///
    /// # Errors
    /// `Corrupt`: what has come has another checksum than the client says.
    pub(super) fn into_content(self) -> Option<(u64, Result<Arc<Content>>)> {
        let PendingCommit {
            operation,
            description,
            expected,
        } = self.commit?;
        let mut running = self.checksum;
        if let Description::Record(record) = &description {
            running.add(record[..].into());
        }
        let checksum = match expected {
            Expected::Known(expected) if expected == running.get() => Some(expected),
            Expected::Nothing => None,
            Expected::Known(_) | Expected::Awaited => {
                let text = "the bytes that came differ from the checksum of those that were written; nothing was committed";
                return Some((operation, Err(Error::Corrupt(text.to_owned()))));
            }
        };
        let content = Content {
            parts: self.parts,
            description,
            checksum,
        };
        Some((operation, Ok(Arc::new(content))))
    }

    /// Refuses a write that does not fit behind the others.
    ///
    /// # Errors
    /// `Config`: too many bytes. `Protocol`: no client of ours sends it.
    pub(super) fn check_write(&self, bytes: &Carried<'_>) -> Result<()> {
        let is_readable = |part: &Part| part.memory.is_some();
        let can_read = self.parts.first().is_some_and(is_readable);
        if self.transfer.is_some() || self.commit.is_some() || (bytes.is_offered() && !can_read) {
            return Err(Error::protocol("a write that is not to come"));
        }
        let num_left = self.num_bytes - self.num_written;
        if bytes.len() > num_left {
            return Err(Error::Config(format!(
                "{} bytes, but only {num_left} of the {} reserved are left; nothing was written",
                bytes.len(),
                self.num_bytes
            )));
        }
        Ok(())
    }
}
