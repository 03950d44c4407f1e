//! How the sending end posts a tensor: a small one inside its message, a large one as the offer of its buffer.

use super::posted::LargeSend;
use super::sender::{QueuedSend, Sender};
use super::{EAGER, OFFER};
use crate::checksum;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::net::codec::Writer;
use crate::session::ReactorContext;
use crate::session::grace::GracePeriod;
use crate::transfer::exposed::ExposedBuffer;
use crate::transport::Payload;

impl Sender {
    /// Posts a small tensor inside its message. Returns it if the session is lost.
    pub(super) fn post_eager(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        queued: QueuedSend,
    ) -> Option<QueuedSend> {
        let len = queued.buffer.len();
        let Some(bytes) = queued.buffer.bytes(0, len) else {
            let text =
                "only host memory travels inside a message; copy the tensor to the CPU first";
            let error = Error::Unavailable(text.to_owned());
            queued.completer.complete(Err(error));
            return None;
        };
        let payload = queued.meta.write(Writer::default()).bytes(bytes).finish();
        let header = cx.header(session, EAGER).u64(self.posted.next_sequence());
        let header = self.add_checksum(header, &payload);
        if !cx.message(session, header, Payload::Bytes(payload)) {
            return Some(queued);
        }
        self.count_sent(len);
        self.posted.add(None);
        queued.completer.complete(Ok(()));
        None
    }

    /// Posts the offer of a large tensor. Returns it if the session is lost.
    pub(super) fn post_offer(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        queued: QueuedSend,
    ) -> Option<QueuedSend> {
        let sequence = self.posted.next_sequence();
        let buffer = queued.buffer.clone();
        let exposed = ExposedBuffer::new(cx, session, buffer, self.is_checksummed);
        let (exposed, described) = match exposed {
            Ok(exposed) => exposed,
            Err(error) => {
                queued.completer.complete(Err(error));
                return None;
            }
        };
        let payload = described
            .write(queued.meta.write(Writer::default()))
            .finish();
        let header = self.add_checksum(cx.header(session, OFFER).u64(sequence), &payload);
        if !cx.message(session, header, Payload::Bytes(payload)) {
            return Some(queued);
        }
        let grace = queued
            .deadline
            .meet_by
            .map(|at| GracePeriod::new(cx.now(), at));
        self.engine.expose(session, sequence, &exposed);
        self.posted
            .add(Some(LargeSend::new(exposed, queued.completer, grace)));
        None
    }

    /// Appends the checksum of the payload to its header.
    fn add_checksum(&self, header: Writer, payload: &[u8]) -> Writer {
        let checksum = self.is_checksummed.then(|| checksum::of(payload));
        header
            .u8(self.is_checksummed.into())
            .u64(checksum.unwrap_or(0))
    }
}
