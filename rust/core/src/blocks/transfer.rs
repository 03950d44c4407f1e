//! A read under way at its destination: which pieces are still to be asked for, how much has come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::handoff::HandoffId;
use crate::handoff::consumer::Batch;
use crate::node::LinkId;
use crate::region::{Layout, Run};
use crate::transport::Memory;
use crate::work::Completer;

/// Largest piece of one get.
pub(super) const GET_PIECE: u64 = 4 << 20;
/// Gets of one transfer under way at once.
pub(super) const GETS_IN_FLIGHT: usize = 16;
/// Bytes a source may send before the destination's next credit.
pub(super) const WINDOW: u64 = 4 << 20;

/// Who is told when a transfer ends.
#[derive(Debug)]
pub(super) enum Owner {
    Caller(Completer<u64>),
    Handoff(HandoffId, Batch),
}

/// A read, before it is known to be possible.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) link: LinkId,
    pub(super) region: u16,
    pub(super) local_ids: Vec<u32>,
    pub(super) remote_region: u16,
    pub(super) remote_ids: Vec<u32>,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: Owner,
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) link: LinkId,
    pub(super) memory: Arc<Memory>,
    pub(super) layout: Layout,
    local_ids: Vec<u32>,
    pub(super) remote_region: u16,
    pub(super) remote_ids: Vec<u32>,
    /// Get road: what has not been asked for.
    pub(super) runs: VecDeque<Run>,
    pub(super) in_flight: usize,
    /// Message road: bytes placed; get road: bytes read.
    pub(super) num_placed: u64,
    pub(super) num_total: u64,
    uncredited: u64,
    pub(super) is_started: bool,
    /// Whether the source has been asked to send it.
    pub(super) is_by_message: bool,
    pub(super) failure: Option<Error>,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: Owner,
}

impl Transfer {
    pub(super) fn new(read: Read, memory: Arc<Memory>, layout: Layout, runs: Vec<Run>) -> Self {
        let num_total = read.local_ids.len() as u64 * layout.block_bytes;
        Self {
            link: read.link,
            memory,
            layout,
            local_ids: read.local_ids,
            remote_region: read.remote_region,
            remote_ids: read.remote_ids,
            runs: runs.into(),
            in_flight: 0,
            num_placed: 0,
            num_total,
            uncredited: 0,
            is_started: false,
            is_by_message: false,
            failure: None,
            deadline: read.deadline,
            owner: read.owner,
        }
    }

    /// Message road: writes a piece to the blocks it belongs to. Pieces come in order, so that any other offset is
    /// an error of the peer.
    pub(super) fn place(&mut self, offset: u64, mut data: &[u8]) -> Result<()> {
        if offset != self.num_placed
            || data.is_empty()
            || offset + data.len() as u64 > self.num_total
        {
            return Err(Error::protocol(format_args!(
                "{} bytes at {offset} of a transfer of {}, {} expected next",
                data.len(),
                self.num_total,
                self.num_placed
            )));
        }
        while !data.is_empty() {
            let (index, within) = (
                self.num_placed / self.layout.block_bytes,
                self.num_placed % self.layout.block_bytes,
            );
            let len = (self.layout.block_bytes - within).min(data.len() as u64) as usize;
            let Some(&id) = self.local_ids.get(index as usize) else {
                return Err(Error::protocol("data beyond the last block"));
            };
            let at = self.layout.offset(id)? + within;
            let (piece, rest) = data.split_at(len);
            if !self.memory.buffer().write(at as usize, piece) {
                return Err(Error::Unavailable(
                    "blocks outside host memory cannot be received over TCP".to_owned(),
                ));
            }
            self.num_placed += len as u64;
            self.uncredited += len as u64;
            data = rest;
        }
        Ok(())
    }

    /// Credit that is due to the source.
    pub(super) fn take_credit(&mut self) -> Option<u64> {
        let is_due = self.uncredited >= WINDOW / 4 && self.num_placed < self.num_total;
        is_due.then(|| std::mem::take(&mut self.uncredited))
    }

    /// Whether nothing more will happen: all is here, or it failed and no get can write any more.
    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.failure.is_some() || self.num_placed == self.num_total)
    }
}
