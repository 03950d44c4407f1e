//! Handoffs at their consumer: what the state machine says becomes sessions, selects and reads, and the other way round.
//!
//! A load whose session is lost gets one fresh session; a block whose read has failed is read once more, by messages.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::ReadyBlock;
use super::agent::{Event, LoadRequest};
use super::announcements::slice_of;
use super::consumer::Load;
use super::messages::HandoffMessage;
use super::service::HandoffService;
use crate::agent::peers::transport;
use crate::agent::regions::LocalRegion;
use crate::error::{Error, Result};
use crate::ids::HandoffId;
use crate::ids::Incarnation;
use crate::ids::RegionId;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::trace::Track;
use crate::transfer::region::RemoteRegion;

/// What a fresh session may take, that of a peer that lives takes milliseconds. A dead one's load is not to be held up.
const FRESH_WITHIN: Duration = Duration::from_secs(2);

/// A load, besides what the state machine knows of it.
pub(super) struct Loading {
    session: SessionKey,
    /// Where the producer listens.
    producer: String,
    incarnation: Incarnation,
    pub(super) started: Instant,
    /// Whether the producer was asked on this session.
    has_selected: bool,
    /// When it first told of ready blocks.
    pub(super) announced: Option<Instant>,
    /// Why a session was lost, and when a fresh one has to be here.
    lost: Option<(String, Instant)>,
    /// It has failed, and waits for reads to end only.
    has_failed: bool,
}

impl Loading {
    /// When the fresh session that it waits for has to be here.
    fn fresh_by(&self) -> Option<Instant> {
        let is_waiting = !self.has_selected && !self.has_failed;
        let lost = self.lost.as_ref().filter(|_| is_waiting);
        lost.map(|(_, by)| *by)
    }
}

impl HandoffService {
    pub(super) fn load(&mut self, cx: &mut ReactorContext, request: LoadRequest) {
        let handoff = request.handoff;
        self.trace.instant(Track::Reactor, "load", &handoff, &[]);
        let block_bytes = self
            .agent
            .regions
            .values()
            .map(|region| region.layout.block_bytes);
        let load = Load {
            epoch: request.epoch,
            max_batch: slice_of(block_bytes.max().unwrap_or_default()),
            first: request.first,
            block_ids: request.block_ids,
            num_regions: self.agent.regions.len() as u16,
            is_committed: request.is_committed,
        };
        if let Err(error) = self.consumer.begin(handoff, load) {
            let text = format!("load refused: {error}");
            return self.events.push_minor(Event::Log(text));
        }
        let session = self.agent.session_to(cx, &request.producer);
        let loading = Loading {
            session,
            producer: request.producer,
            incarnation: request.incarnation,
            started: cx.now(),
            has_selected: false,
            announced: None,
            lost: None,
            has_failed: false,
        };
        self.loading.insert(handoff, loading);
        if self.agent.regions.is_empty() {
            return self.fail_load(cx, handoff, "no region is registered here");
        }
        self.continue_load(cx, handoff);
    }

    /// Does for a load what can be done now, and ends it if it is over.
    pub(super) fn continue_load(&mut self, cx: &mut ReactorContext, handoff: HandoffId) {
        self.select(cx, handoff);
        self.read_again(cx, handoff);
        self.report_if_verified(cx, handoff);
        self.end_load_if_over(cx, handoff);
    }

    /// The regions of a peer are known: loads from it can go on.
    pub(super) fn regions_known(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let of_it = self.loading.iter();
        let of_it = of_it.filter(|(_, loading)| loading.session == session);
        for handoff in of_it.map(|(handoff, _)| *handoff).collect::<Vec<_>>() {
            self.continue_load(cx, handoff);
        }
    }

    /// Asks the producer for a load's blocks once its regions are known, and nothing of a session before is under way.
    fn select(&mut self, cx: &mut ReactorContext, handoff: HandoffId) {
        let Some(loading) = self.loading.get_mut(&handoff) else {
            return;
        };
        if loading.has_failed || self.consumer.is_reading(&handoff) {
            return;
        }
        let Some(peer) = self.agent.peers.get(&loading.session) else {
            return;
        };
        let Some(theirs) = peer.regions.as_ref().filter(|_| !loading.has_selected) else {
            return;
        };
        loading.has_selected = true;
        if peer.handle.incarnation() != loading.incarnation {
            let reason = "the producer has been restarted";
            self.consumer.fail(&handoff, reason);
        } else if let Some(difference) = region_difference(&self.agent.regions, theirs) {
            self.consumer.fail(&handoff, &difference);
        } else if let Some((first, end)) = self.consumer.select(&handoff) {
            let epoch = self.consumer.epoch(&handoff).unwrap_or_default();
            let select = HandoffMessage::Select { epoch, first, end };
            select.send(cx, loading.session, &handoff);
            let facts = [("first", u64::from(first)), ("end", u64::from(end))];
            self.trace
                .instant(Track::Reactor, "selected", &handoff, &facts);
        }
    }

    /// Reads once more, from the session that is there, what it has not brought.
    fn read_again(&mut self, cx: &mut ReactorContext, handoff: HandoffId) {
        let loading = self.loading.get(&handoff);
        let selected = loading.filter(|loading| loading.has_selected);
        let Some(session) = selected.map(|loading| loading.session) else {
            return;
        };
        if self.agent.is_lost(cx, session) {
            return; // its end, which is about to be reported, leads to a fresh one
        }
        for batch in self.consumer.next_retries(&handoff) {
            self.read_batch(cx, session, handoff, batch);
        }
    }

    pub(super) fn is_loading_from(&self, session: SessionKey, handoff: &HandoffId) -> bool {
        self.loading
            .get(handoff)
            .is_some_and(|loading| loading.session == session)
    }

    pub(super) fn announced(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        handoff: HandoffId,
        epoch: u32,
        blocks: &[ReadyBlock],
    ) -> Result<()> {
        let loading = self.loading.get_mut(&handoff);
        let Some(loading) = loading.filter(|loading| loading.session == session) else {
            return Ok(());
        };
        loading.announced.get_or_insert(cx.now());
        for batch in self.consumer.blocks_announced(&handoff, epoch, blocks)? {
            self.read_batch(cx, session, handoff, batch);
        }
        Ok(())
    }

    pub(super) fn fail_load(&mut self, cx: &mut ReactorContext, handoff: HandoffId, reason: &str) {
        if let Some(loading) = self.loading.get_mut(&handoff) {
            loading.has_failed = true;
        }
        self.consumer.fail(&handoff, reason);
        let closed = Error::Closed(reason.to_owned());
        let batches = self.batches.iter();
        let of_it = batches.filter(|(_, (other, _))| *other == handoff);
        for task in of_it.map(|(task, _)| *task).collect::<Vec<_>>() {
            self.agent.abandon_task(cx, task, &closed);
        }
        self.end_load_if_over(cx, handoff);
    }

    /// Tells the scheduler, which knows of the sequence state first, that it need not wait for this thread.
    fn report_if_verified(&mut self, cx: &ReactorContext, handoff: HandoffId) {
        let Some(verified) = self.consumer.next_verified(&handoff) else {
            return;
        };
        self.trace
            .instant(Track::Reactor, "verified", &handoff, &[]);
        if let Some(loading) = self
            .loading
            .get(&handoff)
            .filter(|_| !verified.is_committed)
        {
            self.events.push(Event::BlocksVerified {
                handoff,
                counts: verified.counts,
                transport: transport(cx, loading.session),
                elapsed: Instant::now().saturating_duration_since(loading.started),
            });
        }
    }

    fn end_load_if_over(&mut self, cx: &mut ReactorContext, handoff: HandoffId) {
        let Some(outcome) = self.consumer.next_outcome(&handoff) else {
            return;
        };
        let Some(loading) = self.loading.remove(&handoff) else {
            return;
        };
        let how = if outcome.failure.is_none() {
            "loaded"
        } else {
            "failed"
        };
        self.trace.instant(Track::Reactor, how, &handoff, &[]);
        let (counts, session) = (outcome.counts, loading.session);
        let transport = transport(cx, session);
        let elapsed = Instant::now().saturating_duration_since(loading.started);
        self.events.push(match outcome.failure {
            None => {
                HandoffMessage::Ack.send(cx, session, &handoff);
                Event::LoadCompleted {
                    handoff,
                    counts,
                    transport,
                    elapsed,
                }
            }
            Some(failure) => Event::LoadFailed {
                handoff,
                counts,
                transport,
                elapsed,
                missing: failure.missing,
                reason: failure.reason,
            },
        });
    }

    pub(super) fn loads_down(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        error: &Error,
    ) {
        let lost = self
            .loading
            .iter()
            .filter(|(_, loading)| loading.session == session);
        let lost: Vec<HandoffId> = lost.map(|(handoff, _)| *handoff).collect();
        for handoff in lost {
            self.session_lost(cx, handoff, error);
        }
    }

    /// A load that had selected gets one fresh session, unless nothing but the sequence state is to come.
    fn session_lost(&mut self, cx: &mut ReactorContext, handoff: HandoffId, error: &Error) {
        let Some(loading) = self.loading.get_mut(&handoff) else {
            return;
        };
        let is_lost = matches!(error, Error::PeerLost { .. } | Error::Timeout(_));
        if let Some((first, _)) = &loading.lost {
            let reason = format!("{first}; asked again: {error}");
            return self.fail_load(cx, handoff, &reason);
        }
        if !is_lost || !loading.has_selected || loading.has_failed {
            return self.fail_load(cx, handoff, &error.to_string());
        }
        if self.consumer.has_all(&handoff) {
            return;
        }
        loading.lost = Some((error.to_string(), cx.now() + FRESH_WITHIN));
        loading.has_selected = false;
        let producer = loading.producer.clone();
        let session = self.agent.session_to(cx, &producer);
        if let Some(loading) = self.loading.get_mut(&handoff) {
            loading.session = session;
        }
        self.continue_load(cx, handoff);
    }

    /// Gives up loads whose fresh session does not come, and tells when to come back.
    pub(super) fn expire_loads(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let late = self.loading.iter().filter_map(|(handoff, loading)| {
            let reason = &loading.lost.as_ref()?.0;
            (loading.fresh_by()? <= cx.now()).then(|| (*handoff, reason.clone()))
        });
        for (handoff, first) in late.collect::<Vec<_>>() {
            let reason = format!("{first}; no fresh session within {FRESH_WITHIN:?}");
            self.fail_load(cx, handoff, &reason);
        }
        self.loading.values().filter_map(Loading::fresh_by).min()
    }
}

fn region_difference(
    ours: &BTreeMap<RegionId, LocalRegion>,
    theirs: &BTreeMap<RegionId, RemoteRegion>,
) -> Option<String> {
    if ours.len() != theirs.len() {
        return Some(format!(
            "{} regions here, {} there",
            ours.len(),
            theirs.len()
        ));
    }
    let differs = |(ours, theirs): (&LocalRegion, &RemoteRegion)| {
        let (here, there) = (ours.layout.block_bytes, theirs.layout.block_bytes);
        (ours.name != theirs.name || here != there).then(|| {
            format!(
                "region {:?} of {here}-byte blocks here, {:?} of {there} there",
                ours.name, theirs.name
            )
        })
    };
    ours.values().zip(theirs.values()).find_map(differs)
}
