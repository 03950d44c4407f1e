//! The two ends of a pipe, which stay: tensors that meet in time, tensors that are never received, and receives without
//! one. The sender of another pipe closes it, and the next one follows.

use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::visitors::{SIZES, TIMEOUT, meta};
use super::{LATE, MANY_BYTES, Rng, TOKEN, is_busy};
use crate::Integrity;
use crate::pipe::{Deadline, Pipe};
use crate::reactor::manual::{Sizes, without_threads};
use crate::transport::{MemoryPath, Transport};
use crate::work::Then;

const TRANSPORT: Transport = Transport::Memory(MemoryPath::RemoteRead);
/// More tensors than may be posted.
const BURST: usize = 70;

/// The two ends of a pipe.
struct Ends {
    sender: Pipe,
    receiver: Pipe,
}

impl Ends {
    fn open() -> Self {
        let poll = Duration::ZERO;
        let listen = || Pipe::listen("127.0.0.1:0", TOKEN, TRANSPORT, poll);
        let receiver = without_threads(listen).expect("a pipe");
        let address = receiver.address().expect("it listens").to_string();
        let (verify, wait) = (Integrity::Validate, TIMEOUT);
        let connect = || Pipe::connect(&address, TOKEN, TRANSPORT, verify, poll, wait);
        let (sender, connected) = without_threads(connect).expect("a pipe");
        drop(connected);
        Self { sender, receiver }
    }

    fn round(&self) -> bool {
        [self.sender.round(), self.receiver.round()]
            .map(is_busy)
            .contains(&true)
    }

    /// Drops the work of the send.
    fn send(&self, len: usize, timeout: Duration) {
        let (content, deadline) = (Buffer::zeroed(len), Deadline::after(Some(timeout)));
        let sent = self.sender.send(meta(len), content, deadline, Then::GoOn);
        drop(sent.expect("it runs"));
    }

    /// Drops the work of the receive.
    fn receive(&self, timeout: Duration) {
        let deadline = Deadline::after(Some(timeout));
        let received = self.receiver.receive(None, deadline, Then::GoOn);
        drop(received.expect("it runs"));
    }

    /// Drops the work of the close, which ends when the tensor is received, or is late.
    fn close(&self, timeout: Duration) {
        self.send(SIZES[1], TIMEOUT);
        let closed = self.sender.close(Deadline::after(Some(timeout)));
        drop(closed.expect("it runs"));
    }
}

pub(super) struct Pipes {
    ends: Ends,
    closing: Ends,
}

impl Pipes {
    pub(super) fn new() -> Self {
        Self {
            ends: Ends::open(),
            closing: Ends::open(),
        }
    }

    pub(super) fn round(&self) -> bool {
        [self.ends.round(), self.closing.round()].contains(&true)
    }

    pub(super) fn act(&mut self, rng: &mut Rng) {
        let (ends, len) = (&self.ends, SIZES[rng.one_of(2) as usize]);
        match rng.one_of(14) {
            0..3 => {
                ends.send(len, TIMEOUT);
                ends.receive(TIMEOUT);
            }
            3..6 => {
                ends.receive(TIMEOUT);
                ends.send(len, TIMEOUT);
            }
            // They are late, or meet one of before.
            6 | 7 => ends.send(len, LATE),
            8..11 => ends.receive(LATE),
            11 => {
                for _ in 0..BURST {
                    ends.send(SIZES[0], TIMEOUT);
                }
                for _ in 0..BURST {
                    ends.receive(TIMEOUT);
                }
            }
            12 => {
                self.closing = Ends::open();
                self.closing.close(TIMEOUT);
            }
            _ => self.closing.receive(TIMEOUT),
        }
    }

    /// Both are late when a part of the tensor is there.
    pub(super) fn begin_large(&self) {
        self.ends.receive(LATE);
        self.ends.send(MANY_BYTES, LATE);
    }

    /// Receives what is left.
    pub(super) fn end_all(&self) {
        for _ in 0..BURST {
            self.ends.receive(Duration::ZERO);
        }
    }

    pub(super) fn check(&self) {
        assert_eq!(self.ends.sender.info().state, "open");
        assert!(self.ends.receiver.info().num_tensors > 1000);
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        vec![
            ("pipe's sender", self.ends.sender.sizes()),
            ("pipe's receiver", self.ends.receiver.sizes()),
            ("closing pipe's sender", self.closing.sender.sizes()),
        ]
    }
}
