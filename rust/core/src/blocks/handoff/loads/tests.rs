use std::net::SocketAddr;
use std::ops::Range;

use kvpipe_ucx::Buffer;

use crate::blocks::Region;
use crate::blocks::handoff::messages::HandoffMessage;
use crate::blocks::handoff::{
    Event, LoadFailure, LoadPart, LoadReport, LoadRequest, ReadyBlocks, ReadyRange,
};
use crate::blocks::regions::LocalRegion;
use crate::blocks::{Agent, AgentConfig};
use crate::reactor::manual::{Round, without_threads};
use crate::session::wire;
use crate::transfer::region::Layout;
use crate::transport::{MemoryPath, Transport};
use crate::{FailureCause, Integrity};

pub(in crate::blocks::handoff) const BLOCK: usize = 1 << 10;
pub(in crate::blocks::handoff) const ID: [u8; 16] = [7; 16];
/// Position of the kind of a message in its header, after the session's id.
pub(in crate::blocks::handoff) const KIND_AT: usize = 0;

pub(in crate::blocks::handoff) struct Side {
    pub(in crate::blocks::handoff) agent: Agent,
    regions: Vec<Region>,
    /// Of each region.
    pub(in crate::blocks::handoff) memories: Vec<Buffer>,
    num_blocks: usize,
}

impl Side {
    /// An agent without a thread, whose reads are gets.
    fn new(content: u8) -> Self {
        Self::with(content, |_| {})
    }

    /// One that tells something else of its region than is so.
    fn with(content: u8, change: impl FnOnce(&mut LocalRegion)) -> Self {
        Self::on(MemoryPath::RemoteRead, Integrity::Auto, content, change)
    }

    pub(in crate::blocks::handoff) fn on(
        path: MemoryPath,
        integrity: Integrity,
        content: u8,
        change: impl FnOnce(&mut LocalRegion),
    ) -> Self {
        let mut side = Self::without_regions(path, integrity, 1);
        side.add_region("kv", content, change);
        side
    }

    /// One that validates, with two regions of two blocks.
    pub(in crate::blocks::handoff) fn with_two_regions(path: MemoryPath, content: u8) -> Self {
        let mut side = Self::without_regions(path, Integrity::Validate, 2);
        for name in ["first", "second"] {
            side.add_region(name, content, |_| {});
        }
        side
    }

    fn without_regions(path: MemoryPath, integrity: Integrity, num_blocks: usize) -> Self {
        let config = AgentConfig {
            integrity,
            ..AgentConfig::new("127.0.0.1:0", b"token", Transport::Memory(path))
        };
        let agent = without_threads(|| Agent::new(config)).expect("agent");
        Self {
            agent,
            regions: Vec::new(),
            memories: Vec::new(),
            num_blocks,
        }
    }

    fn add_region(&mut self, name: &str, content: u8, change: impl FnOnce(&mut LocalRegion)) {
        let len = self.num_blocks * BLOCK;
        let memory = Buffer::from_vec(vec![content; len]);
        let layout = Layout::new(len as u64, BLOCK as u64, BLOCK as u64).expect("layout");
        let registered = self.agent.reactor.register(memory.clone());
        let registered = registered.expect("register");
        let mut region = LocalRegion::new(name, layout, false, registered).expect("region");
        change(&mut region);
        let registered = self.agent.register_region(region).expect("it runs");
        settle(&[&self.agent]);
        let region = registered.result().expect("registered").expect("a region");
        self.regions.push(region);
        self.memories.push(memory);
    }

    pub(in crate::blocks::handoff) fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn block_ids(&self) -> Vec<u32> {
        (0..self.num_blocks as u32).collect()
    }

    /// Its blocks are ready for each of these.
    pub(in crate::blocks::handoff) fn mark_ready(&self, handoffs: impl Iterator<Item = [u8; 16]>) {
        self.mark_ready_in(0..self.regions.len(), 0, handoffs);
    }

    /// Its blocks are ready in some regions, from this position on.
    pub(in crate::blocks::handoff) fn mark_ready_in(
        &self,
        regions: Range<usize>,
        first: u32,
        handoffs: impl Iterator<Item = [u8; 16]>,
    ) {
        let part = |handoff| ReadyRange {
            handoff,
            first,
            block_ids: self.block_ids(),
        };
        let ready = ReadyBlocks::new(handoffs.map(part).collect()).expect("ready");
        let regions = &self.regions[regions];
        self.agent.mark_ready(&ready, regions).expect("mark_ready");
        settle(&[&self.agent]);
    }

    pub(in crate::blocks::handoff) fn load(&self, handoff: [u8; 16], producer: &Self) {
        self.load_from(
            handoff,
            producer,
            producer.agent.address().expect("address"),
        );
    }

    /// Loads from a producer that is reached at this address.
    pub(in crate::blocks::handoff) fn load_from(
        &self,
        handoff: [u8; 16],
        producer: &Self,
        address: SocketAddr,
    ) {
        let request = LoadRequest {
            handoff,
            producer: address.to_string(),
            incarnation: producer.agent.incarnation(),
            parts: vec![LoadPart::of_all_regions(0, self.block_ids())],
            is_committed: true,
            ..LoadRequest::default()
        };
        self.agent.load(request).expect("load");
    }

    /// All that its regions hold.
    pub(in crate::blocks::handoff) fn content(&self) -> Vec<u8> {
        let bytes = |memory: &Buffer| memory.bytes(0, memory.len()).expect("its bytes").to_vec();
        self.memories.iter().flat_map(bytes).collect()
    }

    /// Writes into all its blocks.
    pub(in crate::blocks::handoff) fn fill(&self, content: u8) {
        for memory in &self.memories {
            assert!(memory.write(0, &vec![content; memory.len()]));
        }
    }

    pub(in crate::blocks::handoff) fn ended(&self) -> Option<Event> {
        let mut events = self.agent.drain().into_iter();
        events.find(|event| !matches!(event, Event::Log(_)))
    }
}

/// Runs reactors until they have nothing more to do.
pub(in crate::blocks::handoff) fn settle(agents: &[&Agent]) {
    let is_at_rest = |agent: &&Agent| matches!(agent.round(), Round::AtRest { .. });
    while !(0..5).all(|_| agents.iter().filter(|it| is_at_rest(it)).count() == agents.len()) {}
}

/// A producer, and a consumer that loads two blocks, of which the first one is here.
pub(in crate::blocks::handoff) fn load_in_part(
    path: MemoryPath,
    integrity: Integrity,
) -> (Side, Side) {
    let [producer, consumer] = [1, 0].map(|content| Side::on(path, integrity, content, |_| {}));
    producer.mark_ready([ID].into_iter());
    let request = LoadRequest {
        handoff: ID,
        producer: producer.agent.address().expect("address").to_string(),
        incarnation: producer.agent.incarnation(),
        parts: vec![LoadPart::of_all_regions(0, vec![0, 0])],
        is_committed: true,
        ..LoadRequest::default()
    };
    consumer.agent.load(request).expect("load");
    settle(&[&producer.agent, &consumer.agent]);
    assert_eq!(consumer.content(), [1; BLOCK]);
    assert_eq!(consumer.ended(), None);
    (producer, consumer)
}

/// Failure of a load of two blocks.
fn failure(ended: Option<Event>) -> LoadFailure {
    let Some(Event::LoadFailed(_, failure)) = ended else {
        panic!("{ended:?}");
    };
    failure
}

#[test]
fn no_block_counts_of_a_handoff_that_its_producer_has_ended_although_its_checksum_matched() {
    let (producer, consumer) = load_in_part(MemoryPath::RemoteRead, Integrity::Checksum);
    producer.agent.end(ID, "preempted").expect("it runs");
    settle(&[&producer.agent, &consumer.agent]);
    let failure = failure(consumer.ended());
    let expected = LoadFailure {
        missing: vec![0, 1],
        reason: "preempted".to_owned(),
        cause: FailureCause::Ended,
    };
    assert_eq!(failure, expected);
}

#[test]
fn no_block_counts_of_a_load_that_is_announced_another_epoch() {
    let announcement = HandoffMessage::BlocksReady {
        epoch: 0,
        blocks: Vec::new(),
    };
    let announces = announcement.to_bytes(&ID).0[0];
    for integrity in [Integrity::Checksum, Integrity::Validate] {
        let (producer, consumer) = load_in_part(MemoryPath::RemoteRead, integrity);
        wire::tap(move |header, _| {
            if header[KIND_AT] == announces {
                // The epoch is the last of its fields.
                *header.last_mut().expect("a header") ^= 1;
            }
        });
        producer.mark_ready_in(0..1, 1, [ID].into_iter());
        settle(&[&producer.agent, &consumer.agent]);
        let LoadFailure {
            missing, reason, ..
        } = failure(consumer.ended());
        assert_eq!(missing, [0, 1]);
        assert!(reason.contains("began it again"), "{reason}");
        wire::tap(|_, _| {});
    }
}

#[test]
fn blocks_of_a_handoff_whose_end_its_owner_has_marked_are_not_announced() {
    let (producer, consumer) = (Side::new(1), Side::new(0));
    consumer.load(ID, &producer);
    settle(&[&producer.agent, &consumer.agent]);
    // The reactor processes the end later.
    producer.agent.handoffs.mark_ended(ID);
    producer.mark_ready([ID].into_iter());
    settle(&[&producer.agent, &consumer.agent]);
    assert_eq!((producer.agent.num_leased(), consumer.ended()), (0, None));
    assert_eq!(consumer.content(), [0; BLOCK]);
}

#[test]
fn a_block_whose_get_has_failed_is_read_again_by_messages() {
    let (producer, consumer) = (Side::new(1), Side::new(0));
    producer.mark_ready([ID].into_iter());
    assert!(producer.memories[0].write(17, &[9]));
    consumer.load(ID, &producer);
    while consumer.content() != producer.content() {
        producer.agent.round();
        settle(&[&consumer.agent]);
    }
    // It has been read without the producer's help, and differs. The second time the producer has to send it.
    assert_eq!(consumer.ended(), None);
    assert!(producer.memories[0].write(17, &[1]));
    settle(&[&producer.agent, &consumer.agent]);
    let ended = consumer.ended();
    let Some(Event::LoadCompleted(LoadReport { counts, .. })) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!((counts.num_retried, counts.num_corrupt), (1, 1));
    assert_eq!(consumer.content(), [1; BLOCK]);
    settle(&[&producer.agent, &consumer.agent]);
    assert_eq!(consumer.ended(), None, "a load ends once");
}

#[test]
fn any_number_of_reads_that_wait_can_fail_as_they_begin() {
    const NUM_LOADS: u32 = 4000;
    let handoff = |number| u128::from(number).to_le_bytes();
    let producer = Side::with(1, |region| region.rkey = b"no key".to_vec());
    let consumer = Side::new(0);
    producer.mark_ready((0..NUM_LOADS).map(handoff));
    for number in 0..NUM_LOADS {
        consumer.load(handoff(number), &producer);
    }
    settle(&[&consumer.agent, &producer.agent]);
    let ended = consumer.agent.drain();
    let is_retried = |event: &&Event| matches!(event, Event::LoadCompleted(report) if report.counts.num_retried == 1);
    assert_eq!(ended.iter().filter(is_retried).count(), NUM_LOADS as usize);
}

#[test]
fn the_end_of_a_session_is_logged_before_the_loads_that_it_fails() {
    let (producer, consumer) = load_in_part(MemoryPath::RemoteRead, Integrity::Checksum);
    producer.agent.close();
    while producer.agent.round() != Round::Over {}
    settle(&[&consumer.agent]);
    let events = consumer.agent.drain();
    // Of the fresh session, which does not come.
    let logged = events
        .iter()
        .rposition(|event| matches!(event, Event::Log(text) if text.starts_with("session.closed")));
    let failed = events
        .iter()
        .position(|event| matches!(event, Event::LoadFailed(..)));
    assert!(logged.is_some() && logged < failed, "{events:?}");
}
