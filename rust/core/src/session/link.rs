//! A connection with its frames: its received bytes, and the keys of both directions.

use std::time::Instant;

use super::connection::Connection;
use super::inbox::Inbox;
use super::outbox::{StreamPart, StreamTag};
use crate::net::record::{Opener, Records, Sealer};

#[derive(Debug)]
pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) inbox: Inbox,
    /// The keys of its frames after the handshake, if they are sealed.
    pub(super) records: Option<Records>,
}

impl Link {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            inbox: Inbox::default(),
            records: None,
        }
    }

    fn split(&mut self) -> (&mut Connection, Option<&mut Sealer>) {
        let sealer = self.records.as_mut().map(|records| &mut records.sealer);
        (&mut self.connection, sealer)
    }

    /// Opens received frames, if they are sealed.
    pub(super) fn opener(&mut self) -> Option<&mut Opener> {
        self.records.as_mut().map(|records| &mut records.opener)
    }

    /// Queues a frame for the next [`flush`](Self::flush); true if that is due.
    ///
    /// # Errors
    /// As of [`send`](Self::send).
    pub(super) fn queue(&mut self, frame: &[u8]) -> Result<bool, String> {
        let (connection, sealer) = self.split();
        connection.queue(frame, sealer)
    }

    /// Sends a frame; what the socket does not take now is sent by [`flush`](Self::flush).
    ///
    /// # Errors
    /// The peer does not read, or the sealer seals no more; the reason does not name the peer.
    pub(super) fn send(&mut self, frame: &[u8]) -> Result<(), String> {
        let (connection, sealer) = self.split();
        connection.send(frame, sealer)
    }

    /// Sends a part of a stream when the socket takes it.
    pub(super) fn send_part(&mut self, part: StreamPart) {
        let (connection, sealer) = self.split();
        connection.send_part(part, sealer);
    }

    /// Sends nothing more of the parts that `is_over` names: their memory may have other bytes from now on.
    pub(super) fn abort_parts(&mut self, is_over: impl Fn(StreamTag) -> bool) {
        self.connection.abort_parts(is_over);
    }

    /// Sends what waits, as far as the socket takes it.
    pub(super) fn flush(&mut self) {
        let (connection, sealer) = self.split();
        connection.flush(sealer);
    }

    /// Waits until the socket has taken everything, at most until `deadline`.
    pub(super) fn flush_until(&mut self, deadline: Instant) {
        let (connection, sealer) = self.split();
        connection.flush_until(sealer, deadline);
    }
}
