//! Workers of vLLM's connector as far as Rust goes: agents with a region for each layer.

use std::cell::RefCell;
use std::ops::Range;

use kvpipe_core::Integrity;
use kvpipe_core::blocks::Region;
use kvpipe_core::blocks::handoff::{Event, LoadPart, LoadRequest, ReadyBlocks, ReadyRange};
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::ids::HandoffId;
use kvpipe_core::transport::Transport;
use kvpipe_ucx::Buffer;

use crate::common::{TIMEOUT, TOKEN, bytes, eventually, local, pattern};

pub const BLOCK: usize = 8192;
pub const COUNT: usize = 32;
pub const LAYERS: usize = 3;
pub const ID: HandoffId = [9; 16];

pub struct Worker {
    pub agent: Agent,
    block_bytes: usize,
    pub layers: Vec<Buffer>,
    pub regions: Vec<Region>,
    pub seen: RefCell<Vec<Event>>,
}

/// A worker whose layers hold patterns from `seed` on.
pub fn worker(transport: &Transport, seed: u64) -> Worker {
    worker_with(transport, seed, Integrity::Auto)
}

pub fn worker_with(transport: &Transport, seed: u64, integrity: Integrity) -> Worker {
    worker_of(transport, seed, integrity, BLOCK)
}

/// A worker with blocks of another size, as with another number of heads.
pub fn worker_of(
    transport: &Transport,
    seed: u64,
    integrity: Integrity,
    block_bytes: usize,
) -> Worker {
    let listen = local();
    let config = AgentConfig {
        integrity,
        ..AgentConfig::new(&listen, TOKEN, transport.clone())
    };
    worker_from(config, seed, block_bytes)
}

/// A worker whose agent has these settings.
pub fn worker_from(config: AgentConfig<'_>, seed: u64, block_bytes: usize) -> Worker {
    let agent = Agent::new(config).expect("agent");
    let layers: Vec<Buffer> = (0..LAYERS as u64)
        .map(|layer| Buffer::from_vec(pattern(COUNT * block_bytes, seed + layer)))
        .collect();
    let register = |(index, layer): (usize, &Buffer)| {
        let name = format!("layer.{index}");
        agent
            .register(&name, layer.clone(), block_bytes as u64, block_bytes as u64)
            .expect("register")
            .wait_for(TIMEOUT)
            .expect("registered")
    };
    let regions = layers.iter().enumerate().map(register).collect();
    Worker {
        agent,
        block_bytes,
        layers,
        regions,
        seen: RefCell::default(),
    }
}

impl Worker {
    pub fn request(&self, block_ids: &[u32]) -> LoadRequest {
        LoadRequest {
            handoff: ID,
            producer: self.agent.address().expect("address").to_string(),
            incarnation: self.agent.incarnation(),
            parts: vec![LoadPart::of_all_regions(0, block_ids.to_vec())],
            is_committed: true,
            ..LoadRequest::default()
        }
    }

    /// A step is over.
    pub fn mark_ready(&self, first: u32, block_ids: &[u32]) {
        let ready = step(first, block_ids).expect("a step");
        self.save(&ready, 0..LAYERS);
    }

    /// A step has computed some of its layers.
    pub fn save(&self, ready: &ReadyBlocks, layers: Range<usize>) {
        self.agent
            .mark_ready(ready, &self.regions[layers])
            .expect("mark_ready");
    }

    pub fn load(&self, request: LoadRequest) {
        self.agent.load(request).expect("load");
    }

    pub fn events(&self) -> Vec<Event> {
        let mut seen = self.seen.borrow_mut();
        let is_log = |event: &Event| matches!(event, Event::Log(_));
        seen.extend(
            self.agent
                .drain()
                .into_iter()
                .filter(|event| !is_log(event)),
        );
        seen.clone()
    }

    /// Waits until the agent has handled what UCX had received: bytes can be here before the agent knows of them.
    pub fn settle(&self) {
        let buffer = Buffer::from_vec(vec![0; BLOCK]);
        let registering = self
            .agent
            .register("settle", buffer, BLOCK as u64, BLOCK as u64);
        let region = registering.expect("register").wait_for(TIMEOUT);
        let region = region.expect("registered");
        let closing = self.agent.close_region(&region, None).expect("close");
        closing.wait_for(TIMEOUT).expect("closed");
    }

    /// The single event that ends the load.
    pub fn ended(&self) -> Event {
        let is_end = |event: &Event| !matches!(event, Event::BlocksVerified(_));
        eventually("the end of the load", || {
            self.events().into_iter().find(is_end)
        })
    }

    pub fn loaded(&self) -> u64 {
        match self.ended() {
            Event::LoadCompleted(report) => report.counts.num_bytes,
            other => panic!("{other:?}"),
        }
    }

    pub fn failed(&self) -> (Vec<u32>, String) {
        match self.ended() {
            Event::LoadFailed(_, failure) => (failure.missing, failure.reason),
            other => panic!("{other:?}"),
        }
    }

    pub fn block(&self, layer: usize, id: u32) -> Vec<u8> {
        let at = id as usize * self.block_bytes;
        bytes(&self.layers[layer])[at..at + self.block_bytes].to_vec()
    }

    pub fn has(&self, ids: &[u32], producer: &Self, from: &[u32]) -> bool {
        let same = |layer| {
            let pairs = ids.iter().zip(from);
            pairs
                .into_iter()
                .all(|(&id, &from)| self.block(layer, id) == producer.block(layer, from))
        };
        (0..LAYERS).all(same)
    }
}

/// The ready blocks of one step of this handoff.
pub fn step(first: u32, block_ids: &[u32]) -> kvpipe_core::Result<ReadyBlocks> {
    ReadyBlocks::new(vec![ReadyRange {
        handoff: ID,
        first,
        block_ids: block_ids.to_vec(),
    }])
}

pub fn pair(transport: &Transport) -> (Worker, Worker) {
    (worker(transport, 100), worker(transport, 900))
}
