//! A peer that is killed while bytes move: everything pending ends as lost within two seconds, on both ends and data paths.

use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::blocks::{Options, Region};
use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::tensor::Meta;
use kvpipe_core::work::Then;
use kvpipe_core::work::Work;
use kvpipe_ucx::{Buffer, Search};

use crate::common::{self, PROMPT, Process, TIMEOUT, TOKEN, on_both_paths, say};

/// Takes hundreds of milliseconds on every data path.
const LARGE: usize = 1 << 30;
/// The same over RDMA that is software in an interpreted machine.
const LARGE_IN_SOFTWARE: usize = 64 << 20;
const BLOCK: usize = 1 << 20;
/// So small that a neighbour reads many of them in one call.
const SMALL_BLOCK: usize = 4 << 10;
/// Enough for a transfer to begin, not to end.
const A_MOMENT: Duration = Duration::from_millis(40);

#[test]
fn peer_process() {
    let Some((role, argument, mut parent)) = common::role() else {
        return;
    };
    let search = common::ucx().expect("the parent found UCX");
    match role.as_str() {
        "receiver" => {
            let pipe = Pipe::listen(&common::local(), TOKEN, search.into(), Duration::ZERO)
                .expect("listen");
            let _received = pipe
                .receive(None, Deadline::default(), Then::GoOn)
                .expect("receive");
            say(&mut parent, &pipe.address().expect("address").to_string());
            common::wait_for_the_end(parent);
        }
        "sender" => {
            let (pipe, _) = Pipe::connect(
                &argument,
                TOKEN,
                search.into(),
                kvpipe_core::Integrity::Auto,
                Duration::ZERO,
                TIMEOUT,
            )
            .expect("connect");
            let _sent = send(&pipe);
            say(&mut parent, "sending");
            common::wait_for_the_end(parent);
        }
        "source" => {
            let agent = agent(&search);
            register(&agent, argument.parse().expect("block size"));
            say(&mut parent, &agent.address().expect("address").to_string());
            common::wait_for_the_end(parent);
        }
        other => panic!("unknown role {other}"),
    }
}

fn large() -> usize {
    if common::is_rdma() {
        LARGE_IN_SOFTWARE
    } else {
        LARGE
    }
}

fn send(pipe: &Pipe) -> Work<()> {
    let meta = Meta {
        family: 2,
        dtype: "uint8".to_owned(),
        shape: vec![large() as u64],
    };
    pipe.send(
        meta,
        Buffer::zeroed(large()),
        Deadline::default(),
        Then::GoOn,
    )
    .expect("send")
}

fn agent(search: &Search) -> Agent {
    let (listen, transport) = (common::local(), search.clone().into());
    Agent::new(AgentConfig::new(&listen, TOKEN, transport)).expect("agent")
}

fn register(agent: &Agent, block: usize) -> Region {
    agent
        .register("kv", Buffer::zeroed(large()), block as u64, block as u64)
        .expect("register")
        .wait_for(TIMEOUT)
        .expect("registered")
}

/// Kills the peer under a pending operation, and expects it to be lost promptly.
fn kill_under<T: Clone + std::fmt::Debug>(peer: &mut Process, pending: &Work<T>) {
    assert!(!pending.is_completed(), "over before the peer was killed");
    let begun = Instant::now();
    peer.kill();
    let error = pending.wait_for(PROMPT).expect_err("the peer is dead");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    assert!(begun.elapsed() < PROMPT);
}

#[test]
fn a_receiver_killed_under_a_large_tensor_fails_the_sender() {
    on_both_paths(|search| {
        let mut peer = Process::start("receiver", "");
        let (pipe, connected) = Pipe::connect(
            &peer.line(),
            TOKEN,
            search.clone().into(),
            kvpipe_core::Integrity::Auto,
            Duration::ZERO,
            TIMEOUT,
        )
        .expect("connect");
        connected.wait_for(TIMEOUT).expect("connected");
        let sent = send(&pipe);
        let queued = send(&pipe);
        std::thread::sleep(A_MOMENT);
        kill_under(&mut peer, &sent);
        assert!(matches!(
            queued.wait_for(PROMPT),
            Err(Error::PeerLost { .. })
        ));
    });
}

#[test]
fn a_sender_killed_under_a_large_tensor_fails_the_receiver() {
    on_both_paths(|search| {
        let pipe = Pipe::listen(
            &common::local(),
            TOKEN,
            search.clone().into(),
            Duration::ZERO,
        )
        .expect("listen");
        let mut peer = Process::start("sender", &pipe.address().expect("address").to_string());
        let receive = || {
            pipe.receive(None, Deadline::default(), Then::GoOn)
                .expect("receive")
        };
        let (received, next) = (receive(), receive());
        peer.line();
        common::eventually("the sender", || (pipe.info().state == "open").then_some(()));
        std::thread::sleep(A_MOMENT);
        kill_under(&mut peer, &received);
        assert!(matches!(next.wait_for(PROMPT), Err(Error::PeerLost { .. })));
    });
}

#[test]
fn a_source_killed_under_a_read_fails_it_and_those_that_wait() {
    on_both_paths(|search| kill_under_reads(search, BLOCK));
}

#[test]
fn a_source_killed_under_a_read_of_small_blocks_fails_it_and_those_that_wait() {
    on_both_paths(|search| kill_under_reads(search, SMALL_BLOCK));
}

fn kill_under_reads(search: &Search, block: usize) {
    let mut peer = Process::start("source", &block.to_string());
    let agent = agent(search);
    let region = register(&agent, block);
    let connected = agent.connect(&peer.line()).expect("connect");
    let source = connected.wait_for(TIMEOUT).expect("connected");
    let ids = 0..(large() / block) as u32;
    // In opposite order: no two blocks are neighbours on both sides.
    let (here, there) = (ids.clone().rev().collect(), ids.collect());
    let plan = agent
        .prepare(&source, (&region, here), ("kv", there))
        .expect("plan");
    let read = || agent.read(&plan, Options::default()).expect("read");
    let reads: Vec<_> = (0..8).map(|_| read()).collect();
    std::thread::sleep(A_MOMENT);
    kill_under(&mut peer, &reads[7]);
    for read in reads {
        let ended = read.wait_for(PROMPT);
        assert!(
            matches!(ended, Ok(_) | Err(Error::PeerLost { .. })),
            "{ended:?}"
        );
    }
}
