//! Real UCX between two threads and between two processes of this machine.

use std::time::Instant;

use kvpipe_ucx::{Buffer, Event, Lane, Library, Payload, Search};

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
fn messages_come_back_intact_and_in_order() {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        echo_all_sizes(&visit_thread(&library, tls));
        let (visitor, _peer) = visit_process(&library, tls);
        echo_all_sizes(&visitor);
    }
}

fn echo_all_sizes(visitor: &Visitor) {
    let sizes = [0, 8, 100 << 10, 1 << 20, 0, 1 << 20, 8, 100 << 10];
    let node = &visitor.node;
    let mut dones = Vec::new();
    for (token, size) in (0..).zip(sizes) {
        let bytes = pattern(size, token);
        let payload = match (size, token % 2) {
            (0, _) => Payload::None,
            (_, 0) => Payload::Bytes(bytes),
            _ => {
                let memory = node
                    .context
                    .register(Buffer::from_vec(bytes))
                    .expect("register");
                Payload::Memory {
                    memory,
                    offset: 0,
                    len: size,
                }
            }
        };
        node.worker
            .am_send(visitor.endpoint, token.to_le_bytes(), payload, token)
            .expect("send");
    }
    let mut echoes = Vec::new();
    node.wait(common::TIMEOUT, |event| {
        match event {
            Event::Message { header, data } => echoes.push((header, data.to_vec())),
            Event::Done { token, result } => dones.push((token, result)),
            other => panic!("unexpected {other:?}"),
        }
        (echoes.len() == sizes.len() && dones.len() == sizes.len()).then_some(())
    })
    .expect("all echoes");
    for ((token, size), (header, data)) in (0u64..).zip(sizes).zip(echoes) {
        assert_eq!(header, token.to_le_bytes());
        assert!(
            data == pattern(size, token),
            "message {token} of {size} bytes differs"
        );
    }
    dones.sort_unstable_by_key(|(token, _)| *token);
    let expected: Vec<_> = (0..sizes.len() as u64)
        .map(|token| (token, Ok(())))
        .collect();
    assert_eq!(dones, expected);
    assert_eq!(node.worker.outstanding(), 0);
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
        local
            .iter()
            .any(|lane| lane.is_am && !lane.device.is_empty()),
        "{local:?}"
    );
    let tcp: Vec<Lane> = lanes(Some("tcp"));
    assert!(
        !tcp.is_empty() && tcp.iter().all(|lane| lane.transport == "tcp"),
        "{tcp:?}"
    );
    assert!(tcp.iter().any(|lane| lane.is_am), "{tcp:?}");
}

#[test]
fn event_fd_wakes_an_armed_worker() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    visitor.greet();
    let worker = &visitor.node.worker;
    // Connection set-up goes on for a moment after the first message.
    let deadline = Instant::now() + common::TIMEOUT;
    let mut has_slept = false;
    while !has_slept {
        assert!(Instant::now() < deadline, "nothing to wake for");
        while !worker.arm().expect("arm") {
            worker.progress();
            while worker.next_event().is_some() {}
        }
        has_slept = !common::sleep_on(worker, 100);
    }
    // Until an echo is slower than this thread.
    for _ in 0..100 {
        let sent = worker.am_send(visitor.endpoint, b"x", Payload::None, 1);
        sent.expect("send");
        let mut has_come = false;
        while !worker.arm().expect("arm") {
            worker.progress();
            while let Some(event) = worker.next_event() {
                has_come |= matches!(event, Event::Message { .. });
            }
        }
        if !has_come {
            assert!(common::sleep_on(worker, 5000), "the echo wakes");
            visitor.node.message();
            return;
        }
    }
    panic!("no echo was waited for");
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
fn longest_header_goes_through() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, Some("tcp"));
    let header = pattern(visitor.node.worker.max_header_bytes(), 5);
    let payload = Payload::Bytes(pattern(3 << 20, 6));
    visitor
        .node
        .worker
        .am_send(visitor.endpoint, header.as_slice(), payload, 1)
        .expect("send");
    let (echoed, data) = visitor.node.message();
    assert!(echoed == header && data == pattern(3 << 20, 6));
}

#[test]
fn close_gives_each_operation_its_done_before_closed() {
    let Some(library) = common::library() else {
        return;
    };
    for tls in TRANSPORTS {
        let visitor = visit_thread(&library, tls);
        visitor.greet();
        let posted = post_many(&visitor);
        let node = &visitor.node;
        node.worker.close(visitor.endpoint);
        let mut dones = Vec::new();
        node.wait(common::TIMEOUT, |event| match event {
            Event::Done { token, .. } => {
                dones.push(token);
                None
            }
            Event::Closed { .. } => Some(()),
            _ => None,
        })
        .expect("closed");
        dones.sort_unstable();
        assert_eq!(dones, posted);
        assert_eq!(node.worker.outstanding(), 0);
        assert_eq!(std::sync::Arc::strong_count(&node.region), 1);
    }
}

/// Posts messages, and gets where they do not go over TCP: there, a close during a get can abort
/// the peer, which is this process (see `Worker::get`). Returns the tokens.
fn post_many(visitor: &Visitor) -> Vec<u64> {
    const LEN: usize = 1 << 16;
    let Visitor {
        node,
        endpoint,
        card,
        ..
    } = visitor;
    let (worker, key) = (&node.worker, visitor.key());
    let lanes = worker.lanes(*endpoint).expect("lanes");
    let has_get = lanes
        .iter()
        .any(|lane| lane.is_rma && lane.transport != "tcp");
    let mut posted = Vec::new();
    for token in 0..400 {
        if token % 2 == 0 {
            let bytes = Payload::Bytes(vec![1; LEN]);
            worker.am_send(*endpoint, b"", bytes, token).expect("send");
        } else if has_get {
            worker
                .get(
                    *endpoint,
                    get(&node.region, (0, LEN), card.region, &key, token),
                )
                .expect("get");
        } else {
            continue;
        }
        posted.push(token);
    }
    posted
}

#[test]
fn worker_can_be_dropped_with_operations_and_received_data_alive() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    let worker = &visitor.node.worker;
    let payload = Payload::Bytes(pattern(4096, 7));
    worker
        .am_send(visitor.endpoint, b"h", payload, 1)
        .expect("send");
    let is_message = |event| match event {
        Event::Message { data, .. } => Some(data),
        _ => None,
    };
    let data = visitor
        .node
        .wait(common::TIMEOUT, is_message)
        .expect("message");
    let key = visitor.key();
    for token in 0..64 {
        let bytes = Payload::Bytes(vec![0; 1 << 20]);
        worker
            .am_send(visitor.endpoint, b"h", bytes, token)
            .expect("send");
    }
    drop(visitor);
    assert!(*data == pattern(4096, 7));
    drop(key);
}
