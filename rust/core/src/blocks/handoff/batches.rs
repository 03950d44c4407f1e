//! Batches of a load: reads of blocks of one region, and the comparison of what has come with the producer's checksums.

use std::sync::Arc;
use std::time::Instant;

use super::announcements::block_bytes;
use super::digests::{Digested, device_block, is_on_device};
use super::load::ReadBatch;
use super::load_request::LoadId;
use super::service::HandoffService;
use super::{Places, ReadyBlock, checksum_at};
use crate::blocks::Peer;
use crate::blocks::plan::region_gone;
use crate::blocks::reads::{BlockTransfer, outcome_of};
use crate::blocks::regions::grant;
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::transfer::Cx;
use crate::transfer::region::{Layout, coalesce};
use crate::transfer::steps::Steps;
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

/// A batch whose bytes are here.
pub(super) struct ArrivedBatch {
    reading: ActiveBatch,
    memory: Arc<Memory>,
    num_bytes: u64,
    steps: Steps,
}

impl ArrivedBatch {
    /// For each block, whether it is here with the checksum that the producer computed, if it has one. `checksum` is that
    /// of the block with this index at a place.
    fn verified(&self, checksum: impl Fn(usize, RunningChecksum) -> Option<u64>) -> Vec<bool> {
        let ActiveBatch { load, batch, .. } = &self.reading;
        let places = Places::new(&load.handoff, batch.epoch);
        let is_verified = |(index, block): (usize, &ReadyBlock)| {
            let place = places.at(block.region, block.position);
            let theirs = block.checksum;
            theirs.is_none_or(|theirs| checksum(index, place) == Some(theirs))
        };
        let blocks = batch.blocks.iter().enumerate();
        blocks.map(is_verified).collect()
    }
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
            checksums: if batch.has_checksums() {
                Checksums::OfCopies
            } else {
                // The parts of a stream have some.
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
        if let Some(active) = self.loads.get_mut(&reading.load) {
            active.batches.remove(&completion.owner);
        }
        let num_bytes = completion.pieces.num_bytes;
        if let Err(error) = outcome_of(completion.outcome, &completion.pieces) {
            return self.batch_failed(cx, &reading, error);
        }
        let arrived = ArrivedBatch {
            memory: completion.memory,
            num_bytes,
            steps: completion.steps,
            reading,
        };
        let (batch, layout) = (&arrived.reading.batch, &arrived.reading.layout);
        if is_on_device(&arrived.memory) && batch.blocks.iter().any(|it| it.checksum.is_some()) {
            if let Some(chunks) = completion.digests
                && let Some(of_blocks) = self.join_digests(layout.block_bytes, &chunks)
            {
                let to_ids = &completion.pieces.to_ids;
                let digests = batch.local_ids.iter().filter_map(|id| {
                    let index = to_ids.binary_search(id).ok()?;
                    of_blocks.get(index).copied()
                });
                let digests = digests.collect();
                return self.batch_digested(cx, &arrived, Ok(digests));
            }
            let blocks = batch.local_ids.iter();
            let blocks = blocks.filter_map(|id| device_block(&arrived.memory, layout, *id));
            let blocks = blocks.collect();
            return self.digest(cx, blocks, Digested::Batch(arrived));
        }
        let verified = arrived.verified(|index, place| {
            let bytes = block_bytes(&arrived.memory, layout, batch.local_ids[index])?;
            Some(checksum_at(place, bytes))
        });
        self.batch_verified(cx, &arrived, &verified);
    }

    /// The digests of the blocks of a batch are known, or will not be.
    pub(super) fn batch_digested(
        &mut self,
        cx: &mut Cx<'_>,
        arrived: &ArrivedBatch,
        digests: std::result::Result<Vec<u64>, String>,
    ) {
        let digests = match digests {
            Ok(digests) => digests,
            Err(reason) => {
                return self.batch_failed(cx, &arrived.reading, Error::Unavailable(reason));
            }
        };
        let block_bytes = arrived.reading.layout.block_bytes;
        let verified = arrived.verified(|index, place| {
            let digest = digests.get(index)?;
            self.digests.checksum(place, block_bytes, *digest)
        });
        self.batch_verified(cx, arrived, &verified);
    }

    fn batch_verified(&mut self, cx: &mut Cx<'_>, arrived: &ArrivedBatch, verified: &[bool]) {
        let (reading, num_bytes) = (&arrived.reading, arrived.num_bytes);
        let (id, batch) = (reading.load, &reading.batch);
        self.agent
            .service_read_ends(&reading.peer, batch.region, &Ok(num_bytes));
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        let num_verified = verified.iter().filter(|is_verified| **is_verified).count();
        let facts = [
            ("layer", batch.place as u64),
            ("blocks", verified.len() as u64),
            ("verified", num_verified as u64),
            ("bytes", num_bytes),
        ];
        let now = Instant::now();
        let whole = ("arrived", arrived.steps.began(), now);
        self.trace.overlapping(&id.handoff, whole, &facts);
        let reported = arrived.steps.spans().last();
        let compared = reported.map(|(_, _, reported)| ("compared", reported, now));
        for step in arrived.steps.spans().chain(compared) {
            self.trace.overlapping(&id.handoff, step, &facts[..2]);
        }
        active.load.read_completed(batch, verified, num_bytes);
        active.catch_up();
        self.continue_load(cx, id);
    }

    fn batch_failed(&mut self, cx: &mut Cx<'_>, reading: &ActiveBatch, error: Error) {
        let (id, batch) = (reading.load, &reading.batch);
        let reason = error.to_string();
        self.agent
            .service_read_ends(&reading.peer, batch.region, &Err(error));
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        active.load.read_failed(batch, &reason);
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
