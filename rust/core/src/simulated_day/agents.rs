//! A prefill's and a decode's agent, which stay: handoffs between them, blocks both ways, notifications, regions. Some
//! transfers are cancelled or late before they are done.

use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::{LATE, MANY_BYTES, Rng, TIMEOUTS, TOKEN, is_busy};
use crate::Integrity;
use crate::blocks::handoff::{Event, LoadPart, LoadRequest, ReadyBlocks, ReadyRange};
use crate::blocks::{Agent, AgentConfig};
use crate::blocks::{Options, Peer, Region};
use crate::ids::{HandoffId, Incarnation};
use crate::reactor::manual::{Sizes, without_threads};
use crate::region::Slice;
use crate::transport::{MemoryPath, Transport};

pub(super) const BLOCK: usize = 1 << 10;
/// With one more, a read waits.
const TRANSFERS_IN_FLIGHT: usize = 4;
pub(super) const NUM_BLOCKS: usize = MANY_BYTES / BLOCK;

/// An agent with a region.
pub(super) struct Node {
    pub(super) agent: Agent,
    pub(super) region: Region,
}

impl Node {
    pub(super) fn new(transport: Transport, token: &[u8], integrity: Integrity) -> Self {
        let config = AgentConfig {
            timeouts: TIMEOUTS,
            integrity,
            ..AgentConfig::new("127.0.0.1:0", token, transport)
        };
        let agent = without_threads(|| Agent::new(config)).expect("agent");
        let region = register(&agent, "kv");
        Self { agent, region }
    }

    pub(super) fn address(&self) -> String {
        self.agent.address().expect("it listens").to_string()
    }

    pub(super) fn round(&self) -> bool {
        is_busy(self.agent.round())
    }

    /// Blocks from one position on are ready.
    pub(super) fn mark_ready(&self, handoff: HandoffId, first: u32, count: u32) {
        let part = ReadyRange {
            handoff,
            first,
            block_ids: (first..first + count).collect(),
        };
        let ready = ReadyBlocks::new(vec![part]).expect("ready");
        let regions = [self.region.clone()];
        self.agent.mark_ready(&ready, &regions).expect("it runs");
    }

    /// Begins reads and writes of a peer's blocks, whatever becomes of them.
    pub(super) fn transfer(&self, rng: &mut Rng, peer: &Peer) {
        let ids: Vec<u32> = (0..=rng.one_of(8) as u32).collect();
        let (local, remote) = ((&self.region, ids.clone()), ("kv", ids));
        let Ok(plan) = self.agent.prepare(peer, local, remote) else {
            return;
        };
        let options = Options {
            notify: (rng.one_of(2) == 0).then(|| b"tag".to_vec()),
            timeout: (rng.one_of(2) == 0).then_some(Duration::from_secs(5)),
        };
        for _ in 0..=TRANSFERS_IN_FLIGHT {
            let _ = self.agent.read(&plan, options.clone());
        }
        let _ = self.agent.write(&plan, options);
        let _ = self.agent.notify(peer, vec![7; 100]);
    }
}

fn register(agent: &Agent, name: &str) -> Region {
    let buffer = Buffer::zeroed(NUM_BLOCKS * BLOCK);
    let size = BLOCK as u64;
    let registered = agent.register_writable(name, buffer, size, size);
    let registered = registered.expect("registered");
    while !registered.is_completed() {
        agent.round();
    }
    registered.result().expect("an end").expect("a region")
}

pub(super) struct Agents {
    /// Of the prefill's and of the decode's agent.
    names: [&'static str; 2],
    pub(super) prefill: Node,
    pub(super) decode: Node,
    /// Handoffs whose owners have not ended them.
    open: Vec<HandoffId>,
    /// The handoff of [`begin_large`](Self::begin_large).
    large: Option<HandoffId>,
    num_loads: usize,
    num_ended: usize,
}

impl Agents {
    /// Of the data path with checksums.
    pub(super) fn streams() -> Self {
        let names = ["prefill's agent of streams", "decode's agent of streams"];
        Self::new(names, MemoryPath::Stream, Integrity::Checksum)
    }

    /// Of the data path without checksums.
    pub(super) fn remote_reads() -> Self {
        let names = [
            "prefill's agent of remote reads",
            "decode's agent of remote reads",
        ];
        Self::new(names, MemoryPath::RemoteRead, Integrity::Validate)
    }

    fn new(names: [&'static str; 2], path: MemoryPath, integrity: Integrity) -> Self {
        let node = || Node::new(Transport::Memory(path), TOKEN, integrity);
        Self {
            names,
            prefill: node(),
            decode: node(),
            open: Vec::new(),
            large: None,
            num_loads: 0,
            num_ended: 0,
        }
    }

    pub(super) fn round(&self) -> bool {
        [self.prefill.round(), self.decode.round()].contains(&true)
    }

    fn load(&mut self, handoff: HandoffId, producer: String, count: u32, is_committed: bool) {
        let incarnation = self.prefill.agent.incarnation();
        self.load_of(incarnation, handoff, producer, count, is_committed);
    }

    /// Loads what a visitor never produces, until it leaves.
    pub(super) fn load_from(&mut self, visitor: &Node, handoff: HandoffId) {
        let incarnation = visitor.agent.incarnation();
        self.load_of(incarnation, handoff, visitor.address(), 4, true);
    }

    /// Loads one half of blocks into the other half of ours.
    fn load_slice(&mut self, handoff: HandoffId, producer: String) {
        let request = LoadRequest {
            handoff,
            producer,
            incarnation: self.prefill.agent.incarnation(),
            parts: vec![LoadPart::of_all_regions(0, (0..4).collect())],
            destination_slice: Some(Slice { index: 0, count: 2 }),
            source_slice: Some(Slice { index: 1, count: 2 }),
            is_committed: true,
            ..LoadRequest::default()
        };
        self.decode.agent.load(request).expect("it runs");
        self.num_loads += 1;
    }

    fn load_of(
        &mut self,
        incarnation: Incarnation,
        handoff: HandoffId,
        producer: String,
        count: u32,
        is_committed: bool,
    ) {
        let request = LoadRequest {
            handoff,
            producer,
            incarnation,
            parts: vec![LoadPart::of_all_regions(0, (0..count).collect())],
            is_committed,
            ..LoadRequest::default()
        };
        self.decode.agent.load(request).expect("it runs");
        self.num_loads += 1;
    }

    pub(super) fn act(&mut self, rng: &mut Rng) {
        let (handoff, there) = (rng.id(), self.prefill.address());
        let (prefill, decode) = (&self.prefill, &self.decode);
        match rng.one_of(13) {
            0 | 1 => {
                prefill.mark_ready(handoff, 0, 4);
                self.load(handoff, there, 4, true);
            }
            // Layer by layer, in an order of their own.
            2 => {
                self.load(handoff, there, 4, true);
                self.prefill.mark_ready(handoff, 2, 2);
                self.prefill.mark_ready(handoff, 0, 2);
            }
            // Committed, cancelled or ended later.
            3 | 4 => {
                prefill.mark_ready(handoff, 0, 2);
                let is_committed = rng.one_of(2) == 0;
                self.load(handoff, there, 4, is_committed);
                self.open.push(handoff);
            }
            // Its producer knows nothing of it.
            5 => self.load(handoff, there, 4, true),
            6 => self.load(handoff, "127.0.0.1:1".to_owned(), 4, true),
            // No consumer loads it.
            7 => {
                prefill.mark_ready(handoff, 0, 4);
                self.open.push(handoff);
            }
            8 => prefill
                .agent
                .end(handoff, "it was never ready")
                .expect("it runs"),
            9 => {
                let peer = decode.agent.peers().into_iter().next();
                if let Some(peer) = peer {
                    decode.transfer(rng, &peer);
                }
            }
            10 => {
                let region = register(&decode.agent, "another");
                let closed = decode.agent.close_region(&region, None);
                drop(closed.expect("it runs"));
            }
            11 => {
                prefill.mark_ready(handoff, 0, 4);
                self.load_slice(handoff, there);
            }
            _ => drop(decode.agent.connect(&there).expect("it runs")),
        }
    }

    /// Begins to move many blocks, all of which takes longer than its deadline, or than it is wanted.
    pub(super) fn begin_large(&mut self, rng: &mut Rng) {
        let (there, count) = (self.prefill.address(), NUM_BLOCKS as u32);
        if rng.one_of(2) == 0 {
            let handoff = rng.id();
            self.prefill.mark_ready(handoff, 0, count);
            self.load(handoff, there, count, true);
            self.large = Some(handoff);
            return;
        }
        let decode = &self.decode;
        let peers = decode.agent.peers();
        let Some(peer) = peers.iter().find(|peer| peer.address() == there) else {
            return drop(decode.agent.connect(&there).expect("it runs"));
        };
        let ids: Vec<u32> = (0..count).collect();
        let (local, remote) = ((&decode.region, ids.clone()), ("kv", ids));
        let Ok(plan) = decode.agent.prepare(peer, local, remote) else {
            return;
        };
        let options = Options {
            timeout: Some(LATE),
            ..Options::default()
        };
        if rng.one_of(2) == 0 {
            drop(decode.agent.read(&plan, options));
        } else {
            drop(decode.agent.write(&plan, options));
        }
    }

    /// Cancels the load that [`begin_large`](Self::begin_large) has begun, and its producer ends the handoff.
    pub(super) fn cancel_large(&mut self, rng: &mut Rng) {
        let Some(handoff) = self.large.take() else {
            return;
        };
        let is_withdrawn = rng.one_of(2) == 0;
        let cancelled = self.decode.agent.cancel(handoff, "aborted", is_withdrawn);
        cancelled.expect("it runs");
        let ended = self.prefill.agent.end(handoff, "aborted");
        ended.expect("it runs");
    }

    /// Their owners decide about some of the handoffs that are open.
    pub(super) fn go_on(&mut self, rng: &mut Rng) {
        let Some(handoff) = (rng.one_of(3) == 0).then(|| self.open.pop()).flatten() else {
            return;
        };
        match rng.one_of(4) {
            0 => self.prefill.mark_ready(handoff, 2, 2),
            1 => self.decode.agent.commit(handoff).expect("it runs"),
            2 => {
                let is_withdrawn = rng.one_of(2) == 0;
                let cancelled = self.decode.agent.cancel(handoff, "aborted", is_withdrawn);
                cancelled.expect("it runs");
            }
            _ => self
                .prefill
                .agent
                .end(handoff, "preempted")
                .expect("it runs"),
        }
        // Whatever was decided, it is ended when they rest.
        self.open.insert(0, handoff);
    }

    pub(super) fn drain(&mut self) {
        for node in [&self.prefill, &self.decode] {
            drop(node.agent.notifications().expect("it runs"));
            let events = node.agent.drain();
            let ends =
                |event: &&Event| matches!(event, Event::LoadCompleted(_) | Event::LoadFailed(..));
            self.num_ended += events.iter().filter(ends).count();
        }
    }

    pub(super) fn end_all(&mut self) {
        for handoff in std::mem::take(&mut self.open) {
            let ended = self.prefill.agent.end(handoff, "over");
            ended.expect("it runs");
            let cancelled = self.decode.agent.cancel(handoff, "over", false);
            cancelled.expect("it runs");
        }
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        let [prefill, decode] = self.names;
        vec![
            (prefill, self.prefill.agent.sizes()),
            (decode, self.decode.agent.sizes()),
        ]
    }

    pub(super) fn check(&self) {
        assert!(self.num_loads > 1000);
        assert_eq!(self.num_ended, self.num_loads, "each load ends once");
        assert_eq!(self.prefill.agent.num_leased(), 0);
    }
}
