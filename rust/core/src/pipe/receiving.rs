//! Large tensors at the receiving end: several are fetched at once, and delivered in order.

use std::sync::Arc;

use kvpipe_ucx::AmData;

use super::arrivals::{Arrived, Content};
use super::receiver::{Received, Receiver, Wanted};
use super::{CORRUPT, Deadline, MESSAGES_IN_FLIGHT, Meta, WITHDRAWN};
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::fetch::{Fetch, Offer};
use crate::transfer::pool::Pool;
use crate::work::Completer;

/// Large tensors that are fetched at once, while less than this is left of those under way.
const FETCHES: usize = 8;
const BYTES_AHEAD: usize = 4 << 20;

/// A large tensor under way. Its fetch bears its sequence number.
pub(super) struct Receiving {
    pub(super) meta: Meta,
    pub(super) fetch: Fetch,
    is_fresh: bool,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Arc<Received>>,
    is_withdrawn: bool,
}

impl Receiver {
    /// Whether the next that has come can be looked at. A large tensor is fetched while others still are, as long as
    /// little of them is left: the wire has no pause between two.
    pub(super) fn may_begin(&self) -> bool {
        let Some(next) = self.arrived.next() else {
            return false;
        };
        let left: usize = self.receiving.iter().map(|each| each.fetch.left()).sum();
        let is_large = matches!(next.content, Content::Offer(_));
        self.receiving.is_empty()
            || (is_large && left < BYTES_AHEAD && self.receiving.len() < FETCHES)
    }

    pub(super) fn begin(
        &mut self,
        cx: &mut ReactorContext,
        sequence: u64,
        meta: Meta,
        offer: Offer,
        wanted: Wanted,
    ) {
        let Some(session) = self.session else { return };
        let memory = match &wanted.out {
            Some((_, buffer)) => cx.register(buffer.clone()),
            None => self.pool.take(cx, offer.len),
        };
        let memory = match memory {
            Ok(memory) => memory,
            Err(error) => {
                // A caller with other memory can still take it.
                self.arrived.put_back(Arrived {
                    sequence,
                    meta,
                    content: Content::Offer(offer),
                });
                return wanted.completer.complete(Err(not_consumed(error)));
            }
        };
        match Fetch::begin(cx, session, sequence, offer, memory) {
            Ok(fetch) => {
                self.receiving.push_back(Receiving {
                    meta,
                    fetch,
                    is_fresh: wanted.out.is_none(),
                    deadline: wanted.deadline,
                    completer: wanted.completer,
                    is_withdrawn: false,
                });
            }
            Err(error) => {
                cx.fail(session, error.clone());
                wanted.completer.complete(Err(error));
            }
        }
    }

    /// A tensor under way.
    pub(super) fn fetch(&mut self, sequence: u64) -> Option<&mut Receiving> {
        let is_it = |receiving: &&mut Receiving| receiving.fetch.id() == sequence;
        self.receiving.iter_mut().find(is_it)
    }

    pub(super) fn place(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        sequence: u64,
        header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        if let Some(receiving) = self.fetch(sequence) {
            return receiving.fetch.take(cx, session, header, data);
        }
        if self.withdrawn.contains(&sequence) {
            // Sent before the sender knew that its withdrawal had been taken.
            return Ok(());
        }
        Err(Error::protocol(format_args!(
            "data of tensor {sequence}, which nobody asked for"
        )))
    }

    pub(super) fn checksums(&mut self, sequence: u64, data: &[u8]) -> Result<()> {
        if let Some(receiving) = self.fetch(sequence) {
            return receiving.fetch.receive_checksums(data);
        }
        // One of which nothing is known was withdrawn, or has failed here.
        let Some(offer) = self.arrived.offer_of(sequence) else {
            return Ok(());
        };
        offer.receive_checksums(data).map(|_| ())
    }

    /// Delivers what is complete, in order; a sender that waits for its withdrawal is answered out of turn.
    pub(super) fn finish(&mut self, cx: &mut ReactorContext) {
        let is_next = |(at, receiving): &(usize, &Receiving)| {
            (*at == 0 || receiving.is_withdrawn) && receiving.fetch.outcome().is_some()
        };
        while let Some((at, _)) = self.receiving.iter().enumerate().find(is_next) {
            if let Some(receiving) = self.receiving.remove(at) {
                self.end(cx, receiving);
            }
        }
        self.pair(cx);
    }

    pub(super) fn end(&mut self, cx: &mut ReactorContext, receiving: Receiving) {
        let Some(outcome) = receiving.fetch.outcome() else {
            return;
        };
        self.count_waiting();
        let (sequence, len) = (receiving.fetch.id(), receiving.fetch.len());
        if receiving.is_withdrawn {
            self.say(cx, WITHDRAWN, sequence);
        }
        let received = outcome.map(|()| {
            self.take(cx, sequence, len);
            let memory = receiving.fetch.into_memory();
            let lend = |pool: &Pool| pool.lend(memory, len);
            let buffer = receiving.is_fresh.then(|| lend(&self.pool)).flatten();
            Arc::new(Received {
                meta: receiving.meta,
                buffer,
            })
        });
        if let Err(Error::Corrupt(_)) = received {
            self.say(cx, CORRUPT, sequence);
        }
        receiving.completer.complete(received);
    }

    pub(super) fn withdraw(&mut self, cx: &mut ReactorContext, sequence: u64) {
        if let Some(receiving) = self.fetch(sequence) {
            // Answered once no read is under way: only then may the sender have its memory back.
            let text = "the sender withdrew the tensor while it was received; it is lost, the pipe is usable";
            receiving.fetch.fail(Error::Timeout(text.to_owned()));
            receiving.is_withdrawn = true;
            self.withdrawn.truncate(MESSAGES_IN_FLIGHT - 1);
            self.withdrawn.push_front(sequence);
            return self.finish(cx);
        }
        if self.arrived.withdraw(sequence) {
            self.say(cx, WITHDRAWN, sequence);
        }
    }
}

fn not_consumed(error: Error) -> Error {
    match error {
        Error::Exhausted(text) => Error::Exhausted(format!("{text}; it was not consumed")),
        other => other,
    }
}
