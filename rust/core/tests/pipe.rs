//! What a pipe promises to its two ends, over every road.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    PATIENCE, PROMPT, Raw, TOKEN, bytes, eventually, on_both_roads, on_every_road, pattern,
};
use kvpipe_core::Error;
use kvpipe_core::codec::Writer;
use kvpipe_core::identity::Service;
use kvpipe_core::pipe::{Deadline, Meta, Pipe, Received};
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Work;
use kvpipe_ucx::{Buffer, Search};

const EAGER: u8 = 1;
const OFFER: u8 = 2;
const ACCEPT: u8 = 3;
const DATA: u8 = 4;
const SUMS: u8 = 9;
const CORRUPT: u8 = 10;
const TAKEN: u8 = 6;

fn pipe(transport: &Transport) -> (Pipe, Pipe) {
    let receiver =
        Pipe::listen("127.0.0.1:0", TOKEN, transport.clone(), Duration::ZERO).expect("listen");
    (sender_to(transport, &receiver), receiver)
}

fn sender_to(transport: &Transport, receiver: &Pipe) -> Pipe {
    let address = receiver.address().expect("address").to_string();
    let (sender, connected) = Pipe::connect(
        &address,
        TOKEN,
        transport.clone(),
        true,
        Duration::ZERO,
        PATIENCE,
    )
    .expect("connect");
    connected.wait_for(PATIENCE).expect("connected");
    sender
}

fn meta(len: usize) -> Meta {
    Meta {
        family: 2,
        dtype: "uint8".to_owned(),
        shape: vec![len as u64],
    }
}

fn send(pipe: &Pipe, content: Vec<u8>) -> Work<()> {
    send_within(pipe, content, None)
}

fn send_within(pipe: &Pipe, content: Vec<u8>, timeout: Option<Duration>) -> Work<()> {
    let meta = meta(content.len());
    pipe.send(meta, Buffer::from_vec(content), Deadline::after(timeout))
        .expect("send")
}

fn receive(pipe: &Pipe) -> Work<Arc<Received>> {
    pipe.receive(None, Deadline::default()).expect("receive")
}

fn content(received: &Work<Arc<Received>>) -> Vec<u8> {
    let received = received.wait_for(PATIENCE).expect("received");
    bytes(received.buffer.as_ref().expect("fresh memory"))
}

fn close(pipe: &Pipe) -> kvpipe_core::Result<()> {
    let closed = pipe.close(Deadline::default()).expect("close");
    closed.map_or(Ok(()), |closed| closed.wait_for(PATIENCE))
}

#[test]
fn tensors_arrive_in_order_whatever_their_size() {
    on_every_road("tensors_arrive_in_order_whatever_their_size", |transport| {
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
            work.wait_for(PATIENCE).expect("sent");
        }
    });
}

#[test]
fn a_tensor_larger_than_the_window_arrives_intact() {
    on_every_road(
        "a_tensor_larger_than_the_window_arrives_intact",
        |transport| {
            let (tx, rx) = pipe(transport);
            let expected = pattern(64 << 20, 5);
            let out = Buffer::zeroed(64 << 20);
            let sent = send(&tx, expected.clone());
            let target = Some((meta(out.len()), out.clone()));
            let received = rx.receive(target, Deadline::default()).expect("receive");
            let received = received.wait_for(PATIENCE).expect("received");
            assert!(
                received.buffer.is_none(),
                "received into memory of the caller"
            );
            assert!(bytes(&out) == expected);
            sent.wait_for(PATIENCE).expect("sent");
            assert_eq!(rx.info().num_bytes, 64 << 20);
        },
    );
}

#[test]
fn more_tensors_than_may_be_in_flight_all_arrive() {
    on_every_road(
        "more_tensors_than_may_be_in_flight_all_arrive",
        |transport| {
            let (tx, rx) = pipe(transport);
            let sent: Vec<_> = (0..500).map(|i| send(&tx, pattern(100, i))).collect();
            for i in 0..500 {
                assert_eq!(content(&receive(&rx)), pattern(100, i));
            }
            for work in sent {
                work.wait_for(PATIENCE).expect("sent");
            }
        },
    );
}

#[test]
fn a_receive_that_times_out_leaves_the_pipe_usable() {
    on_every_road(
        "a_receive_that_times_out_leaves_the_pipe_usable",
        |transport| {
            let (tx, rx) = pipe(transport);
            let soon = Deadline::after(Some(Duration::from_millis(50)));
            let error = rx
                .receive(None, soon)
                .expect("receive")
                .wait_for(PATIENCE)
                .expect_err("nothing came");
            assert!(
                matches!(&error, Error::Timeout(text) if text.contains("usable")),
                "{error}"
            );
            let _sent = send(&tx, pattern(1 << 20, 1));
            assert!(content(&receive(&rx)) == pattern(1 << 20, 1));
        },
    );
}

#[test]
fn a_tensor_that_nobody_takes_is_withdrawn_and_the_next_one_arrives() {
    on_every_road(
        "a_tensor_that_nobody_takes_is_withdrawn_and_the_next_one_arrives",
        |transport| {
            let (tx, rx) = pipe(transport);
            let soon = Some(Duration::from_millis(50));
            let error = send_within(&tx, pattern(1 << 20, 1), soon)
                .wait_for(PATIENCE)
                .expect_err("nobody receives");
            assert!(
                matches!(&error, Error::Timeout(text) if text.contains("usable")),
                "{error}"
            );
            let sent = send(&tx, pattern(1 << 20, 2));
            assert!(content(&receive(&rx)) == pattern(1 << 20, 2));
            sent.wait_for(PATIENCE).expect("sent");
        },
    );
}

#[test]
fn an_out_that_does_not_match_consumes_nothing() {
    on_every_road("an_out_that_does_not_match_consumes_nothing", |transport| {
        let (tx, rx) = pipe(transport);
        for size in [100, 1 << 20] {
            let sent = send(&tx, pattern(size, 3));
            let out = Some((meta(10), Buffer::zeroed(10)));
            let error = rx
                .receive(out, Deadline::default())
                .expect("receive")
                .wait_for(PATIENCE)
                .expect_err("too small");
            let named = |text: &str| text.contains("[10]") && text.contains(&format!("[{size}]"));
            assert!(
                matches!(&error, Error::Config(text) if named(text)),
                "{error}"
            );
            assert!(content(&receive(&rx)) == pattern(size, 3));
            sent.wait_for(PATIENCE).expect("sent");
        }
    });
}

#[test]
fn a_receive_that_is_withdrawn_takes_no_tensor_and_the_others_keep_their_order() {
    on_every_road(
        "a_receive_that_is_withdrawn_takes_no_tensor_and_the_others_keep_their_order",
        |transport| {
            let (tx, rx) = pipe(transport);
            let works = [receive(&rx), receive(&rx), receive(&rx)];
            rx.withdraw(&works[1]).expect("withdrawn");
            let error = works[1].wait_for(PATIENCE).expect_err("withdrawn");
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
                work.wait_for(PATIENCE).expect("sent");
            }
            assert_eq!(rx.info().in_flight, 0);
        },
    );
}

#[test]
fn a_second_sender_is_refused_with_the_reason() {
    on_every_road("a_second_sender_is_refused_with_the_reason", |transport| {
        let (tx, rx) = pipe(transport);
        let address = rx.address().expect("address").to_string();
        let (_second, connected) = Pipe::connect(
            &address,
            TOKEN,
            transport.clone(),
            true,
            Duration::ZERO,
            PATIENCE,
        )
        .expect("connect");
        let error = connected.wait_for(PATIENCE).expect_err("refused");
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
    on_every_road(
        "after_an_orderly_close_all_tensors_come_and_then_the_end",
        |transport| {
            let (tx, rx) = pipe(transport);
            let _sent = [send(&tx, pattern(10, 1)), send(&tx, pattern(1 << 20, 2))];
            let closed = tx
                .close(Deadline::default())
                .expect("close")
                .expect("a sender's work");
            assert!(!closed.is_completed(), "closed before all was taken");
            assert_eq!(content(&receive(&rx)), pattern(10, 1));
            assert!(content(&receive(&rx)) == pattern(1 << 20, 2));
            closed.wait_for(PATIENCE).expect("closed");
            for _ in 0..2 {
                assert_eq!(
                    receive(&rx).wait_for(PATIENCE).map(|_| ()),
                    Err(Error::EndOfPipe)
                );
            }
        },
    );
}

#[test]
fn a_sender_that_closes_at_once_ends_the_pipe_in_order() {
    on_every_road(
        "a_sender_that_closes_at_once_ends_the_pipe_in_order",
        |transport| {
            let is_cheap = matches!(transport, Transport::Memory(_));
            for round in 0..if is_cheap { 300 } else { 20 } {
                let (tx, rx) = pipe(transport);
                let received = receive(&rx);
                close(&tx).expect("closed");
                drop(tx);
                let ended = received.wait_for(PATIENCE).map(|_| ());
                assert_eq!(ended, Err(Error::EndOfPipe), "round {round}");
            }
        },
    );
}

#[test]
fn a_receiver_that_leaves_after_the_last_tensor_does_not_fail_the_sender() {
    on_every_road(
        "a_receiver_that_leaves_after_the_last_tensor_does_not_fail_the_sender",
        |transport| {
            for round in 0..8 {
                let (tx, rx) = pipe(transport);
                let sent = send(&tx, pattern(1 << 20, round));
                receive(&rx).wait_for(PATIENCE).expect("received");
                rx.stop();
                sent.wait_for(PATIENCE).expect("it was taken");
            }
        },
    );
}

#[test]
fn a_sender_is_told_at_its_close_of_small_tensors_that_were_lost() {
    on_every_road(
        "a_sender_is_told_at_its_close_of_small_tensors_that_were_lost",
        |transport| {
            let (tx, rx) = pipe(transport);
            send(&tx, pattern(10, 1))
                .wait_for(PATIENCE)
                .expect("it has left");
            rx.stop();
            eventually("the loss", || (tx.info().state == "closed").then_some(()));
            assert!(matches!(close(&tx), Err(Error::PeerLost { .. })));
            assert_eq!(close(&tx), Ok(()), "a second time");
        },
    );
}

#[test]
fn stopping_an_end_ends_its_operations_and_those_of_the_other() {
    on_every_road(
        "stopping_an_end_ends_its_operations_and_those_of_the_other",
        |transport| {
            let (tx, rx) = pipe(transport);
            let received = receive(&rx);
            rx.stop();
            assert!(matches!(received.wait_for(PATIENCE), Err(Error::Closed(_))));
            let error = send(&tx, pattern(1 << 20, 1))
                .wait_for(PROMPT)
                .expect_err("nobody is there");
            assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        },
    );
}

#[test]
fn a_receive_timeout_under_way_closes_the_pipe_on_both_ends() {
    on_every_road(
        "a_receive_timeout_under_way_closes_the_pipe_on_both_ends",
        |transport| {
            let (tx, rx) = pipe(transport);
            let len = 1 << 30;
            let sent = tx
                .send(meta(len), Buffer::zeroed(len), Deadline::default())
                .expect("send");
            let now = Instant::now();
            // Met long before, and done by then it cannot be.
            let deadline = Deadline {
                meet_by: None,
                done_by: Some(now + Duration::from_millis(20)),
            };
            let received = rx.receive(None, deadline).expect("receive");
            let error = received.wait_for(PATIENCE).expect_err("too late");
            assert!(
                matches!(&error, Error::Timeout(text) if text.contains("closed")),
                "{error}"
            );
            let error = sent.wait_for(PROMPT).expect_err("closed");
            assert!(
                error.to_string().contains("not received in time"),
                "{error}"
            );
        },
    );
}

#[test]
fn no_wake_up_is_lost() {
    on_every_road("no_wake_up_is_lost", |transport| {
        let (tx, rx) = pipe(transport);
        for i in 0..500 {
            let size = if i % 10 == 0 { 100_000 } else { 8 };
            let begun = Instant::now();
            let sent = send(&tx, vec![7; size]);
            receive(&rx).wait_for(PATIENCE).expect("received");
            sent.wait_for(PATIENCE).expect("sent");
            // The longest sleep of a thread is 1 s.
            let took = begun.elapsed();
            assert!(took < Duration::from_millis(700), "{took:?} for tensor {i}");
        }
    });
}

#[test]
fn many_queued_tensors_cost_no_time_each_round() {
    on_every_road("many_queued_tensors_cost_no_time_each_round", |transport| {
        let (tx, rx) = pipe(transport);
        let count = 20_000;
        let timeout = Some(Duration::from_secs(3600));
        let sent: Vec<_> = (0..count)
            .map(|_| send_within(&tx, vec![7; 8], timeout))
            .collect();
        let begun = Instant::now();
        for _ in 0..count {
            receive(&rx).wait_for(PATIENCE).expect("received");
        }
        for work in sent {
            work.wait_for(PATIENCE).expect("sent");
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
    on_every_road(
        "the_memory_of_a_tensor_that_was_let_go_is_used_again_and_no_other",
        |transport| {
            let (tx, rx) = pipe(transport);
            let next = |seed| {
                let _sent = send(&tx, pattern(3 << 20, seed));
                let received = receive(&rx).wait_for(PATIENCE).expect("received");
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
        },
    );
}

// --- a sender that keeps to no rules

fn eager(sequence: u64, content: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let payload = described(content.len()).bytes(content).finish();
    (eager_header(sequence, 0, 0), payload)
}

fn eager_header(sequence: u64, is_summed: u8, sum: u64) -> Vec<u8> {
    let header = Writer::new(EAGER).u64(sequence);
    header.u8(is_summed).u64(sum).finish()
}

/// The payload of an offer: length, address, how it is proved, key.
fn offer(len: u64, address: u64, proof: u8, key: &[u8]) -> Vec<u8> {
    let offer = described(len as usize).u64(len).u64(address);
    offer.u8(proof).bytes(key).finish()
}

fn described(len: usize) -> Writer {
    Writer::default()
        .u8(2)
        .str("uint8")
        .list(&[len as u64], |w, n| w.u64(*n))
}

fn raw(search: &Search) -> (Raw, Pipe) {
    let receiver =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    let address = receiver.address().expect("address");
    (Raw::connect(search, address, Service::Pipe), receiver)
}

#[test]
fn a_message_that_overtakes_the_handshakes_last_frame_counts() {
    on_both_roads(
        "a_message_that_overtakes_the_handshakes_last_frame_counts",
        |search| {
            let rx = Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO)
                .expect("listen");
            let mut raw = Raw::begin(search, rx.address().expect("address"), Service::Pipe);
            let received = receive(&rx);
            let (header, payload) = eager(0, b"early");
            raw.send(&header, &payload);
            let (taken, _) = raw.message(TAKEN);
            assert_eq!(taken, 0u64.to_le_bytes());
            assert_eq!(content(&received), b"early");
            raw.finish();
            let (header, payload) = eager(1, b"later");
            raw.send(&header, &payload);
            raw.message_while(|| receive(&rx), b"later");
        },
    );
}

impl Raw {
    fn message_while(&self, begin: impl FnOnce() -> Work<Arc<Received>>, expected: &[u8]) {
        let received = begin();
        self.message(TAKEN);
        assert_eq!(content(&received), expected);
    }
}

#[test]
fn a_sender_that_leaves_before_it_is_established_leaves_its_place() {
    let Some(search) = common::ucx() else { return };
    let rx =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    drop(Raw::begin(
        &search,
        rx.address().expect("address"),
        Service::Pipe,
    ));
    std::thread::sleep(Duration::from_millis(100));
    let tx = sender_to(&search.into(), &rx);
    let _sent = send(&tx, pattern(10, 1));
    assert_eq!(content(&receive(&rx)), pattern(10, 1));
}

#[test]
fn an_offer_that_no_memory_can_hold_is_an_error_and_not_the_end() {
    let Some(search) = common::ucx() else { return };
    let (raw, rx) = raw(&search);
    let len = 1u64 << 60;
    let header = Writer::new(OFFER).u64(0).finish();
    raw.send(&header, &offer(len, 4096, 0, &[0; 16]));
    let received = receive(&rx);
    eventually("the refusal", || {
        raw.worker.progress();
        received.is_completed().then_some(())
    });
    let error = received.wait_for(PATIENCE).expect_err("no such memory");
    assert!(
        matches!(&error, Error::Exhausted(text) if text.contains("not consumed")),
        "{error}"
    );
    assert_eq!(rx.info().state, "open");
}

fn is_corrupt(received: &Work<Arc<Received>>) -> bool {
    matches!(received.wait_for(PATIENCE), Err(Error::Corrupt(text)) if text.contains("checksum"))
}

#[test]
fn a_small_tensor_that_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on() {
    let Some(search) = common::ucx() else { return };
    let (raw, rx) = raw(&search);
    raw.send(&eager_header(0, 1, 7), &eager(0, b"flipped").1);
    let received = receive(&rx);
    raw.message(TAKEN);
    assert!(is_corrupt(&received));
    raw.send(&eager(1, b"next").0, &eager(1, b"next").1);
    raw.message_while(|| receive(&rx), b"next");
}

#[test]
fn a_large_tensor_that_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on() {
    on_both_roads(
        "a_large_tensor_that_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on",
        |search| {
            let (raw, rx) = raw(search);
            let len = 64 << 10;
            let buffer = Buffer::from_vec(pattern(len, 3));
            let memory = raw.context.register(buffer).expect("memory");
            let (address, key) = (memory.buffer().address() as u64, memory.pack_rkey());
            let is_read = !common::is_tcp();
            let proof = if is_read { 1 } else { 2 };
            let header = Writer::new(OFFER).u64(0).finish();
            raw.send(
                &header,
                &offer(len as u64, address, proof, &key.expect("key")),
            );
            let received = receive(&rx);
            if is_read {
                let wrong = Writer::default().list(&[7], |w, sum| w.u64(*sum)).finish();
                raw.send(&Writer::new(SUMS).u64(0).finish(), &wrong);
            } else {
                raw.message(ACCEPT);
                let header = Writer::new(DATA).u64(0).u64(0).u64(7).finish();
                raw.send(&header, &pattern(len, 3));
            }
            raw.message(CORRUPT);
            assert!(is_corrupt(&received));
            raw.send(&eager(1, b"next").0, &eager(1, b"next").1);
            raw.message_while(|| receive(&rx), b"next");
        },
    );
}

#[test]
fn a_tensor_without_checksums_arrives() {
    on_both_roads("a_tensor_without_checksums_arrives", |search| {
        let rx = Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO)
            .expect("listen");
        let address = rx.address().expect("address").to_string();
        let (tx, connected) = Pipe::connect(
            &address,
            TOKEN,
            search.clone().into(),
            false,
            Duration::ZERO,
            PATIENCE,
        )
        .expect("connect");
        connected.wait_for(PATIENCE).expect("connected");
        for len in [100, 3 << 20] {
            let sent = send(&tx, pattern(len, 1));
            assert!(content(&receive(&rx)) == pattern(len, 1));
            assert_eq!(sent.wait_for(PATIENCE), Ok(()));
        }
    });
}

#[test]
fn a_sender_that_ignores_its_credit_or_its_bounds_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let too_many: Vec<_> = (0..100).map(|i| eager(i, b"x")).collect();
    let header = Writer::new(OFFER).u64(0).finish();
    let wraps = vec![(header, offer(1 << 40, u64::MAX - 4096, 0, &[0; 16]))];
    let unasked = vec![(
        Writer::new(DATA).u64(0).u64(u64::MAX).u64(0).finish(),
        b"data".to_vec(),
    )];
    let skips = vec![eager(1, b"x")];
    let unknown = vec![(vec![99; 9], vec![])];
    let cut = vec![(vec![EAGER, 0], vec![])];
    for messages in [too_many, wraps, unasked, skips, unknown, cut] {
        let (mut raw, rx) = raw(&search);
        for (header, payload) in &messages {
            if raw.worker.outstanding() > 1000 {
                break;
            }
            raw.send(header, payload);
        }
        assert!(raw.is_closed());
        let error = eventually("the end", || receive(&rx).wait_for(PATIENCE).err());
        assert!(matches!(error, Error::Protocol(_)), "{error}");
    }
}
