//! The two ends of a pipe, which stay: tensors that meet in time, tensors that nobody receives, and receives without one.

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

pub(super) struct Pipes {
    sender: Pipe,
    receiver: Pipe,
}

impl Pipes {
    pub(super) fn new() -> Self {
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

    pub(super) fn round(&self) -> bool {
        [self.sender.round(), self.receiver.round()]
            .map(is_busy)
            .contains(&true)
    }

    /// Nobody waits for the send.
    fn send(&self, len: usize, timeout: Duration) {
        let (content, deadline) = (Buffer::zeroed(len), Deadline::after(Some(timeout)));
        let sent = self.sender.send(meta(len), content, deadline, Then::GoOn);
        drop(sent.expect("it runs"));
    }

    /// Nobody waits for the receive.
    fn receive(&self, timeout: Duration) {
        let deadline = Deadline::after(Some(timeout));
        let received = self.receiver.receive(None, deadline, Then::GoOn);
        drop(received.expect("it runs"));
    }

    pub(super) fn act(&self, rng: &mut Rng) {
        let len = SIZES[rng.one_of(2) as usize];
        match rng.one_of(12) {
            0..3 => {
                self.send(len, TIMEOUT);
                self.receive(TIMEOUT);
            }
            3..6 => {
                self.receive(TIMEOUT);
                self.send(len, TIMEOUT);
            }
            // They are late, or meet one of before.
            6 | 7 => self.send(len, LATE),
            8..11 => self.receive(LATE),
            _ => {
                for _ in 0..BURST {
                    self.send(SIZES[0], TIMEOUT);
                }
                for _ in 0..BURST {
                    self.receive(TIMEOUT);
                }
            }
        }
    }

    /// Both are late when a part of the tensor is there.
    pub(super) fn begin_large(&self) {
        self.receive(LATE);
        self.send(MANY_BYTES, LATE);
    }

    /// Receives what is left.
    pub(super) fn end_all(&self) {
        for _ in 0..BURST {
            self.receive(Duration::ZERO);
        }
    }

    pub(super) fn check(&self) {
        assert_eq!(self.sender.info().state, "open");
        assert!(self.receiver.info().num_tensors > 1000);
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        vec![
            ("pipe's sender", self.sender.sizes()),
            ("pipe's receiver", self.receiver.sizes()),
        ]
    }
}
