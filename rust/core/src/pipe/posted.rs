//! What has left the sending end and was not taken yet.

use std::collections::VecDeque;
use std::time::Instant;

use super::WITHDRAW;
use crate::error::{Error, Result};
use crate::reactor::{ReactorContext, SessionKey};
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transfer::fetch::ExposedBuffer;
use crate::transport::Payload;
use crate::work::Completer;

/// A tensor that the receiver has not taken. Small ones have completed already and wait for their credit only.
pub(super) struct Posted {
    sequence: u64,
    pub(super) large: Option<Large>,
}

pub(super) struct Large {
    pub(super) exposed: ExposedBuffer,
    completer: Completer<()>,
    grace: Option<GracePeriod>,
    is_withdrawn: bool,
}

impl Large {
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

    /// First deregistered and let go, then reported: the caller may free the tensor at once.
    pub(super) fn complete(self, result: Result<()>) {
        drop(self.exposed);
        self.completer.complete(result);
    }
}

/// All of them, in the order in which they left.
#[derive(Default)]
pub(super) struct OnTheirWay {
    tensors: VecDeque<Posted>,
    next_sequence: u64,
}

impl OnTheirWay {
    /// The number of the tensor that is added next.
    pub(super) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    pub(super) fn add(&mut self, large: Option<Large>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.tensors.push_back(Posted { sequence, large });
    }

    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    pub(super) fn large(&mut self, sequence: u64) -> Option<&mut Large> {
        let mut tensors = self.tensors.iter_mut();
        let posted = tensors.find(|posted| posted.sequence == sequence)?;
        posted.large.as_mut()
    }

    pub(super) fn remove(&mut self, sequence: u64) -> Option<Posted> {
        let is_it = |posted: &Posted| posted.sequence == sequence;
        let at = self.tensors.iter().position(is_it)?;
        self.tensors.remove(at)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Large> {
        self.tensors.drain(..).filter_map(|posted| posted.large)
    }

    /// Hashes a slice of what has not been hashed; whether there was any.
    pub(super) fn run_checksum_slice(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
    ) -> bool {
        let mut larges = self
            .tensors
            .iter_mut()
            .filter_map(|posted| posted.large.as_mut());
        larges.any(|large| large.exposed.run_checksum_slice(cx, session))
    }

    /// When one of them has to be looked at.
    pub(super) fn next(&self, cx: &ReactorContext, session: SessionKey) -> Option<Instant> {
        let larges = self
            .tensors
            .iter()
            .filter_map(|posted| posted.large.as_ref());
        let patiences = larges.filter_map(|large| large.grace.as_ref());
        patiences.map(|grace| grace.next(cx, &[session])).min()
    }

    /// Withdraws offers that nobody asked for in time; closes the pipe under one whose withdrawal is not answered: the
    /// receiver may be reading, and the memory must go back to the caller now.
    pub(super) fn expire(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let mut withdraw = Vec::new();
        for posted in &mut self.tensors {
            let Some(large) = &mut posted.large else {
                continue;
            };
            let Some(grace) = &mut large.grace else {
                continue;
            };
            match grace.look(cx, &[session]) {
                AnswerStage::Late | AnswerStage::Over if !large.is_withdrawn => {
                    large.is_withdrawn = true;
                    grace.due_from(cx.now);
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
