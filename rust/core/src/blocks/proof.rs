//! Checksums of blocks that the destination reads: the source computes them on request, while the destination reads;
//! the destination compares each block when it is here, as close behind the read as it gets.

use std::ops::Range;
use std::sync::Arc;

use super::handoffs::block_bytes;
use super::messages::{SUMS, SUMS_CAP, read_sums, sums};
use super::serve::refuse;
use super::service::Blocks;
use super::transfer::Transfer;
use crate::checksum;
use crate::error::{Error, Result};
use crate::node::{Io, LinkId};
use crate::region::Layout;
use crate::transport::{Memory, Payload};

/// Bytes that are summed or compared in one go, which sockets and other transfers wait for: less than a millisecond.
const SLICE: u64 = 2 << 20;

fn blocks_of_slice(layout: &Layout) -> usize {
    usize::try_from(SLICE / layout.block_bytes)
        .unwrap_or(SUMS_CAP)
        .clamp(1, SUMS_CAP)
}

/// Blocks whose checksums a destination wants, at their source.
#[derive(Debug)]
pub(super) struct Summing {
    memory: Arc<Memory>,
    layout: Layout,
    ids: Vec<u32>,
    num_summed: usize,
}

impl Summing {
    /// Checks the ids that a peer asks for.
    pub(super) fn new(memory: Arc<Memory>, layout: Layout, ids: Vec<u32>) -> Result<Self> {
        ids.iter()
            .try_for_each(|id| layout.offset(*id).map(|_| ()))?;
        Ok(Self {
            memory,
            layout,
            ids,
            num_summed: 0,
        })
    }

    /// The next checksums; none after the last.
    fn next(&mut self) -> Result<Vec<u64>> {
        let ids = self.ids.iter().skip(self.num_summed);
        let ids = ids.take(blocks_of_slice(&self.layout));
        let sum = |id: &u32| {
            let bytes = block_bytes(&self.memory, &self.layout, *id);
            bytes.map(checksum::of).ok_or_else(|| {
                let text = format!("block {id} is not in memory that this process can read");
                Error::Unavailable(text)
            })
        };
        let sums: Vec<u64> = ids.map(sum).collect::<Result<_>>()?;
        self.num_summed += sums.len();
        Ok(sums)
    }

    fn is_over(&self) -> bool {
        self.num_summed == self.ids.len()
    }
}

/// What is known of the blocks of a transfer, at its destination.
#[derive(Debug)]
pub(super) struct Proof {
    /// The source's checksums of the first blocks.
    theirs: Vec<u64>,
    pub(super) num_compared: usize,
    /// The first block that differs from its checksum.
    pub(super) corrupt: Option<usize>,
    /// Whether blocks come in order.
    is_in_order: bool,
}

impl Proof {
    pub(super) fn new(is_in_order: bool) -> Self {
        Self {
            theirs: Vec::new(),
            num_compared: 0,
            corrupt: None,
            is_in_order,
        }
    }
}

impl Transfer {
    /// Blocks that are here, with their checksums, and have not been compared.
    pub(super) fn comparable(&self) -> Range<usize> {
        let Some(proof) = &self.proof else {
            return 0..0;
        };
        let is_whole = self.num_read == self.pieces.num_bytes;
        let num_here = match self.num_read / self.layout.block_bytes {
            num_read if is_whole || proof.is_in_order => num_read as usize,
            _ => 0,
        };
        proof.num_compared..num_here.min(proof.theirs.len())
    }

    /// Compares the next slice.
    pub(super) fn compare(&mut self) {
        let range = self.comparable();
        let Some(proof) = &mut self.proof else {
            return;
        };
        for index in range.take(blocks_of_slice(&self.layout)) {
            let id = self.pieces.to_ids.get(index);
            let bytes = id.and_then(|id| block_bytes(&self.memory, &self.layout, *id));
            if bytes.map(checksum::of).as_ref() != proof.theirs.get(index) {
                proof.corrupt.get_or_insert(index);
            }
            proof.num_compared = index + 1;
        }
    }
}

impl Blocks {
    /// Computes and sends the next checksums of what peers want; whether there were any.
    pub(super) fn sum_on(&mut self, io: &mut Io) -> bool {
        let Some((link, id)) = self.summing.pop_front() else {
            return false;
        };
        let Some(summing) = self.summing_of(link, id) else {
            return true; // of a link that has ended
        };
        match summing.next() {
            Ok(next) => {
                let is_over = summing.is_over();
                let header = io.header(link, SUMS).u64(id);
                io.message(link, header, Payload::Bytes(sums(&next)));
                if is_over {
                    self.serving.remove(&(link, id));
                } else {
                    self.summing.push_back((link, id));
                }
            }
            Err(error) => {
                self.serving.remove(&(link, id));
                refuse(io, link, id, &error);
            }
        }
        true
    }

    /// The source's checksums of the next blocks of a transfer.
    pub(super) fn take_sums(&mut self, link: LinkId, id: u64, payload: &[u8]) -> Result<()> {
        let sums = read_sums(payload)?;
        let is_its = |transfer: &&mut Transfer| transfer.link == link;
        // Of a transfer that has ended meanwhile: nothing.
        let Some(transfer) = self.transfers.get_mut(&id).filter(is_its) else {
            return Ok(());
        };
        let num_blocks = transfer.pieces.to_ids.len();
        let proof = transfer.proof.as_mut();
        let Some(proof) = proof.filter(|proof| proof.theirs.len() + sums.len() <= num_blocks)
        else {
            return Err(Error::protocol(format_args!(
                "{} checksums more of a transfer of {num_blocks} blocks",
                sums.len()
            )));
        };
        proof.theirs.extend(sums);
        self.give_turn(id);
        Ok(())
    }
}
