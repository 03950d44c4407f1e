//! Writes of blocks between two agents, over every data path: an offer that the target checks and takes.

use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::blocks::Agent;
use kvpipe_core::blocks::Options;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{
    BLOCK, COUNT, agent, connect, pair, register, register_writable, tagged, tags,
};
use crate::common::{self, Raw, TIMEOUT, bytes, eventually, on_every_path, pattern};

const OFFER: u8 = 36;
const ACCEPTED: u8 = 37;
const DECLINED: u8 = 38;
const WITHDRAW: u8 = 47;

#[test]
fn written_blocks_arrive_and_nothing_else_is_written() {
    on_every_path(|transport| {
        let all: Vec<u32> = (0..COUNT as u32).collect();
        let reversed: Vec<u32> = all.iter().rev().copied().collect();
        for (from_stride, to_stride) in [
            (BLOCK, BLOCK),
            (BLOCK + 512, BLOCK),
            (3 * BLOCK, BLOCK + 64),
        ] {
            let pair = pair(transport, from_stride, to_stride);
            pair.to.write(0, &pattern(pair.to.len(), 5));
            let strides = (from_stride, to_stride);
            pair.write_and_check(&all, &all, strides);
            pair.write_and_check(&all, &reversed, strides);
            pair.write_and_check(&[9, 0, 63, 10], &[5, 60, 6, 7], strides);
            pair.write_and_check(&[8, 8], &[1, 2], strides);
            pair.write_and_check(&[], &[], strides);
            let stats = pair.peer.stats();
            assert_eq!(
                (stats.num_writes, stats.num_reads, stats.in_flight),
                (5, 0, 0)
            );
            assert_eq!(stats, pair.destination.stats());
        }
    });
}

#[test]
fn repeated_ids_are_refused_in_the_destination_only() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let twice = |error: Error| match error {
            Error::Config(text) => assert!(text.contains("17 is named twice"), "{text}"),
            other => panic!("{other}"),
        };
        twice(pair.write(&[1, 2], &[17, 17]).expect_err("twice"));
        twice(pair.read(&[17, 17], &[1, 2]).expect_err("twice"));
        pair.write_and_check(&[17, 17], &[1, 2], (BLOCK, BLOCK));
        pair.read_and_check(&[1, 2], &[17, 17], (BLOCK, BLOCK));
    });
}

#[test]
fn a_region_is_written_only_when_its_owner_says_so() {
    let Some(search) = common::ucx() else { return };
    let (writer, target) = (agent(&search), agent(&search));
    let region = register(&writer, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    register(&target, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
    let peer = connect(&writer, &target);
    let plan = writer
        .prepare(&peer, (&region, vec![0]), ("kv", vec![0]))
        .expect("reads are fine");
    let error = writer
        .write(&plan, Options::default())
        .expect_err("not writable");
    assert!(matches!(error, Error::Config(_)), "{error}");
    assert!(
        error.to_string().contains("\"kv\" is not writable"),
        "{error}"
    );
    assert!(error.to_string().contains("writable=True"), "{error}");
    let read = writer.read(&plan, Options::default()).expect("read");
    assert_eq!(read.wait_for(TIMEOUT), Ok(BLOCK as u64));
}

#[test]
fn both_sides_write_to_and_read_from_each_other_at_once() {
    on_every_path(|transport| {
        let (count, block) = (32u32, 256 << 10);
        let agents = [agent(transport), agent(transport)];
        let len = count as usize * block;
        let room: Vec<Buffer> = (0..4).map(|_| Buffer::zeroed(len)).collect();
        let own: Vec<Buffer> = (1..3)
            .map(|seed| Buffer::from_vec(pattern(len, seed)))
            .collect();
        let mut regions = Vec::new();
        for (i, agent) in agents.iter().enumerate() {
            let own = register(agent, "own", &own[i], block, block);
            let read = register(agent, "read", &room[i], block, block);
            agent
                .register_writable("written", room[2 + i].clone(), block as u64, block as u64)
                .expect("register")
                .wait_for(TIMEOUT)
                .expect("registered");
            regions.push((own, read));
        }
        let peers = [
            connect(&agents[0], &agents[1]),
            connect(&agents[1], &agents[0]),
        ];
        let mut works = Vec::new();
        for i in 0..2 {
            for id in 0..count {
                let plan = |region, remote| {
                    let ids = vec![id];
                    let local = (region, ids.clone());
                    agents[i]
                        .prepare(&peers[i], local, (remote, ids))
                        .expect("plan")
                };
                let (own, read) = &regions[i];
                let options = Options::default;
                works.push(agents[i].read(&plan(read, "own"), options()).expect("read"));
                works.push(
                    agents[i]
                        .write(&plan(own, "written"), options())
                        .expect("write"),
                );
            }
        }
        for work in works {
            assert_eq!(work.wait_for(TIMEOUT), Ok(block as u64));
        }
        for i in 0..2 {
            assert!(bytes(&room[i]) == bytes(&own[1 - i]), "read");
            assert!(bytes(&room[2 + i]) == bytes(&own[1 - i]), "written");
        }
    });
}

#[test]
fn blocks_of_a_region_that_was_registered_just_now_are_taken() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        for i in 0..50 {
            let memory = Buffer::from_vec(pattern(BLOCK, i));
            let region = register(&pair.destination, "fresh", &memory, BLOCK, BLOCK);
            let plan = pair
                .destination
                .prepare(&pair.peer, (&region, vec![0]), ("kv", vec![7]))
                .expect("plan");
            let options = tagged(&i.to_le_bytes());
            let work = pair.destination.write(&plan, options).expect("write");
            assert_eq!(work.wait_for(TIMEOUT), Ok(BLOCK as u64));
            assert_eq!(tags(&pair.source, 1), [i.to_le_bytes()]);
            assert!(bytes(&pair.from)[7 * BLOCK..8 * BLOCK] == pattern(BLOCK, i));
            let closing = pair.destination.close_region(&region, None).expect("close");
            assert_eq!(closing.wait_for(TIMEOUT), Ok(()));
        }
    });
}

#[test]
fn a_plan_moves_the_blocks_of_the_day_both_ways() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let (local, remote) = ((&pair.region, vec![5, 3]), ("kv", vec![1, 9]));
        let plan = pair
            .destination
            .prepare(&pair.peer, local, remote)
            .expect("plan");
        assert_eq!(plan.num_blocks(), 2);
        for day in 0..5 {
            let today = pattern(BLOCK, day);
            pair.from.write(BLOCK, &today);
            let read = pair
                .destination
                .read(&plan, Options::default())
                .expect("read");
            assert_eq!(read.wait_for(TIMEOUT), Ok(2 * BLOCK as u64));
            assert!(bytes(&pair.to)[5 * BLOCK..6 * BLOCK] == today);
            pair.to.write(3 * BLOCK, &today);
            let written = pair
                .destination
                .write(&plan, Options::default())
                .expect("write");
            assert_eq!(written.wait_for(TIMEOUT), Ok(2 * BLOCK as u64));
            assert!(bytes(&pair.from)[9 * BLOCK..10 * BLOCK] == today);
        }
        pair.source.close();
        eventually("the loss", || {
            let error = pair.destination.read(&plan, Options::default()).err()?;
            assert!(matches!(error, Error::PeerLost { .. }), "{error}");
            Some(())
        });
    });
}

// --- a writer that keeps to no rules

/// An agent with a writable region 0 and one that is not, 1; and a peer that says it has a region 0.
fn raw(search: &Search) -> (Raw, Agent, Buffer) {
    let target = agent(search);
    let memory = Buffer::zeroed(COUNT * BLOCK);
    register_writable(&target, "kv", &memory);
    register(
        &target,
        "closed to others",
        &Buffer::zeroed(BLOCK),
        BLOCK,
        BLOCK,
    );
    let address = target.address().expect("address");
    let mut raw = Raw::connect(address, SessionKind::Agent);
    describe(&mut raw, &[0]);
    (raw, target, memory)
}

fn describe(raw: &mut Raw, ids: &[u32]) {
    let regions = Writer::new(1).list(ids, |w, id| {
        let layout = w
            .u32(*id)
            .str("mine")
            .u32(0)
            .u32(1)
            .u64(8)
            .u64(BLOCK as u64)
            .u64(BLOCK as u64)
            .u64(0);
        layout.str("cpu").u8(0).u64(4096).bytes(&[1])
    });
    raw.send(&regions.finish(), &[]);
}

fn offer(raw: &Raw, offer: u64, (to, from): (u32, u32), to_ids: &[u32], from_ids: &[u32]) {
    let header = Writer::new(OFFER)
        .u64(offer)
        .u32(to)
        .u32(from)
        .u8(1)
        .u8(0)
        .finish();
    let list = |w: Writer, ids: &[u32]| w.list(ids, |w, id| w.u32(*id));
    let payload = list(list(Writer::default(), to_ids), from_ids).bytes(b"");
    raw.send(&header, &payload.finish());
}

fn refused(raw: &Raw, number: u64) -> String {
    let (header, payload) = raw.message(DECLINED);
    assert_eq!(header, number.to_le_bytes());
    Reader::new(&payload).str(4096).expect("a reason")
}

/// Its memory may be changed when the write is settled, and a target that still reads must be able to know.
#[test]
fn a_write_that_was_begun_and_times_out_is_withdrawn_and_settled_by_its_answer() {
    let Some(search) = common::ucx() else { return };
    let (writer, memory) = (agent(&search), Buffer::zeroed(COUNT * BLOCK));
    let region = register(&writer, "kv", &memory, BLOCK, BLOCK);
    let address = writer.address().expect("address");
    let raw = Raw::connect(address, SessionKind::Agent);
    let writable = Writer::new(1).list(&[0u32], |w, id| {
        let layout = w.u32(*id).str("mine").u32(0).u32(1).u64(8);
        let layout = layout.u64(BLOCK as u64).u64(BLOCK as u64).u64(0).str("cpu");
        layout.u8(1).u64(4096).bytes(&[1])
    });
    raw.send(&writable.finish(), &[]);
    let peer = eventually("the peer", || writer.peers().pop());
    let plan = |block| {
        eventually("its region", || {
            let (ours, theirs) = ((&region, vec![block]), ("mine", vec![block]));
            writer.prepare(&peer, ours, theirs).ok()
        })
    };
    let options = Options {
        notify: None,
        timeout: Some(Duration::from_millis(50)),
    };
    let work = writer.write(&plan(0), options).expect("write");
    let (offer, _) = raw.message(OFFER);
    let error = work.wait_for(TIMEOUT).expect_err("not taken");
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    assert!(!work.is_settled());
    let (withdrawn, _) = raw.message(WITHDRAW);
    assert_eq!(withdrawn, offer[..8]);
    let busy = writer.write(&plan(0), Options::default()).expect("write");
    let busy = busy.wait_for(TIMEOUT).expect_err("the target may read it");
    assert!(matches!(busy, Error::Exhausted(_)), "{busy}");
    let other = writer.write(&plan(1), Options::default()).expect("write");
    let (next, _) = raw.message(OFFER);
    let reason = Writer::default().text("withdrawn", 100).finish();
    raw.send(&Writer::new(DECLINED).raw(&withdrawn).finish(), &reason);
    raw.send(&Writer::new(ACCEPTED).raw(&next[..8]).finish(), b"");
    assert_eq!(other.wait_for(TIMEOUT), Ok(BLOCK as u64));
    eventually("the end of the late one", || {
        work.is_settled().then_some(())
    });
    assert_eq!(peer.lost(), None);
}

/// Regions, target's ids, writer's ids, and what the answer names.
type Case<'a> = ((u32, u32), &'a [u32], &'a [u32], &'a str);

#[test]
fn an_offer_that_does_not_fit_is_refused_by_name_and_nothing_is_written() {
    let Some(search) = common::ucx() else { return };
    let (raw, target, memory) = raw(&search);
    let high = [COUNT as u32];
    let cases: [Case<'_>; 8] = [
        ((0, 0), &high, &[0], "block id 64"),
        ((0, 0), &[u32::MAX], &[0], "4294967295"),
        ((0, 0), &[0], &[8], "block id 8"),
        ((0, 0), &[3, 3], &[0, 1], "3 is named twice"),
        ((0, 0), &[0, 1], &[0], "2 destination ids for 1"),
        ((1, 0), &[0], &[0], "not writable"),
        ((9, 0), &[0], &[0], "closed"),
        // The key is none that UCX would give out. Over TCP and CMA it is not looked at.
        ((0, 0), &[0], &[0], "key"),
    ];
    let num_cases = cases.len() - usize::from(!common::is_rdma());
    for ((regions, to_ids, from_ids, named), number) in cases.into_iter().take(num_cases).zip(1..) {
        offer(&raw, number, regions, to_ids, from_ids);
        let text = refused(&raw, number);
        assert!(text.contains(named), "{text}");
    }
    assert!(bytes(&memory).iter().all(|byte| *byte == 0));
    let (writer, content) = (agent(&search), pattern(BLOCK, 3));
    let region = register(
        &writer,
        "kv",
        &Buffer::from_vec(content.clone()),
        BLOCK,
        BLOCK,
    );
    let plan = writer
        .prepare(
            &connect(&writer, &target),
            (&region, vec![0]),
            ("kv", vec![1]),
        )
        .expect("plan");
    let work = writer.write(&plan, Options::default()).expect("write");
    assert_eq!(work.wait_for(TIMEOUT), Ok(BLOCK as u64));
    assert!(bytes(&memory)[BLOCK..2 * BLOCK] == content);
}

#[test]
fn an_offer_waits_for_the_region_that_it_is_of() {
    let Some(search) = common::ucx() else { return };
    let (mut raw, _target, _memory) = raw(&search);
    offer(&raw, 4, (0, 7), &[COUNT as u32], &[0]);
    offer(&raw, 5, (9, 0), &[0], &[0]);
    refused(&raw, 5);
    describe(&mut raw, &[0, 7]);
    assert!(refused(&raw, 4).contains("block id 64"));
}

#[test]
fn a_writer_that_offers_more_than_it_may_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let (mut raw, _target, memory) = raw(&search);
    for number in 0..9 {
        offer(&raw, number, (0, 7), &[0], &[0]);
    }
    assert!(raw.is_closed());
    assert!(bytes(&memory).iter().all(|byte| *byte == 0));
}

#[test]
fn a_writer_that_offers_nonsense_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let false_length = Writer::default().u32(u32::MAX).finish();
    let long_tag = Writer::default()
        .u32(0)
        .u32(0)
        .bytes(&vec![0; (64 << 10) + 1])
        .finish();
    let more = Writer::default().u32(0).u32(0).bytes(b"").u8(0).finish();
    for payload in [false_length, long_tag, more, vec![]] {
        let (mut raw, _target, _memory) = raw(&search);
        let header = Writer::new(OFFER).u64(1).u32(0).u32(0).u8(1).u8(0).finish();
        raw.send(&header, &payload);
        assert!(raw.is_closed(), "{} bytes", payload.len());
    }
}

#[test]
fn an_answer_to_an_offer_that_was_not_made_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    for (kind, payload) in [
        (ACCEPTED, vec![]),
        (DECLINED, Writer::default().str("no").finish()),
    ] {
        let (mut raw, _target, _memory) = raw(&search);
        raw.send(&Writer::new(kind).u64(1).finish(), &payload);
        assert!(raw.is_closed());
    }
}
