//! Workers that were dropped before UCX was done with their endpoints. One test, as it counts what the process holds.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Node, context, visit_process};
use kvpipe_ucx::{Library, Payload};

#[test]
fn peer_process() {
    common::serve_if_child();
}

fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("fds").count()
}

/// Makes a worker and lets it go.
fn come_and_go(library: &Arc<Library>) {
    drop(Node::new(context(library, None)));
}

#[test]
fn what_workers_hold_that_could_not_end_is_given_back_once_their_peers_have_ended() {
    let Some(library) = common::library() else {
        return;
    };
    come_and_go(&library);
    let (before, mut peers) = (num_descriptors(), Vec::new());
    for _ in 0..4 {
        let (visitor, peer) = visit_process(&library, None);
        common::stop(&peer);
        let worker = &visitor.node.worker;
        let hello = worker.am_send(visitor.endpoint, b"hello", Payload::None, 1);
        hello.expect("send");
        drop(visitor);
        peers.push(peer);
    }
    assert!(num_descriptors() > before + 8, "nothing is held");
    for peer in &mut peers {
        peer.0.kill().expect("kill");
    }
    drop(peers);
    let give_up = Instant::now() + Duration::from_secs(20);
    while num_descriptors() > before && Instant::now() < give_up {
        come_and_go(&library);
        std::thread::sleep(Duration::from_millis(50));
    }
    let held = num_descriptors();
    assert!(held <= before, "{held} descriptors, {before} before");
}
