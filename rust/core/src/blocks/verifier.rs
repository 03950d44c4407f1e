//! Checksums of blocks that the destination reads: the source computes them on request, while the destination reads;
//! the destination compares each block when it is here, as close behind the read as it gets: over CMA, where reads end
//! in order, each slice while it is in the cache, otherwise when all is here.

use std::ops::Range;
use std::sync::Arc;

use super::handoffs::block_bytes;
use super::messages::{CHECKSUMS, CHECKSUMS_CAP, checksums, read_checksums};
use super::process_vm::CHECKSUMMED_BYTES;
use super::serve::refuse;
use super::service::Blocks;
use super::transfer::Transfer;
use crate::checksum::{self, RunningChecksum};
use crate::error::{Error, Result};
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::region::Layout;
use crate::transport::{Memory, Payload};

/// Bytes that are checksummed in one go, which sockets and other transfers wait for: less than a millisecond.
const SLICE: u64 = 2 << 20;

/// The checksum of one block after the other, each as far as a slice goes.
#[derive(Debug, Default)]
struct BlockHasher {
    /// Bytes of the current block that are behind.
    at: u64,
    checksum: RunningChecksum,
}

impl BlockHasher {
    /// Goes on with a block for at most `budget` bytes, which are taken from it; its checksum at its end.
    fn go_on(&mut self, block: &[u8], budget: &mut u64) -> Option<u64> {
        let rest = block.get(self.at as usize..).unwrap_or_default();
        let len = (rest.len() as u64).min(*budget);
        *budget -= len;
        if self.at == 0 && len == block.len() as u64 {
            return Some(checksum::of(block));
        }
        self.checksum
            .add(rest.get(..len as usize).unwrap_or_default());
        self.at += len;
        (self.at == block.len() as u64).then(|| std::mem::take(self).checksum.get())
    }
}

/// Blocks whose checksums a destination wants, at their source.
#[derive(Debug)]
pub(super) struct ChecksumJob {
    memory: Arc<Memory>,
    layout: Layout,
    ids: Vec<u32>,
    num_checksummed: usize,
    hasher: BlockHasher,
}

impl ChecksumJob {
    /// Checks the ids that a peer asks for.
    pub(super) fn new(memory: Arc<Memory>, layout: Layout, ids: Vec<u32>) -> Result<Self> {
        ids.iter()
            .try_for_each(|id| layout.offset(*id).map(|_| ()))?;
        Ok(Self {
            memory,
            layout,
            ids,
            num_checksummed: 0,
            hasher: BlockHasher::default(),
        })
    }

    /// The checksums of the next slice, which may lie within one block.
    fn next(&mut self) -> Result<Vec<u64>> {
        let (mut checksums, mut budget) = (Vec::new(), SLICE);
        while let Some(&id) = self.ids.get(self.num_checksummed)
            && budget > 0
            && checksums.len() < CHECKSUMS_CAP
        {
            let block = block_bytes(&self.memory, &self.layout, id).ok_or_else(|| {
                let text = format!("block {id} is not in memory that this process can read");
                Error::Unavailable(text)
            })?;
            let checksum = self.hasher.go_on(block, &mut budget);
            self.num_checksummed += usize::from(checksum.is_some());
            checksums.extend(checksum);
        }
        Ok(checksums)
    }

    fn is_over(&self) -> bool {
        self.num_checksummed == self.ids.len()
    }
}

/// What is known of the blocks of a transfer, at its destination.
#[derive(Debug)]
pub(super) struct Verifier {
    /// The source's checksums of the first blocks.
    theirs: Vec<u64>,
    pub(super) num_compared: usize,
    /// The first block that differs from its checksum.
    pub(super) corrupt: Option<usize>,
    hasher: BlockHasher,
    /// Whether blocks come in order.
    is_in_order: bool,
}

impl Verifier {
    pub(super) fn new(is_in_order: bool) -> Self {
        Self {
            theirs: Vec::new(),
            num_compared: 0,
            corrupt: None,
            hasher: BlockHasher::default(),
            is_in_order,
        }
    }
}

impl Transfer {
    /// Blocks that are here, with their checksums, and have not been compared.
    pub(super) fn comparable(&self) -> Range<usize> {
        let Some(verifier) = &self.verifier else {
            return 0..0;
        };
        let is_whole = self.num_read == self.pieces.num_bytes;
        let num_here = match self.num_read / self.layout.block_bytes {
            num_read if is_whole || verifier.is_in_order => num_read as usize,
            _ => 0,
        };
        verifier.num_compared..num_here.min(verifier.theirs.len())
    }

    /// Compares the next slice: as much as a call of our own reads.
    pub(super) fn compare(&mut self) {
        let (range, mut budget) = (self.comparable(), CHECKSUMMED_BYTES);
        let Some(verifier) = &mut self.verifier else {
            return;
        };
        for index in range {
            let id = self.pieces.to_ids.get(index);
            let block = id.and_then(|id| block_bytes(&self.memory, &self.layout, *id));
            let checksum = block.map(|block| verifier.hasher.go_on(block, &mut budget));
            if checksum == Some(None) {
                return; // the slice ends within the block
            }
            if checksum.flatten().as_ref() != verifier.theirs.get(index) {
                verifier.corrupt.get_or_insert(index);
            }
            verifier.num_compared = index + 1;
        }
    }
}

impl Blocks {
    /// Computes and sends the next checksums of what peers want; whether there were any.
    pub(super) fn run_checksum_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let Some((session, id)) = self.checksum_jobs.pop_front() else {
            return false;
        };
        let Some(checksum_jobs) = self.checksum_job_of(session, id) else {
            return true; // of a session that has ended
        };
        let first = checksum_jobs.num_checksummed as u64;
        match checksum_jobs.next() {
            Ok(next) => {
                let is_over = checksum_jobs.is_over();
                if !next.is_empty() {
                    let header = cx.header(session, CHECKSUMS).u64(id).u64(first);
                    cx.message(session, header, Payload::Bytes(checksums(&next)));
                }
                if is_over {
                    self.serving.remove(&(session, id));
                } else {
                    self.checksum_jobs.push_back((session, id));
                }
            }
            Err(error) => {
                self.serving.remove(&(session, id));
                refuse(cx, session, id, &error);
            }
        }
        true
    }

    /// The source's checksums of the next blocks of a transfer.
    pub(super) fn receive_checksums(
        &mut self,
        session: SessionKey,
        id: u64,
        first: u64,
        payload: &[u8],
    ) -> Result<()> {
        let checksums = read_checksums(payload)?;
        let is_its = |transfer: &&mut Transfer| transfer.session == session;
        // Of a transfer that has ended meanwhile: nothing.
        let Some(transfer) = self.transfers.get_mut(&id).filter(is_its) else {
            return Ok(());
        };
        let num_blocks = transfer.pieces.to_ids.len();
        let num_known = transfer
            .verifier
            .as_ref()
            .map_or(0, |verifier| verifier.theirs.len());
        let is_next = first == num_known as u64 && num_known + checksums.len() <= num_blocks;
        let Some(verifier) = transfer.verifier.as_mut().filter(|_| is_next) else {
            return Err(Error::protocol(format_args!(
                "{} checksums from block {first} on of a transfer of {num_blocks} blocks, {num_known} known",
                checksums.len()
            )));
        };
        verifier.theirs.extend(checksums);
        self.give_turn(id);
        Ok(())
    }
}
