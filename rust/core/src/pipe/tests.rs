//! The two ends of a pipe whose tensors are validated, run step by step.

mod late;

use super::*;
use crate::checksum;
use crate::reactor::manual::{Round, without_threads};
use crate::session::wire;
use crate::transport::MemoryPath;

const PATHS: [MemoryPath; 2] = [MemoryPath::RemoteRead, MemoryPath::Stream];
const LEN: usize = 1 << 20; // less than is credited, so that all of it is sent at once
const LATE: Duration = Duration::from_millis(900);

#[test]
fn a_pipe_that_was_stopped_says_that_reads_have_not_ended_as_long_as_that_is_so() {
    let ends = Ends::open(MemoryPath::RemoteRead);
    let End::Receiver(reactor) = &ends.receiver.end else {
        panic!("the receiving end")
    };
    ends.receiver.stop();
    assert_eq!(ends.receiver.check_reads_ended(), Ok(()));
    reactor.pending_reads().pretend(2);
    let told = ends.receiver.check_reads_ended();
    assert!(
        matches!(&told, Err(Error::Timeout(text)) if text.contains("2 reads have not ended")),
        "{told:?}"
    );
    reactor.pending_reads().pretend(0);
    assert_eq!(ends.receiver.check_reads_ended(), Ok(()));
}

struct Ends {
    sender: Pipe,
    receiver: Pipe,
}

fn rest(pipe: &Pipe) {
    while pipe.round() == Round::Busy {}
}

impl Ends {
    fn open(path: MemoryPath) -> Self {
        let transport = || Transport::Memory(path);
        let listen = || Pipe::listen("127.0.0.1:0", b"token", transport(), Duration::ZERO);
        let receiver = without_threads(listen).unwrap();
        let address = receiver.address().unwrap().to_string();
        let (integrity, timeout) = (Integrity::Validate, Duration::from_secs(600));
        let connect = || {
            let busy_poll = Duration::ZERO;
            Pipe::connect(
                &address,
                b"token",
                transport(),
                integrity,
                busy_poll,
                timeout,
            )
        };
        let (sender, connected) = without_threads(connect).unwrap();
        let ends = Self { sender, receiver };
        ends.run_until(|| connected.is_completed());
        ends
    }

    fn run_until(&self, is_over: impl Fn() -> bool) {
        while !is_over() {
            rest(&self.sender);
            rest(&self.receiver);
        }
    }

    fn send(&self, content: &Buffer, timeout: Option<Duration>) -> Work<()> {
        let (content, deadline) = (content.clone(), Deadline::after(timeout));
        let sent = self
            .sender
            .send(Meta::default(), content, deadline, Then::GoOn);
        sent.unwrap()
    }

    fn receive(&self, out: &Buffer, timeout: Option<Duration>) -> Work<Arc<Received>> {
        let (out, deadline) = ((Meta::default(), out.clone()), Deadline::after(timeout));
        let received = self.receiver.receive(Some(out), deadline, Then::GoOn);
        received.unwrap()
    }

    /// Moves another tensor.
    fn check_usable(&self) {
        let (content, out) = (Buffer::from_vec(vec![2; LEN]), Buffer::zeroed(LEN));
        let (sent, received) = (self.send(&content, None), self.receive(&out, None));
        self.run_until(|| sent.is_completed() && received.is_completed());
        assert!(received.result().unwrap().is_ok());
        assert!(holds(&out, 2));
    }

    /// A tensor whose last read has ended, and of which the sender has not seen the question.
    fn validating(
        path: MemoryPath,
        timeout: Option<Duration>,
    ) -> (Self, Work<()>, Work<Arc<Received>>) {
        let ends = Self::open(path);
        let (content, out) = (Buffer::from_vec(vec![1; LEN]), Buffer::zeroed(LEN));
        let (sent, received) = (ends.send(&content, None), ends.receive(&out, timeout));
        rest(&ends.receiver);
        rest(&ends.sender);
        rest(&ends.receiver);
        while !holds(&out, 1) {
            rest(&ends.sender);
            rest(&ends.receiver);
        }
        assert!(holds(&out, 1), "{path:?}");
        assert!(!received.is_completed(), "{path:?}");
        (ends, sent, received)
    }
}

fn holds(buffer: &Buffer, byte: u8) -> bool {
    let held = checksum::of_shared(buffer.bytes(0, LEN).unwrap());
    held == checksum::of(&vec![byte; LEN])
}

#[test]
fn a_validated_tensor_is_delivered_when_its_sender_has_answered() {
    for path in PATHS {
        let (ends, sent, received) = Ends::validating(path, None);
        rest(&ends.sender);
        rest(&ends.receiver);
        assert!(received.result().unwrap().is_ok(), "{path:?}");
        rest(&ends.sender);
        assert_eq!(sent.result(), Some(Ok(())));
        ends.check_usable();
    }
}

#[test]
fn a_tensor_whose_sender_falls_silent_before_it_has_answered_is_lost() {
    for path in PATHS {
        let (ends, sent, received) = Ends::validating(path, None);
        for _ in 0..100 {
            clock::advance(Duration::from_secs(1));
            rest(&ends.receiver);
        }
        let lost = received.result().unwrap();
        assert!(
            matches!(lost, Err(Error::PeerLost { .. })),
            "{path:?}: {lost:?}"
        );
        // It goes on, and answers on a session that is closed.
        ends.run_until(|| sent.is_completed());
        assert!(sent.result().unwrap().is_err());
    }
}

#[test]
fn a_receive_that_is_late_while_its_sender_is_asked_ends_at_its_deadline() {
    for path in PATHS {
        let (ends, sent, received) = Ends::validating(path, Some(LATE));
        clock::advance(LATE);
        rest(&ends.receiver);
        let late = received.result().unwrap();
        assert!(matches!(late, Err(Error::Timeout(_))), "{path:?}: {late:?}");
        ends.run_until(|| sent.is_completed());
        assert!(matches!(sent.result(), Some(Err(Error::Timeout(_)))));
        ends.check_usable();
    }
}

#[test]
fn a_small_tensor_that_changes_on_its_way_is_not_delivered_and_the_pipe_goes_on() {
    let ends = Ends::open(MemoryPath::Stream);
    let mut has_changed = false;
    wire::tap(move |header, body| {
        if header[0] == messages::EAGER && !has_changed {
            *body.last_mut().unwrap() ^= 1;
            has_changed = true;
        }
    });
    let (content, out) = (Buffer::from_vec(vec![1; 8]), Buffer::zeroed(8));
    let (_sent, received) = (ends.send(&content, None), ends.receive(&out, None));
    ends.run_until(|| received.is_completed());
    assert!(matches!(received.result(), Some(Err(Error::Corrupt(_)))));
    assert_eq!(out.bytes(0, 8).unwrap().to_vec(), [0; 8]);
    ends.check_usable();
}

/// Runs a tensor whose send is late after so many rounds, and whose sender changes it as soon as the send has ended. Whether
/// it was late, and whether it was delivered.
fn is_late_and_delivered(
    path: MemoryPath,
    num_rounds: usize,
    is_receiver_first: bool,
) -> (bool, bool) {
    let ends = Ends::open(path);
    let (content, out) = (Buffer::from_vec(vec![1; LEN]), Buffer::zeroed(LEN));
    let (sent, received) = (ends.send(&content, Some(LATE)), ends.receive(&out, None));
    let mut order = [&ends.sender, &ends.receiver];
    if is_receiver_first {
        order.reverse();
    }
    let mut num_run = 0;
    while !sent.is_completed() {
        if num_run == num_rounds {
            clock::advance(LATE);
        }
        order[num_run % 2].round();
        num_run += 1;
        assert!(num_run < 5000, "{path:?} {num_rounds}: no end");
    }
    assert!(content.write(0, &vec![9; LEN]));
    let is_sent = sent.result().unwrap().is_ok();
    rest(&ends.receiver);
    if is_sent || received.is_completed() {
        let received = received.result().unwrap();
        assert_eq!(
            received.is_ok(),
            is_sent,
            "{path:?} {num_rounds}: {received:?}"
        );
        assert!(!is_sent || holds(&out, 1), "{path:?} {num_rounds}");
        ends.check_usable();
    } else {
        // The tensor was withdrawn before it met the receive, which gets the next one.
        let sent = ends.send(&Buffer::from_vec(vec![2; LEN]), None);
        ends.run_until(|| sent.is_completed() && received.is_completed());
        assert!(holds(&out, 2), "{path:?} {num_rounds}");
    }
    (num_run > num_rounds, is_sent)
}

#[test]
fn a_tensor_that_is_withdrawn_at_any_moment_is_delivered_as_it_was_sent_or_lost_on_both_sides() {
    for path in PATHS {
        for is_receiver_first in [false, true] {
            let (mut num_lost, mut num_rounds) = (0, 0);
            loop {
                let (is_late, is_sent) = is_late_and_delivered(path, num_rounds, is_receiver_first);
                if !is_late {
                    assert!(is_sent);
                    break;
                }
                num_lost += usize::from(!is_sent);
                num_rounds += 1;
            }
            assert!(num_lost > 0, "{path:?}");
        }
    }
}
