//! The receiving end: what has come, who waits for it, and the one large tensor that is being fetched.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, Buffer, Status};

use super::arrivals::{Arrivals, Arrived, Content};
use super::receiving::Receiving;
use super::{
    CORRUPT, Deadline, EAGER, EAGER_CAP, MESSAGES_IN_FLIGHT, Meta, OFFER, Shared, TAKEN, WITHDRAW,
};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::identity::Identity;
use crate::reactor::{ReactorContext, Service, SessionKey};
use crate::transfer::fetch::{CHECKSUMS, DATA};
use crate::transfer::pool::Pool;
use crate::transport::Payload;
use crate::work::{Completer, Work};

/// The frame with which a sender ends the pipe in order; all tensors have been taken before it.
pub(super) const END: &[u8] = b"end";

/// A sender is told of the small tensors that were taken within this time.
const TELL_WITHIN: Duration = Duration::from_micros(500);

/// A tensor that was received.
#[derive(Debug)]
pub struct Received {
    /// What it is.
    pub meta: Meta,
    /// Its bytes, when they were not received into memory of the caller.
    pub buffer: Option<Buffer>,
}

#[derive(Debug)]
pub(super) enum Command {
    Receive {
        out: Option<(Meta, Buffer)>,
        deadline: Deadline,
        completer: Completer<Arc<Received>>,
    },
    /// Nobody waits for this receive any more.
    Withdraw(Work<Arc<Received>>),
}

pub(super) struct Wanted {
    pub(super) out: Option<(Meta, Buffer)>,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Arc<Received>>,
}

pub(super) struct Receiver {
    pub(super) shared: Shared,
    /// The one sender, from the moment it was let in.
    pub(super) sender: Option<SessionKey>,
    /// The same, while its session is established.
    pub(super) session: Option<SessionKey>,
    pub(super) arrived: Arrivals,
    pub(super) wanted: VecDeque<Wanted>,
    pub(super) deadlines: Earliest,
    /// In the order in which they are delivered.
    pub(super) receiving: VecDeque<Receiving>,
    /// Taken, and the sender has not been told; when it is told at the latest.
    pub(super) taken: Vec<u64>,
    pub(super) tell_at: Option<Instant>,
    pub(super) pool: Pool,
    /// The last tensors that were withdrawn while they were fetched; messages of them may still come.
    pub(super) withdrawn: VecDeque<u64>,
    pub(super) has_ended: bool,
    pub(super) failure: Option<Error>,
}

impl Receiver {
    pub(super) fn new(shared: Shared) -> Self {
        Self {
            shared,
            sender: None,
            session: None,
            arrived: Arrivals::default(),
            wanted: VecDeque::new(),
            deadlines: Earliest::default(),
            receiving: VecDeque::new(),
            taken: Vec::new(),
            tell_at: None,
            pool: Pool::default(),
            withdrawn: VecDeque::new(),
            has_ended: false,
            failure: None,
        }
    }

    /// Brings what has come and who waits together, in order, until one of them is missing.
    pub(super) fn pair(&mut self, cx: &mut ReactorContext) {
        while self.may_begin() && !self.wanted.is_empty() {
            let Some(wanted) = self.wanted.pop_front() else {
                return;
            };
            let Some(arrived) = self.arrived.take_next() else {
                return;
            };
            self.count_waiting();
            if let Some(error) = mismatch(&wanted, &arrived) {
                self.arrived.put_back(arrived);
                wanted.completer.complete(Err(error));
                continue;
            }
            let (sequence, meta) = (arrived.sequence, arrived.meta);
            match arrived.content {
                Content::Eager(bytes) => self.deliver(cx, sequence, meta, bytes, wanted),
                Content::Corrupt { was_offered } => {
                    if was_offered {
                        self.say(cx, CORRUPT, sequence);
                    } else {
                        self.take(cx, sequence, 0);
                    }
                    let text = format!(
                        "tensor {sequence} differs from its checksum; it is lost, the pipe is usable"
                    );
                    wanted.completer.complete(Err(Error::Corrupt(text)));
                }
                Content::Offer(offer) => self.begin(cx, sequence, meta, offer, wanted),
            }
        }
        if self.arrived.is_empty() && self.receiving.is_empty() {
            self.report_end();
        }
        self.count_waiting();
    }

    fn report_end(&mut self) {
        let Some(error) = &self.failure else { return };
        for wanted in self.wanted.drain(..) {
            wanted.completer.complete(Err(error.clone()));
        }
    }

    fn deliver(
        &mut self,
        cx: &mut ReactorContext,
        sequence: u64,
        meta: Meta,
        bytes: Vec<u8>,
        wanted: Wanted,
    ) {
        self.take(cx, sequence, bytes.len());
        let buffer = match wanted.out {
            Some((_, out)) if !out.write(0, &bytes) => {
                let text = "the CUDA driver could not write into out=; the tensor is lost, the pipe is usable";
                let error = Error::Unavailable(text.to_owned());
                return wanted.completer.complete(Err(error));
            }
            Some(_) => None,
            None => Some(Buffer::from_vec(bytes)),
        };
        let received = Received { meta, buffer };
        wanted.completer.complete(Ok(Arc::new(received)));
    }

    /// Takes a tensor. The sender of a small one waits for nothing but its credit: it is told with others, so that it
    /// need not wake for each.
    pub(super) fn take(&mut self, cx: &mut ReactorContext, sequence: u64, len: usize) {
        self.taken.push(sequence);
        if len > EAGER_CAP || self.taken.len() >= MESSAGES_IN_FLIGHT / 4 {
            self.tell_taken(cx);
        } else {
            self.tell_at.get_or_insert(cx.now + TELL_WITHIN);
        }
        let mut info = self.shared.get();
        info.num_tensors += 1;
        info.num_bytes += len as u64;
    }

    fn tell_taken(&mut self, cx: &mut ReactorContext) {
        self.tell_at = None;
        let taken = std::mem::take(&mut self.taken);
        if let (Some(session), Some((first, rest))) = (self.session, taken.split_first()) {
            let header = cx.header(session, TAKEN).u64(*first);
            let rest = Writer::default().list(rest, |w, sequence| w.u64(*sequence));
            cx.message(session, header, Payload::Bytes(rest.finish()));
        }
    }

    /// Tells the sender something about one of its tensors.
    pub(super) fn say(&self, cx: &mut ReactorContext, kind: u8, sequence: u64) {
        if let Some(session) = self.session {
            let header = cx.header(session, kind).u64(sequence);
            cx.message(session, header, Payload::None);
        }
    }

    fn withdraw_receive(&mut self, receive: &Work<Arc<Received>>) {
        let is_it = |wanted: &Wanted| wanted.completer.completes(receive);
        let at = self.wanted.iter().position(is_it);
        if let Some(wanted) = at.and_then(|at| self.wanted.remove(at)) {
            self.count_waiting();
            let error = Error::Closed("the receive was withdrawn; the pipe is usable".to_owned());
            wanted.completer.complete(Err(error));
        }
    }

    /// Called before an operation completes: whoever sees its end finds it counted.
    pub(super) fn count_waiting(&self) {
        self.shared.get().in_flight = self.wanted.len() + self.receiving.len();
    }

    fn expire(&mut self, cx: &mut ReactorContext) {
        let now = cx.now;
        if self.deadlines.take_if_past(now) {
            let late = |wanted: &Wanted| wanted.deadline.meet_by.is_some_and(|at| at <= now);
            let (expired, kept): (VecDeque<_>, VecDeque<_>) = self.wanted.drain(..).partition(late);
            self.wanted = kept;
            self.count_waiting();
            for wanted in expired {
                let text = "no tensor came in time; the pipe is usable";
                let error = Error::Timeout(text.to_owned());
                wanted.completer.complete(Err(error));
            }
            for wanted in &self.wanted {
                self.deadlines.add(wanted.deadline.meet_by);
            }
        }
        let is_late = |receiving: &&mut Receiving| {
            let done_by = receiving.deadline.done_by;
            !receiving.fetch.has_failed() && done_by.is_some_and(|at| at <= now)
        };
        if let (Some(session), Some(receiving)) =
            (self.session, self.receiving.iter_mut().find(is_late))
        {
            let len = receiving.fetch.len();
            let text =
                format!("a tensor of {len} bytes was not received in time; the pipe is closed");
            receiving.fetch.fail(Error::Timeout(text.clone()));
            cx.fail(session, Error::Timeout(text));
        }
    }
}

fn mismatch(wanted: &Wanted, arrived: &Arrived) -> Option<Error> {
    let (meta, buffer) = wanted.out.as_ref()?;
    let len = match &arrived.content {
        Content::Eager(bytes) => bytes.len(),
        Content::Offer(offer) => offer.len,
        Content::Corrupt { .. } => return None,
    };
    if *meta == arrived.meta && buffer.len() == len {
        return None;
    }
    let show = |meta: &Meta| match meta.family {
        0 => "None".to_owned(),
        1 => format!("torch {} {:?}", meta.dtype, meta.shape),
        _ => format!("numpy {} {:?}", meta.dtype, meta.shape),
    };
    Some(Error::Config(format!(
        "out= is {}, the next tensor is {}; it was not consumed, receive it with a matching out= or without",
        show(meta),
        show(&arrived.meta)
    )))
}

impl Service for Receiver {
    type Command = Command;

    fn command(&mut self, cx: &mut ReactorContext, command: Command) {
        match command {
            Command::Receive {
                out,
                deadline,
                completer,
            } => {
                self.deadlines.add(deadline.meet_by);
                self.wanted.push_back(Wanted {
                    out,
                    deadline,
                    completer,
                });
                self.pair(cx);
            }
            Command::Withdraw(receive) => self.withdraw_receive(&receive),
        }
    }

    fn accept(&mut self, session: SessionKey, _peer: &Identity) -> std::result::Result<(), String> {
        if self.sender.is_some() {
            return Err(
                "this pipe already has a sender; a pipe has one for its whole life".to_owned(),
            );
        }
        self.sender = Some(session);
        Ok(())
    }

    fn dismissed(&mut self, session: SessionKey) {
        self.sender.take_if(|sender| *sender == session);
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        self.session = Some(session);
        self.shared.open(cx, session, peer);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, _link: SessionKey, error: Error) {
        let error = if self.has_ended {
            Error::EndOfPipe
        } else {
            error
        };
        self.failure.get_or_insert(error.clone());
        self.session = None;
        // What came whole can still be received; an offer cannot, its memory is gone with the sender.
        self.arrived.lose_offers();
        for receiving in &mut self.receiving {
            receiving.fetch.fail(error.clone());
        }
        self.shared.get().state = "closed";
        self.finish(cx);
        self.pair(cx);
    }

    fn frame(&mut self, _io: &mut ReactorContext, _link: SessionKey, frame: &[u8]) -> Result<()> {
        if frame != END {
            return Err(Error::protocol(
                "the sender of a pipe sent an unknown frame",
            ));
        }
        self.has_ended = true;
        Ok(())
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
        let sequence = reader.u64()?;
        match kind {
            EAGER => self.arrived.eager(sequence, reader, &data)?,
            OFFER => self.arrived.offer(sequence, reader, &data)?,
            DATA => {
                self.place(cx, session, sequence, reader, &data)?;
                self.finish(cx);
            }
            CHECKSUMS => {
                reader.end()?;
                self.checksums(sequence, &data)?;
                self.finish(cx);
            }
            WITHDRAW => self.withdraw(cx, sequence),
            other => {
                return Err(Error::protocol(format_args!(
                    "message {other} to the receiver of a pipe"
                )));
            }
        }
        drop(data);
        self.pair(cx);
        Ok(())
    }

    fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        for receiving in &mut self.receiving {
            if receiving.fetch.done(cx, self.session, token, result) {
                break;
            }
        }
        // Also of a session that has gone: the last read that ends is what its receive has waited for.
        self.finish(cx);
    }

    fn closing(&mut self, cx: &mut ReactorContext) {
        self.tell_taken(cx);
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        if self.tell_at.is_some_and(|at| at <= cx.now) {
            self.tell_taken(cx);
        }
        self.expire(cx);
        let receiving = self
            .receiving
            .iter()
            .filter(|receiving| !receiving.fetch.has_failed())
            .filter_map(|receiving| receiving.deadline.done_by);
        receiving
            .chain(self.deadlines.at())
            .chain(self.tell_at)
            .chain(self.pool.expire(cx.now))
            .min()
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        let closed = || cx.closed("the pipe is closed");
        for wanted in self.wanted.drain(..) {
            wanted.completer.complete(Err(closed()));
        }
        for receiving in self.receiving.drain(..) {
            receiving.completer.complete(Err(closed()));
        }
    }
}

#[cfg(test)]
mod tests;
