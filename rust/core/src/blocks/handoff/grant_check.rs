//! The question whether a grant still holds, at the consumer that asks it and at the producer that answers.

#[cfg(test)]
mod tests;

use std::time::Duration;

use super::load_request::LoadId;
use super::messages::HandoffMessage;
use super::producer::Producer;
use super::service::HandoffService;
use super::shared::HandoffShared;
use crate::blocks::regions::grant;
use crate::error::FailureCause;
use crate::ids::{Epoch, HandoffId, SessionKey};
use crate::transfer::Cx;

/// Timeout of the answer for a load that has ended. Its blocks may still count, and must not occupy the consumer for
/// long.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The consumer.
impl HandoffService {
    /// Asks the producer whether a load's grant still holds, once nothing of the load is being read.
    pub(super) fn validate(&mut self, cx: &mut Cx<'_>, id: LoadId) {
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        let Some(epoch) = active.load.epoch_to_validate() else {
            return;
        };
        let has_ended = active.load.has_ended();
        if !active.has_selected || self.agent.is_lost(cx.links, active.session()) {
            // A load that has not ended asks on a fresh session.
            if has_ended {
                active.load.cannot_validate();
            }
            return;
        }
        let question = cx.links.token();
        HandoffMessage::Validate { epoch, question }.send(cx.links, active.session(), &id.handoff);
        active.load.validation_asked(question);
        if has_ended {
            let answer_by = cx.links.now() + ANSWER_WITHIN;
            self.loads.set_deadline(id, answer_by);
        }
    }

    /// The producer has answered.
    pub(super) fn validated(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        handoff: HandoffId,
        question: u64,
        is_valid: bool,
    ) {
        let Some(id) = self.loads.at(session, handoff) else {
            return;
        };
        let Some(active) = self.loads.get_mut(&id) else {
            return;
        };
        if !active.load.validation_answered(question, is_valid) {
            return;
        }
        if is_valid {
            return self.continue_load(cx, id);
        }
        let reason = "the producer ended the handoff before its blocks were validated";
        self.fail_load(cx, id, FailureCause::Ended, reason);
    }
}

/// True if blocks may be read under a grant, which READ names.
pub(super) fn grant_holds(producer: &Producer, shared: &HandoffShared, named: u64) -> bool {
    let mut granted = producer.granted();
    granted.any(|(handoff, epoch)| grant(epoch) == named && !shared.has_ended(handoff))
}

/// The producer.
impl HandoffService {
    /// Answers whether a grant holds: every read that ended before the question has got what was ready then.
    pub(super) fn answer_validate(
        &self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        handoff: HandoffId,
        epoch: Epoch,
        question: u64,
    ) {
        // An end is marked before a block changes, and processed later.
        let is_valid =
            self.producer.is_granted(&handoff, epoch) && !self.shared.has_ended(&handoff);
        let answer = if is_valid {
            HandoffMessage::Valid { question }
        } else {
            HandoffMessage::Invalid { question }
        };
        answer.send(cx.links, session, &handoff);
    }
}
