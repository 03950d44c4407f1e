//! Closing a region: peers let it go, or its memory stays where it is.

use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::blocks::Options;
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;
use kvpipe_ucx::Buffer;

use crate::agents::{BLOCK, COUNT, agent, connect, pair, register};
use crate::common::{self, Raw, TIMEOUT, bytes, eventually, on_every_path, pattern};

const REGIONS: u8 = 1;
const RELEASED: u8 = 2;

/// A first close has given up.
#[test]
fn a_second_close_waits_for_the_same_peers_as_the_first() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    let region = register(&owner, "kv", &Buffer::zeroed(COUNT * BLOCK), BLOCK, BLOCK);
    let address = owner.address().expect("address");
    let reader = Raw::connect(address, SessionKind::Agent);
    let none = Writer::new(1).list(&[0u8; 0], |w, _| w);
    reader.send(&none.finish(), &[]);
    eventually("the peer", || owner.peers().pop());
    let close = |timeout| owner.close_region(&region, timeout).expect("close");
    let first = close(Some(Duration::from_millis(50)));
    assert!(matches!(first.wait_for(TIMEOUT), Err(Error::Timeout(_))));
    let (second, third) = (close(None), close(Some(Duration::ZERO)));
    assert!(matches!(third.wait_for(TIMEOUT), Err(Error::Timeout(_))));
    assert!(!second.is_completed());
    let released = Writer::new(2).u32(0).finish();
    reader.send(&released, &[]);
    assert_eq!(second.wait_for(TIMEOUT), Ok(()));
    assert_eq!(close(None).wait_for(TIMEOUT), Ok(()));
}

#[test]
fn a_closed_region_is_refused_by_name_on_both_sides_and_its_name_is_free_again() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let (local, remote) = ((&pair.region, vec![0]), ("kv", vec![0]));
        let plan = pair
            .destination
            .prepare(&pair.peer, local, remote)
            .expect("plan");
        let close = || {
            pair.source
                .close_region(&pair.source_region, None)
                .expect("close")
        };
        assert_eq!(close().wait_for(TIMEOUT), Ok(()));
        assert_eq!(close().wait_for(TIMEOUT), Ok(()), "closing twice is fine");
        assert!(pair.peer.regions().is_empty());
        let read = pair.destination.read(&plan, Options::default());
        let text = read.expect_err("closed").to_string();
        assert!(
            text.contains("\"kv\"") && text.contains("was closed by its owner"),
            "{text}"
        );

        let fresh = Buffer::from_vec(pattern(COUNT * BLOCK, 8));
        register(&pair.source, "kv", &fresh, BLOCK, BLOCK);
        eventually("the new region", || pair.read(&[0], &[3]).ok());
        assert!(bytes(&pair.to)[..BLOCK] == pattern(COUNT * BLOCK, 8)[3 * BLOCK..4 * BLOCK]);
        assert!(pair.destination.read(&plan, Options::default()).is_err());

        let closing = pair
            .destination
            .close_region(&pair.region, None)
            .expect("close");
        assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
        let text = pair.read(&[0], &[0]).expect_err("closed").to_string();
        assert!(
            text.contains("region \"kv\" was closed; register"),
            "{text}"
        );
    });
}

#[test]
fn reads_under_way_when_a_region_is_closed_end_whole_or_with_the_reason() {
    on_every_path(|transport| {
        for closes_source in [true, false] {
            let pair = pair(transport, BLOCK, BLOCK);
            let all: Vec<u32> = (0..COUNT as u32).collect();
            let begin = |_| pair.begin_read(&all, &all, Options::default()).ok();
            let works: Vec<_> = (0..64).filter_map(begin).collect();
            let closing = if closes_source {
                pair.source.close_region(&pair.source_region, None)
            } else {
                pair.destination.close_region(&pair.region, None)
            };
            assert_eq!(closing.expect("close").wait_for(TIMEOUT), Ok(()));
            for work in works {
                match work.wait_for(TIMEOUT) {
                    Ok(len) => assert_eq!(len, (COUNT * BLOCK) as u64),
                    Err(Error::Config(text)) => assert!(text.contains("closed"), "{text}"),
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(pair.peer.lost().is_none());
        }
    });
}

#[test]
fn nothing_is_written_to_a_region_once_its_closing_is_done() {
    on_every_path(|transport| {
        let (block, count) = (1 << 20, 64);
        let (source, destination) = (agent(transport), agent(transport));
        let memory = || Buffer::zeroed(block * count as usize);
        register(&source, "kv", &memory(), block, block);
        let region = register(&destination, "kv", &memory(), block, block);
        let peer = connect(&destination, &source);
        let ids: Vec<u32> = (0..count).collect();
        let plan = destination
            .prepare(&peer, (&region, ids.clone()), ("kv", ids))
            .expect("plan");
        let read = |_| destination.read(&plan, Options::default()).expect("read");
        let works: Vec<_> = (0..8).map(read).collect();
        let closing = destination.close_region(&region, None).expect("close");
        assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
        assert!(works.iter().all(kvpipe_core::work::Work::is_completed));
        let moved = works.iter().filter_map(|work| work.result()?.ok()).count();
        assert!(moved >= 1, "what had begun ends well");
    });
}

#[test]
fn a_peer_that_does_not_let_go_is_waited_for_until_the_deadline_and_no_longer() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    let region = register(&owner, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let address = owner.address().expect("address");
    let raw = Raw::connect(address, SessionKind::Agent);
    raw.send(&Writer::new(REGIONS).u32(0).finish(), &[]);
    eventually("the peer", || (owner.peers().len() == 1).then_some(()));
    let timeout = Some(Duration::from_millis(200));
    let closing = owner.close_region(&region, timeout).expect("close");
    let error = closing.wait_for(TIMEOUT).expect_err("no answer");
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    let peer = owner.peers()[0].address().to_owned();
    assert!(error.to_string().contains(&peer), "{error}");
    // Late is not wrong.
    raw.send(&Writer::new(RELEASED).u32(0).finish(), &[]);
    register(&owner, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    assert_eq!(owner.peers().len(), 1);
}

#[test]
fn who_waits_for_a_peer_to_let_go_is_answered_when_the_agent_is_closed() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    let region = register(&owner, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let address = owner.address().expect("address");
    let raw = Raw::connect(address, SessionKind::Agent);
    raw.send(&Writer::new(REGIONS).u32(0).finish(), &[]);
    eventually("the peer", || (owner.peers().len() == 1).then_some(()));
    let closing = owner.close_region(&region, None).expect("close");
    assert!(closing.wait_for(Duration::from_millis(100)).is_err());
    owner.close();
    assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
}

#[test]
fn a_peer_that_is_lost_is_not_waited_for() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    let region = register(&owner, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let address = owner.address().expect("address");
    let raw = Raw::connect(address, SessionKind::Agent);
    raw.send(&Writer::new(REGIONS).u32(0).finish(), &[]);
    eventually("the peer", || (owner.peers().len() == 1).then_some(()));
    let closing = owner.close_region(&region, None).expect("close");
    assert!(closing.wait_for(Duration::from_millis(100)).is_err());
    drop(raw);
    assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
}

#[test]
fn a_release_that_was_not_asked_for_and_a_region_that_comes_back_are_cut_off() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    register(&owner, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let address = owner.address().expect("address");
    let describe = |ids: &[u32]| {
        let each = |w: Writer, id: &u32| {
            let whole = w.u32(*id).str("mine").u32(0).u32(1);
            let layout = whole.u64(8).u64(64).u64(64).u64(0);
            layout.str("cpu").u8(0).u64(4096).bytes(&[1])
        };
        Writer::new(REGIONS).list(ids, each).finish()
    };
    let released = Writer::new(RELEASED).u32(0).finish();
    for frames in [
        vec![describe(&[]), released],
        vec![describe(&[0, 1]), describe(&[1]), describe(&[0, 1])],
        vec![describe(&[1, 0])],
        vec![describe(&[1, 1])],
    ] {
        let mut raw = Raw::connect(address, SessionKind::Agent);
        for frame in &frames {
            raw.send(frame, &[]);
        }
        assert!(raw.is_closed(), "{frames:?}");
    }
}

#[test]
fn a_peer_that_describes_a_region_anew_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let owner = agent(&search);
    let address = owner.address().expect("address");
    let describe = |stride: u64, base: u64, rkey: u8| {
        let each = |w: Writer, id: &u32| {
            let whole = w.u32(*id).str("mine").u32(0).u32(1);
            let layout = whole.u64(8).u64(64).u64(stride).u64(0);
            layout.str("cpu").u8(0).u64(base).bytes(&[rkey])
        };
        Writer::new(REGIONS).list(&[0], each).finish()
    };
    let beyond = u64::MAX - 8 * 64 + 1;
    let cases = [
        describe(64, beyond, 1),
        describe(64, 8192, 1),
        describe(128, 4096, 1),
        describe(64, 4096, 2),
    ];
    for anew in cases {
        let mut raw = Raw::connect(address, SessionKind::Agent);
        let same = describe(64, 4096, 1);
        raw.send(&same, &[]);
        raw.send(&same, &[]);
        let up = || (owner.peers().len() == 1).then_some(());
        eventually("the peer", up);
        raw.send(&anew, &[]);
        assert!(raw.is_closed());
        eventually("its end", || owner.peers().is_empty().then_some(()));
    }
}

#[test]
fn a_region_or_a_peer_of_another_agent_is_refused() {
    let Some(search) = common::ucx() else { return };
    let (pair, other) = (pair(&search, BLOCK, BLOCK), agent(&search));
    let foreign = register(&other, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let text = pair
        .destination
        .prepare(&pair.peer, (&foreign, vec![0]), ("kv", vec![0]))
        .expect_err("foreign")
        .to_string();
    assert!(text.contains("registered with another agent"), "{text}");
    assert!(pair.destination.close_region(&foreign, None).is_err());
    let text = other
        .prepare(&pair.peer, (&foreign, vec![0]), ("kv", vec![0]))
        .expect_err("foreign")
        .to_string();
    assert!(text.contains("peer of another agent"), "{text}");
}
