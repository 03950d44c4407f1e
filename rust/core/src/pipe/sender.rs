//! The sending end: queued and posted tensors.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::iter::once;
use std::sync::Arc;
use std::time::Instant;

use super::messages::{END, ReceiverMessage, SenderMessage};
use super::posted::{LargeSend, PostedSend, QueuedSend};
use super::{EAGER_CAP, MESSAGES_IN_FLIGHT, SharedInfo, TRANSFERS_IN_FLIGHT};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::grace::GracePeriod;
use crate::session::{Links, Payload};
use crate::transfer::exposed::ExposedBuffer;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Completer;

#[derive(Debug)]
pub(super) enum SenderCommand {
    Connect {
        address: String,
        completer: Completer<()>,
    },
    Send(QueuedSend),
    Close(ClosingCaller),
}

/// A caller that waits for the end of the pipe.
#[derive(Debug)]
pub(super) struct ClosingCaller {
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<()>,
}

pub(super) struct Sender {
    shared: SharedInfo,
    integrity: Integrity,
    session: Option<SessionKey>,
    connecting: Option<Completer<()>>,
    pub(super) queue: VecDeque<QueuedSend>,
    pub(super) deadlines: Earliest,
    /// In the order of their sequence numbers.
    posted: VecDeque<PostedSend>,
    next_sequence: u64,
    closing: Vec<ClosingCaller>,
    failure: Option<Error>,
    /// True if tensors were not acknowledged when the session failed.
    has_lost: bool,
}

impl Sender {
    pub(super) fn new(shared: SharedInfo, integrity: Integrity) -> Self {
        Self {
            shared,
            integrity,
            session: None,
            connecting: None,
            queue: VecDeque::new(),
            deadlines: Earliest::default(),
            posted: VecDeque::new(),
            next_sequence: 0,
            closing: Vec::new(),
            failure: None,
            has_lost: false,
        }
    }

    fn post(&mut self, cx: &mut Cx<'_>) {
        let Some(session) = self.session.filter(|session| cx.links.is_up(*session)) else {
            return;
        };
        while self.posted.len() < MESSAGES_IN_FLIGHT
            && let Some(send) = self.queue.pop_front()
        {
            let (message, exposed) = match self.tensor_message(cx.links, session, &send) {
                Ok(message) => message,
                Err(error) => {
                    send.completer.complete(Err(error));
                    continue;
                }
            };
            let is_checksummed = self.integrity != Integrity::None;
            if !message.send(cx.links, session, self.next_sequence, is_checksummed) {
                // The session is lost; its end fails everything that is queued.
                self.queue.push_front(send);
                return;
            }
            self.add_posted(cx, session, send, exposed);
        }
        self.finish_closing(cx.links);
    }

    /// The message of a tensor, and the memory that the receiver may read if it is large.
    fn tensor_message<'a>(
        &self,
        links: &Links,
        session: SessionKey,
        send: &'a QueuedSend,
    ) -> Result<(SenderMessage<'a>, Option<ExposedBuffer>)> {
        let (meta, len) = (Cow::Borrowed(&send.meta), send.buffer.len());
        if len <= EAGER_CAP
            && let Some(bytes) = send.buffer.bytes(0, len)
        {
            return Ok((SenderMessage::Eager { meta, bytes }, None));
        }
        let buffer = send.buffer.clone();
        self.integrity.check_tensor(buffer.kind())?;
        let (exposed, buffer) = ExposedBuffer::new(links, session, buffer, self.integrity)?;
        Ok((SenderMessage::Offer { meta, buffer }, Some(exposed)))
    }

    fn add_posted(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        send: QueuedSend,
        exposed: Option<ExposedBuffer>,
    ) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let Some(exposed) = exposed else {
            self.count_sent(send.buffer.len());
            let large = None;
            self.posted.push_back(PostedSend { sequence, large });
            return send.completer.complete(Ok(()));
        };
        cx.transfers.expose(session, sequence, &exposed);
        let large = Some(LargeSend {
            exposed,
            completer: send.completer,
            grace: send.meet_by.map(|at| GracePeriod::new(cx.links.now(), at)),
            is_withdrawn: false,
        });
        self.posted.push_back(PostedSend { sequence, large });
    }

    /// Ends a posted tensor, which the receiver does not read any more; false if it is not posted.
    fn end_posted(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        sequence: u64,
        outcome: Result<()>,
    ) -> bool {
        cx.transfers.withdraw_source(cx.links, session, sequence);
        let is_it = |posted: &PostedSend| posted.sequence == sequence;
        let at = self.posted.iter().position(is_it);
        let Some(posted) = at.and_then(|at| self.posted.remove(at)) else {
            return false;
        };
        if let Some(large) = posted.large {
            if outcome.is_ok() {
                self.count_sent(large.exposed.len());
            }
            large.complete(outcome);
        }
        true
    }

    /// Ends the pipe when it is closing and everything has been acknowledged.
    fn finish_closing(&mut self, links: &mut Links) {
        if self.closing.is_empty() || !self.queue.is_empty() || !self.posted.is_empty() {
            return;
        }
        if let Some(session) = self.session {
            links.send(session, &[END]);
            links.close(session, "the sender closed the pipe");
        }
        for caller in self.closing.drain(..) {
            caller.completer.complete(Ok(()));
        }
        self.fail(&Error::Closed("the pipe is closed".to_owned()));
    }

    fn fail(&mut self, error: &Error) {
        if self.failure.is_none() {
            self.has_lost = !self.queue.is_empty() || !self.posted.is_empty();
        }
        for queued in self.queue.drain(..) {
            queued.completer.complete(Err(error.clone()));
        }
        for large in self.posted.drain(..).filter_map(|posted| posted.large) {
            large.complete(Err(error.clone()));
        }
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        for caller in self.closing.drain(..) {
            caller.completer.complete(Err(error.clone()));
        }
        self.failure.get_or_insert_with(|| error.clone());
        let mut info = self.shared.get();
        info.state = "closed";
        info.in_flight = 0;
    }

    fn num_in_flight(&self) -> usize {
        self.queue.len() + self.posted.len()
    }

    /// Called before a send completes, so that its caller sees the new counts.
    fn count_sent(&self, len: usize) {
        let mut info = self.shared.get();
        info.num_tensors += 1;
        info.num_bytes += len as u64;
        info.in_flight = self.num_in_flight();
    }
}

impl TransferService for Sender {
    type Command = SenderCommand;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, cx: &mut Cx<'_>, command: SenderCommand) {
        match command {
            SenderCommand::Connect { address, completer } => {
                self.connecting = Some(completer);
                self.session = Some(cx.links.connect(&address));
            }
            SenderCommand::Send(send) => {
                if let Some(error) = &self.failure {
                    return send.completer.complete(Err(error.clone()));
                }
                if !self.closing.is_empty() {
                    let error = Error::Closed("the pipe is closing".to_owned());
                    return send.completer.complete(Err(error));
                }
                self.deadlines.add(send.meet_by);
                self.queue.push_back(send);
                self.post(cx);
            }
            SenderCommand::Close(caller) => {
                if let Some(error) = &self.failure {
                    // The sends of small tensors have completed without an acknowledgement: their loss is reported here, once.
                    let has_lost = std::mem::take(&mut self.has_lost);
                    let ended = if has_lost { Err(error.clone()) } else { Ok(()) };
                    return caller.completer.complete(ended);
                }
                self.closing.push(caller);
                self.post(cx);
            }
        }
        self.shared.get().in_flight = self.num_in_flight();
    }

    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.shared.open(cx.links, session);
        self.data_path_changed(cx, session);
        if let Some(completer) = self.connecting.take() {
            completer.complete(Ok(()));
        }
        self.post(cx);
    }

    fn data_path_changed(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        let data_path = cx.links.peer_data_path(session);
        let transport = data_path.map(|data_path| data_path.transport().to_owned());
        self.shared.set_transport(transport);
    }

    fn session_down(&mut self, _cx: &mut Cx<'_>, _session: SessionKey, error: Error) {
        self.fail(&error);
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let sequence = header.u64()?;
        match ReceiverMessage::decode(kind, &data)? {
            ReceiverMessage::Ack { others } => {
                for acknowledged in once(sequence).chain(others.iter().copied()) {
                    if !self.end_posted(cx, session, acknowledged, Ok(())) {
                        return Err(Error::protocol(format_args!(
                            "tensor {acknowledged} was acknowledged, but is not posted"
                        )));
                    }
                }
            }
            ReceiverMessage::Withdrawn => {
                let text =
                    "the tensor was not received in time; it was withdrawn, the pipe is usable";
                self.end_posted(cx, session, sequence, Err(Error::Timeout(text.to_owned())));
            }
            ReceiverMessage::Validate => {
                let mut posted = self.posted.iter();
                let answer = if posted.any(|it| it.is_offered_as(sequence)) {
                    SenderMessage::Valid
                } else {
                    SenderMessage::Invalid
                };
                answer.send(cx.links, session, sequence, false);
            }
            ReceiverMessage::Corrupt => {
                let text = "the tensor came with another checksum than it had here; it was changed while it was sent, or on its way; the pipe is usable";
                self.end_posted(cx, session, sequence, Err(Error::Corrupt(text.to_owned())));
            }
            ReceiverMessage::Refused { reason } => {
                let text = format!("the receiver refused the tensor, the pipe is usable: {reason}");
                self.end_posted(cx, session, sequence, Err(Error::Exhausted(text)));
            }
        }
        self.post(cx);
        self.shared.get().in_flight = self.num_in_flight();
        Ok(())
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let sequence = request.source;
        let posted = self.posted.iter().find(|it| it.is_offered_as(sequence));
        match posted.and_then(|posted| posted.large.as_ref()) {
            Some(large) => large.exposed.requested(request),
            None => Err(Error::Config(format!(
                "tensor {sequence} is not offered any more"
            ))),
        }
    }

    /// A sender begins no transfer.
    fn transferred(&mut self, _cx: &mut Cx<'_>, _completion: Completion) {}

    fn expire(&mut self, cx: &mut Cx<'_>) {
        let Some(session) = self.session else { return };
        let now = cx.links.now();
        self.expire_queued(now);
        for posted in &mut self.posted {
            if posted.expire(cx.links, session) {
                // The receiver drops anything after WITHDRAW, and the caller may change the memory.
                cx.transfers
                    .withdraw_source(cx.links, session, posted.sequence);
            }
        }
        let is_late = |caller: &ClosingCaller| caller.deadline.is_some_and(|at| at <= now);
        if self.closing.iter().any(is_late) {
            let left = self.num_in_flight();
            let text = format!("{left} tensors had not been received in time; the pipe is closed");
            // The receiver may be reading: only the end of the session stops it.
            cx.links.fail(session, Error::Timeout(text));
        }
    }

    fn next_deadline(&mut self, links: &Links) -> Option<Instant> {
        let session = self.session?;
        let posted = self.posted.iter();
        let posted = posted.filter_map(|it| it.next(links, session));
        let closing = self.closing.iter().filter_map(|caller| caller.deadline);
        posted.chain(closing).chain(self.deadlines.at()).min()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let closed = Error::Closed("the pipe is closed".to_owned());
        cx.transfers.stop(&closed);
        self.fail(&closed);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("queued sends", self.queue.len()),
            ("posted sends", self.posted.len()),
            ("closing callers", self.closing.len()),
        ]
    }
}

#[cfg(test)]
mod tests;
