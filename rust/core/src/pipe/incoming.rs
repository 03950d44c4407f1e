//! Tensors that have arrived and wait for a receive, and receives that wait for a tensor. They meet in order.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::messages::{OFFER, ReceiverMessage, SenderMessage};
use super::receiver::Receiver;
use super::{Deadline, MESSAGES_IN_FLIGHT};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::Payload;
use crate::tensor::{Meta, Received};
use crate::transfer::Cx;
use crate::transfer::exposed::BufferDescription;
use crate::work::Completer;

/// A receive that has not met a tensor.
#[derive(Debug)]
pub(super) struct PendingReceive {
    pub(super) out: Option<(Meta, Buffer)>,
    pub(super) deadline: Deadline,
    pub(super) completer: Completer<Arc<Received>>,
}

/// A tensor that has not met a receive.
pub(super) struct IncomingTensor {
    pub(super) sequence: u64,
    pub(super) meta: Meta,
    pub(super) content: IncomingContent,
}

pub(super) enum IncomingContent {
    /// The message, which ends with the tensor's bytes: they are not copied out of it.
    Eager {
        message: Vec<u8>,
        len: usize,
    },
    Offer(BufferDescription),
    /// The message differs from its checksum: none of its fields can be trusted.
    Corrupt {
        /// An offer: its sender waits for an answer.
        was_offered: bool,
    },
}

impl IncomingTensor {
    /// The error if it does not fit the memory that a caller receives into.
    fn mismatch(&self, out: Option<&(Meta, Buffer)>) -> Option<Error> {
        let (meta, buffer) = out?;
        let len = match &self.content {
            IncomingContent::Eager { len, .. } => *len,
            IncomingContent::Offer(buffer) => buffer.len,
            IncomingContent::Corrupt { .. } => return None,
        };
        if *meta == self.meta && buffer.len() == len {
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
            show(&self.meta)
        )))
    }
}

impl Receiver {
    /// A message of the sender, besides those of transfers.
    pub(super) fn sender_message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let sequence = header.u64()?;
        let (meta, content) = match SenderMessage::decode(kind, header, &data) {
            Ok(SenderMessage::Eager { meta, bytes }) => {
                let (meta, len) = (meta.into_owned(), bytes.len());
                let message = data.into_bytes();
                (meta, IncomingContent::Eager { message, len })
            }
            Ok(SenderMessage::Offer { meta, buffer }) => {
                (meta.into_owned(), IncomingContent::Offer(buffer))
            }
            Ok(SenderMessage::Withdraw) => {
                self.withdraw(cx, session, sequence);
                return Ok(());
            }
            Ok(SenderMessage::Valid) => return self.validated(sequence, true),
            Ok(SenderMessage::Invalid) => return self.validated(sequence, false),
            Err(Error::Corrupt(_)) => {
                let was_offered = kind == OFFER;
                (Meta::default(), IncomingContent::Corrupt { was_offered })
            }
            Err(error) => return Err(error),
        };
        let (next, num_waiting) = (self.next_sequence, self.incoming.len());
        if sequence != next || num_waiting >= MESSAGES_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "tensor {sequence} arrived, {next} was next and {num_waiting} wait"
            )));
        }
        self.next_sequence += 1;
        if let IncomingContent::Offer(buffer) = &content {
            cx.transfers.add_source(session, sequence, buffer.source());
        }
        self.incoming.push_back(IncomingTensor {
            sequence,
            meta,
            content,
        });
        Ok(())
    }

    /// Matches queued tensors with pending receives, in order, until one of the two queues is empty.
    pub(super) fn match_receives(&mut self, cx: &mut Cx<'_>) {
        while let Some(next) = self.incoming.front()
            && self.can_begin(cx.transfers, next)
            && let Some(receive) = self.receives.pop_front()
        {
            self.count_waiting();
            if let Some(error) = next.mismatch(receive.out.as_ref()) {
                receive.completer.complete(Err(error));
                continue;
            }
            let Some(tensor) = self.incoming.pop_front() else {
                return;
            };
            let (sequence, meta) = (tensor.sequence, tensor.meta);
            match tensor.content {
                IncomingContent::Eager { message, len } => {
                    self.record_received(cx.links, sequence, len);
                    let placed = place(message, len, receive.out);
                    let received = placed.map(|buffer| Arc::new(Received { meta, buffer }));
                    receive.completer.complete(received);
                }
                IncomingContent::Offer(buffer) => {
                    self.begin_large(cx, sequence, meta, buffer, receive);
                }
                IncomingContent::Corrupt { was_offered } => {
                    if was_offered {
                        self.reply(cx.links, sequence, &ReceiverMessage::Corrupt);
                    } else {
                        self.record_received(cx.links, sequence, 0);
                    }
                    let text = format!(
                        "tensor {sequence} differs from its checksum; it is lost, the pipe is usable"
                    );
                    receive.completer.complete(Err(Error::Corrupt(text)));
                }
            }
        }
        if let Some(error) = &self.failure
            && self.incoming.is_empty()
            && self.large_receives.is_empty()
        {
            for receive in self.receives.drain(..) {
                receive.completer.complete(Err(error.clone()));
            }
        }
        self.count_waiting();
    }
}

/// Copies a small tensor, the last `len` bytes of its message, into the caller's memory; without any, returns memory that
/// holds it.
fn place(mut message: Vec<u8>, len: usize, out: Option<(Meta, Buffer)>) -> Result<Option<Buffer>> {
    let start = message.len() - len;
    match out {
        Some((_, out)) if !out.write(0, &message[start..]) => {
            let text =
                "the CUDA driver could not write into out=; the tensor is lost, the pipe is usable";
            Err(Error::Unavailable(text.to_owned()))
        }
        Some(_) => Ok(None),
        None => {
            message.drain(..start); // elements are aligned where an allocation begins
            Ok(Some(Buffer::from_vec(message)))
        }
    }
}
