//! The receiving end: queued tensors, pending receives, and the large tensors that are being transferred.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::incoming::{IncomingContent, IncomingTensor, PendingReceive};
use super::large_receive::LargeReceive;
use super::messages::{END, ReceiverMessage};
use super::{EAGER_CAP, MESSAGES_IN_FLIGHT, SharedInfo, TRANSFERS_IN_FLIGHT};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::tensor::Received;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Work;

/// Longest delay of the acknowledgement of a small tensor.
const MAX_ACK_DELAY: Duration = Duration::from_micros(500);

#[derive(Debug)]
pub(super) enum ReceiverCommand {
    Receive(PendingReceive),
    /// Withdraws a receive that its caller has abandoned.
    Withdraw(Work<Arc<Received>>),
}

pub(super) struct Receiver {
    shared: SharedInfo,
    /// Of the one sender, from its admission on. Messages to it go nowhere once the session has ended.
    pub(super) session: Option<SessionKey>,
    /// In the order in which they are received.
    pub(super) incoming: VecDeque<IncomingTensor>,
    pub(super) next_sequence: u64,
    pub(super) receives: VecDeque<PendingReceive>,
    deadlines: Earliest,
    /// Large tensors, in the order in which they complete.
    pub(super) large_receives: VecDeque<LargeReceive>,
    /// Received tensors that are not acknowledged yet, and the time when they are at the latest.
    unacknowledged: Vec<u64>,
    ack_at: Option<Instant>,
    /// True if the sender has ended the pipe in order.
    pub(super) has_ended: bool,
    pub(super) failure: Option<Error>,
}

impl Receiver {
    pub(super) fn new(shared: SharedInfo) -> Self {
        Self {
            shared,
            session: None,
            incoming: VecDeque::new(),
            next_sequence: 0,
            receives: VecDeque::new(),
            deadlines: Earliest::default(),
            large_receives: VecDeque::new(),
            unacknowledged: Vec::new(),
            ack_at: None,
            has_ended: false,
            failure: None,
        }
    }

    /// Counts and acknowledges a received tensor. Acknowledgements of small ones are batched: their sends have completed,
    /// and each message would wake the sender.
    pub(super) fn record_received(&mut self, links: &mut Links, sequence: u64, len: usize) {
        self.unacknowledged.push(sequence);
        if len > EAGER_CAP || self.unacknowledged.len() >= MESSAGES_IN_FLIGHT / 4 {
            self.send_acks(links);
        } else {
            self.ack_at.get_or_insert(links.now() + MAX_ACK_DELAY);
        }
        let mut info = self.shared.get();
        info.num_tensors += 1;
        info.num_bytes += len as u64;
    }

    fn send_acks(&mut self, links: &mut Links) {
        self.ack_at = None;
        let received = std::mem::take(&mut self.unacknowledged);
        if let Some((first, others)) = received.split_first() {
            let others = others.into();
            self.reply(links, *first, &ReceiverMessage::Ack { others });
        }
    }

    /// Sends a message about one tensor.
    pub(super) fn reply(&self, links: &mut Links, sequence: u64, reply: &ReceiverMessage<'_>) {
        if let Some(session) = self.session {
            reply.send(links, session, sequence);
        }
    }

    fn withdraw_receive(&mut self, work: &Work<Arc<Received>>) {
        let is_match = |receive: &PendingReceive| receive.completer.completes(work);
        let at = self.receives.iter().position(is_match);
        if let Some(receive) = at.and_then(|at| self.receives.remove(at)) {
            self.count_waiting();
            let error = Error::Closed("the receive was withdrawn; the pipe is usable".to_owned());
            receive.completer.complete(Err(error));
        }
    }

    /// Called before an operation completes, so that its caller sees the new count.
    pub(super) fn count_waiting(&self) {
        self.shared.get().in_flight = self.receives.len() + self.large_receives.len();
    }

    fn expire_receives(&mut self, now: Instant) {
        if !self.deadlines.clear_if_past(now) {
            return;
        }
        let late = |receive: &PendingReceive| receive.deadline.meet_by.is_some_and(|at| at <= now);
        let (expired, kept): (VecDeque<_>, VecDeque<_>) = self.receives.drain(..).partition(late);
        self.receives = kept;
        self.count_waiting();
        for receive in expired {
            let error = Error::Timeout("no tensor came in time; the pipe is usable".to_owned());
            receive.completer.complete(Err(error));
        }
        for receive in &self.receives {
            self.deadlines.add(receive.deadline.meet_by);
        }
    }
}

impl TransferService for Receiver {
    type Command = ReceiverCommand;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: ReceiverCommand) {
        match command {
            ReceiverCommand::Receive(receive) => {
                self.deadlines.add(receive.deadline.meet_by);
                self.receives.push_back(receive);
            }
            ReceiverCommand::Withdraw(receive) => self.withdraw_receive(&receive),
        }
    }

    fn accept(&mut self, session: SessionKey, _peer: &Identity) -> std::result::Result<(), String> {
        if self.session.is_some() {
            return Err(
                "this pipe already has a sender; a pipe has one for its whole life".to_owned(),
            );
        }
        self.session = Some(session);
        Ok(())
    }

    fn dismissed(&mut self, session: SessionKey) {
        self.session.take_if(|sender| *sender == session);
    }

    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.shared.open(cx.links, session);
        self.data_path_changed(cx, session);
    }

    fn data_path_changed(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        self.shared.set_transport(cx.links.shown_transport(session));
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, _session: SessionKey, error: Error) {
        let error = if self.has_ended {
            Error::EndOfPipe
        } else {
            error
        };
        self.failure.get_or_insert(error.clone());
        // Eager tensors can still be received. Offers cannot: their memory is gone with the sender.
        self.incoming
            .retain(|tensor| !matches!(tensor.content, IncomingContent::Offer(_)));
        for large in &mut self.large_receives {
            large.fail(&error);
            large.grace = None;
        }
        self.shared.get().state = "closed";
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        if kind == END {
            self.has_ended = true;
            return header.end();
        }
        self.sender_message(cx, session, (kind, header), data)
    }

    fn source(&mut self, _request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        Err(Error::protocol("a read of what a receiver does not expose"))
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        self.record_transferred(cx, completion);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        self.complete_and_match(cx);
    }

    fn expire(&mut self, cx: &mut Cx<'_>) {
        if self.ack_at.is_some_and(|at| at <= cx.links.now()) {
            self.send_acks(cx.links);
        }
        self.expire_receives(cx.links.now());
        self.expire_large(cx);
    }

    fn next_deadline(&mut self, links: &Links) -> Option<Instant> {
        self.next_expiry(links)
            .into_iter()
            .chain(self.deadlines.at())
            .chain(self.ack_at)
            .min()
    }

    fn closing(&mut self, cx: &mut Cx<'_>) {
        self.send_acks(cx.links);
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let closed = cx.links.closed("the pipe is closed");
        cx.transfers.stop(&closed);
        let receives = std::mem::take(&mut self.receives);
        let large_receives = std::mem::take(&mut self.large_receives);
        self.count_waiting();
        for receive in receives {
            receive.completer.complete(Err(closed.clone()));
        }
        for large in large_receives {
            large.completer.complete(Err(closed.clone()));
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("incoming tensors", self.incoming.len()),
            ("receives", self.receives.len()),
            ("large receives", self.large_receives.len()),
            ("unacknowledged tensors", self.unacknowledged.len()),
        ]
    }
}

#[cfg(test)]
mod tests;
