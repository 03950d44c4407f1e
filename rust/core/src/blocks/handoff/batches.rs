//! Batches of a load: reads of blocks of one region, and the comparison of what has come with the producer's checksums.

use std::sync::Arc;

use super::announcements::block_bytes;
use super::load::ReadBatch;
use super::load_request::LoadId;
use super::service::HandoffService;
use super::{Places, ReadyBlock, checksum_at};
use crate::blocks::Peer;
use crate::blocks::plan::region_gone;
use crate::blocks::reads::{BlockTransfer, outcome_of};
use crate::blocks::regions::grant;
use crate::error::Result;
use crate::ids::{HandoffId, SessionKey};
use crate::transfer::Cx;
use crate::transfer::region::{Layout, coalesce};
use crate::transfer::{Checksums, Completion, TransferRequest};
use crate::transport::Memory;

/// A batch whose blocks are being read.
pub(super) struct ActiveBatch {
    load: LoadId,
    batch: ReadBatch,
    /// Its number in the engine.
    pub(super) transfer: u64,
    peer: Peer,
    layout: Layout,
}

impl HandoffService {
    /// Begins to read batches. A load one of whose reads failed at once goes on at once; no block is read more than twice.
    pub(super) fn read_batches(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        id: LoadId,
        batches: Vec<ReadBatch>,
    ) {
        let mut has_failed = false;
        for batch in batches {
            has_failed |= !self.read_batch(cx, session, id, batch);
        }
        if has_failed {
            self.continue_load(cx, id);
        }
    }

    /// Begins to read a batch; false if that failed at once.
    fn read_batch(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        load: LoadId,
        batch: ReadBatch,
    ) -> bool {
        let planned = self.plan_batch(session, &batch);
        let Some(active) = self.loads.get_mut(&load) else {
            return true;
        };
        let begun = planned.and_then(|transfer| {
            let destination = self.agent.service_read_begins(cx.links, &transfer)?;
            Ok((transfer, destination))
        });
        let (transfer, (memory, layout)) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                active.load.read_failed(&batch, &error.to_string());
                active.catch_up();
                return false;
            }
        };
        let token = cx.links.token();
        let number = cx.transfers.add(TransferRequest {
            owner: token,
            session,
            source: transfer.remote_region.into(),
            grant: grant(batch.epoch),
            memory,
            pieces: transfer.pieces,
            // Without checksums of the blocks, the parts of a stream have some.
            checksums: if batch.has_checksums() {
                Checksums::None
            } else {
                Checksums::OfStream
            },
            is_verified_by_owner: true,
            is_retry: batch.is_retry,
            deadline: None,
        });
        active.batches.insert(token);
        let reading = ActiveBatch {
            load,
            batch,
            transfer: number,
            peer: transfer.peer,
            layout,
        };
        self.batches.insert(token, reading);
        cx.transfers.enqueue(cx.links, number);
        true
    }

    /// The read of a batch has ended.
    pub(super) fn batch_ended(
        &mut self,
        cx: &mut Cx<'_>,
        reading: ActiveBatch,
        completion: Completion,
    ) {
        let (id, batch) = (reading.load, reading.batch);
        let num_bytes = completion.pieces.num_bytes;
        let outcome = outcome_of(completion.outcome, &completion.pieces).map(|()| num_bytes);
        self.agent
            .service_read_ends(&reading.peer, batch.region, &outcome);
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        active.batches.remove(&completion.owner);
        match outcome {
            Ok(num_bytes) => {
                let arrived = (&*completion.memory, &reading.layout);
                let verified = verify(&id.handoff, &batch, arrived);
                let num_verified = verified.iter().filter(|is_verified| **is_verified).count();
                let facts = [
                    ("layer", batch.place as u64),
                    ("blocks", verified.len() as u64),
                    ("verified", num_verified as u64),
                    ("bytes", num_bytes),
                ];
                let began = self.trace.now().saturating_sub(completion.elapsed);
                self.trace
                    .overlapping("arrived", &id.handoff, began, &facts);
                active.load.read_completed(&batch, &verified, num_bytes);
            }
            Err(error) => active.load.read_failed(&batch, &error.to_string()),
        }
        active.catch_up();
        self.continue_load(cx, id);
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
fn verify(
    handoff: &HandoffId,
    batch: &ReadBatch,
    (memory, layout): (&Memory, &Layout),
) -> Vec<bool> {
    let places = Places::new(handoff, batch.epoch);
    let is_verified = |(block, &local): (&ReadyBlock, &u32)| {
        let Some(theirs) = block.checksum else {
            return true;
        };
        block_bytes(memory, layout, local).is_some_and(|bytes| {
            checksum_at(places.at(block.region, block.position), bytes) == theirs
        })
    };
    let blocks = batch.blocks.iter().zip(&batch.local_ids);
    blocks.map(is_verified).collect()
}
