//! Tensors that the sender has posted and the receiver has not acknowledged.

use std::collections::VecDeque;
use std::time::Instant;

use super::WITHDRAW;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transfer::exposed::ExposedBuffer;
use crate::transport::Payload;
use crate::work::Completer;

/// A posted tensor. The send of a small one has completed already; only its place in the window is still occupied.
pub(super) struct PostedSend {
    sequence: u64,
    pub(super) large: Option<LargeSend>,
}

pub(super) struct LargeSend {
    pub(super) exposed: ExposedBuffer,
    completer: Completer<()>,
    grace: Option<GracePeriod>,
    is_withdrawn: bool,
}

impl LargeSend {
    pub(super) fn new(
        exposed: ExposedBuffer,
        completer: Completer<()>,
        grace: Option<GracePeriod>,
    ) -> Self {
        Self {
            exposed,
            completer,
            grace,
            is_withdrawn: false,
        }
    }

    /// Deregisters and releases the buffer before it reports the result: the caller may free the tensor at once. The
    /// engine has withdrawn it before.
    pub(super) fn complete(self, result: Result<()>) {
        drop(self.exposed);
        self.completer.complete(result);
    }
}

/// All posted tensors, in the order of their sequence numbers.
#[derive(Default)]
pub(super) struct PostedSends {
    sends: VecDeque<PostedSend>,
    next_sequence: u64,
}

impl PostedSends {
    /// The sequence number of the next tensor.
    pub(super) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    pub(super) fn add(&mut self, large: Option<LargeSend>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.sends.push_back(PostedSend { sequence, large });
    }

    pub(super) fn len(&self) -> usize {
        self.sends.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sends.is_empty()
    }

    pub(super) fn large(&self, sequence: u64) -> Option<&LargeSend> {
        let mut sends = self.sends.iter();
        let posted = sends.find(|posted| posted.sequence == sequence)?;
        posted.large.as_ref()
    }

    pub(super) fn remove(&mut self, sequence: u64) -> Option<PostedSend> {
        let is_match = |posted: &PostedSend| posted.sequence == sequence;
        let at = self.sends.iter().position(is_match)?;
        self.sends.remove(at)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = LargeSend> {
        self.sends.drain(..).filter_map(|posted| posted.large)
    }

    /// The time of the next call of [`expire`](Self::expire).
    pub(super) fn next(&self, cx: &ReactorContext, session: SessionKey) -> Option<Instant> {
        let larges = self.sends.iter().filter_map(|posted| posted.large.as_ref());
        let grace_periods = larges.filter_map(|large| large.grace.as_ref());
        grace_periods.map(|grace| grace.next(cx, &[session])).min()
    }

    /// Withdraws offers whose deadline has passed. Without an answer within the grace period the session fails: the
    /// receiver may still be reading, and the caller needs its memory back.
    pub(super) fn expire(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let mut withdraw = Vec::new();
        for posted in &mut self.sends {
            let Some(large) = &mut posted.large else {
                continue;
            };
            let Some(grace) = &mut large.grace else {
                continue;
            };
            match grace.look(cx, &[session]) {
                AnswerStage::Late | AnswerStage::Over if !large.is_withdrawn => {
                    large.is_withdrawn = true;
                    grace.due_from(cx.now());
                    withdraw.push(posted.sequence);
                }
                AnswerStage::InTime | AnswerStage::Late => {}
                AnswerStage::Over => {
                    let text = "the tensor was not received in time, and the receiver does not say that it will not read it any more; the pipe is closed";
                    return cx.fail(session, Error::Timeout(text.to_owned()));
                }
            }
        }
        for sequence in withdraw {
            let header = cx.header(session, WITHDRAW).u64(sequence);
            cx.message(session, header, Payload::None);
        }
    }
}
