//! Blocks on their way at their destination: which pieces are still to be asked for, how much has come.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::ProcessVmReader;

use super::peer::Peer;
use super::verifier::Verifier;
use crate::error::Error;
use crate::handoff::HandoffId;
use crate::handoff::consumer::ReadBatch;
use crate::reactor::SessionKey;
use crate::transfer::cursor::Cursor;
use crate::transfer::region::{Layout, Pieces, RegionId, Run};
use crate::transfer::stream::Incoming;
use crate::transport::{Memory, RemoteKey};
use crate::work::Completer;

/// Largest piece of one get, so that several are under way; it fits into [`LEN_BITS`].
const GET_PIECE: u64 = 1 << 20;
/// Bits of a get's token that hold its length; the rest is the transfer.
const LEN_BITS: u32 = 21;

/// The token of a get: which transfer it is of, and its bytes.
pub(super) fn get_token(id: u64, len: u64) -> u64 {
    id << LEN_BITS | len
}

pub(super) fn split_token(token: u64) -> (u64, u64) {
    (token >> LEN_BITS, token & ((1 << LEN_BITS) - 1))
}

/// Who is told when a transfer ends.
#[derive(Debug)]
pub(super) enum Owner {
    /// Our user, and the peer's if there is a tag.
    Caller(Completer<u64>, Option<Notify>),
    Handoff(HandoffId, ReadBatch),
    /// The peer that offered the blocks, and our user if there is a tag.
    Offer {
        offer: u64,
        notice: Option<(u64, Vec<u8>)>,
    },
}

impl Owner {
    /// Whether this side asked for it.
    pub(super) fn is_ours(&self) -> bool {
        !matches!(self, Self::Offer { .. })
    }
}

/// What the peer is told when a transfer has gone well.
#[derive(Debug)]
pub(super) struct Notify {
    pub(super) tag: Vec<u8>,
    /// Its place among the notifications; a transfer begins when it has one.
    pub(super) number: Option<u64>,
}

/// A transfer, before it is known whether its regions are still there.
#[derive(Debug)]
pub(super) struct Take {
    pub(super) session: SessionKey,
    pub(super) region: RegionId,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    pub(super) is_checksummed: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: Owner,
}

/// What a transfer that went well leaves.
pub(super) struct Arrived {
    pub(super) num_bytes: u64,
    pub(super) memory: Arc<Memory>,
    pub(super) layout: Layout,
    pub(super) began: Duration,
}

pub(super) struct Transfer {
    pub(super) session: SessionKey,
    pub(super) peer: Peer,
    pub(super) region: RegionId,
    pub(super) memory: Arc<Memory>,
    pub(super) layout: Layout,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    /// Remote read: where the peer's region begins and the key to it, from the start on.
    pub(super) remote: Option<(u64, Rc<RemoteKey>)>,
    /// Remote read: what has been asked for.
    pub(super) cursor: Cursor,
    pub(super) in_flight: usize,
    /// Remote read: bytes read.
    pub(super) num_read: u64,
    /// Remote read: what verifies the bytes, if anything does.
    pub(super) verifier: Option<Verifier>,
    /// Whether it waits for its turn to work, see `turns.rs`.
    pub(super) has_turn: bool,
    pub(super) is_checksummed: bool,
    pub(super) is_started: bool,
    /// Stream path, once the source has been asked to send it.
    pub(super) incoming: Option<Incoming>,
    /// Whom calls of our own read it from, see `neighbours.rs`.
    pub(super) process_vm: Option<Rc<ProcessVmReader>>,
    pub(super) failure: Option<Error>,
    pub(super) deadline: Option<Instant>,
    /// When it was started, if that is traced.
    pub(super) began: Duration,
    pub(super) owner: Owner,
}

impl Transfer {
    pub(super) fn new(take: Take, peer: Peer, memory: Arc<Memory>, layout: Layout) -> Self {
        Self {
            session: take.session,
            peer,
            region: take.region,
            memory,
            layout,
            remote_region: take.remote_region,
            pieces: take.pieces,
            remote: None,
            cursor: Cursor::default(),
            in_flight: 0,
            num_read: 0,
            verifier: None,
            has_turn: false,
            is_checksummed: take.is_checksummed,
            is_started: false,
            incoming: None,
            process_vm: None,
            failure: None,
            deadline: take.deadline,
            began: Duration::ZERO,
            owner: take.owner,
        }
    }

    /// Whether it goes by messages whatever the data path of the session is: the other data path has failed.
    pub(super) fn is_by_messages(&self) -> bool {
        matches!(&self.owner, Owner::Handoff(_, batch) if batch.is_retry)
    }

    /// Remote read: what to ask for next.
    pub(super) fn next_get(&self) -> Option<Run> {
        let is_going =
            self.failure.is_none() && self.incoming.is_none() && self.process_vm.is_none();
        is_going
            .then(|| self.cursor.piece(&self.pieces.runs, GET_PIECE))
            .flatten()
    }

    /// Whether nothing more will happen: all is here and compared, or it failed and no get can write any more.
    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.failure.is_some() || self.is_here())
    }

    fn is_here(&self) -> bool {
        if let Some(incoming) = &self.incoming {
            return incoming.is_here();
        }
        let num_blocks = self.pieces.to_ids.len();
        let verifier = self.verifier.as_ref();
        self.num_read == self.pieces.num_bytes
            && verifier.is_none_or(|verifier| verifier.num_compared == num_blocks)
    }

    /// Whether it has checksums. What comes as messages of a handoff has those of its blocks.
    pub(super) fn is_verified(&self) -> bool {
        match &self.incoming {
            Some(incoming) => incoming.is_checksummed() || matches!(self.owner, Owner::Handoff(..)),
            None => self.verifier.is_some(),
        }
    }

    /// The error of a transfer of which a part differs from its checksum.
    pub(super) fn corruption(&self) -> Option<Error> {
        let index = if let Some(incoming) = &self.incoming {
            (incoming.corrupt()? / self.layout.block_bytes) as usize
        } else {
            self.verifier.as_ref()?.corrupt?
        };
        let (to, from) = (
            self.pieces.to_ids.get(index)?,
            self.pieces.from_ids.get(index)?,
        );
        // A piece of the stream path can have many small blocks.
        let or_later = if self.incoming.is_some() {
            " or a later one"
        } else {
            ""
        };
        Some(Error::Corrupt(format!(
            "block {to}, from block {from},{or_later} differs from its checksum: it changed while it was moved, or on its \
             way; move the blocks again"
        )))
    }
}
