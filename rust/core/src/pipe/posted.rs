//! Tensors of the sender: queued, then posted until the receiver has acknowledged them.

use std::collections::VecDeque;
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::messages::SenderMessage;
use super::sender::Sender;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::Links;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::tensor::Meta;
use crate::transfer::exposed::ExposedBuffer;
use crate::work::Completer;

/// A tensor that has not been posted.
#[derive(Debug)]
pub(super) struct QueuedSend {
    pub(super) meta: Meta,
    pub(super) buffer: Buffer,
    pub(super) meet_by: Option<Instant>,
    pub(super) completer: Completer<()>,
}

impl Sender {
    /// Withdraws tensors that have not been posted in time.
    pub(super) fn expire_queued(&mut self, now: Instant) {
        if !self.deadlines.clear_if_past(now) {
            return;
        }
        let late = |queued: &QueuedSend| queued.meet_by.is_some_and(|at| at <= now);
        let (expired, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(late);
        for queued in expired {
            let text = "the tensor was not sent in time; it was withdrawn, the pipe is usable";
            let error = Error::Timeout(text.to_owned());
            queued.completer.complete(Err(error));
        }
        for queued in &kept {
            self.deadlines.add(queued.meet_by);
        }
        self.queue = kept;
    }
}

/// A posted tensor. The send of a small one has completed already; only its place in the window is still occupied.
pub(super) struct PostedSend {
    pub(super) sequence: u64,
    pub(super) large: Option<LargeSend>,
}

/// A large tensor, exposed until the receiver has answered. The caller of a late one may have its error already.
pub(super) struct LargeSend {
    pub(super) exposed: ExposedBuffer,
    pub(super) completer: Completer<()>,
    /// `None` without a deadline, and once the caller knows that it is late.
    pub(super) grace: Option<GracePeriod>,
    pub(super) is_withdrawn: bool,
}

impl LargeSend {
    /// Deregisters and releases the buffer before it reports the result: the caller may free the tensor at once. The
    /// engine has withdrawn it before. A caller that knows of the deadline by then keeps that error.
    pub(super) fn complete(self, result: Result<()>) {
        drop(self.exposed);
        self.completer.complete(result);
    }
}

impl PostedSend {
    /// True if it is offered under this sequence number now. A send is marked as withdrawn, or is posted no more, before its
    /// caller may change the memory.
    pub(super) fn is_offered_as(&self, sequence: u64) -> bool {
        let large = self.large.as_ref();
        self.sequence == sequence && large.is_some_and(|large| !large.is_withdrawn)
    }

    /// The time of the next call of [`expire`](Self::expire).
    pub(super) fn next(&self, links: &Links, session: SessionKey) -> Option<Instant> {
        let grace = self.large.as_ref()?.grace.as_ref()?;
        Some(grace.next(links, &[session]))
    }

    /// Withdraws an offer whose deadline has passed; whether it did. Without an answer within the grace period the send fails
    /// unsettled: the receiver may still be reading.
    pub(super) fn expire(&mut self, links: &mut Links, session: SessionKey) -> bool {
        let Some(large) = &mut self.large else {
            return false;
        };
        let Some(grace) = &mut large.grace else {
            return false;
        };
        let stage = grace.look(links, &[session]);
        if stage != AnswerStage::InTime && !large.is_withdrawn {
            large.is_withdrawn = true;
            grace.due_from(links.now());
            SenderMessage::Withdraw.send(links, session, self.sequence, false);
            return true;
        }
        match stage {
            AnswerStage::InTime | AnswerStage::Late => {}
            AnswerStage::Overdue => {
                large.grace = None;
                let text = "the tensor was not received in time, and whether it will be is not known; its memory may still be read until the work is settled or the pipe is closed, and must not change before (dropping the tensor is safe); the pipe is usable";
                let late = Err(Error::Timeout(text.to_owned()));
                large.completer.complete_unsettled(late);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::Integrity;
    use crate::transport::{MemoryPath, Transport};
    use crate::work::work;

    #[test]
    fn a_tensor_is_offered_until_it_is_withdrawn_and_under_its_own_sequence_number() {
        let transport = Transport::Memory(MemoryPath::RemoteRead);
        let opened = transport.open();
        let mut links = Links::manual(Some(opened.unwrap()));
        let buffer = Buffer::zeroed(8);
        let (exposed, _) = ExposedBuffer::new(&links, 20, buffer, Integrity::Validate).unwrap();
        let (_sent, completer) = work();
        let large = LargeSend {
            exposed,
            completer,
            grace: Some(GracePeriod::new(links.now(), links.now())),
            is_withdrawn: false,
        };
        let mut posted = PostedSend {
            sequence: 3,
            large: Some(large),
        };
        assert!(posted.is_offered_as(3));
        assert!(!posted.is_offered_as(2));
        assert!(posted.expire(&mut links, 20), "it is late");
        assert!(!posted.is_offered_as(3));
        posted.large = None;
        assert!(!posted.is_offered_as(3), "its bytes were in its message");
    }
}
