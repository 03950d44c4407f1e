//! Reads of blocks between two agents, over every data path.

use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::blocks::Options;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::checksum;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{BLOCK, COUNT, agent, connect, pair, pair_of, register};
use crate::common::{self, Raw, TIMEOUT, TOKEN, bytes, eventually, on_every_path, pattern};

const READ: u8 = 32;
const REFUSED: u8 = 35;
/// In READ: bytes with checksums, as messages.
const WITH_CHECKSUMS: u8 = 1;

#[test]
fn named_blocks_arrive_and_nothing_else_is_written() {
    on_every_path(|transport| {
        let all: Vec<u32> = (0..COUNT as u32).collect();
        let reversed: Vec<u32> = all.iter().rev().copied().collect();
        for (from_stride, to_stride) in [
            (BLOCK, BLOCK),
            (BLOCK + 512, BLOCK),
            (BLOCK, 2 * BLOCK),
            (3 * BLOCK, BLOCK + 64),
        ] {
            let pair = pair(transport, from_stride, to_stride);
            assert!(common::is_name(&pair.peer.transport(), transport));
            let strides = (from_stride, to_stride);
            pair.read_and_check(&all, &all, strides);
            pair.read_and_check(&all, &reversed, strides);
            pair.read_and_check(&[5, 60, 6, 7], &[9, 0, 63, 10], strides);
            pair.read_and_check(&[1, 2], &[8, 8], strides);
            pair.read_and_check(&[], &[], strides);
        }
    });
}

#[test]
fn a_region_larger_than_every_window_arrives() {
    on_every_path(|transport| {
        let (source, destination) = (agent(transport), agent(transport));
        let (block, count) = (1 << 20, 48);
        let from = Buffer::from_vec(pattern(block * count, 3));
        let to = Buffer::zeroed(block * count);
        register(&source, "kv", &from, block, block);
        let region = register(&destination, "kv", &to, block, block);
        let peer = connect(&destination, &source);
        // More reads at once than may be under way.
        let begin = |id| {
            let (local, remote) = ((&region, vec![id]), ("kv", vec![id]));
            let plan = destination.prepare(&peer, local, remote).expect("plan");
            destination.read(&plan, Options::default()).expect("read")
        };
        let works: Vec<_> = (0..count as u32).map(begin).collect();
        for work in works {
            assert_eq!(work.wait_for(TIMEOUT), Ok(block as u64));
        }
        assert!(bytes(&from) == bytes(&to));
    });
}

#[test]
fn bad_ids_and_regions_are_named_and_the_peer_stays_usable() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let text = |to: &[u32], from: &[u32]| match pair.read(to, from) {
            Err(Error::Config(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(text(&[0], &[4711]).contains("4711"));
        assert!(text(&[4712], &[0]).contains("4712"));
        assert!(text(&[17, 17], &[0, 1]).contains("17 is named twice"));
        assert!(text(&[1], &[0, 1]).contains("1 local ids for 2"));
        let local = (&pair.region, vec![0]);
        let unknown = pair
            .destination
            .prepare(&pair.peer, local, ("kx", vec![0]))
            .expect_err("unknown");
        assert!(
            unknown
                .to_string()
                .contains("no region \"kx\"; its regions: [\"kv\"]")
        );
        pair.read_and_check(&[1], &[2], (BLOCK, BLOCK));
    });
}

#[test]
fn blocks_of_different_sizes_do_not_fit() {
    let Some(search) = common::ucx() else { return };
    let (source, destination) = (agent(&search), agent(&search));
    register(&source, "kv", &Buffer::zeroed(4096), 1024, 1024);
    let region = register(&destination, "kv", &Buffer::zeroed(4096), 512, 512);
    let peer = connect(&destination, &source);
    let error = destination
        .prepare(&peer, (&region, vec![0]), ("kv", vec![0]))
        .expect_err("sizes differ");
    assert!(error.to_string().contains("1024"), "{error}");
}

#[test]
fn a_region_registered_later_becomes_known_to_peers() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    register(
        &pair.source,
        "later",
        &Buffer::from_vec(pattern(BLOCK, 9)),
        BLOCK,
        BLOCK,
    );
    let read = || {
        let (local, remote) = ((&pair.region, vec![0]), ("later", vec![0]));
        let plan = pair.destination.prepare(&pair.peer, local, remote).ok()?;
        let work = pair.destination.read(&plan, Options::default()).ok()?;
        work.wait_for(TIMEOUT).ok()
    };
    eventually("the region", read);
    assert!(bytes(&pair.to)[..BLOCK] == pattern(BLOCK, 9));
}

#[test]
fn a_peer_that_is_gone_ends_reads_as_lost_and_can_be_reached_again() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let address = pair.source.address().expect("address").to_string();
        pair.source.close();
        let read = || pair.read(&[0], &[0]).err();
        let error = eventually("the loss", read);
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        assert!(pair.peer.lost().is_some());
        let error = pair.read(&[0], &[0]).expect_err("still lost");
        assert!(error.to_string().contains("connect again"), "{error}");
        let error = pair
            .destination
            .connect(&address)
            .expect("connect")
            .wait_for(TIMEOUT)
            .expect_err("no listener");
        assert!(matches!(error, Error::Connect(_)), "{error}");
    });
}

// --- an initiator that keeps to no rules

fn raw(search: &Search) -> (Raw, Agent) {
    let source = agent(search);
    register(
        &source,
        "kv",
        &Buffer::from_vec(pattern(COUNT * BLOCK, 1)),
        BLOCK,
        BLOCK,
    );
    let address = source.address().expect("address");
    (Raw::connect(address, SessionKind::Agent), source)
}

fn ask(raw: &Raw, transfer: u64, region: u32, ids: &[u32]) {
    let header = Writer::new(READ)
        .u64(transfer)
        .u64(region.into())
        .u8(WITH_CHECKSUMS);
    let header = header.finish();
    let ids = Writer::default().list(ids, |w, id| w.u32(*id)).finish();
    raw.send(&header, &ids);
}

#[test]
fn a_source_refuses_ids_that_it_does_not_have_and_serves_on() {
    let Some(search) = common::ucx() else { return };
    let (raw, _source) = raw(&search);
    for (region, ids, named) in [
        (0, vec![0, COUNT as u32], "64"),
        (0, vec![u32::MAX], "4294967295"),
        (7, vec![0], "closed"),
    ] {
        ask(&raw, 5, region, &ids);
        let (header, payload) = raw.message(REFUSED);
        assert_eq!(header, 5u64.to_le_bytes());
        let text = Reader::new(&payload).str(4096).expect("a reason");
        assert!(text.contains(named), "{text}");
    }
    ask(&raw, 6, 0, &[3]);
    let (header, payload) = raw.message(33);
    let block = &pattern(COUNT * BLOCK, 1)[3 * BLOCK..4 * BLOCK];
    let fields = [6, 0, checksum::of(block)].map(u64::to_le_bytes);
    assert_eq!(header, fields.concat());
    assert!(payload == block);
}

#[test]
fn an_initiator_that_asks_for_more_than_it_may_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let (mut raw, _source) = raw(&search);
    // 8 MiB each, more than the first window: none of them ends without credit.
    let ids: Vec<u32> = (0..2048).map(|i| i % COUNT as u32).collect();
    for transfer in 0..5 {
        ask(&raw, transfer, 0, &ids);
    }
    assert!(raw.is_closed());
}

#[test]
fn a_peer_that_does_not_describe_its_regions_is_given_up() {
    let Some(search) = common::ucx() else { return };
    let timeouts = SessionTimeouts {
        handshake: Duration::from_secs(2),
        ..SessionTimeouts::default()
    };
    let config = AgentConfig {
        timeouts,
        ..AgentConfig::new("127.0.0.1:0", TOKEN, search.clone().into())
    };
    let agent = Agent::new(config).expect("agent");
    let address = agent.address().expect("address");
    let mut raw = Raw::connect(address, SessionKind::Agent);
    assert!(raw.is_closed());
}

#[test]
fn a_source_that_sends_what_was_not_asked_for_writes_nothing_and_loses_its_session() {
    let Some(search) = common::ucx() else { return };
    let destination = agent(&search);
    let to = Buffer::zeroed(COUNT * BLOCK);
    register(&destination, "kv", &to, BLOCK, BLOCK);
    let address = destination.address().expect("address");
    for transfer in [0, 1, 63] {
        for offset in [0, BLOCK as u64, u64::MAX - 8] {
            let raw = Raw::connect(address, SessionKind::Agent);
            let header = Writer::new(33).u64(transfer).u64(offset).u64(0).finish();
            raw.send(&header, &[7; BLOCK]);
            let reason = raw.goodbye();
            assert!(reason.contains("which was not begun"), "{reason}");
        }
    }
    assert!(bytes(&to).iter().all(|byte| *byte == 0));
}

#[test]
fn late_reads_end_alone_beside_healthy_ones() {
    const LARGE: usize = 32 << 20;
    on_every_path(|transport| {
        let pair = pair_of(transport, (2, LARGE), (LARGE, LARGE));
        let mut num_late = 0;
        for _ in 0..5 {
            let healthy = pair.begin_read(&[0], &[0], Options::default());
            let options = Options {
                timeout: Some(Duration::from_millis(2)),
                ..Options::default()
            };
            let late = pair.begin_read(&[1], &[1], options).expect("read");
            // Fast enough it may be; over it is in any case, and alone.
            if let Err(error) = late.wait_for(TIMEOUT) {
                assert!(matches!(error, Error::Timeout(_)), "{error}");
                num_late += 1;
            }
            let healthy = healthy.expect("read").wait_for(TIMEOUT);
            assert_eq!(healthy, Ok(LARGE as u64));
            eventually("its end", || late.is_settled().then_some(()));
            assert_eq!(pair.read(&[1], &[1]), Ok(LARGE as u64));
        }
        assert!(num_late > 0, "no read was late");
    });
}

#[test]
fn a_read_that_takes_too_long_ends_at_its_deadline() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let ids: Vec<u32> = (0..COUNT as u32).collect();
        let options = Options {
            timeout: Some(Duration::ZERO),
            ..Options::default()
        };
        let read = pair.begin_read(&ids, &ids, options).expect("read");
        // Fast enough it may be; over it is in any case.
        match read.wait_for(TIMEOUT) {
            Ok(len) => assert_eq!(len, (COUNT * BLOCK) as u64),
            Err(error) => assert!(matches!(error, Error::Timeout(_)), "{error}"),
        }
    });
}
