//! State of a connection after its peer was killed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{Event, RemoteKey, Status, Token};

use crate::common::{
    self, Node, REGION_BYTES, TRANSPORTS, Visitor, context, get, stop, visit_process,
};

const IN_FLIGHT: usize = 4;
const LEN: usize = REGION_BYTES / 2;

#[test]
fn peer_process() {
    common::serve_if_child();
}

/// Closing such an endpoint at once crashed UCX 1.22 in a third of 40 tries.
#[test]
fn an_endpoint_that_is_closed_before_it_is_connected_waits_for_that_or_its_peers_end() {
    let Some(library) = common::library() else {
        return;
    };
    for _ in 0..4 {
        // Over shared memory nothing waits for the peer.
        let (visitor, mut peer) = visit_process(&library, Some("tcp"));
        stop(&peer);
        let worker = &visitor.node.worker;
        let key = visitor.key();
        let read = get(&visitor.node.region, (0, 8), visitor.card.region, &key, 1);
        worker.get(visitor.endpoint, read).expect("get");
        worker.close(visitor.endpoint);
        assert_eq!(worker.outstanding(), 0, "no caller has to wait for it");
        let is_closed = |event| matches!(event, Event::Closed { .. }).then_some(());
        let early = visitor.node.wait(Duration::from_millis(100), is_closed);
        assert_eq!(early, None);
        peer.0.kill().expect("kill");
        let closed = visitor.node.wait(Duration::from_secs(5), is_closed);
        assert_eq!(closed, Some(()));
        assert_eq!(worker.outstanding(), 0);
    }
}

#[test]
fn a_worker_with_such_an_endpoint_is_dropped_without_waiting_for_it() {
    let Some(library) = common::library() else {
        return;
    };
    let (visitor, peer) = visit_process(&library, Some("tcp"));
    stop(&peer);
    let late = Node::new(context(&library, Some("tcp")));
    // SAFETY: a worker has written this address.
    let endpoint = unsafe { late.worker.connect(&visitor.card.worker) }.expect("connect");
    late.worker.flush(endpoint, 1).expect("flush");
    late.worker.close(endpoint);
    let begun = Instant::now();
    drop(late);
    assert!(begun.elapsed() < Duration::from_secs(2));
}

/// Number of small reads that `kvpipe-core` has under way. With 256, rc's whole queue, UCX 1.13 had no room to begin
/// the close.
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
            let mut load = Load::new(&visitor);
            (load.in_flight, load.len) = (in_flight, len);
            load.run(Instant::now() + Duration::from_millis(100));
            peer.0.kill().expect("kill");
            load.run(Instant::now() + Duration::from_millis(100));
            load.close();
            assert_eq!(Arc::strong_count(&visitor.node.region), 1, "memory let go");
        }
    }
}

#[test]
fn get_from_killed_peer_fails_within_two_seconds() {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        let (visitor, mut peer) = visit_process(&library, tls);
        visitor.greet();
        let mut load = Load::new(&visitor);
        load.run(Instant::now() + Duration::from_millis(200));
        assert!(load.failure.is_none(), "over {tls:?}: {:?}", load.failure);
        peer.0.kill().expect("kill");
        load.run(Instant::now() + Duration::from_secs(2));
        assert!(load.failure.is_some(), "over {tls:?}: no failed read");
        assert!(load.endpoint_failures == 1, "over {tls:?}: no report");
        load.close();
        assert_eq!(load.endpoint_failures, 1);
        assert_eq!(Arc::strong_count(&visitor.node.region), 1, "memory let go");
    }
}

/// Keeps operations in flight and counts what comes of them.
struct Load<'v> {
    visitor: &'v Visitor,
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
    fn new(visitor: &'v Visitor) -> Self {
        let (key, pending) = (visitor.key(), std::collections::BTreeSet::new());
        let (failure, endpoint_failures, is_closed) = (None, 0, false);
        Self {
            visitor,
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
        let posted = worker.get(*ep, get(region, (0, len), card.region, &self.key, token));
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
            self.drain_events();
        }
    }

    fn drain_events(&mut self) {
        let worker = &self.visitor.node.worker;
        if worker.progress() == 0 && worker.arm().expect("arm") {
            common::sleep_on(worker, 1);
        }
        while let Some(event) = worker.next_event() {
            assert!(!self.is_closed, "after Closed: {event:?}");
            match event {
                Event::Done {
                    token: Token::MAX, ..
                } => {}
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
            self.drain_events();
        }
        assert!(self.is_closed, "closed, {} pending", self.pending.len());
        assert!(self.pending.is_empty(), "no Done for {:?}", self.pending);
        assert_eq!(worker.outstanding(), 0);
    }
}
