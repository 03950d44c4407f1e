//! Blocks on their way at their destination: which pieces are still to be asked for, how much has come.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::Neighbour;

use super::peer::Peer;
use crate::error::{Error, Result};
use crate::handoff::HandoffId;
use crate::handoff::consumer::Batch;
use crate::node::LinkId;
use crate::region::{Layout, Pieces, RegionId, Run};
use crate::transport::{Memory, RemoteKey};
use crate::work::Completer;

/// Largest piece of one get, so that several are under way; it fits into [`LEN_BITS`].
const GET_PIECE: u64 = 1 << 20;
/// Bits of a get's token that hold its length; the rest is the transfer.
const LEN_BITS: u32 = 21;
/// Bytes a source may send before the destination's next credit.
pub(super) const WINDOW: u64 = 4 << 20;

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
    Handoff(HandoffId, Batch),
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
    pub(super) link: LinkId,
    pub(super) region: RegionId,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: Owner,
}

/// What a transfer that went well leaves.
pub(super) struct Arrived {
    pub(super) num_bytes: u64,
    pub(super) memory: Arc<Memory>,
    pub(super) layout: Layout,
}

pub(super) struct Transfer {
    pub(super) link: LinkId,
    pub(super) peer: Peer,
    pub(super) region: RegionId,
    pub(super) memory: Arc<Memory>,
    pub(super) layout: Layout,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    /// Get road: where the peer's region begins and the key to it, from the start on.
    pub(super) remote: Option<(u64, Rc<RemoteKey>)>,
    /// The run that comes next, and what of it is behind.
    next_run: usize,
    within: u64,
    pub(super) in_flight: usize,
    /// Message road: bytes placed; get road: bytes read.
    pub(super) num_placed: u64,
    uncredited: u64,
    pub(super) is_started: bool,
    /// Whether the source has been asked to send it.
    pub(super) is_by_message: bool,
    /// Whom calls of our own read it from, see `neighbours.rs`.
    pub(super) neighbour: Option<Rc<Neighbour>>,
    pub(super) failure: Option<Error>,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: Owner,
}

impl Transfer {
    pub(super) fn new(take: Take, peer: Peer, memory: Arc<Memory>, layout: Layout) -> Self {
        Self {
            link: take.link,
            peer,
            region: take.region,
            memory,
            layout,
            remote_region: take.remote_region,
            pieces: take.pieces,
            remote: None,
            next_run: 0,
            within: 0,
            in_flight: 0,
            num_placed: 0,
            uncredited: 0,
            is_started: false,
            is_by_message: false,
            neighbour: None,
            failure: None,
            deadline: take.deadline,
            owner: take.owner,
        }
    }

    /// What of the blocks comes next, at most `cap` bytes of it.
    pub(super) fn piece(&self, cap: u64) -> Option<Run> {
        let run = self.pieces.runs.get(self.next_run)?;
        Some(Run {
            to: run.to + self.within,
            from: run.from + self.within,
            len: (run.len - self.within).min(cap),
        })
    }

    /// Get road: what to ask for next.
    pub(super) fn next_get(&self) -> Option<Run> {
        let is_going = self.failure.is_none() && !self.is_by_message && self.neighbour.is_none();
        is_going.then(|| self.piece(GET_PIECE)).flatten()
    }

    /// The next `len` bytes of the current run are behind.
    pub(super) fn advance(&mut self, len: u64) {
        self.within += len;
        let run = self.pieces.runs.get(self.next_run);
        if run.is_some_and(|run| run.len == self.within) {
            (self.next_run, self.within) = (self.next_run + 1, 0);
        }
    }

    /// Message road: writes a piece to the blocks it belongs to. Pieces come in order, so that any other offset is
    /// an error of the peer.
    pub(super) fn place(&mut self, offset: u64, mut data: &[u8]) -> Result<()> {
        let (len, num_bytes) = (data.len() as u64, self.pieces.num_bytes);
        if offset != self.num_placed || len == 0 || len > num_bytes - offset {
            return Err(Error::protocol(format_args!(
                "{len} bytes at {offset} of a transfer of {num_bytes}, {} expected next",
                self.num_placed
            )));
        }
        while let Some(run) = self.piece(data.len() as u64).filter(|run| run.len > 0) {
            let (piece, rest) = data.split_at(run.len as usize);
            if !self.memory.buffer().write(run.to as usize, piece) {
                return Err(Error::Unavailable(
                    "blocks outside host memory cannot be received over TCP".to_owned(),
                ));
            }
            self.advance(run.len);
            data = rest;
        }
        self.num_placed += len;
        self.uncredited += len;
        Ok(())
    }

    /// Credit that is due to the source.
    pub(super) fn take_credit(&mut self) -> Option<u64> {
        let is_due = self.uncredited >= WINDOW / 4 && self.num_placed < self.pieces.num_bytes;
        is_due.then(|| std::mem::take(&mut self.uncredited))
    }

    /// Whether nothing more will happen: all is here, or it failed and no get can write any more.
    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.failure.is_some() || self.num_placed == self.pieces.num_bytes)
    }
}
