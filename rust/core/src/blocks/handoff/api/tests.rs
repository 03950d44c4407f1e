//! Errors of a closed agent about UCX reads that have not ended. The tests of reactors cover how it learns of them.

use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::*;
use crate::blocks::handoff::ReadyRange;
use crate::blocks::{AgentConfig, Options, Peer};
use crate::integrity::Integrity;
use crate::transport::{MemoryPath, Transport};

const TIMEOUT: Duration = Duration::from_secs(20);

fn agent() -> Agent {
    let transport = Transport::Memory(MemoryPath::RemoteRead);
    Agent::new(AgentConfig::new("127.0.0.1:0", b"", transport)).expect("agent")
}

fn agent_with_region() -> (Agent, Region) {
    let agent = agent();
    let region = agent.register("kv", Buffer::zeroed(64), 64, 64);
    let region = region.expect("open").wait_for(TIMEOUT).expect("region");
    (agent, region)
}

fn assert_told(result: Result<()>) {
    let Err(Error::Timeout(text)) = result else {
        panic!("{result:?}")
    };
    for part in [
        "2 reads have not ended",
        "kvpipe keeps it alive",
        "take other memory",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_agent_that_was_closed_says_that_reads_have_not_ended_as_long_as_that_is_so() {
    let (agent, _region) = agent_with_region();
    agent.close();
    assert_eq!(agent.check_reads_ended(), Ok(()));
    agent.reactor.pending_reads().pretend(2);
    assert_told(agent.check_reads_ended());
    agent.reactor.pending_reads().pretend(0);
    assert_eq!(agent.check_reads_ended(), Ok(()));
}

#[test]
fn a_region_that_is_closed_after_its_agent_says_that_reads_have_not_ended() {
    let (agent, region) = agent_with_region();
    agent.close();
    agent.reactor.pending_reads().pretend(2);
    let close = || agent.close_region(&region, None)?.wait_for(TIMEOUT);
    assert_told(close());
    assert_told(close());
    agent.reactor.pending_reads().pretend(0);
    assert_eq!(close(), Ok(()), "they have ended since");
}

#[test]
fn what_is_asked_of_an_agent_that_is_ending_is_answered_by_its_end() {
    use crate::reactor::manual::{Round, without_threads};

    for num_unended in [0, 2] {
        let agent = without_threads(agent);
        let registered = agent.register("kv", Buffer::zeroed(64), 64, 64);
        let registered = registered.expect("open");
        while !registered.is_completed() {
            agent.round();
        }
        let region = registered.result().expect("registered").expect("region");
        agent.close();
        let request = LoadRequest {
            handoff: [7; 16],
            producer: "127.0.0.1:9".to_owned(),
            incarnation: [0; 16],
            parts: vec![LoadPart::of_all_regions(0, vec![0])],
            is_committed: true,
            ..LoadRequest::default()
        };
        agent.load(request.clone()).expect("it has not ended");
        let connected = agent.connect("127.0.0.1:9").expect("it has not ended");
        let closed = agent.close_region(&region, None).expect("it has not ended");
        agent.reactor.pending_reads().pretend(num_unended);
        while agent.round() != Round::Over {}
        let ended = agent.drain();
        assert!(
            matches!(&ended[..], [Event::LoadFailed(_, failure)] if failure.missing == [0]),
            "{ended:?}"
        );
        assert!(matches!(connected.result(), Some(Err(Error::Closed(_)))));
        match (num_unended, closed.result().expect("answered").map(drop)) {
            (0, closed) => assert_eq!(closed, Ok(())),
            (_, closed) => assert_told(closed),
        }
        assert!(matches!(agent.load(request), Err(Error::Closed(_))));
    }
}

#[test]
fn a_region_that_a_peer_still_reads_when_its_agent_ends_says_that_reads_have_not_ended() {
    use crate::reactor::manual::{Round, without_threads};

    let (ours, theirs) = (without_threads(agent), without_threads(agent));
    let registered = ours.register("kv", Buffer::zeroed(64), 64, 64);
    let registered = registered.expect("open");
    let address = ours.address().expect("address").to_string();
    let connected = theirs.connect(&address).expect("open");
    while !(registered.is_completed() && connected.is_completed()) {
        ours.round();
        theirs.round();
    }
    let region = registered.result().expect("registered").expect("region");
    let closed = ours.close_region(&region, None).expect("open");
    ours.round();
    assert!(!closed.is_completed(), "the peer has not let it go");
    ours.reactor.pending_reads().pretend(2);
    ours.close();
    while ours.round() != Round::Over {}
    assert_told(closed.result().expect("the agent has ended").map(drop));
}

/// Two agents that are run by hand, blocks of a region of each, and whether they can come although their source has ended.
mod by_messages {
    use super::*;
    use crate::reactor::manual::{Round, without_threads};
    use crate::session::wire;
    use crate::transfer::message::DATA;

    const BLOCK: u64 = 1 << 16; // less than is credited, so that all of it is sent at once

    struct Side {
        agent: Agent,
        region: Region,
    }

    impl Side {
        fn new(integrity: Integrity) -> Self {
            let config = AgentConfig {
                integrity,
                ..AgentConfig::new("127.0.0.1:0", b"", Transport::Memory(MemoryPath::Stream))
            };
            let agent = without_threads(|| Agent::new(config)).expect("agent");
            let buffer = Buffer::zeroed(BLOCK as usize);
            let registered = agent.register_writable("kv", buffer, BLOCK, BLOCK);
            let registered = registered.expect("open");
            while !registered.is_completed() {
                agent.round();
            }
            let region = registered.result().expect("registered").expect("region");
            Self { agent, region }
        }

        fn rest(&self) {
            while self.agent.round() == Round::Busy {}
        }
    }

    /// A block without a checksum takes little, and a long prompt of a deep model has a million of them.
    #[test]
    fn many_blocks_without_checksums_are_announced_in_several_rounds() {
        const NUM_BLOCKS: u32 = 8193;
        let config = AgentConfig {
            integrity: Integrity::Validate,
            ..AgentConfig::new("127.0.0.1:0", b"", Transport::Memory(MemoryPath::Stream))
        };
        let agent = without_threads(|| Agent::new(config)).expect("agent");
        let registered = agent.register("kv", Buffer::zeroed(8 * NUM_BLOCKS as usize), 8, 8);
        let registered = registered.expect("open");
        while !registered.is_completed() {
            agent.round();
        }
        let region = registered.result().expect("registered").expect("region");
        let range = ReadyRange {
            handoff: [7; 16],
            first: 0,
            block_ids: (0..NUM_BLOCKS).collect(),
        };
        let ready = ReadyBlocks::new(vec![range]).expect("blocks");
        agent.mark_ready(&ready, &[region]).expect("it runs");
        let waiting = || {
            agent
                .sizes()
                .iter()
                .any(|&(name, size)| name == "ready queue" && size > 0)
        };
        agent.round();
        assert!(waiting());
        while agent.round() == Round::Busy {}
        assert!(!waiting());
    }

    fn connected(reader: &Side, source: &Side) -> Peer {
        let address = source.agent.address().expect("address").to_string();
        let connected = reader.agent.connect(&address).expect("open");
        while !connected.is_completed() {
            reader.rest();
            source.rest();
        }
        connected.result().expect("connected").expect("peer")
    }

    /// Whatever is asked for has been sent when the source ends, and has not been looked at.
    fn end(reader: &Side, source: &Side, num_questions: usize) {
        for _ in 0..num_questions {
            reader.rest();
            source.rest();
        }
        source.agent.close();
        while source.agent.round() != Round::Over {}
    }

    fn read(integrity: Integrity) -> Result<u64> {
        let (reader, source) = (Side::new(integrity), Side::new(integrity));
        let peer = connected(&reader, &source);
        let ours = (&reader.region, vec![0]);
        let plan = reader.agent.prepare(&peer, ours, ("kv", vec![0]))?;
        let read = reader.agent.read(&plan, Options::default())?;
        end(&reader, &source, 1);
        while !read.is_completed() {
            reader.agent.round();
        }
        read.result().expect("read")
    }

    #[test]
    fn blocks_without_checksums_count_only_if_their_lender_holds_the_session() {
        assert_eq!(read(Integrity::Auto), Ok(BLOCK));
        let lost = read(Integrity::None);
        assert!(matches!(lost, Err(Error::PeerLost { .. })), "{lost:?}");
    }

    #[test]
    fn a_read_or_write_of_blocks_that_change_on_their_way_fails() {
        for is_write in [false, true] {
            let (near, far) = (Side::new(Integrity::Auto), Side::new(Integrity::Auto));
            let peer = connected(&near, &far);
            wire::tap(move |header, body| {
                if header[0] == DATA {
                    body[17] ^= 1;
                }
            });
            let ours = (&near.region, vec![0]);
            let plan = near.agent.prepare(&peer, ours, ("kv", vec![0]));
            let (plan, options) = (plan.expect("plan"), Options::default());
            let moved = if is_write {
                near.agent.write(&plan, options)
            } else {
                near.agent.read(&plan, options)
            };
            let moved = moved.expect("open");
            while !moved.is_completed() {
                near.rest();
                far.rest();
            }
            let corrupt = moved.result().expect("moved");
            assert!(matches!(corrupt, Err(Error::Corrupt(_))), "{corrupt:?}");
        }
    }

    #[test]
    fn blocks_of_a_handoff_count_by_their_own_checksums_although_their_producer_has_ended() {
        let (reader, source) = (Side::new(Integrity::Auto), Side::new(Integrity::Auto));
        connected(&reader, &source);
        let part = ReadyRange {
            handoff: [7; 16],
            first: 0,
            block_ids: vec![0],
        };
        let ready = ReadyBlocks::new(vec![part]).expect("a step");
        let regions = std::slice::from_ref(&source.region);
        source.agent.mark_ready(&ready, regions).expect("open");
        source.rest();
        let request = LoadRequest {
            handoff: [7; 16],
            producer: source.agent.address().expect("address").to_string(),
            incarnation: source.agent.incarnation(),
            parts: vec![LoadPart::of_all_regions(0, vec![0])],
            is_committed: true,
            ..LoadRequest::default()
        };
        reader.agent.load(request).expect("open");
        end(&reader, &source, 2);
        let ended = loop {
            reader.agent.round();
            let is_end = |event: &Event| !matches!(event, Event::Log(_));
            if let Some(event) = reader.agent.drain().into_iter().find(is_end) {
                break event;
            }
        };
        assert!(matches!(ended, Event::LoadCompleted(_)), "{ended:?}");
    }

    #[test]
    fn an_agent_without_integrity_has_no_handoffs() {
        let side = Side::new(Integrity::None);
        let ready = ReadyBlocks::new(Vec::new()).expect("a step");
        let request = LoadRequest {
            handoff: [7; 16],
            producer: "127.0.0.1:1".to_owned(),
            incarnation: [0; 16],
            parts: vec![LoadPart::of_all_regions(0, vec![0])],
            is_committed: true,
            ..LoadRequest::default()
        };
        for refused in [side.agent.mark_ready(&ready, &[]), side.agent.load(request)] {
            let text = refused.expect_err("refused").to_string();
            assert!(text.contains("integrity=none"), "{text}");
        }
    }
}
