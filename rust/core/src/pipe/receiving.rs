//! Large tensors at the receiving end: several are fetched at once, and complete in order.

use std::sync::Arc;

use kvpipe_ucx::AmData;

use super::incoming::{Content, IncomingTensor};
use super::receiver::{PendingReceive, Receiver};
use super::{CORRUPT, Deadline, MESSAGES_IN_FLIGHT, WITHDRAWN};
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::reactor::{ReactorContext, SessionKey};
use crate::tensor::{Meta, Received};
use crate::transfer::fetch::{Fetch, Offer};
use crate::transfer::pool::Pool;
use crate::work::Completer;

/// Most large tensors that are fetched at once.
const FETCHES: usize = 8;
/// Another fetch begins when fewer bytes than this are left of those that have begun.
const BYTES_AHEAD: usize = 4 << 20;

/// A large tensor that is being fetched. The id of its fetch is its sequence number.
pub(super) struct LargeReceive {
    pub(super) meta: Meta,
    pub(super) fetch: Fetch,
    is_pooled: bool,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Arc<Received>>,
    is_withdrawn: bool,
}

impl Receiver {
    /// Whether the next queued tensor can be matched. A large tensor begins when little is left of those before it, so
    /// that the wire is not idle between two.
    pub(super) fn can_begin(&self) -> bool {
        let Some(next) = self.incoming.next() else {
            return false;
        };
        let left: usize = self
            .large_receives
            .iter()
            .map(|each| each.fetch.left())
            .sum();
        let is_large = matches!(next.content, Content::Offer(_));
        self.large_receives.is_empty()
            || (is_large && left < BYTES_AHEAD && self.large_receives.len() < FETCHES)
    }

    pub(super) fn begin_fetch(
        &mut self,
        cx: &mut ReactorContext,
        sequence: u64,
        meta: Meta,
        offer: Offer,
        receive: PendingReceive,
    ) {
        let Some(session) = self.session else { return };
        let memory = match &receive.out {
            Some((_, buffer)) => cx.register(buffer.clone()),
            None => self.pool.take(offer.len, |buffer| cx.register(buffer)),
        };
        let memory = match memory {
            Ok(memory) => memory,
            Err(error) => {
                // A caller with other memory can still receive it.
                self.incoming.requeue(IncomingTensor {
                    sequence,
                    meta,
                    content: Content::Offer(offer),
                });
                return receive.completer.complete(Err(not_consumed(error)));
            }
        };
        match Fetch::begin(cx, session, sequence, offer, memory) {
            Ok(fetch) => {
                self.large_receives.push_back(LargeReceive {
                    meta,
                    fetch,
                    is_pooled: receive.out.is_none(),
                    deadline: receive.deadline,
                    completer: receive.completer,
                    is_withdrawn: false,
                });
            }
            Err(error) => {
                cx.fail(session, error.clone());
                receive.completer.complete(Err(error));
            }
        }
    }

    /// The large tensor with this sequence number.
    pub(super) fn large_receive(&mut self, sequence: u64) -> Option<&mut LargeReceive> {
        let is_match = |large: &&mut LargeReceive| large.fetch.id() == sequence;
        self.large_receives.iter_mut().find(is_match)
    }

    pub(super) fn receive_data(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        sequence: u64,
        header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        if let Some(large) = self.large_receive(sequence) {
            return large.fetch.take(cx, session, header, data);
        }
        if self.withdrawn.contains(&sequence) {
            // The sender had not received WITHDRAWN when it sent this.
            return Ok(());
        }
        Err(Error::protocol(format_args!(
            "data of tensor {sequence}, which was not requested"
        )))
    }

    pub(super) fn receive_checksums(&mut self, sequence: u64, data: &[u8]) -> Result<()> {
        if let Some(large) = self.large_receive(sequence) {
            return large.fetch.receive_checksums(data);
        }
        // An unknown tensor was withdrawn, or its fetch has failed.
        let Some(offer) = self.incoming.offer_of(sequence) else {
            return Ok(());
        };
        offer.receive_checksums(data).map(|_| ())
    }

    /// Completes the receives whose fetch has ended, in order. Withdrawn ones complete out of order: their sender waits.
    pub(super) fn complete_fetched(&mut self, cx: &mut ReactorContext) {
        let is_next = |(at, large): &(usize, &LargeReceive)| {
            (*at == 0 || large.is_withdrawn) && large.fetch.outcome().is_some()
        };
        while let Some((at, _)) = self.large_receives.iter().enumerate().find(is_next) {
            if let Some(large) = self.large_receives.remove(at) {
                self.complete_large(cx, large);
            }
        }
        self.match_receives(cx);
    }

    fn complete_large(&mut self, cx: &mut ReactorContext, large: LargeReceive) {
        let Some(outcome) = large.fetch.outcome() else {
            return;
        };
        self.count_waiting();
        let (sequence, len) = (large.fetch.id(), large.fetch.len());
        if large.is_withdrawn {
            self.reply(cx, WITHDRAWN, sequence);
        }
        let received = outcome.map(|()| {
            self.record_received(cx, sequence, len);
            let memory = large.fetch.into_memory();
            let lend = |pool: &Pool| pool.lend(memory, len);
            let buffer = large.is_pooled.then(|| lend(&self.pool)).flatten();
            Arc::new(Received {
                meta: large.meta,
                buffer,
            })
        });
        if let Err(Error::Corrupt(_)) = received {
            self.reply(cx, CORRUPT, sequence);
        }
        large.completer.complete(received);
    }

    pub(super) fn withdraw(&mut self, cx: &mut ReactorContext, sequence: u64) {
        if let Some(large) = self.large_receive(sequence) {
            // The answer is sent when no read is under way: then the sender may reuse its memory.
            let text = "the sender withdrew the tensor while it was received; it is lost, the pipe is usable";
            large.fetch.fail(Error::Timeout(text.to_owned()));
            large.is_withdrawn = true;
            self.withdrawn.truncate(MESSAGES_IN_FLIGHT - 1);
            self.withdrawn.push_front(sequence);
            return self.complete_fetched(cx);
        }
        if self.incoming.withdraw(sequence) {
            self.reply(cx, WITHDRAWN, sequence);
        }
    }
}

fn not_consumed(error: Error) -> Error {
    match error {
        Error::Exhausted(text) => Error::Exhausted(format!("{text}; it was not consumed")),
        other => other,
    }
}
