//! Promises of a pipe to its two ends, over every data path.

use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Then;
use kvpipe_ucx::Buffer;

use crate::common::pipes::{close, content, meta, pipe, receive, send, send_within};
use crate::common::{self, PROMPT, TIMEOUT, TOKEN, bytes, eventually, on_every_path, pattern};

#[test]
fn tensors_arrive_in_order_whatever_their_size() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let name = tx.info().transport;
        assert!(common::is_name(&name, transport), "{name}");
        let sizes = [
            0,
            1,
            1 << 20,
            7,
            32 << 10,
            (32 << 10) + 1,
            0,
            9_000_001,
            3,
            131_072,
        ];
        let early: Vec<_> = sizes.iter().map(|_| receive(&rx)).collect();
        let mut sent = Vec::new();
        for round in 0..2 {
            for (index, &size) in sizes.iter().enumerate() {
                sent.push(send(&tx, pattern(size, round * 100 + index as u64)));
            }
        }
        let late: Vec<_> = sizes.iter().map(|_| receive(&rx)).collect();
        for (round, works) in [early, late].iter().enumerate() {
            for (index, work) in works.iter().enumerate() {
                let expected = pattern(sizes[index], (round * 100 + index) as u64);
                assert!(content(work) == expected, "round {round}, tensor {index}");
            }
        }
        for work in sent {
            work.wait_for(TIMEOUT).expect("sent");
        }
    });
}

#[test]
fn receives_that_wait_get_their_tensors_in_order_although_several_are_fetched_at_once() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let sizes = [
            1 << 20,
            64 << 10,
            10,
            3 << 20,
            100 << 10,
            0,
            5 << 20,
            33 << 10,
        ];
        let received: Vec<_> = sizes.iter().map(|_| receive(&rx)).collect();
        let sent: Vec<_> = sizes
            .iter()
            .zip(1..)
            .map(|(&len, seed)| send(&tx, pattern(len, seed)))
            .collect();
        for ((received, &len), seed) in received.iter().zip(&sizes).zip(1..) {
            assert!(
                content(received) == pattern(len, seed),
                "tensor of {len} bytes"
            );
        }
        for sent in sent {
            assert_eq!(sent.wait_for(TIMEOUT), Ok(()));
        }
        assert_eq!(rx.info().num_tensors, sizes.len() as u64);
    });
}

#[test]
fn a_tensor_larger_than_the_window_arrives_intact() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let expected = pattern(64 << 20, 5);
        let out = Buffer::zeroed(64 << 20);
        let sent = send(&tx, expected.clone());
        let target = Some((meta(out.len()), out.clone()));
        let received = rx
            .receive(target, Deadline::default(), Then::GoOn)
            .expect("receive");
        let received = received.wait_for(TIMEOUT).expect("received");
        assert!(
            received.buffer.is_none(),
            "received into memory of the caller"
        );
        assert!(bytes(&out) == expected);
        sent.wait_for(TIMEOUT).expect("sent");
        assert_eq!(rx.info().num_bytes, 64 << 20);
    });
}

#[test]
fn more_tensors_than_may_be_in_flight_all_arrive() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let sent: Vec<_> = (0..500).map(|i| send(&tx, pattern(100, i))).collect();
        for i in 0..500 {
            assert_eq!(content(&receive(&rx)), pattern(100, i));
        }
        for work in sent {
            work.wait_for(TIMEOUT).expect("sent");
        }
    });
}

#[test]
fn a_receive_that_times_out_leaves_the_pipe_usable() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let soon = Deadline::after(Some(Duration::from_millis(50)));
        let error = rx
            .receive(None, soon, Then::GoOn)
            .expect("receive")
            .wait_for(TIMEOUT)
            .expect_err("nothing came");
        assert!(
            matches!(&error, Error::Timeout(text) if text.contains("usable")),
            "{error}"
        );
        let _sent = send(&tx, pattern(1 << 20, 1));
        assert!(content(&receive(&rx)) == pattern(1 << 20, 1));
    });
}

#[test]
fn a_tensor_without_a_receive_is_withdrawn_and_the_next_one_arrives() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let soon = Some(Duration::from_millis(50));
        let error = send_within(&tx, pattern(1 << 20, 1), soon)
            .wait_for(TIMEOUT)
            .expect_err("no receive");
        assert!(
            matches!(&error, Error::Timeout(text) if text.contains("usable")),
            "{error}"
        );
        let sent = send(&tx, pattern(1 << 20, 2));
        assert!(content(&receive(&rx)) == pattern(1 << 20, 2));
        sent.wait_for(TIMEOUT).expect("sent");
    });
}

#[test]
fn a_tensor_without_checksums_arrives() {
    on_every_path(|transport| {
        let rx = Pipe::listen(&common::local(), TOKEN, transport.clone(), Duration::ZERO)
            .expect("listen");
        let address = rx.address().expect("address").to_string();
        let (tx, connected) = Pipe::connect(
            &address,
            TOKEN,
            transport.clone(),
            kvpipe_core::Integrity::None,
            Duration::ZERO,
            TIMEOUT,
        )
        .expect("connect");
        connected.wait_for(TIMEOUT).expect("connected");
        for len in [100, 3 << 20] {
            let sent = send(&tx, pattern(len, 1));
            assert!(content(&receive(&rx)) == pattern(len, 1));
            assert_eq!(sent.wait_for(TIMEOUT), Ok(()));
        }
    });
}

#[test]
fn an_out_that_does_not_match_consumes_nothing() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        for size in [100, 1 << 20] {
            let sent = send(&tx, pattern(size, 3));
            let out = Some((meta(10), Buffer::zeroed(10)));
            let error = rx
                .receive(out, Deadline::default(), Then::GoOn)
                .expect("receive")
                .wait_for(TIMEOUT)
                .expect_err("too small");
            let named = |text: &str| text.contains("[10]") && text.contains(&format!("[{size}]"));
            assert!(
                matches!(&error, Error::Config(text) if named(text)),
                "{error}"
            );
            assert!(content(&receive(&rx)) == pattern(size, 3));
            sent.wait_for(TIMEOUT).expect("sent");
        }
    });
}

#[test]
fn a_receive_that_is_withdrawn_takes_no_tensor_and_the_others_keep_their_order() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let works = [receive(&rx), receive(&rx), receive(&rx)];
        rx.withdraw(&works[1]).expect("withdrawn");
        let error = works[1].wait_for(TIMEOUT).expect_err("withdrawn");
        assert!(
            matches!(&error, Error::Closed(text) if text.contains("usable")),
            "{error}"
        );
        let sent = [1, 2].map(|seed| send(&tx, pattern(100_000, seed)));
        assert!(content(&works[0]) == pattern(100_000, 1));
        // Nothing to take back any more.
        rx.withdraw(&works[0]).expect("done before");
        assert!(content(&works[2]) == pattern(100_000, 2));
        for work in sent {
            work.wait_for(TIMEOUT).expect("sent");
        }
        assert_eq!(rx.info().in_flight, 0);
    });
}

#[test]
fn a_second_sender_is_refused_with_the_reason() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let address = rx.address().expect("address").to_string();
        let (_second, connected) = Pipe::connect(
            &address,
            TOKEN,
            transport.clone(),
            kvpipe_core::Integrity::Auto,
            Duration::ZERO,
            TIMEOUT,
        )
        .expect("connect");
        let error = connected.wait_for(TIMEOUT).expect_err("refused");
        assert!(
            matches!(&error, Error::Connect(text) if text.contains("already has a sender")),
            "{error}"
        );
        let _sent = send(&tx, pattern(10, 1));
        assert_eq!(content(&receive(&rx)), pattern(10, 1));
    });
}

#[test]
fn after_an_orderly_close_all_tensors_come_and_then_the_end() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let _sent = [send(&tx, pattern(10, 1)), send(&tx, pattern(1 << 20, 2))];
        let closed = tx
            .close(Deadline::default())
            .expect("close")
            .expect("a sender's work");
        assert!(!closed.is_completed(), "closed before all was taken");
        assert_eq!(content(&receive(&rx)), pattern(10, 1));
        assert!(content(&receive(&rx)) == pattern(1 << 20, 2));
        closed.wait_for(TIMEOUT).expect("closed");
        for _ in 0..2 {
            assert_eq!(
                receive(&rx).wait_for(TIMEOUT).map(|_| ()),
                Err(Error::EndOfPipe)
            );
        }
    });
}

#[test]
fn a_sender_that_closes_at_once_ends_the_pipe_in_order() {
    on_every_path(|transport| {
        let is_cheap = matches!(transport, Transport::Memory(_));
        for round in 0..if is_cheap { 300 } else { 20 } {
            let (tx, rx) = pipe(transport);
            let received = receive(&rx);
            close(&tx).expect("closed");
            drop(tx);
            let ended = received.wait_for(TIMEOUT).map(|_| ());
            assert_eq!(ended, Err(Error::EndOfPipe), "round {round}");
        }
    });
}

#[test]
fn a_receiver_that_leaves_after_the_last_tensor_does_not_fail_the_sender() {
    on_every_path(|transport| {
        for round in 0..8 {
            let (tx, rx) = pipe(transport);
            let sent = send(&tx, pattern(1 << 20, round));
            receive(&rx).wait_for(TIMEOUT).expect("received");
            rx.stop();
            sent.wait_for(TIMEOUT).expect("it was taken");
        }
    });
}

#[test]
fn a_sender_is_told_at_its_close_of_small_tensors_that_were_lost() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        send(&tx, pattern(10, 1))
            .wait_for(TIMEOUT)
            .expect("it has left");
        rx.stop();
        eventually("the loss", || (tx.info().state == "closed").then_some(()));
        assert!(matches!(close(&tx), Err(Error::PeerLost { .. })));
        assert_eq!(close(&tx), Ok(()), "a second time");
    });
}

#[test]
fn stopping_an_end_ends_its_operations_and_those_of_the_other() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let received = receive(&rx);
        rx.stop();
        assert!(matches!(received.wait_for(TIMEOUT), Err(Error::Closed(_))));
        let error = send(&tx, pattern(1 << 20, 1))
            .wait_for(PROMPT)
            .expect_err("the receiver has ended");
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    });
}

#[test]
fn a_receive_that_is_late_under_way_loses_its_tensor_on_both_ends_and_the_pipe_goes_on() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let len = 1 << 30;
        let sent = tx
            .send(
                meta(len),
                Buffer::zeroed(len),
                Deadline::default(),
                Then::GoOn,
            )
            .expect("send");
        let now = Instant::now();
        // Met long before, and done by then it cannot be.
        let deadline = Deadline {
            meet_by: None,
            done_by: Some(now + Duration::from_millis(20)),
        };
        let received = rx.receive(None, deadline, Then::GoOn).expect("receive");
        let error = received.wait_for(TIMEOUT).expect_err("too late");
        assert!(
            matches!(&error, Error::Timeout(text) if text.contains("the pipe is usable")),
            "{error}"
        );
        let error = sent.wait_for(PROMPT).expect_err("lost");
        assert!(
            matches!(&error, Error::Timeout(text) if text.contains("the pipe is usable")),
            "{error}"
        );
        let sent = send(&tx, vec![7; 100_000]);
        receive(&rx).wait_for(TIMEOUT).expect("received");
        sent.wait_for(TIMEOUT).expect("sent");
    });
}

#[test]
fn no_wake_up_is_lost() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        for i in 0..500 {
            let size = if i % 10 == 0 { 100_000 } else { 8 };
            let begun = Instant::now();
            let sent = send(&tx, vec![7; size]);
            receive(&rx).wait_for(TIMEOUT).expect("received");
            sent.wait_for(TIMEOUT).expect("sent");
            // The longest sleep of a thread is 1 s.
            let took = begun.elapsed();
            assert!(took < Duration::from_millis(700), "{took:?} for tensor {i}");
        }
    });
}

#[test]
fn many_queued_tensors_cost_no_time_each_round() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let count = 20_000;
        let timeout = Some(Duration::from_secs(3600));
        let sent: Vec<_> = (0..count)
            .map(|_| send_within(&tx, vec![7; 8], timeout))
            .collect();
        let begun = Instant::now();
        for _ in 0..count {
            receive(&rx).wait_for(TIMEOUT).expect("received");
        }
        for work in sent {
            work.wait_for(TIMEOUT).expect("sent");
        }
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
    });
}

#[test]
fn the_memory_of_a_tensor_that_was_let_go_is_used_again_and_no_other() {
    on_every_path(|transport| {
        let (tx, rx) = pipe(transport);
        let next = |seed| {
            let _sent = send(&tx, pattern(3 << 20, seed));
            let received = receive(&rx).wait_for(TIMEOUT).expect("received");
            received.buffer.clone().expect("its memory")
        };
        let (first, second) = (next(1), next(2));
        assert_ne!(first.address(), second.address());
        let address = second.address();
        drop(second);
        let third = next(3);
        assert_eq!(third.address(), address);
        assert!(bytes(&first) == pattern(3 << 20, 1));
        assert!(bytes(&third) == pattern(3 << 20, 3));
    });
}
