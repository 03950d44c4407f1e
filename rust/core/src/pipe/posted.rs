//! A tensor that the sender has posted and the receiver has not acknowledged.

use std::time::Instant;

use super::messages::SenderMessage;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::transfer::exposed::ExposedBuffer;
use crate::work::Completer;

/// A posted tensor. The send of a small one has completed already; only its place in the window is still occupied.
pub(super) struct PostedSend {
    pub(super) sequence: u64,
    pub(super) large: Option<LargeSend>,
}

pub(super) struct LargeSend {
    pub(super) exposed: ExposedBuffer,
    pub(super) completer: Completer<()>,
    pub(super) grace: Option<GracePeriod>,
    pub(super) is_withdrawn: bool,
}

impl LargeSend {
    /// Deregisters and releases the buffer before it reports the result: the caller may free the tensor at once. The
    /// engine has withdrawn it before.
    pub(super) fn complete(self, result: Result<()>) {
        drop(self.exposed);
        self.completer.complete(result);
    }
}

impl PostedSend {
    /// The time of the next call of [`expire`](Self::expire).
    pub(super) fn next(&self, cx: &ReactorContext, session: SessionKey) -> Option<Instant> {
        let grace = self.large.as_ref()?.grace.as_ref()?;
        Some(grace.next(cx, &[session]))
    }

    /// Withdraws an offer whose deadline has passed. Without an answer within the grace period the session fails: the
    /// receiver may still be reading, and the caller needs its memory back.
    pub(super) fn expire(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(large) = &mut self.large else { return };
        let Some(grace) = &mut large.grace else {
            return;
        };
        match grace.look(cx, &[session]) {
            AnswerStage::Late | AnswerStage::Over if !large.is_withdrawn => {
                large.is_withdrawn = true;
                grace.due_from(cx.now());
                SenderMessage::Withdraw.send(cx, session, self.sequence, false);
            }
            AnswerStage::InTime | AnswerStage::Late => {}
            AnswerStage::Over => {
                let text = "the tensor was not received in time, and the receiver does not say that it will not read it any more; the pipe is closed";
                cx.fail(session, Error::Timeout(text.to_owned()));
            }
        }
    }
}
