//! Pipes without checksums, over real data paths: a tensor is delivered if its sender still offered it after the last read.

use std::time::{Duration, Instant};

use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Then;
use kvpipe_core::{Error, Integrity};
use kvpipe_ucx::Buffer;

use crate::common::pipes::{close, meta};
use crate::common::{self, TIMEOUT, TOKEN, bytes, on_both_paths};

const LEN: usize = 8 << 20;
const NUM_TENSORS: u8 = 100;
/// Tensors that are sent without a deadline first.
const NUM_TIMED: usize = 5;
/// Content of memory that is overwritten once its send is settled.
const OVERWRITTEN: u8 = 255;

fn validating(transport: &Transport) -> (Pipe, Pipe) {
    let (local, busy_poll) = (common::local(), Duration::ZERO);
    let rx = Pipe::listen(&local, TOKEN, transport.clone(), busy_poll).expect("listen");
    let address = rx.address().expect("address").to_string();
    let (transport, integrity) = (transport.clone(), Integrity::Validate);
    let connected = Pipe::connect(&address, TOKEN, transport, integrity, busy_poll, TIMEOUT);
    let (tx, connected) = connected.expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    (tx, rx)
}

/// Sends a tensor of these bytes, and overwrites it as soon as its send is settled. True if it was received.
fn send_and_overwrite(tx: &Pipe, number: u8, timeout: Option<Duration>) -> bool {
    let content = Buffer::from_vec(vec![number; LEN]);
    let deadline = Deadline::after(timeout);
    let sent = tx.send(meta(LEN), content.clone(), deadline, Then::GoOn);
    let sent = sent.expect("send");
    let began = Instant::now();
    while !sent.is_settled() {
        assert!(began.elapsed() < TIMEOUT, "tensor {number} is not settled");
        std::thread::yield_now();
    }
    assert!(content.write(0, &vec![OVERWRITTEN; LEN]));
    match sent.result() {
        Some(Ok(())) => true,
        Some(Err(Error::Timeout(_))) => false,
        other => panic!("tensor {number}: {other:?}"),
    }
}

/// Time of a tensor from its send until it is received.
fn time_of(tx: &Pipe, rx: &Pipe, number: u8) -> Duration {
    let began = Instant::now();
    let received = rx.receive(None, Deadline::default(), Then::GoOn);
    assert!(send_and_overwrite(tx, number, None));
    let received = received.expect("receive").wait_for(TIMEOUT);
    received.expect("received");
    began.elapsed()
}

/// A part of twice this time, another one for each tensor.
fn some_of(time: Duration, number: u8) -> Duration {
    time * (u32::from(number) * 37 % 100) / 50
}

/// Receives to the end of the pipe, every other time with a deadline. The tensors that were delivered.
fn receive_all(rx: &Pipe, time: Duration) -> Vec<u8> {
    let mut delivered = Vec::new();
    for number in (0..=u8::MAX).cycle() {
        let timeout = (number % 2 == 0).then(|| 2 * some_of(time, number));
        let received = rx.receive(None, Deadline::after(timeout), Then::GoOn);
        match received.expect("receive").wait_for(TIMEOUT) {
            Ok(received) => {
                let content = bytes(received.buffer.as_ref().expect("fresh memory"));
                assert!(
                    content == vec![content[0]; LEN],
                    "tensor {} is torn",
                    content[0]
                );
                delivered.push(content[0]);
            }
            Err(Error::Timeout(_)) => {}
            Err(Error::EndOfPipe) => break,
            Err(other) => panic!("{other}"),
        }
    }
    delivered
}

#[test]
fn a_tensor_is_delivered_as_it_was_sent_and_in_order_whenever_others_are_withdrawn() {
    on_both_paths(|search| {
        let (tx, rx) = validating(&search.clone().into());
        // On a busy machine any one may take long.
        let times = [0; NUM_TIMED].map(|number| time_of(&tx, &rx, number));
        let time = times.into_iter().min().expect("a time");
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive_all(&rx, time));
            let mut sent = Vec::new();
            for number in 1..=NUM_TENSORS {
                let timeout = (number % 10 > 0).then(|| some_of(time, number));
                if send_and_overwrite(&tx, number, timeout) {
                    sent.push(number);
                }
            }
            close(&tx).expect("closed");
            let delivered = receiver.join().expect("the receiver");
            assert!(
                delivered.is_sorted_by(|one, next| one < next),
                "{delivered:?}"
            );
            assert!(!delivered.contains(&OVERWRITTEN), "{delivered:?}");
            let is_delivered = |number: &u8| delivered.contains(number);
            assert!(sent.iter().all(is_delivered), "{sent:?} {delivered:?}");
            assert!(!delivered.is_empty());
            assert!(
                delivered.len() < usize::from(NUM_TENSORS),
                "none was withdrawn"
            );
        });
    });
}
