//! Late reads, late writes and cancelled loads of agents without threads: what else is under way is not touched.

use std::time::{Duration, Instant};

use kvpipe_ucx::Buffer;

use super::*;
use crate::blocks::handoff::ReadyRange;
use crate::blocks::{AgentConfig, Options, Peer};
use crate::reactor::manual::{Round, without_threads};
use crate::session::wire;
use crate::transfer::message::DATA;
use crate::transport::{MemoryPath, Transport};
use crate::work::{Waited, Work};

/// Several windows of a stream, and more reads than are in flight at once.
const BLOCK: u64 = 16 << 20;
const NUM_BLOCKS: usize = 3;
const TIMEOUT: Duration = Duration::from_millis(30);

struct Side {
    agent: Agent,
    region: Region,
    memory: Buffer,
}

impl Side {
    /// With blocks whose bytes are all `fill`.
    fn new(path: MemoryPath, fill: u8) -> Self {
        let config = AgentConfig::new("127.0.0.1:0", b"", Transport::Memory(path));
        let agent = without_threads(|| Agent::new(config)).unwrap();
        let memory = Buffer::from_vec(vec![fill; NUM_BLOCKS * BLOCK as usize]);
        let registered = agent.register_writable("kv", memory.clone(), BLOCK, BLOCK);
        let registered = registered.unwrap();
        while !registered.is_completed() {
            agent.round();
        }
        let region = registered.result().unwrap().unwrap();
        Self {
            agent,
            region,
            memory,
        }
    }

    fn read(&self, peer: &Peer, block: u32, timeout: Option<Duration>) -> Work<u64> {
        let ours = (&self.region, vec![block]);
        let plan = self.agent.prepare(peer, ours, ("kv", vec![block])).unwrap();
        let options = Options {
            timeout,
            ..Options::default()
        };
        self.agent.read(&plan, options).unwrap()
    }

    fn write(&self, peer: &Peer, block: u32, timeout: Option<Duration>) -> Work<u64> {
        let ours = (&self.region, vec![block]);
        let plan = self.agent.prepare(peer, ours, ("kv", vec![block])).unwrap();
        let options = Options {
            timeout,
            notify: Some(vec![block as u8]),
        };
        self.agent.write(&plan, options).unwrap()
    }

    fn rest(&self) {
        while self.agent.round() == Round::Busy {}
    }

    fn is_filled(&self, block: u32, fill: u8) -> bool {
        let at = u64::from(block) * BLOCK;
        let bytes = self.memory.bytes(at as usize, BLOCK as usize).unwrap();
        bytes.to_vec().iter().all(|byte| *byte == fill)
    }

    fn tags(&self) -> Vec<Vec<u8>> {
        let notifications = self.agent.notifications().unwrap();
        notifications.into_iter().map(|one| one.tag).collect()
    }
}

struct Pair {
    near: Side,
    far: Side,
    peer: Peer,
}

impl Pair {
    fn new(path: MemoryPath) -> Self {
        let (near, far) = (Side::new(path, 0), Side::new(path, 7));
        let address = far.agent.address().unwrap().to_string();
        let connected = near.agent.connect(&address).unwrap();
        while !connected.is_completed() {
            near.rest();
            far.rest();
        }
        let peer = connected.result().unwrap().unwrap();
        Self { near, far, peer }
    }

    fn until(&self, is_done: impl Fn() -> bool) {
        while !is_done() {
            self.near.agent.round();
            self.far.agent.round();
        }
    }

    fn finish<T: Clone>(&self, work: &Work<T>) -> Result<T> {
        self.until(|| work.is_completed());
        work.result().unwrap()
    }
}

fn pass(timeout: Duration) {
    std::thread::sleep(timeout);
}

fn assert_late<T: Clone + std::fmt::Debug>(result: Option<Result<T>>) {
    let Some(Err(Error::Timeout(text))) = result else {
        panic!("{result:?}")
    };
    assert!(text.contains("the peer is usable"), "{text}");
}

#[test]
fn a_late_remote_read_keeps_its_blocks_busy_until_it_is_settled_and_touches_no_other() {
    let pair = Pair::new(MemoryPath::RemoteRead);
    // The transport ends the last read that was posted first.
    let late = pair.near.read(&pair.peer, 0, Some(TIMEOUT));
    let healthy = pair.near.read(&pair.peer, 1, None);
    pair.near.agent.round();
    pass(TIMEOUT);
    while !late.is_completed() {
        pair.near.agent.round();
    }
    assert_late(late.result());
    assert!(!late.is_settled(), "reads are under way");
    for work in [
        pair.near.read(&pair.peer, 0, None),
        pair.near.write(&pair.peer, 0, None),
    ] {
        pair.near.agent.round();
        let refused = work.result();
        assert!(
            matches!(&refused, Some(Err(Error::Exhausted(text))) if text.contains("block 0 of region \"kv\" is busy")),
            "{refused:?}"
        );
    }
    let beside = pair.near.read(&pair.peer, 2, None);
    let offered = pair.far.write(&pair.far.agent.peers()[0], 0, None);
    assert_eq!(pair.finish(&healthy), Ok(BLOCK));
    assert_eq!(pair.finish(&beside), Ok(BLOCK));
    let declined = pair.finish(&offered);
    assert!(
        matches!(&declined, Err(Error::Config(text)) if text.contains("is busy")),
        "{declined:?}"
    );
    pair.until(|| late.is_settled());
    let again = pair.near.read(&pair.peer, 0, None);
    assert_eq!(pair.finish(&again), Ok(BLOCK));
    assert!((0..3).all(|block| pair.near.is_filled(block, 7)));
    assert_eq!(pair.peer.lost(), None);
    assert_eq!(pair.near.agent.stats().in_flight, 0);
}

#[test]
fn a_work_is_not_settled_while_a_read_outlives_its_agent() {
    let pair = Pair::new(MemoryPath::RemoteRead);
    let late = pair.near.read(&pair.peer, 0, Some(TIMEOUT));
    pair.near.agent.round();
    pass(TIMEOUT);
    while !late.is_completed() {
        pair.near.agent.round();
    }
    let pending_reads = pair.near.agent.reactor.pending_reads();
    pending_reads.pretend(2);
    pair.near.agent.close();
    while pair.near.agent.round() != Round::Over {}
    pending_reads.pretend(2); // its end has counted none
    let settled = late.wait_settled(None);
    assert!(
        matches!(&settled, Err(Error::Timeout(text)) if text.contains("2 reads have not ended")),
        "{settled:?}"
    );
    pending_reads.pretend(0);
    assert_eq!(late.wait_settled(None), Ok(Waited::Done));
}

#[test]
fn the_blocks_of_a_late_stream_are_free_at_once_and_nothing_is_put_there_any_more() {
    let pair = Pair::new(MemoryPath::Stream);
    let healthy = pair.near.read(&pair.peer, 1, None);
    let late = pair.near.read(&pair.peer, 0, Some(TIMEOUT));
    pair.near.rest();
    pair.far.rest(); // a window of both is on its way
    pass(TIMEOUT);
    while !late.is_completed() {
        // Before what has come is looked at.
        pair.near.agent.round();
    }
    assert_late(late.result());
    assert!(late.is_settled());
    assert!(pair.near.memory.write(0, &vec![1; BLOCK as usize]));
    assert_eq!(pair.finish(&healthy), Ok(BLOCK));
    assert!(pair.near.is_filled(0, 1), "they are the caller's again");
    let again = pair.near.read(&pair.peer, 0, None);
    assert_eq!(pair.finish(&again), Ok(BLOCK));
    assert!(pair.near.is_filled(0, 7));
    assert_eq!(pair.peer.lost(), None);
}

#[test]
fn a_late_write_is_withdrawn_its_target_knows_nothing_of_it_and_others_go_on() {
    for path in [MemoryPath::RemoteRead, MemoryPath::Stream] {
        let pair = Pair::new(path);
        let late = pair.near.write(&pair.peer, 0, Some(TIMEOUT));
        let healthy = pair.near.write(&pair.peer, 1, None);
        pair.near.rest();
        pair.far.agent.round(); // reads both
        pass(TIMEOUT);
        while !late.is_completed() {
            pair.near.agent.round();
        }
        assert_late(late.result());
        assert!(!late.is_settled(), "the target may read");
        let refused = pair.near.write(&pair.peer, 0, None);
        pair.near.agent.round();
        assert!(matches!(refused.result(), Some(Err(Error::Exhausted(_)))));
        assert_eq!(pair.finish(&healthy), Ok(BLOCK));
        pair.until(|| late.is_settled());
        assert_eq!(pair.far.tags(), [[1]], "{path:?}");
        let again = pair.near.write(&pair.peer, 0, None);
        assert_eq!(pair.finish(&again), Ok(BLOCK));
        assert_eq!(pair.far.tags(), [[0]]);
        assert_eq!(pair.peer.lost(), None);
    }
}

/// A load of one block into the same block here.
fn load(pair: &Pair, id: u8, block: u32) {
    let handoff = [id; 16];
    let part = ReadyRange {
        handoff,
        first: 0,
        block_ids: vec![block],
    };
    let regions = std::slice::from_ref(&pair.far.region);
    let ready = ReadyBlocks::new(vec![part]).unwrap();
    pair.far.agent.mark_ready(&ready, regions).unwrap();
    let request = LoadRequest {
        handoff,
        producer: pair.far.agent.address().unwrap().to_string(),
        incarnation: pair.far.agent.incarnation(),
        parts: vec![LoadPart::of_all_regions(0, vec![block])],
        is_committed: true,
        ..LoadRequest::default()
    };
    pair.near.agent.load(request).unwrap();
}

#[test]
fn of_two_streamed_loads_one_is_cancelled_and_the_other_neither_notices_nor_retries() {
    let pair = Pair::new(MemoryPath::Stream);
    load(&pair, 1, 0);
    load(&pair, 2, 1);
    let has_begun = |block: u32| {
        let at = (u64::from(block) * BLOCK) as usize;
        pair.near.memory.bytes(at, 1).unwrap().to_vec() == [7]
    };
    pair.until(|| has_begun(0) && has_begun(1));
    let mut num_rounds = 0;
    pair.near
        .agent
        .cancel([1; 16], "not wanted", false)
        .unwrap();
    let mut ended = Vec::new();
    let begun = Instant::now();
    while ended.len() < 2 {
        pair.near.agent.round();
        let events = pair.near.agent.drain();
        let is_end = |event: &Event| !matches!(event, Event::Log(_));
        for event in events.into_iter().filter(is_end) {
            ended.push((event, num_rounds));
        }
        pair.far.agent.round();
        num_rounds += 1;
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    let (Event::LoadFailed(_, failure), at_once) = &ended[0] else {
        panic!("{ended:?}")
    };
    assert_eq!((&failure.reason[..], *at_once), ("not wanted", 0));
    let (Event::LoadCompleted(report), _) = &ended[1] else {
        panic!("{ended:?}")
    };
    assert_eq!(
        (report.counts.num_retried, report.counts.num_bytes),
        (0, BLOCK)
    );
    assert!(pair.near.is_filled(1, 7));
}

/// Bytes of another request, which has the blocks of a handoff that has ended.
const REUSED: u8 = 9;

/// True if a block here has a byte that was there after the handoff had ended.
fn has_reused(side: &Side, block: u32) -> bool {
    let at = u64::from(block) * BLOCK;
    let bytes = side.memory.bytes(at as usize, BLOCK as usize).unwrap();
    bytes.to_vec().contains(&REUSED)
}

/// A block of the producer has other bytes.
fn reuse(pair: &Pair, block: u32) {
    let at = (u64::from(block) * BLOCK) as usize;
    assert!(pair.far.memory.write(at, &vec![REUSED; BLOCK as usize]));
}

/// Runs both until so many loads have ended; their events.
fn ended(pair: &Pair, num_loads: usize) -> Vec<Event> {
    let mut ended = Vec::new();
    let begun = Instant::now();
    while ended.len() < num_loads {
        pair.near.agent.round();
        pair.far.agent.round();
        let events = pair.near.agent.drain().into_iter();
        ended.extend(events.filter(|event| !matches!(event, Event::Log(_))));
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    ended
}

#[test]
fn nothing_of_a_block_is_streamed_after_its_handoff_has_ended_and_another_handoff_goes_on() {
    let pair = Pair::new(MemoryPath::Stream);
    load(&pair, 1, 0);
    load(&pair, 2, 1);
    let has_begun = |block: u32| {
        let at = (u64::from(block) * BLOCK) as usize;
        pair.near.memory.bytes(at, 1).unwrap().to_vec() == [7]
    };
    pair.until(|| has_begun(0) && has_begun(1));
    pair.far.agent.end([1; 16], "preempted").unwrap();
    pair.far.agent.round(); // processes the end
    reuse(&pair, 0);
    let ended = ended(&pair, 2);
    let [Event::LoadFailed(_, failure), Event::LoadCompleted(report)] = &ended[..] else {
        panic!("{ended:?}")
    };
    assert_eq!(
        (&failure.reason[..], &failure.missing[..]),
        ("preempted", &[0][..])
    );
    assert!(!has_reused(&pair.near, 0));
    assert_eq!(
        (report.counts.num_retried, pair.near.is_filled(1, 7)),
        (0, true)
    );
    assert_eq!(pair.peer.lost(), None);
}

#[test]
fn nothing_of_a_block_is_streamed_to_a_consumer_that_asks_when_its_handoff_has_ended() {
    let pair = Pair::new(MemoryPath::Stream);
    load(&pair, 1, 0);
    while pair.near.agent.stats().in_flight == 0 {
        pair.far.agent.round();
        pair.near.agent.round(); // asks last
    }
    // Behind the end it would not be placed.
    wire::tap(|header, payload| assert!(header[0] != DATA || !payload.contains(&REUSED)));
    pair.far.agent.end([1; 16], "preempted").unwrap();
    reuse(&pair, 0);
    let ended = ended(&pair, 1);
    assert!(matches!(&ended[..], [Event::LoadFailed(..)]), "{ended:?}");
    assert_eq!(pair.peer.lost(), None);
    wire::tap(|_, _| {});
}
