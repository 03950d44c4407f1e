//! The bytes of one reservation: its memory, how far they have come, and the commit that waits for them.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::super::messages::Carried;
use crate::checksum::RunningChecksum;
use crate::entries::state::Holder;
use crate::error::{Error, Result};
use crate::transport::Memory;

/// The memory of a reservation that has its space.
#[derive(Debug)]
pub(super) struct Allocated {
    pub(super) buffer: Buffer,
    /// As of [`Content`](super::super::content::Content).
    pub(super) memory: Option<Arc<Memory>>,
}

/// A commit that waits for its bytes.
#[derive(Debug)]
pub(super) struct PendingCommit {
    /// Whose answer it is.
    pub(super) operation: u64,
    pub(super) record: Box<[u8]>,
    /// Of a put it comes when its client has computed it.
    pub(super) checksum: Option<u64>,
}

/// The bytes of a reservation.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) num_bytes: u64,
    pub(super) ttl: Option<Duration>,
    /// `None` while it waits for space.
    pub(super) allocated: Option<Allocated>,
    /// Bytes that a put brings, until it has its space.
    pub(super) put: Option<Carried<'static>>,
    pub(super) num_written: usize,
    /// The transfer of a write.
    pub(super) transfer: Option<u64>,
    /// Of what was written.
    pub(super) checksum: RunningChecksum,
    pub(super) commit: Option<PendingCommit>,
}

/// A write whose bytes are being read.
#[derive(Debug)]
pub(super) struct PendingWrite {
    pub(super) holder: Holder,
    pub(super) operation: u64,
    /// Its reservation may end before the reads: until then the memory is used for nothing else.
    pub(super) _buffer: Buffer,
}

impl Arrival {
    pub(super) fn new(num_bytes: u64, ttl: Option<Duration>) -> Self {
        Self {
            num_bytes,
            ttl,
            allocated: None,
            put: None,
            num_written: 0,
            transfer: None,
            checksum: RunningChecksum::default(),
            commit: None,
        }
    }

    pub(super) fn of_put(
        operation: u64,
        ttl: Option<Duration>,
        record: Cow<'_, [u8]>,
        bytes: Carried<'_>,
    ) -> Self {
        let commit = PendingCommit {
            operation,
            record: record.into(),
            checksum: None,
        };
        let num_bytes = bytes.len();
        Self {
            put: Some(bytes.into_owned()),
            commit: Some(commit),
            ..Self::new(num_bytes, ttl)
        }
    }

    pub(super) fn is_put(&self, holder: Holder) -> bool {
        let commit = self.commit.as_ref();
        commit.is_some_and(|commit| commit.operation == holder.1)
    }

    /// True if everything is here that a commit needs.
    pub(super) fn is_complete(&self) -> bool {
        let commit = self.commit.as_ref();
        self.allocated.is_some()
            && self.num_written as u64 == self.num_bytes
            && commit.is_some_and(|commit| commit.checksum.is_some())
    }

    /// Refuses a write that does not fit behind the others.
    ///
    /// # Errors
    /// `Config`: too many bytes. `Protocol`: no client of ours sends it.
    pub(super) fn check_write(&self, bytes: &Carried<'_>) -> Result<()> {
        if self.transfer.is_some() || self.commit.is_some() {
            return Err(Error::protocol("a write that is not to come"));
        }
        let num_left = self.num_bytes - self.num_written as u64;
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
