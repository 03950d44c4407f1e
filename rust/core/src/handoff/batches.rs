//! Batches of a load: reads of blocks of one region, and the comparison of what has come with the producer's checksums.

use std::sync::Arc;

use super::announcements::block_bytes;
use super::read_batch::ReadBatch;
use super::service::HandoffService;
use super::{ReadyBlock, checksum};
use crate::agent::{BlockTransfer, BlocksRead, ReadOwner, region_gone};
use crate::clock;
use crate::error::Result;
use crate::ids::{HandoffId, SessionKey};
use crate::transfer::Cx;
use crate::transfer::region::coalesce;

impl HandoffService {
    pub(super) fn read_batch(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        handoff: HandoffId,
        batch: ReadBatch,
    ) {
        let transfer = self.plan_batch(session, &batch);
        let (token, is_retry) = (cx.links.token(), batch.is_retry);
        let (has_checksums, epoch) = (batch.has_checksums(), batch.epoch);
        if let Some(active) = self.loads.get_mut(&handoff) {
            active.batches.insert(token, batch);
            self.batches.insert(token, handoff);
        }
        let owner = ReadOwner::Service {
            token,
            is_retry,
            has_checksums,
            epoch,
        };
        self.agent.read(cx, session, transfer, owner);
    }

    /// A read of blocks has ended.
    pub(super) fn batch_ended(&mut self, cx: &mut Cx<'_>, token: u64, outcome: Result<BlocksRead>) {
        let Some(handoff) = self.batches.remove(&token) else {
            return;
        };
        let Some(active) = self.loads.get_mut(&handoff) else {
            return;
        };
        let Some(batch) = active.batches.remove(&token) else {
            return;
        };
        match outcome {
            Ok(read) => {
                let verified = verify(&handoff, &batch, &read);
                let num_verified = verified.iter().filter(|is_verified| **is_verified).count();
                let facts = [
                    ("layer", batch.place as u64),
                    ("blocks", verified.len() as u64),
                    ("verified", num_verified as u64),
                    ("bytes", read.num_bytes),
                ];
                let began = self.trace.now().saturating_sub(read.elapsed);
                self.trace.overlapping("arrived", &handoff, began, &facts);
                active
                    .load
                    .read_completed(&batch, &verified, read.num_bytes);
            }
            Err(error) => active.load.read_failed(&batch, &error.to_string()),
        }
        let since = active.announced.unwrap_or(active.started);
        let after = clock::now().saturating_duration_since(since);
        active.load.caught_up(after);
        self.continue_load(cx, handoff);
    }

    fn plan_batch(&self, session: SessionKey, batch: &ReadBatch) -> Result<BlockTransfer> {
        let peer = self.agent.peers.get(&session).ok_or_else(region_gone)?;
        let ours = self.agent.regions.get(&batch.region);
        let (Some(ours), Some(theirs)) = (ours, peer.region(batch.remote_region())) else {
            return Err(region_gone());
        };
        let from_ids: Vec<u32> = batch.blocks.iter().map(|block| block.block_id).collect();
        let to = (&ours.layout, &batch.local_ids[..]);
        let pieces = coalesce(to, (&theirs.layout, &from_ids))?;
        Ok(BlockTransfer {
            peer: peer.handle.clone(),
            region: batch.region,
            remote_region: theirs.id,
            pieces: Arc::new(pieces),
            is_checksummed: false,
            deadline: None,
        })
    }
}

/// For each block of a batch, whether it is here with the checksum that the producer computed, if it has one.
fn verify(handoff: &HandoffId, batch: &ReadBatch, read: &BlocksRead) -> Vec<bool> {
    let is_verified = |(block, &local): (&ReadyBlock, &u32)| {
        let Some(theirs) = block.checksum else {
            return true;
        };
        block_bytes(&read.memory, &read.layout, local).is_some_and(|bytes| {
            checksum(handoff, batch.epoch, block.region, block.position, bytes) == theirs
        })
    };
    let blocks = batch.blocks.iter().zip(&batch.local_ids);
    blocks.map(is_verified).collect()
}
