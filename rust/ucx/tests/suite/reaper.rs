//! Workers that were dropped before UCX was done with what they were asked for: what they hold is given back once it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvpipe_ucx::{Library, Memory, MemoryKind, RemoteKey};

use crate::common::{self, Node, Peer, TIMEOUT, Visitor, alone, context, get, visit_process};

#[test]
fn peer_process() {
    common::serve_if_child();
}

fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("fds").count()
}

/// Threads that work on what is left of a worker.
fn num_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads");
    let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    let names = threads.flatten().filter_map(|thread| name(thread).ok());
    names.filter(|name| name.trim() == "kvpipe-reaper").count()
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let give_up = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(
            Instant::now() < give_up,
            "{what}: not so within {TIMEOUT:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes a worker and lets it go.
fn come_and_go(library: &Arc<Library>) {
    drop(Node::new(context(library, None)));
}

/// A visitor of a process that was stopped before the two were connected. Over TCP: CMA reads of a stopped process, too.
fn visit_stopped(library: &Arc<Library>) -> (Visitor, Peer) {
    let (visitor, peer) = visit_process(library, Some("tcp"));
    common::stop(&peer);
    (visitor, peer)
}

/// A node that connects to a worker. If that has stopped before, the descriptor of UCX is readable all the
/// time.
fn greeting(library: &Arc<Library>, worker: &[u8]) -> Node {
    let node = Node::new(context(library, Some("tcp")));
    // SAFETY: a worker has written this address.
    let endpoint = unsafe { node.worker.connect(worker) }.expect("connect");
    node.worker.flush(endpoint, 1).expect("flush");
    node
}

#[test]
fn what_workers_hold_that_could_not_end_is_given_back_once_their_peers_have_ended() {
    alone(|library| {
        come_and_go(library);
        let (before, mut peers) = (num_descriptors(), Vec::new());
        for _ in 0..4 {
            let (visitor, peer) = visit_stopped(library);
            drop(drop_reading(visitor, 0));
            peers.push(peer);
        }
        assert!(num_descriptors() > before + 8, "nothing is held");
        eventually("each has a thread", || num_threads() == 4);
        for peer in &mut peers {
            peer.0.kill().expect("kill");
        }
        drop(peers);
        eventually("descriptors are given back", || num_descriptors() <= before);
        eventually("the threads end", || num_threads() == 0);
    });
}

/// Drops a worker that reads from a stopped process. Returns the count of its reads, the memory that they are to fill,
/// and the worker's keys that are still held.
fn drop_reading(
    visitor: Visitor,
    num_held_keys: usize,
) -> (Arc<AtomicUsize>, Arc<Memory>, Vec<RemoteKey>) {
    let Visitor {
        node,
        endpoint,
        card,
        ..
    } = visitor;
    let key = || {
        let key = node
            .worker
            .unpack_rkey(endpoint, &card.rkey, MemoryKind::Host);
        key.expect("unpack")
    };
    let (used, held) = (key(), (0..num_held_keys).map(|_| key()).collect());
    for token in 0..2 {
        let got = node.worker.get(
            endpoint,
            get(&node.region, (0, 4096), card.region, &used, token),
        );
        got.expect("get");
    }
    drop(used);
    let num_reads = Arc::default();
    drop(node.worker.end(Arc::clone(&num_reads)));
    (num_reads, node.region, held)
}

#[test]
fn memory_of_reads_is_kept_until_they_have_ended_which_a_stopped_peer_that_goes_on_ends() {
    alone(|library| {
        let (visitor, peer) = visit_stopped(library);
        let (num_reads, memory, _) = drop_reading(visitor, 0);
        assert_eq!(num_reads.load(Ordering::Acquire), 2);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(Arc::strong_count(&memory), 3, "ours, and one for each read");
        common::go_on(&peer);
        eventually("reads end", || num_reads.load(Ordering::Acquire) == 0);
        assert_eq!(Arc::strong_count(&memory), 1);
        eventually("the thread ends", || num_threads() == 0);
    });
}

#[test]
fn a_worker_that_waits_for_its_peer_takes_no_cpu() {
    alone(|library| {
        let (visitor, peer) = visit_stopped(library);
        let (num_reads, ..) = drop_reading(visitor, 0);
        assert_takes_no_cpu();
        assert_eq!(num_reads.load(Ordering::Acquire), 2);
        drop(peer);
        eventually("the thread ends", || num_threads() == 0);
    });
}

#[test]
fn a_worker_that_waits_for_its_connection_takes_no_cpu() {
    alone(|library| {
        let (visitor, peer) = visit_stopped(library);
        drop(greeting(library, &visitor.card.worker));
        eventually("it has a thread", || num_threads() == 1);
        assert_takes_no_cpu();
        drop(peer);
        eventually("the thread ends", || num_threads() == 0);
    });
}

fn assert_takes_no_cpu() {
    let begun = cpu_time();
    std::thread::sleep(Duration::from_secs(1));
    let taken = cpu_time().saturating_sub(begun);
    assert!(taken < Duration::from_millis(200), "{taken:?} of a second");
}

/// By which a process knows that it is to exit, and which worker is to keep it from that.
const EXITING: &str = "KVPIPE_TEST_EXIT";
#[test]
fn exiting_process() {
    let Ok(address) = std::env::var(EXITING) else {
        return;
    };
    let library = common::library().expect("the parent found UCX");
    let bytes = address.split(' ').map(|byte| byte.parse().expect("a byte"));
    drop(greeting(&library, &bytes.collect::<Vec<u8>>()));
    eventually("its rest has a thread", || num_threads() == 1);
    std::process::exit(0);
}

#[test]
fn a_process_exits_although_a_worker_is_still_worked_on() {
    exit_although_a_worker_is_still_worked_on(5);
}

#[test]
#[ignore = "slow"]
fn fifty_processes_exit_although_a_worker_is_still_worked_on() {
    exit_although_a_worker_is_still_worked_on(50);
}

fn exit_although_a_worker_is_still_worked_on(num_rounds: usize) {
    alone(|library| {
        let (visitor, _peer) = visit_stopped(library);
        let bytes = visitor.card.worker.iter().map(u8::to_string);
        let address = bytes.collect::<Vec<_>>().join(" ");
        for round in 0..num_rounds {
            let begun = Instant::now();
            let mut process = common::child("exiting_process", &[(EXITING, &address)]);
            let status = process.0.wait().expect("its end");
            assert_eq!(status.code(), Some(0), "round {round}: {status}");
            assert!(begun.elapsed() < TIMEOUT, "round {round}");
        }
    });
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let mut usage = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place for the answer.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut usage) };
    assert_eq!(code, 0);
    Duration::new(
        usage.tv_sec.unsigned_abs(),
        u32::try_from(usage.tv_nsec).expect("below a second"),
    )
}

#[test]
fn a_worker_whose_keys_are_held_is_left_alone() {
    alone(|library| {
        let (visitor, peer) = visit_stopped(library);
        let (num_reads, memory, keys) = drop_reading(visitor, 1);
        common::go_on(&peer);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(num_threads(), 0);
        assert_eq!(num_reads.load(Ordering::Acquire), 2);
        assert_eq!(Arc::strong_count(&memory), 3);
        drop(keys);
    });
}
