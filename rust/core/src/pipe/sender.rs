//! The sending end: queued and posted tensors.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Buffer, MemoryKind};

use super::posted::{PostedSend, PostedSends};
use super::{
    ACK, CORRUPT, Deadline, EAGER_CAP, MESSAGES_IN_FLIGHT, SharedInfo, TRANSFERS_IN_FLIGHT,
    WITHDRAWN,
};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{ReactorContext, Service};
use crate::tensor::Meta;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Handled, Message, TransferEngine};
use crate::transport::Memory;
use crate::work::Completer;

#[derive(Debug)]
pub(super) enum SenderCommand {
    Connect {
        address: String,
        completer: Completer<()>,
    },
    Send {
        meta: Meta,
        buffer: Buffer,
        deadline: Deadline,
        completer: Completer<()>,
    },
    Close {
        deadline: Deadline,
        completer: Completer<()>,
    },
}

/// A tensor that has not been posted.
pub(super) struct QueuedSend {
    pub(super) meta: Meta,
    pub(super) buffer: Buffer,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<()>,
}

pub(super) struct Sender {
    shared: SharedInfo,
    /// Whether tensors are sent with checksums.
    pub(super) is_checksummed: bool,
    session: Option<SessionKey>,
    is_up: bool,
    connecting: Option<Completer<()>>,
    queue: VecDeque<QueuedSend>,
    deadlines: Earliest,
    pub(super) posted: PostedSends,
    pub(super) engine: TransferEngine,
    /// Callers that wait for the end of the pipe.
    closing: Vec<(Deadline, Completer<()>)>,
    failure: Option<Error>,
    /// Whether tensors were not acknowledged when the session failed.
    has_lost: bool,
}

impl Sender {
    pub(super) fn new(shared: SharedInfo, is_checksummed: bool) -> Self {
        Self {
            shared,
            is_checksummed,
            session: None,
            is_up: false,
            connecting: None,
            queue: VecDeque::new(),
            deadlines: Earliest::default(),
            posted: PostedSends::default(),
            engine: TransferEngine::new(TRANSFERS_IN_FLIGHT),
            closing: Vec::new(),
            failure: None,
            has_lost: false,
        }
    }

    fn post(&mut self, cx: &mut ReactorContext) {
        let Some(session) = self.session.filter(|_| self.is_up) else {
            return;
        };
        while self.posted.len() < MESSAGES_IN_FLIGHT {
            let Some(queued) = self.queue.pop_front() else {
                break;
            };
            let is_host = queued.buffer.kind() == MemoryKind::Host;
            let unsent = if is_host && queued.buffer.len() <= EAGER_CAP {
                self.post_eager(cx, session, queued)
            } else {
                self.post_offer(cx, session, queued)
            };
            if let Some(queued) = unsent {
                // The session is lost; its end fails everything that is queued.
                self.queue.push_front(queued);
                return;
            }
        }
        self.finish_closing(cx);
    }

    /// Removes a posted tensor, which the receiver does not read any more.
    fn remove_posted(&mut self, sequence: u64) -> Option<PostedSend> {
        if let Some(session) = self.session {
            self.engine.withdraw_source(session, sequence);
        }
        self.posted.remove(sequence)
    }

    /// A posted tensor that the receiver may read.
    fn exposed(&self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let Some(large) = self.posted.large(request.source) else {
            let text = format!("tensor {} is not offered any more", request.source);
            return Err(Error::Config(text));
        };
        large.exposed.requested(request)
    }

    fn transfer_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        message: (u8, Reader<'_>),
        data: &AmData,
    ) -> Result<()> {
        match self.engine.message(cx, session, message, data)? {
            Handled::Done => {}
            Handled::Request(request) => {
                let source = self.exposed(&request);
                self.engine.serve(cx, &request, source);
            }
            Handled::UnknownTransfer => {
                return Err(Error::protocol("bytes for the sender of a pipe"));
            }
        }
        Ok(())
    }

    fn receive_ack(&mut self, cx: &mut ReactorContext, sequence: u64) -> Result<()> {
        let Some(posted) = self.remove_posted(sequence) else {
            return Err(Error::protocol(format_args!(
                "tensor {sequence} was acknowledged, but is not posted"
            )));
        };
        if let Some(large) = posted.large {
            self.count_sent(large.exposed.len());
            large.complete(Ok(()));
        }
        self.post(cx);
        Ok(())
    }

    /// The receiver does not receive a large tensor.
    fn fail_send(&mut self, cx: &mut ReactorContext, sequence: u64, error: Error) {
        if let Some(large) = self.remove_posted(sequence).and_then(|posted| posted.large) {
            large.complete(Err(error));
        }
        self.post(cx);
    }

    /// Ends the pipe when it is closing and everything has been acknowledged.
    fn finish_closing(&mut self, cx: &mut ReactorContext) {
        if self.closing.is_empty() || !self.queue.is_empty() || !self.posted.is_empty() {
            return;
        }
        if let Some(session) = self.session {
            cx.send(session, super::receiver::END);
            cx.close(session, "the sender closed the pipe");
        }
        for (_, completer) in self.closing.drain(..) {
            completer.complete(Ok(()));
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
        for large in self.posted.drain() {
            large.complete(Err(error.clone()));
        }
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        for (_, completer) in self.closing.drain(..) {
            completer.complete(Err(error.clone()));
        }
        self.is_up = false;
        self.failure.get_or_insert_with(|| error.clone());
        let mut info = self.shared.get();
        info.state = "closed";
        info.in_flight = 0;
    }

    pub(super) fn count_sent(&self, len: usize) {
        let mut info = self.shared.get();
        info.num_tensors += 1;
        info.num_bytes += len as u64;
        info.in_flight = self.queue.len() + self.posted.len();
    }

    fn expire_queued(&mut self, now: Instant) {
        if !self.deadlines.take_if_past(now) {
            return;
        }
        let late = |queued: &QueuedSend| queued.deadline.meet_by.is_some_and(|at| at <= now);
        let (expired, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(late);
        for queued in expired {
            let text = "the tensor was not sent in time; it was withdrawn, the pipe is usable";
            let error = Error::Timeout(text.to_owned());
            queued.completer.complete(Err(error));
        }
        for queued in &kept {
            self.deadlines.add(queued.deadline.meet_by);
        }
        self.queue = kept;
    }

    fn next_deadline(&self, cx: &ReactorContext) -> Option<Instant> {
        let posted = self
            .session
            .and_then(|session| self.posted.next(cx, session));
        let closing = self
            .closing
            .iter()
            .filter_map(|(deadline, _)| deadline.meet_by);
        closing.chain(posted).chain(self.deadlines.at()).min()
    }
}

impl Service for Sender {
    type Command = SenderCommand;

    fn command(&mut self, cx: &mut ReactorContext, command: SenderCommand) {
        match command {
            SenderCommand::Connect { address, completer } => {
                self.connecting = Some(completer);
                self.session = Some(cx.connect(&address));
            }
            SenderCommand::Send {
                meta,
                buffer,
                deadline,
                completer,
            } => {
                if let Some(error) = &self.failure {
                    return completer.complete(Err(error.clone()));
                }
                if !self.closing.is_empty() {
                    return completer
                        .complete(Err(Error::Closed("the pipe is closing".to_owned())));
                }
                self.deadlines.add(deadline.meet_by);
                self.queue.push_back(QueuedSend {
                    meta,
                    buffer,
                    deadline,
                    completer,
                });
                self.post(cx);
            }
            SenderCommand::Close {
                deadline,
                completer,
            } => {
                if let Some(error) = &self.failure {
                    // The sends of small tensors have completed without an acknowledgement: their loss is reported here, once.
                    let has_lost = std::mem::take(&mut self.has_lost);
                    let ended = if has_lost { Err(error.clone()) } else { Ok(()) };
                    return completer.complete(ended);
                }
                self.closing.push((deadline, completer));
                self.post(cx);
            }
        }
        self.shared.get().in_flight = self.queue.len() + self.posted.len();
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        self.is_up = true;
        self.engine.session_up(session);
        self.shared.open(cx, session, peer);
        if let Some(completer) = self.connecting.take() {
            completer.complete(Ok(()));
        }
        self.post(cx);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.engine.session_down(cx, session, &error);
        self.fail(&error);
    }

    fn frame(
        &mut self,
        _cx: &mut ReactorContext,
        _session: SessionKey,
        _frame: &[u8],
    ) -> Result<()> {
        Err(Error::protocol("the receiver of a pipe sent a frame"))
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: AmData,
    ) -> Result<()> {
        let mut reader = Reader::new(header);
        let kind = reader.u8()?;
        if Message::is_kind(kind) {
            return self.transfer_message(cx, session, (kind, reader), &data);
        }
        let sequence = reader.u64()?;
        match kind {
            ACK => {
                let mut rest = Reader::new(&data);
                let others = rest.list(MESSAGES_IN_FLIGHT, Reader::u64)?;
                rest.end()?;
                for sequence in [sequence].into_iter().chain(others) {
                    self.receive_ack(cx, sequence)?;
                }
            }
            WITHDRAWN => {
                let text = "the receiver did not ask for the tensor in time; it was withdrawn, the pipe is usable";
                self.fail_send(cx, sequence, Error::Timeout(text.to_owned()));
            }
            CORRUPT => {
                let text = "the tensor came with another checksum than it had here; it was changed while it was sent, or on its way; the pipe is usable";
                self.fail_send(cx, sequence, Error::Corrupt(text.to_owned()));
            }
            other => {
                return Err(Error::protocol(format_args!(
                    "message {other} to the sender of a pipe"
                )));
            }
        }
        self.shared.get().in_flight = self.queue.len() + self.posted.len();
        Ok(())
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        self.engine.run_slice(cx)
    }

    fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        self.expire_queued(cx.now());
        if let Some(session) = self.session {
            self.posted.expire(cx, session);
        }
        let now = cx.now();
        let is_late = |(deadline, _): &(Deadline, _)| deadline.meet_by.is_some_and(|at| at <= now);
        if self.closing.iter().any(is_late) {
            let left = self.queue.len() + self.posted.len();
            let text = format!("{left} tensors had not been received in time; the pipe is closed");
            match self.session {
                // The receiver may be reading: only the end of the session stops it.
                Some(session) if !cx.has_failed(session) => cx.fail(session, Error::Timeout(text)),
                Some(_) => {}
                None => self.fail(&Error::Timeout(text)),
            }
        }
        self.next_deadline(cx)
    }

    fn stop(&mut self, _cx: &mut ReactorContext) {
        let closed = Error::Closed("the pipe is closed".to_owned());
        self.engine.stop(&closed);
        self.fail(&closed);
    }
}
