//! Handoffs at their producer, and what either side says: what the state machine says becomes messages, and the other
//! way round. The consumer's side is in `loads.rs`.

use std::sync::atomic::Ordering;

use super::Event;
use super::messages::{
    BLOCKS_READY, HANDOFF_ENDED, REASON_CAP, SELECT, read_ready_blocks, ready_blocks, reason,
};
use super::ready::ReadyRange;
use super::service::Blocks;
use crate::error::Result;
use crate::handoff::producer::{BlockSelection, ProducerAction};
use crate::handoff::{HandoffId, ReadyBlock, checksum};
use crate::net::codec::{Reader, Writer};
use crate::reactor::{ReactorContext, SessionKey};
use crate::trace::Track;
use crate::transfer::region::{Layout, RegionId};
use crate::transport::{Memory, Payload};

/// Bytes of one slice of work on checksums: about a millisecond, which sockets and other handoffs wait at most.
const SLICE: u64 = 8 << 20;

/// The producer.
impl Blocks {
    /// Takes the next slice of blocks that are ready, in the regions in which they are, and tells who has selected
    /// them; whether more are left.
    pub(super) fn finalize_on(&mut self, cx: &mut ReactorContext) -> bool {
        let known = &self.regions;
        let num_blocks = |regions: &[RegionId]| {
            let known = regions.iter().filter_map(|region| known.get(region));
            slice_of(known.map(|region| region.layout.block_bytes).sum())
        };
        let Some((part, regions)) = self.ready.slice(num_blocks) else {
            return false;
        };
        let began = self.trace.now();
        match self.checksums(&part, &regions) {
            // Marked before the blocks could change: unmarked now, they did not change while they were read.
            Ok(_) if self.ended.is_marked(&part.handoff) => {}
            Ok(blocks) => {
                let actions = self.producer.mark_ready(part.handoff, part.epoch, &blocks);
                self.act(cx, actions);
                let before = regions
                    .first()
                    .map_or(0, |id| self.regions.range(..id).count());
                let facts = [
                    ("layer", before as u64),
                    ("first", u64::from(part.first)),
                    ("blocks", part.block_ids.len() as u64),
                    ("layers", regions.len() as u64),
                ];
                self.trace
                    .span(Track::Reactor, "announced", &part.handoff, began, &facts);
            }
            Err(reason) => self.end(cx, part.handoff, &reason),
        }
        !self.ready.is_empty()
    }

    fn checksums(
        &self,
        part: &ReadyRange,
        regions: &[RegionId],
    ) -> std::result::Result<Vec<ReadyBlock>, String> {
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be leased".to_owned());
            };
            let region = self.regions.range(..id).count() as u16;
            for (&block_id, position) in part.block_ids.iter().zip(part.first..) {
                let Some(bytes) = block_bytes(&local.memory, &local.layout, block_id) else {
                    return Err(format!(
                        "block {block_id} cannot be leased: it is not in region {:?}",
                        local.name
                    ));
                };
                blocks.push(ReadyBlock {
                    region,
                    position,
                    block_id,
                    checksum: checksum(&part.handoff, part.epoch, region, position, bytes),
                });
            }
        }
        Ok(blocks)
    }

    pub(super) fn end(&mut self, cx: &mut ReactorContext, handoff: HandoffId, reason: &str) {
        self.trace.instant(Track::Reactor, "ended", &handoff, &[]);
        self.ready.forget(&handoff);
        let actions = self.producer.end_handoff(handoff, reason);
        self.act(cx, actions);
    }

    pub(super) fn act(&mut self, cx: &mut ReactorContext, actions: Vec<ProducerAction>) {
        for action in actions {
            match action {
                ProducerAction::Announce {
                    session,
                    handoff,
                    epoch,
                    blocks,
                } => {
                    let header = cx.header(session, BLOCKS_READY).raw(&handoff).u32(epoch);
                    cx.message(session, header, Payload::Bytes(ready_blocks(&blocks)));
                }
                ProducerAction::End {
                    session,
                    handoff,
                    reason,
                } => {
                    let header = cx.header(session, HANDOFF_ENDED).raw(&handoff);
                    let text = Writer::default().text(&reason, REASON_CAP).finish();
                    cx.message(session, header, Payload::Bytes(text));
                }
            }
        }
        let num_leased = self.producer.num_leased();
        self.shared.num_leased.store(num_leased, Ordering::Relaxed);
    }
}

/// What the other side says.
impl Blocks {
    pub(super) fn handoff_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        let handoff = header.fixed()?;
        match kind {
            SELECT => {
                let _generation = header.u32()?;
                let (first, end) = (header.u32()?, header.u32()?);
                header.end()?;
                let selection = BlockSelection {
                    session,
                    handoff,
                    first,
                    end,
                };
                let actions = self.producer.select(selection, cx.now);
                self.act(cx, actions);
            }
            BLOCKS_READY => {
                let epoch = header.u32()?;
                header.end()?;
                self.announced(cx, session, handoff, epoch, &read_ready_blocks(data)?)?;
            }
            HANDOFF_ENDED => {
                header.end()?;
                let text = reason(data)?;
                if self.is_loading_from(session, &handoff) {
                    self.consumer.withdraw(&handoff);
                    self.fail_load(cx, handoff, &text);
                }
            }
            _ => {
                header.end()?;
                if self.producer.acknowledge(session, handoff) {
                    self.trace
                        .instant(Track::Reactor, "acknowledged", &handoff, &[]);
                    self.events.push(Event::Acknowledged { handoff });
                    self.act(cx, Vec::new());
                }
            }
        }
        Ok(())
    }
}

/// How many blocks of this size make a slice of work.
pub(super) fn slice_of(block_bytes: u64) -> usize {
    (SLICE / block_bytes.max(1)).max(1) as usize
}

pub(super) fn block_bytes<'m>(memory: &'m Memory, layout: &Layout, id: u32) -> Option<&'m [u8]> {
    let at = layout.offset(id).ok()?;
    memory
        .buffer()
        .bytes(at as usize, layout.block_bytes as usize)
}
