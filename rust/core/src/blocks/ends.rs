//! Ends of transfers that come from elsewhere: their user, their load, their session, the clock.

use std::time::Duration;

use super::service::Blocks;
use super::transfer::{Owner, Transfer};
use crate::error::Error;
use crate::handoff::HandoffId;
use crate::reactor::{ReactorContext, SessionKey};

/// What is on its way to a load that has ended has to be here within this time.
const REST_WITHIN: Duration = Duration::from_secs(2);

impl Blocks {
    /// Fails transfers that have not begun.
    pub(super) fn withdraw_takes(
        &mut self,
        cx: &mut ReactorContext,
        is_affected: impl Fn(&Transfer) -> bool,
        error: &Error,
    ) {
        let mut affected = Vec::new();
        for (id, transfer) in &mut self.transfers {
            if !transfer.is_started && is_affected(transfer) {
                transfer.failure.get_or_insert(error.clone());
                affected.push((transfer.session, *id));
            }
        }
        for (session, id) in affected {
            self.settle(cx, session, id);
        }
    }

    /// Ends what a load need not wait for: reads that have not begun, and gets that are not posted.
    pub(super) fn abandon_reads(
        &mut self,
        cx: &mut ReactorContext,
        handoff: &HandoffId,
        reason: &str,
    ) {
        let is_theirs =
            |owner: &Owner| matches!(owner, Owner::Handoff(other, _) if other == handoff);
        let mut affected = Vec::new();
        for (id, transfer) in &mut self.transfers {
            if !is_theirs(&transfer.owner) {
                continue;
            }
            if transfer.incoming.is_some() {
                // A source cannot be stopped once it sends; one that does not send is not waited for.
                transfer.deadline.get_or_insert(cx.now + REST_WITHIN);
                self.deadlines.add(transfer.deadline);
            } else {
                let error = Error::Closed(reason.to_owned());
                transfer.failure.get_or_insert(error);
                affected.push((transfer.session, *id));
            }
        }
        for (session, id) in affected {
            self.settle(cx, session, id);
        }
    }

    pub(super) fn transfers_down(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        error: &Error,
    ) {
        let mut affected = Vec::new();
        for (id, transfer) in &mut self.transfers {
            if transfer.session == session {
                transfer.failure.get_or_insert(error.clone());
                affected.push(*id);
            }
        }
        for id in affected {
            self.finish_if_over(cx, id);
        }
    }

    pub(super) fn expire_transfers(&mut self, cx: &mut ReactorContext) {
        let now = cx.now;
        if !self.deadlines.take_if_past(now) {
            return;
        }
        let text = "the blocks were not read in time; the peer is closed, connect again";
        let mut withdrawn = Vec::new();
        for (&id, transfer) in &mut self.transfers {
            if transfer.failure.is_some() {
                continue;
            }
            if transfer.deadline.is_none_or(|deadline| deadline > now) {
                self.deadlines.add(transfer.deadline);
            } else if transfer.is_started {
                transfer.failure = Some(Error::Timeout(text.to_owned()));
                cx.fail(transfer.session, Error::Timeout(text.to_owned()));
            } else {
                let text = "the read did not begin in time; the peer is usable";
                transfer.failure = Some(Error::Timeout(text.to_owned()));
                withdrawn.push((transfer.session, id));
            }
        }
        for (session, id) in withdrawn {
            self.settle(cx, session, id);
        }
        self.expire_offers(cx);
    }
}
