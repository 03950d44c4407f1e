//! Checksums of blocks that are read and written.

use std::sync::atomic::{AtomicBool, Ordering};

use kvpipe_core::Integrity;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::blocks::{Options, Plan, Region};
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::{Error, checksum};
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{self, BLOCK, COUNT, agent, pair, register, register_writable};
use crate::common::{
    self, Raw, TIMEOUT, TOKEN, bytes, eventually, on_both_paths, on_every_path, pattern,
};

const READ: u8 = 32;
const DATA: u8 = 33;
const REFUSED: u8 = 35;
const OFFER: u8 = 36;
const CORRUPT: u8 = 39;
const CHECKSUMS: u8 = 43;

/// A peer with a region of its own, which answers what it likes.
pub struct Source {
    pub raw: Raw,
    memory: Buffer,
}

impl Source {
    fn connect(search: &Search, agent: &Agent) -> Self {
        Self::on("cpu", search, agent)
    }

    /// Says that its region is on a device, whose blocks it sends as they are: the host's memory stands in for a GPU's.
    fn on(device: &str, _search: &Search, agent: &Agent) -> Self {
        let address = agent.address().expect("address");
        let raw = Raw::connect(address, SessionKind::Agent);
        let memory = Buffer::from_vec(pattern(COUNT * BLOCK, 1));
        let base = memory.address() as u64;
        let regions = Writer::new(1).list(&[0u32], |w, id| {
            let layout = w.u32(*id).str("kv").u32(0).u32(1).u64(COUNT as u64);
            let layout = layout.u64(BLOCK as u64).u64(BLOCK as u64).u64(0);
            let layout = layout.str(device);
            layout.u8(1).u64(base).bytes(&[])
        });
        raw.send(&regions.finish(), &[]);
        Self { raw, memory }
    }

    /// The same; and a plan between blocks of the agent, in the returned memory, and these of its own.
    pub fn meet(
        device: &str,
        search: &Search,
        agent: &Agent,
        ours: &[u32],
        theirs: &[u32],
    ) -> (Self, Plan, Buffer) {
        let memory = Buffer::zeroed(COUNT * BLOCK);
        let region = register(agent, "own", &memory, BLOCK, BLOCK);
        let source = Self::on(device, search, agent);
        let plan = eventually("its region", || {
            let (peer, remote) = (agent.peers().pop()?, ("kv", theirs.to_vec()));
            agent.prepare(&peer, (&region, ours.to_vec()), remote).ok()
        });
        (source, plan, memory)
    }

    pub fn block(&self, id: usize) -> Vec<u8> {
        let block = self.memory.bytes(id * BLOCK, BLOCK);
        block.expect("host memory").to_vec()
    }

    /// Answers the next READ with these checksums of the blocks 3 and 4.
    fn answer(&self, sums: [u64; 2]) {
        let (header, _) = self.raw.message(READ);
        let mut header = Reader::new(&header);
        let transfer = header.u64().expect("a transfer");
        let wanted = header.fixed::<9>().expect("a source and what is wanted")[8];
        assert_eq!(wanted, if common::is_tcp() { 1 } else { 2 });
        if common::is_tcp() {
            for (id, sum) in [3, 4].into_iter().zip(sums) {
                let offset = (id - 3) * BLOCK;
                let header = Writer::new(DATA).u64(transfer).u64(offset as u64);
                self.raw.send(&header.u64(sum).finish(), &self.block(id));
            }
        } else {
            let sums = Writer::default().list(&sums, |w, sum| w.u64(*sum));
            let header = Writer::new(CHECKSUMS).u64(transfer).u64(0).finish();
            self.raw.send(&header, &sums.finish());
        }
    }

    fn sums(&self) -> [u64; 2] {
        [3, 4].map(|id| checksum::of(&self.block(id)))
    }
}

#[test]
fn blocks_that_differ_from_their_checksums_end_the_read_and_the_peer_stays_usable() {
    on_both_paths(|search| {
        let reader = agent(search);
        let (source, plan, to) = Source::meet("cpu", search, &reader, &[7, 9], &[3, 4]);
        let [first, second] = source.sums();
        for (sums, named) in [
            ([first ^ 1, second], "block 7"),
            ([first, second ^ 1], "block 9"),
        ] {
            let work = reader.read(&plan, Options::default()).expect("read");
            source.answer(sums);
            let error = work.wait_for(TIMEOUT).expect_err("corrupt");
            let is_named = |text: &str| text.contains(named);
            assert!(
                matches!(&error, Error::Corrupt(text) if is_named(text)),
                "{error}"
            );
        }
        let work = reader.read(&plan, Options::default()).expect("read");
        source.answer([first, second]);
        assert_eq!(work.wait_for(TIMEOUT), Ok(2 * BLOCK as u64));
        assert!(bytes(&to)[7 * BLOCK..8 * BLOCK] == *source.block(3));
        assert!(bytes(&to)[9 * BLOCK..10 * BLOCK] == *source.block(4));
    });
}

#[test]
fn blocks_of_a_gpu_come_to_the_host_as_messages_without_checksums_whatever_the_road() {
    on_both_paths(|search| {
        let reader = agent(search);
        let (source, plan, to) = Source::meet("cuda:0", search, &reader, &[7], &[3]);
        let work = reader.read(&plan, Options::default()).expect("read");
        let (header, _) = source.raw.message(READ);
        let mut header = Reader::new(&header);
        let transfer = header.u64().expect("a transfer");
        let wanted = header.fixed::<9>().expect("a source and what is wanted")[8];
        assert_eq!(wanted, 0);
        let header = Writer::new(DATA).u64(transfer).u64(0).u64(0).finish();
        source.raw.send(&header, &source.block(3));
        assert_eq!(work.wait_for(TIMEOUT), Ok(BLOCK as u64));
        assert!(bytes(&to)[7 * BLOCK..8 * BLOCK] == *source.block(3));
    });
}

#[test]
fn offered_blocks_that_differ_from_their_checksums_are_not_taken() {
    on_both_paths(|search| {
        let target = agent(search);
        register_writable(&target, "own", &Buffer::zeroed(COUNT * BLOCK));
        let source = Source::connect(search, &target);
        let header = Writer::new(OFFER).u64(5).u32(0).u32(0).u8(1).u8(1).u64(0);
        let list = |w: Writer, ids: [u32; 2]| w.list(&ids, |w, id| w.u32(*id));
        let payload = list(list(Writer::default(), [7, 9]), [3, 4]).bytes(b"tag");
        source.raw.send(&header.finish(), &payload.finish());
        let [first, second] = source.sums();
        source.answer([first, second ^ 1]);
        assert_eq!(source.raw.message(CORRUPT).0, 5u64.to_le_bytes());
        assert!(target.notifications().expect("open").is_empty());
    });
}

#[test]
fn a_writer_learns_that_its_blocks_came_corrupt() {
    let Some(search) = common::ucx() else { return };
    let writer = agent(&search);
    let (target, plan, _memory) = Source::meet("cpu", &search, &writer, &[0], &[0]);
    let work = writer.write(&plan, Options::default()).expect("write");
    let (header, _) = target.raw.message(OFFER);
    let offer = Reader::new(&header).u64().expect("an offer");
    let reason = Writer::default().str("block 0 differs").finish();
    target
        .raw
        .send(&Writer::new(CORRUPT).u64(offer).finish(), &reason);
    let error = work.wait_for(TIMEOUT).expect_err("corrupt");
    assert_eq!(error, Error::Corrupt("block 0 differs".to_owned()));
}

#[test]
fn more_checksums_than_blocks_are_cut_off() {
    let Some(search) = common::ucx() else { return };
    if common::is_tcp() {
        return;
    }
    let reader = agent(&search);
    let (mut source, plan, _memory) = Source::meet("cpu", &search, &reader, &[0], &[3]);
    let work = reader.read(&plan, Options::default()).expect("read");
    source.answer(source.sums());
    assert!(source.raw.is_closed());
    let error = work.wait_for(TIMEOUT).expect_err("cut off");
    assert!(
        matches!(error, Error::Protocol(_) | Error::PeerLost { .. }),
        "{error}"
    );
}

/// Ends the other thread, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A read of memory that its owner changes at the same time gets parts of two states.
#[test]
fn blocks_that_change_while_they_are_read_are_not_delivered() {
    on_every_path(|transport| {
        let pair = pair(transport, BLOCK, BLOCK);
        let ids: Vec<u32> = (0..COUNT as u32).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seed in 0u64.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let at = (seed as usize * 8) % pair.from.len();
                    pair.from.write(at, &seed.to_le_bytes());
                }
            });
            let _over = Over(&is_over);
            let error = eventually("a difference", || pair.read(&ids, &ids).err());
            assert!(matches!(error, Error::Corrupt(_)), "{error}");
        });
        pair.read_and_check(&ids, &ids, (BLOCK, BLOCK));
    });
}

#[test]
fn without_checksums_the_source_is_asked_for_none() {
    on_both_paths(|search| {
        let (listen, transport) = (common::local(), search.clone().into());
        let config = AgentConfig {
            integrity: Integrity::None,
            ..AgentConfig::new(&listen, TOKEN, transport)
        };
        let reader = Agent::new(config).expect("agent");
        let (source, plan, to) = Source::meet("cpu", search, &reader, &[0], &[3]);
        let work = reader.read(&plan, Options::default()).expect("read");
        if common::is_tcp() {
            let (header, _) = source.raw.message(READ);
            assert_eq!(header.last(), Some(&0));
            let header = [&[DATA], &header[..8], &[0; 16]].concat();
            source.raw.send(&header, &source.block(3));
        }
        assert_eq!(work.wait_for(TIMEOUT), Ok(BLOCK as u64));
        assert!(bytes(&to)[..BLOCK] == *source.block(3));
    });
}

#[test]
fn blocks_larger_than_a_slice_are_proved_too() {
    on_every_path(|transport| {
        let (source, destination) = (agent(transport), agent(transport));
        let (block, count) = ((5 << 20) + 8, 4);
        let from = Buffer::from_vec(pattern(block * count, 3));
        let to = Buffer::zeroed(block * count);
        register(&source, "kv", &from, block, block);
        let region = register(&destination, "kv", &to, block, block);
        let peer = agents::connect(&destination, &source);
        let local = (&region, vec![2, 0, 1]);
        let plan = destination.prepare(&peer, local, ("kv", vec![3, 1, 2]));
        let read = destination.read(&plan.expect("plan"), Options::default());
        let len = read.expect("read").wait_for(TIMEOUT);
        assert_eq!(len, Ok(3 * block as u64));
        assert!(bytes(&to)[..3 * block] == bytes(&from)[block..]);
    });
}

// --- a destination that keeps to no rules

/// An agent with a region of `COUNT` blocks, and a raw session to it.
fn asked(search: &Search) -> (Raw, Agent, Region) {
    let source = agent(search);
    let from = Buffer::from_vec(pattern(COUNT * BLOCK, 1));
    let region = register(&source, "kv", &from, BLOCK, BLOCK);
    let address = source.address().expect("address");
    (Raw::connect(address, SessionKind::Agent), source, region)
}

fn ask(raw: &Raw, transfer: u64, wanted: u8, ids: &[u32]) {
    let header = Writer::new(READ).u64(transfer).u64(0).u8(wanted).finish();
    let ids = Writer::default().list(ids, |w, id| w.u32(*id)).finish();
    raw.send(&header, &ids);
}

#[test]
fn a_source_tells_the_checksums_of_its_blocks_in_order() {
    let Some(search) = common::ucx() else { return };
    let (raw, _source, _region) = asked(&search);
    ask(&raw, 8, 2, &[9, 0, 9]);
    let (header, payload) = raw.message(CHECKSUMS);
    assert_eq!(header, [8, 0].map(u64::to_le_bytes).concat());
    let memory = pattern(COUNT * BLOCK, 1);
    let sums = [9, 0, 9].map(|id| checksum::of(&memory[id * BLOCK..][..BLOCK]));
    let list = Writer::default().list(&sums, |w, sum| w.u64(*sum));
    assert_eq!(payload, list.finish());
}

#[test]
fn checksums_of_blocks_that_it_does_not_have_are_refused() {
    let Some(search) = common::ucx() else { return };
    let (raw, _source, _region) = asked(&search);
    ask(&raw, 5, 2, &[1, COUNT as u32]);
    let (header, payload) = raw.message(REFUSED);
    assert_eq!(header, 5u64.to_le_bytes());
    let text = Reader::new(&payload).str(4096).expect("a reason");
    assert!(text.contains("block id 64"), "{text}");
}

#[test]
fn who_asks_twice_for_one_transfer_or_for_something_unknown_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    // 256 MiB, which are not sent or summed before the next message is looked at.
    let ids: Vec<u32> = (0..1 << 16).map(|i| i % COUNT as u32).collect();
    for asked_for in [&[2, 2][..], &[1, 1], &[3]] {
        let (mut raw, _source, _region) = asked(&search);
        for &wanted in asked_for {
            ask(&raw, 5, wanted, &ids);
        }
        assert!(raw.is_closed(), "{asked_for:?}");
    }
}

/// It was told of the region's end after it had begun to read.
#[test]
fn a_read_that_began_before_its_region_was_closed_gets_its_checksums() {
    let Some(search) = common::ucx() else { return };
    let (raw, source, region) = asked(&search);
    let none = Writer::new(1).list(&[0u8; 0], |w, _| w);
    raw.send(&none.finish(), &[]);
    eventually("the peer", || source.peers().pop());
    let closed = source.close_region(&region, None).expect("close");
    ask(&raw, 5, 2, &[3]);
    raw.message(CHECKSUMS);
    assert!(!closed.is_completed());
    let released = Writer::new(2).u32(0).finish();
    raw.send(&released, &[]);
    assert_eq!(closed.wait_for(TIMEOUT), Ok(()));
    ask(&raw, 6, 2, &[3]);
    raw.message(REFUSED);
}

#[test]
fn a_source_that_never_tells_its_checksums_and_goes_is_lost() {
    let Some(search) = common::ucx() else { return };
    if common::is_tcp() {
        return;
    }
    let reader = agent(&search);
    let (source, plan, _memory) = Source::meet("cpu", &search, &reader, &[0], &[3]);
    let work = reader.read(&plan, Options::default()).expect("read");
    source.raw.message(READ);
    assert!(!work.is_completed());
    drop(source);
    let error = work.wait_for(TIMEOUT).expect_err("lost");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}
