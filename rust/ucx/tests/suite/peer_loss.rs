//! What remains of a connection whose peer was killed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{Event, Payload, RemoteKey, Status, Token};

use crate::common::{self, REGION_BYTES, TRANSPORTS, Visitor, get, go_on, stop, visit_process};

const IN_FLIGHT: usize = 4;
const LEN: usize = REGION_BYTES / 2;
/// Fits a TCP segment, as kvpipe's messages do. One in parts, to a killed peer, aborts this process with UCX 1.13: an
/// assertion in `uct_tcp_iface_progress`, seen in 2 of 4 runs.
const MESSAGE_LEN: usize = 128 << 10;

#[test]
fn peer_process() {
    common::serve_if_child();
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Message,
    Get,
}

#[test]
fn message_to_killed_peer_fails_within_two_seconds() {
    kill_during(Operation::Message);
}

#[test]
fn get_from_killed_peer_fails_within_two_seconds() {
    kill_during(Operation::Get);
}

/// Closing such an endpoint at once crashed UCX 1.22 in a third of 40 tries.
#[test]
fn an_endpoint_that_is_closed_before_it_is_connected_waits_for_that_or_its_peers_end() {
    let Some(library) = common::library() else {
        return;
    };
    // Over shared memory nothing waits for the peer.
    let tls = Some("tcp");
    {
        for _ in 0..4 {
            let (visitor, mut peer) = visit_process(&library, tls);
            stop(&peer);
            let worker = &visitor.node.worker;
            worker
                .am_send(visitor.endpoint, b"hello", Payload::None, 1)
                .expect("send");
            worker.close(visitor.endpoint);
            assert_eq!(worker.outstanding(), 0, "nobody has to wait for it");
            let is_closed = |event| matches!(event, Event::Closed { .. }).then_some(());
            let early = visitor.node.wait(Duration::from_millis(100), is_closed);
            assert_eq!(early, None, "over {tls:?}");
            peer.0.kill().expect("kill");
            let closed = visitor.node.wait(Duration::from_secs(5), is_closed);
            assert_eq!(closed, Some(()), "over {tls:?}");
            assert_eq!(worker.outstanding(), 0);
        }
    }
}

/// Closed before, it crashed UCX 1.22 in a twentieth of 300 tries, if its peer closed too (`tests/test_faults.py`).
#[test]
fn an_endpoint_that_sends_over_tcp_is_closed_once_all_has_left() {
    const NUM_MESSAGES: u64 = 128; // more than sockets hold
    let Some(library) = common::library() else {
        return;
    };
    let (visitor, peer) = visit_process(&library, Some("tcp"));
    visitor.greet();
    stop(&peer);
    let worker = &visitor.node.worker;
    for token in 0..NUM_MESSAGES {
        let payload = Payload::Bytes(vec![0; MESSAGE_LEN]);
        let sent = worker.am_send(visitor.endpoint, b"", payload, token);
        sent.expect("send");
    }
    worker.close(visitor.endpoint);
    assert_eq!(worker.outstanding(), 0, "nobody has to wait for it");
    let (mut num_done, mut num_good) = (0, 0);
    let mut closes_within = |patience| {
        visitor.node.wait(patience, |event| {
            if let Event::Done { result, .. } = &event {
                num_done += 1;
                num_good += u64::from(result.is_ok());
            }
            matches!(event, Event::Closed { .. }).then_some(())
        })
    };
    assert_eq!(closes_within(Duration::from_millis(100)), None);
    go_on(&peer);
    assert_eq!(closes_within(Duration::from_secs(5)), Some(()));
    assert_eq!((num_done, num_good), (NUM_MESSAGES, NUM_MESSAGES));
    assert_eq!(worker.outstanding(), 0);
}

#[test]
fn a_worker_with_such_an_endpoint_is_dropped_without_waiting_for_it() {
    let Some(library) = common::library() else {
        return;
    };
    let (visitor, peer) = visit_process(&library, None);
    stop(&peer);
    let worker = &visitor.node.worker;
    worker
        .am_send(visitor.endpoint, b"hello", Payload::None, 1)
        .expect("send");
    worker.close(visitor.endpoint);
    let begun = Instant::now();
    drop(visitor);
    assert!(begun.elapsed() < Duration::from_secs(2));
}

/// How many small reads `kvpipe-core` has under way. With 256, rc's whole queue, UCX 1.13 had no room to begin the close.
const MANY: usize = 128;

#[test]
fn closing_ends_every_read_of_a_killed_peer_however_long_it_has_been_dead() {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        for (in_flight, len) in [(8, 1 << 20), (MANY, 4096)] {
            let (visitor, mut peer) = visit_process(&library, tls);
            visitor.greet();
            let mut load = Load::new(&visitor, Operation::Get);
            (load.in_flight, load.len) = (in_flight, len);
            load.run(Instant::now() + Duration::from_millis(100));
            peer.0.kill().expect("kill");
            load.run(Instant::now() + Duration::from_millis(100));
            load.close();
            assert_eq!(Arc::strong_count(&visitor.node.region), 1, "memory let go");
        }
    }
}

fn kill_during(operation: Operation) {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        let (visitor, mut peer) = visit_process(&library, tls);
        visitor.greet();
        let mut load = Load::new(&visitor, operation);
        if matches!(operation, Operation::Message) {
            load.len = MESSAGE_LEN;
        }
        load.run(Instant::now() + Duration::from_millis(200));
        assert!(
            load.failure.is_none(),
            "{operation:?} over {tls:?}: {:?}",
            load.failure
        );
        peer.0.kill().expect("kill");
        load.run(Instant::now() + Duration::from_secs(2));
        assert!(
            load.failure.is_some(),
            "{operation:?} over {tls:?}: no failed operation"
        );
        assert!(
            load.endpoint_failures == 1,
            "{operation:?} over {tls:?}: no report"
        );
        load.close();
        assert_eq!(load.endpoint_failures, 1);
        assert_eq!(Arc::strong_count(&visitor.node.region), 1, "memory let go");
    }
}

/// Keeps operations in flight and counts what comes of them.
struct Load<'v> {
    visitor: &'v Visitor,
    operation: Operation,
    in_flight: usize,
    len: usize,
    key: RemoteKey,
    next: Token,
    pending: std::collections::BTreeSet<Token>,
    failure: Option<Status>,
    endpoint_failures: usize,
    is_closed: bool,
}

impl<'v> Load<'v> {
    fn new(visitor: &'v Visitor, operation: Operation) -> Self {
        let (key, pending) = (visitor.key(), std::collections::BTreeSet::new());
        let (failure, endpoint_failures, is_closed) = (None, 0, false);
        Self {
            visitor,
            operation,
            in_flight: IN_FLIGHT,
            len: LEN,
            key,
            next: 0,
            pending,
            failure,
            endpoint_failures,
            is_closed,
        }
    }

    fn post(&mut self) {
        let len = self.len;
        let Visitor {
            node,
            endpoint: ep,
            card,
            ..
        } = self.visitor;
        let (worker, region, token) = (&node.worker, &node.region, self.next);
        let posted = match self.operation {
            Operation::Get => worker.get(*ep, get(region, (0, len), card.region, &self.key, token)),
            Operation::Message => {
                let memory = Arc::clone(region);
                worker.am_send(
                    *ep,
                    b"",
                    Payload::Memory {
                        memory,
                        offset: 0,
                        len,
                    },
                    token,
                )
            }
        };
        match posted {
            Ok(()) => assert!(self.pending.insert(token)),
            Err(status) => self.failure = Some(status),
        }
        self.next += 1;
    }

    /// Runs until the deadline, or until both failures have been seen.
    fn run(&mut self, deadline: Instant) {
        while Instant::now() < deadline && (self.failure.is_none() || self.endpoint_failures == 0) {
            while self.failure.is_none() && self.pending.len() < self.in_flight {
                self.post();
            }
            self.take_events();
        }
    }

    fn take_events(&mut self) {
        let worker = &self.visitor.node.worker;
        if worker.progress() == 0 && worker.arm().expect("arm") {
            common::sleep_on(worker, 1);
        }
        while let Some(event) = worker.next_event() {
            assert!(!self.is_closed, "after Closed: {event:?}");
            match event {
                Event::Done {
                    token: Token::MAX, ..
                }
                | Event::Message { .. } => {}
                Event::Done { token, result } => {
                    assert!(self.pending.remove(&token), "second Done for {token}");
                    self.failure = self.failure.or(result.err());
                }
                Event::EndpointFailed { endpoint, .. } => {
                    assert_eq!(endpoint, self.visitor.endpoint);
                    self.endpoint_failures += 1;
                }
                Event::Closed { .. } => self.is_closed = true,
            }
        }
    }

    fn close(&mut self) {
        let worker = &self.visitor.node.worker;
        worker.close(self.visitor.endpoint);
        let deadline = Instant::now() + common::TIMEOUT;
        while !self.is_closed && Instant::now() < deadline {
            self.take_events();
        }
        assert!(self.is_closed, "closed, {} pending", self.pending.len());
        assert!(self.pending.is_empty(), "no Done for {:?}", self.pending);
        assert_eq!(worker.outstanding(), 0);
    }
}
