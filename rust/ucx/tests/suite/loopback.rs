//! Real UCX between two threads and between two processes of this machine.

use std::time::Instant;

use kvpipe_ucx::{Event, Lane, Library, Search, Worker};

use crate::common::{
    self, REGION_BYTES, REGION_SEED, TRANSPORTS, Visitor, get, pattern, visit_process, visit_thread,
};

/// Earlier versions seen (1.13 to 1.19) leave CMA out in PEER error mode, whatever the threshold.
const CMA_SINCE: (u32, u32, u32) = (1, 20, 0);

#[test]
fn peer_process() {
    common::serve_if_child();
}

#[test]
fn a_get_returns_the_peers_bytes() {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        read_region(&visit_thread(&library, tls));
        let (visitor, _peer) = visit_process(&library, tls);
        read_region(&visitor);
    }
}

fn read_region(visitor: &Visitor) {
    let Visitor {
        node,
        endpoint,
        card,
        ..
    } = visitor;
    let (worker, region, key) = (&node.worker, &node.region, visitor.key());
    let (to, from) = (2 << 20, 128);
    let theirs = pattern(REGION_BYTES, REGION_SEED);
    for len in [1, 4096, 65_537, 1 << 20] {
        assert!(region.buffer().write(to, &vec![0; len]));
        let read = get(region, (to, len), card.region + from as u64, &key, 1);
        worker.get(*endpoint, read).expect("get");
        assert_eq!(node.done(1), Ok(()));
        let read = region.buffer().bytes(to, len).expect("host memory");
        assert!(read == theirs[from..from + len], "{len} bytes differ");
    }
    let empty = get(region, (0, 0), card.region, &key, 2);
    worker.get(*endpoint, empty).expect("empty get");
    assert_eq!(node.done(2), Ok(()));
}

#[test]
fn lanes_name_cma_between_local_processes_and_tcp_where_asked() {
    let Some(library) = common::library() else {
        return;
    };
    if std::env::var_os("UCX_TLS").is_some() || library.version() < CMA_SINCE {
        return;
    }
    let lanes = |tls| {
        let (visitor, _peer) = visit_process(&library, tls);
        visitor.greet();
        visitor.node.worker.lanes(visitor.endpoint).expect("lanes")
    };
    let local: Vec<Lane> = lanes(None);
    assert!(
        local
            .iter()
            .any(|lane| lane.transport == "cma" && lane.is_rma),
        "{local:?}"
    );
    assert!(
        local.iter().all(|lane| !lane.device.is_empty()),
        "{local:?}"
    );
    let tcp: Vec<Lane> = lanes(Some("tcp"));
    assert!(
        !tcp.is_empty() && tcp.iter().all(|lane| lane.transport == "tcp"),
        "{tcp:?}"
    );
}

#[test]
fn event_fd_wakes_an_armed_worker() {
    let Some(library) = common::library() else {
        return;
    };
    // The peer's software serves reads over both. Shared memory wakes only a worker that is armed, TCP also another. Shared
    // memory of older UCX does not notice lost peers by default.
    let is_old = library.version() < CMA_SINCE;
    let transports: &[_] = if is_old { &["tcp"] } else { &["tcp", "posix"] };
    for tls in transports {
        check_woken(&visit_thread(&library, Some(tls)));
    }
}

fn check_woken(visitor: &Visitor) {
    visitor.greet();
    let worker = &visitor.node.worker;
    // Connection set-up goes on for a moment.
    let deadline = Instant::now() + common::TIMEOUT;
    let mut has_slept = false;
    while !has_slept {
        assert!(Instant::now() < deadline, "nothing to wake for");
        progress_until_armed(worker);
        has_slept = !common::sleep_on(worker, 100);
    }
    // Until a read is slower than this thread.
    let key = visitor.key();
    let deadline = Instant::now() + common::TIMEOUT;
    for token in 0.. {
        assert!(Instant::now() < deadline, "no read was waited for");
        let read = get(
            &visitor.node.region,
            (0, 8),
            visitor.card.region,
            &key,
            token,
        );
        worker.get(visitor.endpoint, read).expect("get");
        if !progress_until_armed(worker) {
            assert!(common::sleep_on(worker, 5000), "the end of the read wakes");
            assert_eq!(visitor.node.done(token), Ok(()));
            return;
        }
    }
}

/// True if an operation has ended. TCP is armed also while there is something to progress.
fn progress_until_armed(worker: &Worker) -> bool {
    let mut has_ended = false;
    loop {
        let is_idle = worker.progress() == 0;
        while let Some(event) = worker.next_event() {
            has_ended |= matches!(event, Event::Done { .. });
        }
        if is_idle && worker.arm().expect("arm") {
            return has_ended;
        }
    }
}

#[test]
fn missing_library_is_an_error_that_names_what_was_tried() {
    let explicit = Some("/nowhere/libucp.so.0".into());
    let search = Search {
        explicit,
        wheel_dir: None,
    };
    let message = Library::load(&search)
        .expect_err("no library there")
        .to_string();
    assert!(message.contains("tried /nowhere/libucp.so.0"), "{message}");
    assert!(
        message.contains("pip install 'kvpipe[ucx-cu12]'"),
        "{message}"
    );
}

#[test]
fn library_tells_its_version_and_file() {
    let Some(library) = common::library() else {
        return;
    };
    assert!(library.version() >= (1, 13, 0));
    assert!(
        library.path().to_string_lossy().contains("libucp"),
        "{library:?}"
    );
    assert!(library.path().is_absolute());
}

#[test]
fn close_gives_each_operation_its_done_before_closed() {
    let Some(library) = common::library() else {
        return;
    };
    // A close during a read over TCP can abort the peer, which is this process (see `Worker::get`).
    let visitor = visit_thread(&library, None);
    visitor.greet();
    let posted = post_many(&visitor, 1 << 16);
    let node = &visitor.node;
    node.worker.close(visitor.endpoint);
    let mut dones = Vec::new();
    node.wait(common::TIMEOUT, |event| match event {
        Event::Done { token, .. } => {
            dones.push(token);
            None
        }
        Event::Closed { .. } => Some(()),
        Event::EndpointFailed { .. } => None,
    })
    .expect("closed");
    dones.sort_unstable();
    assert_eq!(dones, posted);
    assert_eq!(node.worker.outstanding(), 0);
    assert_eq!(std::sync::Arc::strong_count(&node.region), 1);
}

/// Posts reads of so many bytes, and returns their tokens.
fn post_many(visitor: &Visitor, len: usize) -> Vec<u64> {
    let (node, key) = (&visitor.node, visitor.key());
    (0..100)
        .inspect(|&token| {
            let read = get(&node.region, (0, len), visitor.card.region, &key, token);
            node.worker.get(visitor.endpoint, read).expect("get");
        })
        .collect()
}

#[test]
fn worker_can_be_dropped_with_operations_and_keys_alive() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    let key = visitor.key();
    post_many(&visitor, 1 << 20);
    drop(visitor);
    drop(key);
}
