//! Both ends of a pipe against a peer that holds the token.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::fuzzing::{Round, without_threads};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::tensor::{Meta, Received};
use kvpipe_core::work::{Then, Work};
use kvpipe_ucx::Buffer;

use crate::hostile::{Hostile, TOKEN, transport};
use crate::script::{Victim, read, run_session};

/// Longer than any conversation.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Calls of the receiving end's user.
pub(crate) mod receiver_user {
    pub(crate) const RECEIVE: u8 = 0;
    pub(crate) const RECEIVE_OUT: u8 = 1;
    pub(crate) const WITHDRAW: u8 = 2;
    pub(crate) const POLL: u8 = 3;
    pub(crate) const COUNT: u8 = POLL + 1;
}

/// Calls of the sending end's user.
pub(crate) mod sender_user {
    pub(crate) const SEND: u8 = 0;
    pub(crate) const CLOSE: u8 = 3;
    pub(crate) const COUNT: u8 = 4;
}

struct Receiver {
    pipe: Pipe,
    receives: Vec<Work<Arc<Received>>>,
}

pub(crate) fn meta(shape: u64) -> Meta {
    Meta {
        family: 2,
        dtype: "u1".to_owned(),
        shape: vec![shape],
    }
}

impl Victim for Receiver {
    fn round(&self) -> Round {
        self.pipe.round()
    }

    fn act(&mut self, what: u8, argument: u8) {
        let len = usize::from(argument) << 10;
        let out = match what % receiver_user::COUNT {
            receiver_user::RECEIVE => None,
            receiver_user::RECEIVE_OUT => Some((meta(len as u64), Buffer::zeroed(len))),
            receiver_user::WITHDRAW => {
                if let Some(receive) = self.receives.last() {
                    let _ = self.pipe.withdraw(receive);
                }
                return;
            }
            _ => {
                let polls = Deadline::after(Some(Duration::ZERO));
                let receive = self.pipe.receive(None, polls, Then::GoOn);
                return self.receives.extend(receive);
            }
        };
        let receive = self.pipe.receive(out, Deadline::default(), Then::GoOn);
        self.receives.extend(receive);
    }

    fn close(&mut self) {
        self.pipe.stop();
    }

    fn check(&mut self) {
        for receive in &self.receives {
            let received = receive.result().expect("the receive has ended");
            if let Ok(received) = received
                && let Some(buffer) = &received.buffer
            {
                assert!(buffer.bytes(0, buffer.len()).is_some());
            }
        }
    }
}

/// The receiving end.
///
/// # Panics
/// The pipe breaks a promise.
pub(crate) fn receiver(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let listen = || Pipe::listen("127.0.0.1:0", TOKEN, transport.clone(), Duration::ZERO);
    let pipe = without_threads(listen).expect("pipe");
    let hostile = Hostile::connect(SessionKind::Pipe, Some(&transport), pipe.address());
    let receives = Vec::new();
    run_session(Receiver { pipe, receives }, hostile, flags, steps);
}

struct Sender {
    pipe: Pipe,
    sends: Vec<Work<()>>,
    /// Shared by every tensor, and released by all of them at the end.
    owner: Arc<()>,
}

impl Victim for Sender {
    fn round(&self) -> Round {
        self.pipe.round()
    }

    fn act(&mut self, what: u8, argument: u8) {
        if what % sender_user::COUNT == sender_user::CLOSE {
            let closed = self.pipe.close(Deadline::default());
            return self.sends.extend(closed.ok().flatten());
        }
        let len = usize::from(argument) << 10;
        let owner = Box::new(Arc::clone(&self.owner));
        let buffer = Buffer::zeroed(len).first(len, owner).expect("all of it");
        let deadline = Deadline::default();
        let sent = self
            .pipe
            .send(meta(len as u64), buffer, deadline, Then::GoOn);
        self.sends.extend(sent);
    }

    fn close(&mut self) {
        self.pipe.stop();
    }

    fn check_without_peer(&self) {
        assert!(self.sends.iter().all(Work::is_completed), "a send goes on");
    }

    fn check(&mut self) {
        assert_eq!(Arc::strong_count(&self.owner), 1, "a tensor is kept");
    }
}

/// The sending end.
///
/// # Panics
/// The pipe breaks a promise.
pub(crate) fn sender(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let (hostile, address) = Hostile::listen(SessionKind::Pipe, Some(&transport));
    let connect = || {
        Pipe::connect(
            &address,
            TOKEN,
            transport.clone(),
            flags.integrity(),
            Duration::ZERO,
            TIMEOUT,
        )
    };
    let (pipe, connected) = without_threads(connect).expect("pipe");
    let sender = Sender {
        pipe,
        sends: vec![connected],
        owner: Arc::new(()),
    };
    run_session(sender, hostile, flags, steps);
}
