//! Handoffs, as other threads ask for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::event_waiter::DeviceEvent;
use super::load_request::{LoadPart, LoadRequest};
use super::ready::{ReadyBlocks, check_positions};
use super::service::HandoffCommand;
use super::shared::Event;
use crate::blocks::{Agent, AgentCommand, Region};
use crate::error::{Error, Result};
use crate::ids::{HandoffId, RegionId};
use crate::integrity::Integrity;
use crate::sync::lock;
use crate::trace::Trace;
use crate::transfer::region::Slice;

impl Agent {
    fn check_integrity(&self) -> Result<()> {
        if self.integrity != Integrity::None {
            return Ok(());
        }
        let text = "integrity=none: a handoff is always verified; set auto, checksum or validate";
        Err(Error::Config(text.to_owned()))
    }

    fn send_handoff(&self, command: HandoffCommand) -> Result<()> {
        self.reactor.send(AgentCommand::Handoff(command))
    }

    /// Producer: what a step makes ready is ready in these regions, each of which is named once for a step.
    ///
    /// # Errors
    /// A region is another agent's, or was closed; the agent has no handoffs.
    pub fn mark_ready(&self, ready: &ReadyBlocks, regions: &[Region]) -> Result<()> {
        let regions = self.checked(regions)?;
        self.send_handoff(HandoffCommand::MarkReady(ready.clone(), regions))
    }

    /// As [`mark_ready`](Self::mark_ready), once an event and those of earlier calls are completed. Does not wait. Should the
    /// event fail, the handoffs end with the reason.
    ///
    /// # Errors
    /// As `mark_ready`.
    pub fn mark_ready_after(
        &self,
        event: Arc<dyn DeviceEvent>,
        ready: &ReadyBlocks,
        regions: &[Region],
    ) -> Result<()> {
        self.events.check()?;
        let (ready, regions) = (ready.clone(), self.checked(regions)?);
        let (queue, shared) = (self.reactor.command_handle(), Arc::clone(&self.handoffs));
        let send = move |command| drop(queue.send(AgentCommand::Handoff(command)));
        let then = move |completed: std::result::Result<(), String>| {
            let Err(reason) = completed else {
                return send(HandoffCommand::MarkReady(ready, regions));
            };
            let reason = format!("the device did not complete what computes the blocks: {reason}");
            shared.log_line(format!("event.failed {reason}"));
            for handoff in ready.handoffs() {
                shared.mark_ended(handoff);
                let reason = reason.clone();
                send(HandoffCommand::End { handoff, reason });
            }
        };
        self.events.after(event, Box::new(then));
        Ok(())
    }

    fn checked<'r>(&self, regions: impl IntoIterator<Item = &'r Region>) -> Result<Vec<RegionId>> {
        self.check_integrity()?;
        let checked = |region: &Region| region.check(self.incarnation()).map(|()| region.id());
        regions.into_iter().map(checked).collect()
    }

    /// Producer: the blocks of a handoff may change from now on.
    ///
    /// Marked before this returns: a checksum that is being computed over blocks that change meanwhile is discarded, and a
    /// consumer that asks whether the grant holds is answered that it does not.
    pub fn end(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.handoffs.mark_ended(handoff);
        self.send_handoff(HandoffCommand::End {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: begins to load; `LoadCompleted` or `LoadFailed` follows exactly once. A handoff that is being loaded is
    /// refused, with a `Log` event.
    pub fn load(&self, request: LoadRequest) -> Result<()> {
        self.begin_load(request, None)
    }

    /// As [`load`](Self::load), and nothing is written into its blocks before an event and those of earlier calls are
    /// completed. Does not wait. Should the event fail, the load fails with the reason.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_after(&self, event: Arc<dyn DeviceEvent>, request: LoadRequest) -> Result<()> {
        self.events.check()?;
        let (load, queue) = (request.id(), self.reactor.command_handle());
        let gate = self.next_gate.fetch_add(1, Ordering::Relaxed);
        self.begin_load(request, Some(gate))?;
        let then = move |completed| {
            let command = HandoffCommand::OpenGate {
                load,
                gate,
                completed,
            };
            drop(queue.send(AgentCommand::Handoff(command)));
        };
        self.events.after(event, Box::new(then));
        Ok(())
    }

    fn begin_load(&self, request: LoadRequest, gate: Option<u64>) -> Result<()> {
        self.check_integrity()?;
        for slice in [request.destination_slice, request.source_slice] {
            slice.map(Slice::check).transpose()?;
        }
        for part in &request.parts {
            check_positions(part.first, part.block_ids.len())?;
        }
        let regions = request.parts.iter().flat_map(|part| part.regions.iter());
        let mut regions = self.checked(regions.flatten())?;
        let num_regions = regions.len();
        regions.sort_unstable();
        regions.dedup();
        if regions.len() < num_regions || request.parts.iter().any(LoadPart::has_no_region) {
            let text = "a load has parts without a region, or with one that another part has";
            return Err(Error::Config(text.to_owned()));
        }
        self.send_handoff(HandoffCommand::Load(request, gate))
    }

    /// Consumer: the sequence state of a handoff is here.
    pub fn commit(&self, handoff: HandoffId) -> Result<()> {
        self.send_handoff(HandoffCommand::Commit { handoff })
    }

    /// Consumer: ends a load; `LoadFailed` follows once nothing writes into its blocks any more. With `is_withdrawn`
    /// every block counts as missing: the producer has withdrawn it, or it is not needed. The producer is not asked.
    pub fn cancel(&self, handoff: HandoffId, reason: &str, is_withdrawn: bool) -> Result<()> {
        self.send_handoff(HandoffCommand::Cancel {
            handoff,
            reason: reason.to_owned(),
            is_withdrawn,
        })
    }

    /// Traces handoffs from now on.
    pub fn trace_to(&self, trace: Trace) -> Result<()> {
        self.send_handoff(HandoffCommand::Trace(trace))
    }

    /// Events since the last call.
    pub fn drain(&self) -> Vec<Event> {
        self.handoffs.events.drain()
    }

    /// Number of handoffs whose blocks are leased.
    pub fn num_leased(&self) -> usize {
        self.handoffs.num_leased.load(Ordering::Relaxed)
    }

    /// Number of sessions in which this side reads its peer's memory, and of those in which it gets streams.
    pub fn num_sessions(&self) -> (usize, usize) {
        *lock(&self.handoffs.num_sessions)
    }
}

#[cfg(test)]
mod event_tests;
#[cfg(test)]
mod late_tests;
#[cfg(test)]
mod tests;
