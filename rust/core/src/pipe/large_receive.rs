//! Large tensors that are being received. Several are transferred at once, and complete in order.

use std::sync::Arc;
use std::time::Instant;

use super::TRANSFERS_IN_FLIGHT;
use super::incoming::{IncomingContent, IncomingTensor, PendingReceive};
use super::messages::ReceiverMessage;
use super::receiver::Receiver;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::Links;
use crate::session::grace::{AnswerStage, GracePeriod};
use crate::tensor::{Meta, Received};
use crate::transfer::exposed::BufferDescription;
use crate::transfer::{Completion, Cx, TransferEngine};
use crate::transport::{Memory, Pool, check_len};
use crate::work::Completer;

/// Another transfer begins when fewer bytes than this are left of those that have begun.
const BYTES_AHEAD: u64 = 4 << 20;

/// State of a large tensor.
#[derive(Debug)]
pub(super) enum ReceiveStage {
    Transferring,
    /// Its last read has ended, and its sender has been asked whether it still offers it.
    Validating(Arc<Memory>),
    /// Ended: nothing writes into its memory any more.
    Ended(Result<Arc<Memory>>),
}

/// A large tensor that is being transferred.
pub(super) struct LargeReceive {
    sequence: u64,
    meta: Meta,
    len: usize,
    /// Its number in the engine.
    transfer: u64,
    is_pooled: bool,
    /// True if its sender is asked after the last read.
    is_validated: bool,
    /// `None` without a deadline, once its session has failed, and once the caller knows that it is late.
    pub(super) grace: Option<GracePeriod>,
    pub(super) completer: Completer<Arc<Received>>,
    /// By its sender, or because its receive is late.
    is_withdrawn: bool,
    pub(super) stage: ReceiveStage,
}

impl LargeReceive {
    /// True if the caller knows that it is late, and reads of it may still write.
    fn is_unsettled(&self) -> bool {
        self.completer.is_completed()
    }

    /// Fails a tensor that no caller has yet, also one that waits for its sender's answer, and one that is complete and
    /// waits for those before it: its sender may have reported it as lost.
    pub(super) fn fail(&mut self, error: &Error) {
        if let ReceiveStage::Validating(_) | ReceiveStage::Ended(Ok(_)) = self.stage {
            self.stage = ReceiveStage::Ended(Err(error.clone()));
        }
    }
}

#[cfg(test)]
impl LargeReceive {
    /// A tensor whose transfer has not ended.
    pub(super) fn waiting(sequence: u64, completer: Completer<Arc<Received>>) -> Self {
        Self {
            sequence,
            meta: Meta::default(),
            len: 8,
            transfer: sequence,
            is_pooled: false,
            is_validated: false,
            grace: None,
            completer,
            is_withdrawn: false,
            stage: ReceiveStage::Transferring,
        }
    }
}

impl Receiver {
    /// True if the next tensor can be matched. A large one begins when little is left of those before it, so that the
    /// wire is not idle between two. Where reads of a late one may still write, none begins: the next receive may be into
    /// the same memory.
    pub(super) fn can_begin(&self, transfers: &TransferEngine, next: &IncomingTensor) -> bool {
        let left = self.large_receives.iter();
        let left: u64 = left.map(|each| transfers.bytes_left(each.transfer)).sum();
        let is_large = matches!(next.content, IncomingContent::Offer(_));
        self.large_receives.is_empty()
            || (is_large
                && left < BYTES_AHEAD
                && self.large_receives.len() < TRANSFERS_IN_FLIGHT
                && !self.large_receives.iter().any(LargeReceive::is_unsettled))
    }

    pub(super) fn begin_large(
        &mut self,
        cx: &mut Cx<'_>,
        sequence: u64,
        meta: Meta,
        buffer: BufferDescription,
        receive: PendingReceive,
    ) {
        let Some(session) = self.session else { return };
        if receive.out.is_none()
            && let Err(error) = check_len(buffer.len)
        {
            cx.transfers
                .remove_source(cx.links, session, sequence, &error);
            let reason = error.to_string().into();
            self.reply(cx.links, sequence, &ReceiverMessage::Refused { reason });
            return receive.completer.complete(Err(error));
        }
        let memory = match &receive.out {
            Some((_, out)) => cx.links.register(out.clone()),
            None => (cx.pool).acquire(buffer.len, |fresh| cx.links.register(fresh)),
        };
        let memory = match memory {
            Ok(memory) => memory,
            Err(error) => {
                // A caller with other memory can still receive it.
                self.incoming.push_front(IncomingTensor {
                    sequence,
                    meta,
                    content: IncomingContent::Offer(buffer),
                });
                return receive.completer.complete(Err(not_consumed(error)));
            }
        };
        let transfer = cx.transfers.add(buffer.transfer(session, sequence, memory));
        self.large_receives.push_back(LargeReceive {
            sequence,
            meta,
            len: buffer.len,
            transfer,
            is_pooled: receive.out.is_none(),
            is_validated: buffer.is_validated(),
            grace: (receive.deadline.done_by).map(|at| GracePeriod::new(cx.links.now(), at)),
            completer: receive.completer,
            is_withdrawn: false,
            stage: ReceiveStage::Transferring,
        });
        cx.transfers.enqueue(cx.links, transfer);
    }

    fn large_receive(&mut self, sequence: u64) -> Option<&mut LargeReceive> {
        let is_match = |large: &&mut LargeReceive| large.sequence == sequence;
        self.large_receives.iter_mut().find(is_match)
    }

    /// Records the outcome of a transfer that has ended.
    pub(super) fn record_transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let (sequence, session) = (completion.owner, completion.session);
        let closed = Error::Closed("the transfer has ended".to_owned());
        cx.transfers
            .remove_source(cx.links, session, sequence, &closed);
        let has_pipe_ended = self.has_ended;
        let Some(large) = self.large_receive(sequence) else {
            return;
        };
        let len = large.len;
        let outcome = completion.outcome.map_err(|error| {
            error.into_error(|corruption| {
                let at = corruption.at;
                format!(
                    "what came differs from its checksum at byte {at} of {len}; nothing was delivered, send it again"
                )
            })
        });
        // Its session has ended in order, although no sender of ours ends one before its tensors are here.
        let outcome = match outcome {
            Err(Error::PeerLost { .. } | Error::Closed(_)) if has_pipe_ended => {
                Err(Error::EndOfPipe)
            }
            outcome => outcome,
        };
        // The sender exposes nothing usable any more.
        if let Err(error @ (Error::Protocol(_) | Error::PeerLost { .. })) = &outcome {
            cx.links.fail(session, error.clone());
        }
        if outcome.is_ok() && large.is_validated {
            large.stage = ReceiveStage::Validating(completion.memory);
            self.reply(cx.links, sequence, &ReceiverMessage::Validate);
        } else {
            large.stage = ReceiveStage::Ended(outcome.map(|()| completion.memory));
        }
    }

    /// Completes receives and begins others, as far as transfers and tensors allow. Receives complete in order: none waits
    /// for one whose caller knows that it is late. Withdrawn ones complete out of order: their sender waits.
    pub(super) fn complete_and_match(&mut self, cx: &mut Cx<'_>) {
        while let Some(at) = self.next_completed()
            && let Some(large) = self.large_receives.remove(at)
        {
            self.complete_large(cx, large);
        }
        self.match_receives(cx);
    }

    fn next_completed(&self) -> Option<usize> {
        let receives = &self.large_receives;
        receives.iter().enumerate().position(|(at, large)| {
            let is_first = receives.iter().take(at).all(LargeReceive::is_unsettled);
            (is_first || large.is_withdrawn) && matches!(large.stage, ReceiveStage::Ended(_))
        })
    }

    fn complete_large(&mut self, cx: &mut Cx<'_>, large: LargeReceive) {
        let ReceiveStage::Ended(outcome) = large.stage else {
            return;
        };
        self.count_waiting();
        let (sequence, len) = (large.sequence, large.len);
        if large.is_withdrawn {
            self.reply(cx.links, sequence, &ReceiverMessage::Withdrawn);
        }
        let received = outcome.map(|memory| {
            self.record_received(cx.links, sequence, len);
            let lend = |pool: &Pool| pool.lend(memory, len);
            let buffer = large.is_pooled.then(|| lend(cx.pool)).flatten();
            Arc::new(Received {
                meta: large.meta,
                buffer,
            })
        });
        match &received {
            Err(Error::Corrupt(_)) => self.reply(cx.links, sequence, &ReceiverMessage::Corrupt),
            // Without a reply, the sender would wait although the transfer has failed.
            Err(Error::Config(reason)) if !large.is_withdrawn => {
                let reason = reason.clone().into();
                self.reply(cx.links, sequence, &ReceiverMessage::Refused { reason });
            }
            _ => {}
        }
        large.completer.complete(received);
    }

    /// Fails a large tensor. It completes when no read of it is in flight.
    fn fail_large(&mut self, cx: &mut Cx<'_>, sequence: u64, error: &Error) {
        if let Some(large) = self.large_receive(sequence) {
            large.fail(error);
            let transfer = large.transfer;
            cx.transfers.fail(cx.links, transfer, error);
        }
    }

    /// Withdraws large tensors that are late: each fails as soon as no read of it is in flight. Where that lasts for the
    /// grace period, the receive fails unsettled.
    pub(super) fn expire_large(&mut self, cx: &mut Cx<'_>) {
        let Some(session) = self.session else { return };
        let mut late = Vec::new();
        for large in &mut self.large_receives {
            let Some(grace) = &mut large.grace else {
                continue;
            };
            let stage = grace.look(cx.links, &[session]);
            if stage != AnswerStage::InTime && !large.is_withdrawn {
                large.is_withdrawn = true;
                late.push((large.sequence, large.len));
                continue;
            }
            match stage {
                AnswerStage::InTime | AnswerStage::Late => {}
                AnswerStage::Overdue => {
                    large.grace = None;
                    let late = Error::Timeout(format!(
                        "a tensor of {} bytes was not received in time; it is lost; reads that have begun may still write into out= until the work is settled; the pipe is usable, and the next receive waits for them",
                        large.len
                    ));
                    large.completer.complete_unsettled(Err(late));
                }
            }
        }
        for (sequence, len) in late {
            let error = Error::Timeout(format!(
                "a tensor of {len} bytes was not received in time; it is lost, the pipe is usable"
            ));
            self.fail_large(cx, sequence, &error);
        }
    }

    /// Time of the next check for late large tensors.
    pub(super) fn next_expiry(&self, links: &Links) -> Option<Instant> {
        let session = self.session?;
        let graces = self.large_receives.iter();
        let graces = graces.filter_map(|large| large.grace.as_ref());
        graces.map(|grace| grace.next(links, &[session])).min()
    }

    /// The sender answers whether it still offers a tensor whose last read had ended. The answer is dropped if the tensor
    /// has failed meanwhile.
    ///
    /// # Errors
    /// It was not asked.
    pub(super) fn validated(&mut self, sequence: u64, is_valid: bool) -> Result<()> {
        let is_offered = sequence < self.next_sequence;
        let Some(large) = self.large_receive(sequence) else {
            let text = format_args!("whether tensor {sequence} is valid, which was not offered");
            return is_offered.then_some(()).ok_or(Error::protocol(text));
        };
        match &large.stage {
            ReceiveStage::Validating(memory) if is_valid => {
                large.stage = ReceiveStage::Ended(Ok(Arc::clone(memory)));
            }
            ReceiveStage::Validating(_) => {
                // Also answers a WITHDRAW.
                large.is_withdrawn = true;
                large.fail(&withdrawn_by_sender());
            }
            ReceiveStage::Ended(Err(_)) => {}
            ReceiveStage::Transferring | ReceiveStage::Ended(Ok(_)) => {
                let text = format_args!("whether tensor {sequence} is valid, which was not asked");
                return Err(Error::protocol(text));
            }
        }
        Ok(())
    }

    /// The sender withdraws a tensor.
    pub(super) fn withdraw(&mut self, cx: &mut Cx<'_>, session: SessionKey, sequence: u64) {
        if let Some(large) = self.large_receive(sequence) {
            // The answer is sent when no read is under way: then the sender may reuse its memory.
            large.is_withdrawn = true;
            return self.fail_large(cx, sequence, &withdrawn_by_sender());
        }
        let is_it = |tensor: &IncomingTensor| tensor.sequence == sequence;
        if let Some(at) = self.incoming.iter().position(is_it) {
            self.incoming.remove(at);
            let closed = Error::Closed("the tensor was withdrawn".to_owned());
            cx.transfers
                .remove_source(cx.links, session, sequence, &closed);
            self.reply(cx.links, sequence, &ReceiverMessage::Withdrawn);
        }
    }
}

fn withdrawn_by_sender() -> Error {
    let text =
        "the sender withdrew the tensor while it was received; it is lost, the pipe is usable";
    Error::Timeout(text.to_owned())
}

fn not_consumed(error: Error) -> Error {
    match error {
        Error::Exhausted(text) => Error::Exhausted(format!("{text}; it was not consumed")),
        other => other,
    }
}
