//! Handoffs at their consumer: carries out the decisions of the state machine by sessions, selections and reads, and
//! feeds it their outcomes.
//!
//! A load whose session is lost gets one fresh session; a block whose read has failed is read once more, as a stream.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use kvpipe_ucx::Digests;

use super::ReadyBlock;
use super::active_loads::ActiveLoad;
use super::announcements::slice_of;
use super::grant_check::ANSWER_WITHIN;
use super::load::{Load, Unreadable};
use super::load_request::{LoadId, LoadRequest};
use super::messages::HandoffMessage;
use super::service::HandoffService;
use super::shared::Event;
use crate::blocks::Region;
use crate::blocks::regions::LocalRegion;
use crate::error::{Error, FailureCause};
use crate::ids::{Epoch, HandoffId, RegionId, SessionKey};
use crate::integrity::Integrity;
use crate::trace::Track;
use crate::transfer::Cx;
use crate::transfer::region::{RemoteRegion, Slice};

/// Deadline for a fresh session. A live peer needs milliseconds, and a dead one must not hold up its loads.
const FRESH_WITHIN: Duration = Duration::from_secs(2);

const REFUSES_VALIDATE: &str = "the producer has integrity=validate, and this side integrity=checksum: set auto or validate \
                                here, or checksum there";

impl HandoffService {
    pub(super) fn load(&mut self, cx: &mut Cx<'_>, request: LoadRequest, gate: Option<u64>) {
        let id = request.id();
        self.trace.instant(Track::Reactor, "load", &id.handoff, &[]);
        if self.loads.get(&id).is_some() {
            let text = "load refused: this handoff is being loaded already";
            return self.log_line(text.to_owned());
        }
        let (ours, failure) = match self.destinations(cx, &request) {
            Ok(ours) => (ours, None),
            Err(error) => (vec![Vec::new(); request.parts.len()], Some(error)),
        };
        let known = self.agent.regions.values();
        let block_bytes = known.map(|region| region.layout.block_bytes);
        let max_batch = slice_of(block_bytes.max().unwrap_or_default());
        let max_batch = max_batch.min(Digests::BLOCKS_CAP);
        let session = self.agent.session_to(cx.links, &request.producer);
        let load = Load::new(request, ours, max_batch);
        let mut active = ActiveLoad::new(load, session, cx.links.now());
        active.gate = gate;
        self.loads.insert(active);
        if let Some(error) = failure {
            self.withdraw_load(id);
            return self.fail_load(cx, id, FailureCause::Other, &error.to_string());
        }
        self.continue_load(cx, id);
    }

    /// The regions into which a load reads, part by part.
    ///
    /// # Errors
    /// There is none, or blocks have no such slices.
    fn destinations(
        &mut self,
        cx: &mut Cx<'_>,
        request: &LoadRequest,
    ) -> Result<Vec<Vec<RegionId>>, Error> {
        let regions = &self.agent.regions;
        let wholes = regions.iter().filter(|(_, region)| region.is_whole());
        let wholes: Vec<RegionId> = wholes.map(|(id, _)| *id).collect();
        if wholes.is_empty() {
            return Err(Error::Config("no region is registered here".to_owned()));
        }
        let num_before = regions.len();
        let parts = request.parts.iter().map(|part| match &part.regions {
            Some(regions) => regions.iter().map(Region::id).collect(),
            None => wholes.clone(),
        });
        let mut parts: Vec<Vec<RegionId>> = parts.collect();
        if let Some(Slice { index, count }) = request.destination_slice {
            for region in parts.iter_mut().flatten() {
                *region = self.agent.division(*region, count)?.slices[index as usize];
            }
        }
        if self.agent.regions.len() > num_before {
            self.agent.send_regions(cx);
        }
        Ok(parts)
    }

    /// Opens the gate of a load: the event that it waited for has ended. A later load of the same handoff has another gate.
    pub(super) fn open_gate(
        &mut self,
        cx: &mut Cx<'_>,
        id: LoadId,
        gate: u64,
        completed: Result<(), String>,
    ) {
        let active = self.loads.get_mut(&id);
        let Some(active) = active.filter(|active| active.gate == Some(gate)) else {
            return;
        };
        match completed {
            Ok(()) => {
                active.gate = None;
                self.continue_load(cx, id);
            }
            Err(reason) => {
                let reason = format!("the device did not complete what uses the blocks: {reason}");
                self.log_line(format!("event.failed {reason}"));
                self.fail_load(cx, id, FailureCause::Other, &reason);
            }
        }
    }

    /// Continues a load as far as possible, and ends it if it is over.
    pub(super) fn continue_load(&mut self, cx: &mut Cx<'_>, id: LoadId) {
        self.select(cx, id);
        self.read_again(cx, id);
        self.report(cx, id);
    }

    /// Asks the producer for a load's blocks once its regions are known, and divided if they have to be, and nothing of a
    /// session before is under way.
    fn select(&mut self, cx: &mut Cx<'_>, id: LoadId) {
        let Some(active) = self.loads.get(&id) else {
            return;
        };
        let is_gated = active.gate.is_some();
        if is_gated || active.has_selected || active.load.has_ended() || active.load.is_reading() {
            return;
        }
        let (session, slice) = (active.session(), active.load.request.source_slice);
        let peer = self.agent.peers.get(&session);
        let Some(theirs) = peer.and_then(|peer| peer.regions.clone()) else {
            return;
        };
        let divided = slice.map_or(Some(Ok(())), |slice| {
            self.agent.ask_to_divide(cx, session, slice.count)
        });
        let (Some(divided), Some(peer)) = (divided, self.agent.peers.get(&session)) else {
            return;
        };
        self.loads.cancel_deadline(id);
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        active.has_selected = true;
        let load = &mut active.load;
        if peer.handle.incarnation() != load.request.incarnation {
            // It knows no grant of its former incarnation.
            load.cannot_validate();
            return load.fail(FailureCause::Lost, "the producer has been restarted");
        }
        if let Err(refusal) = divided {
            let reason = format!("the producer cannot divide its blocks: {refusal}");
            return load.fail(FailureCause::Refused, &reason);
        }
        let theirs = theirs.iter().filter(|region| region.slice == slice);
        let theirs: Vec<&RemoteRegion> = theirs.map(|region| &**region).collect();
        let parts = &load.request.parts;
        if parts.iter().any(|part| part.regions.is_none()) && load.regions().len() != theirs.len() {
            let (num_ours, num_theirs) = (load.regions().len(), theirs.len());
            let difference = format!("{num_ours} regions here, {num_theirs} there");
            return load.fail(FailureCause::Refused, &difference);
        }
        let theirs = match same_regions(&self.agent.regions, load.regions(), &theirs) {
            Ok(theirs) => theirs,
            Err(difference) => return load.fail(FailureCause::Refused, &difference),
        };
        let parts = load.select(&theirs);
        let facts = parts.first().map(|part| {
            let (first, end) = (u64::from(part.first), u64::from(part.end));
            [("first", first), ("end", end)]
        });
        let facts = facts.as_ref().map_or(&[][..], |facts| facts);
        let select = HandoffMessage::Select {
            parts,
            first_block_timeout: self.first_block_timeout,
        };
        select.send(cx.links, session, &id.handoff);
        self.trace
            .instant(Track::Reactor, "selected", &id.handoff, facts);
    }

    /// Reads once more, from the present session, the blocks whose reads have failed.
    fn read_again(&mut self, cx: &mut Cx<'_>, id: LoadId) {
        let active = self.loads.get_mut(&id);
        let Some(active) = active.filter(|active| active.has_selected) else {
            return;
        };
        let session = active.session();
        if self.agent.is_lost(cx.links, session) {
            return; // its end, which is about to be reported, leads to a fresh one
        }
        let batches = active.load.next_retries();
        self.read_batches(cx, session, id, batches);
    }

    pub(super) fn blocks_announced(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        handoff: HandoffId,
        epoch: Epoch,
        blocks: &[ReadyBlock],
    ) {
        let Some(id) = self.loads.at(session, handoff) else {
            return;
        };
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        active.announced.get_or_insert(cx.links.now());
        if self.integrity == Integrity::Checksum && blocks.iter().any(|it| it.checksum.is_none()) {
            return self.fail_load(cx, id, FailureCause::Refused, REFUSES_VALIDATE);
        }
        match active.load.blocks_announced(epoch, blocks) {
            Ok(batches) => self.read_batches(cx, session, id, batches),
            Err(Unreadable::Region(region)) => {
                let name = self.region_name(session, region);
                let reason = format!("{name} of the producer was closed or registered meanwhile");
                self.fail_load(cx, id, FailureCause::Ended, &reason);
            }
            Err(Unreadable::Epoch) => {
                self.withdraw_load(id);
                let reason = "the producer ended the handoff, and began it again";
                self.fail_load(cx, id, FailureCause::Ended, reason);
            }
        }
    }

    fn region_name(&self, session: SessionKey, id: RegionId) -> String {
        let peer = self.agent.peers.get(&session);
        match peer.and_then(|peer| peer.region(id)) {
            Some(region) => format!("region {:?}", region.name),
            None => format!("region {id}"),
        }
    }

    /// The producer has described its regions again: a load that lacks blocks of one that was closed fails.
    pub(super) fn regions_described(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        for id in self.loads.of_session(session) {
            match self.closed_region(session, id) {
                Some(name) => {
                    let reason = format!("region {name:?} was closed by the producer");
                    self.fail_load(cx, id, FailureCause::Ended, &reason);
                }
                None => self.continue_load(cx, id),
            }
        }
    }

    /// The name of a region that the producer has closed, and of which a load lacks blocks.
    fn closed_region(&self, session: SessionKey, id: LoadId) -> Option<String> {
        let active = self.loads.get(&id);
        let active = active.filter(|active| active.has_selected)?;
        let peer = self.agent.peers.get(&session)?;
        let open = |id: &RegionId| peer.region(*id).is_some();
        let ours = active.load.lacked_region(open)?;
        Some(self.agent.regions.get(&ours)?.name.clone())
    }

    pub(super) fn withdraw_load(&mut self, id: LoadId) {
        if let Some(active) = self.loads.get_mut(&id) {
            active.load.withdraw();
            self.loads.cancel_deadline(id);
        }
    }

    pub(super) fn fail_load(
        &mut self,
        cx: &mut Cx<'_>,
        id: LoadId,
        cause: FailureCause,
        reason: &str,
    ) {
        if let Some(active) = self.loads.get_mut(&id) {
            let had_ended = active.load.has_ended();
            active.load.fail(cause, reason);
            let closed = Error::Closed(reason.to_owned());
            for token in &active.batches {
                if let Some(reading) = self.batches.get(token) {
                    cx.transfers.fail(cx.links, reading.transfer, &closed);
                }
            }
            let is_asked = active.load.awaits_validation();
            // The answer to one that had ended before has its deadline.
            if !had_ended && is_asked {
                self.loads.set_deadline(id, cx.links.now() + ANSWER_WITHIN);
            } else if !had_ended {
                self.loads.cancel_deadline(id);
            }
        }
        self.report(cx, id);
    }

    /// Reports what has become known of a load: that its blocks are verified, then how it ended.
    fn report(&mut self, cx: &mut Cx<'_>, id: LoadId) {
        self.validate(cx, id);
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        let verified = active.load.next_verified();
        let outcome = active.load.outcome();
        let events = &self.shared.events;
        if let Some(counts) = verified {
            self.trace
                .instant(Track::Reactor, "verified", &id.handoff, &[]);
            // The scheduler knows of the sequence state first, and need not wait for this thread.
            if !active.load.request.is_committed {
                events.push(Event::BlocksVerified(active.report(cx.links, counts)));
            }
        }
        let Some(outcome) = outcome else {
            return;
        };
        let report = active.report(cx.links, outcome.counts);
        match outcome.failure {
            None => {
                self.trace
                    .instant(Track::Reactor, "loaded", &id.handoff, &[]);
                if !active.load.request.is_shared {
                    HandoffMessage::Ack.send(cx.links, active.session(), &id.handoff);
                }
                events.push(Event::LoadCompleted(report));
            }
            Some(failure) => {
                self.trace
                    .instant(Track::Reactor, "failed", &id.handoff, &[]);
                events.push(Event::LoadFailed(report, failure));
            }
        }
        self.loads.remove(id);
    }

    /// A load that had selected gets one fresh session, unless nothing but the sequence state is to come.
    pub(super) fn session_lost(&mut self, cx: &mut Cx<'_>, id: LoadId, error: &Error) {
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        active.load.session_lost();
        if let Some(first) = &active.lost {
            let reason = format!("{first}; asked again: {error}");
            return self.fail_load(cx, id, error.cause(), &reason);
        }
        let is_lost = matches!(error, Error::PeerLost { .. } | Error::Timeout(_));
        if !is_lost || !active.has_selected || active.load.has_ended() {
            return self.fail_load(cx, id, error.cause(), &error.to_string());
        }
        if active.load.is_complete() && !active.load.needs_validation() {
            return;
        }
        active.lost = Some(error.to_string());
        active.has_selected = false;
        let fresh = self
            .agent
            .session_to(cx.links, &active.load.request.producer);
        self.loads.set_session(id, fresh);
        self.loads.set_deadline(id, cx.links.now() + FRESH_WITHIN);
        self.continue_load(cx, id);
    }

    /// Gives up loads whose fresh session or whose answer does not come.
    pub(super) fn expire_loads(&mut self, cx: &mut Cx<'_>) {
        while let Some(id) = self.loads.pop_expired(cx.links.now()) {
            let Some(active) = self.loads.get_mut(&id) else {
                continue;
            };
            if active.load.has_ended() {
                active.load.cannot_validate();
                self.report(cx, id);
            } else if let Some(lost) = &active.lost {
                let reason = format!("{lost}; no fresh session within {FRESH_WITHIN:?}");
                self.fail_load(cx, id, FailureCause::Lost, &reason);
            }
        }
    }
}

/// For each of our regions, the producer's of the same name.
///
/// # Errors
/// The producer lacks one of them or has other blocks in it, or ours have changed since the load began.
fn same_regions(
    open: &BTreeMap<RegionId, LocalRegion>,
    ours: &[RegionId],
    theirs: &[&RemoteRegion],
) -> Result<Vec<RegionId>, String> {
    let by_name: HashMap<&str, &RemoteRegion> = theirs
        .iter()
        .map(|theirs| (&*theirs.name, *theirs))
        .collect();
    let same = |ours: &RegionId| {
        let ours = open.get(ours).ok_or("a region was closed here")?;
        let name = &ours.name;
        let theirs = by_name
            .get(&**name)
            .ok_or_else(|| format!("region {name:?} is here and not there"))?;
        let (here, there) = (ours.layout.block_bytes, theirs.layout.block_bytes);
        if here != there {
            return Err(format!(
                "region {name:?} has blocks of {here} bytes here, of {there} there"
            ));
        }
        Ok(theirs.id)
    };
    ours.iter().map(same).collect()
}
