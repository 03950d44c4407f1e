//! Batches of a load: reads of blocks of one region, and the comparison of what has come with the producer's checksums.

use std::time::Instant;

use super::announcements::block_bytes;
use super::consumer::ReadBatch;
use super::service::HandoffService;
use super::{ReadyBlock, checksum};
use crate::agent::{BlocksRead, region_gone};
use crate::error::Result;
use crate::ids::HandoffId;
use crate::ids::RegionId;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transfer::region::{Layout, Pieces, coalesce};
use crate::transport::Memory;

impl HandoffService {
    pub(super) fn read_batch(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        handoff: HandoffId,
        batch: ReadBatch,
    ) {
        let (planned, is_retry) = (self.plan_batch(session, &batch), batch.is_retry);
        let task = cx.token();
        self.batches.insert(task, (handoff, batch));
        match planned {
            Ok((regions, pieces)) => {
                self.agent
                    .read_for_task(cx, task, session, regions, pieces, is_retry);
            }
            Err(error) => self.agent.fail_task(task, error),
        }
    }

    /// A read of blocks has ended.
    pub(super) fn batch_ended(
        &mut self,
        cx: &mut ReactorContext,
        task: u64,
        outcome: Result<BlocksRead>,
    ) {
        let Some((handoff, batch)) = self.batches.remove(&task) else {
            return;
        };
        match outcome {
            Ok(read) => {
                let verified = self.verify(&handoff, &batch, &read.memory, &read.layout);
                self.trace_arrival(&handoff, &batch, &verified, &read);
                self.consumer
                    .read_completed(&handoff, &batch, &verified, read.num_bytes);
            }
            Err(error) => {
                let reason = error.to_string();
                self.consumer.read_failed(&handoff, &batch, &reason);
            }
        }
        if let Some(loading) = self.loading.get(&handoff) {
            let since = loading.announced.unwrap_or(loading.started);
            let after = Instant::now().saturating_duration_since(since);
            self.consumer.caught_up(&handoff, after);
        }
        self.continue_load(cx, handoff);
    }

    fn trace_arrival(
        &self,
        handoff: &HandoffId,
        batch: &ReadBatch,
        verified: &[bool],
        read: &BlocksRead,
    ) {
        let num_verified = verified.iter().filter(|is_verified| **is_verified).count();
        let facts = [
            ("layer", u64::from(batch.region)),
            ("blocks", verified.len() as u64),
            ("verified", num_verified as u64),
            ("bytes", read.num_bytes),
        ];
        let began = self.trace.now().saturating_sub(read.elapsed);
        self.trace.overlapping("arrived", handoff, began, &facts);
    }

    /// Handoffs name regions by their place among all of an agent.
    fn plan_batch(
        &self,
        session: SessionKey,
        batch: &ReadBatch,
    ) -> Result<((RegionId, RegionId), Pieces)> {
        let place = usize::from(batch.region);
        let peer = self.agent.peers.get(&session);
        let theirs = peer.and_then(|peer| peer.regions.as_ref()?.values().nth(place));
        let (Some((&id, ours)), Some(theirs)) = (self.agent.regions.iter().nth(place), theirs)
        else {
            return Err(region_gone());
        };
        let from_ids: Vec<u32> = batch.blocks.iter().map(|block| block.block_id).collect();
        let pieces = coalesce(
            (&ours.layout, &batch.local_ids),
            (&theirs.layout, &from_ids),
        )?;
        Ok(((id, theirs.id), pieces))
    }

    /// For each block of a batch, whether it is here with the checksum that the producer computed.
    fn verify(
        &self,
        handoff: &HandoffId,
        batch: &ReadBatch,
        memory: &Memory,
        layout: &Layout,
    ) -> Vec<bool> {
        let epoch = self.consumer.epoch(handoff).unwrap_or_default();
        let is_verified = |(block, &local): (&ReadyBlock, &u32)| {
            block_bytes(memory, layout, local).is_some_and(|bytes| {
                checksum(handoff, epoch, block.region, block.position, bytes) == block.checksum
            })
        };
        let blocks = batch.blocks.iter().zip(&batch.local_ids);
        blocks.map(is_verified).collect()
    }
}
