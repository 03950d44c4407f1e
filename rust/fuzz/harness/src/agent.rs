//! An agent against a peer that holds the token: blocks both ways, notifications, handoffs.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::Result;
use kvpipe_core::blocks::handoff::{Event, LoadPart, LoadRequest, ReadyBlocks, ReadyRange};
use kvpipe_core::blocks::{Agent, AgentConfig, Options, Peer, Region};
use kvpipe_core::fuzzing::{Round, without_threads};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::work::Work;
use kvpipe_ucx::Buffer;

use crate::hostile::{Hostile, TOKEN, transport};
use crate::script::{Victim, read, run_session};

const BLOCK: usize = 1 << 10;
const COUNT: usize = 16;
/// The handoff that the victim produces, and the one that it consumes.
pub(crate) const HANDOFFS: [[u8; 16]; 2] = [[1; 16], [2; 16]];
/// The region of the peer that the user transfers with, and the victim's of the same name.
pub(crate) const KV: &str = "kv";
/// Another region of the peer, and the victim's of the same name, which is writable.
pub(crate) const ANOTHER: &str = "another";

/// In the argument of a transfer: it carries a tag.
pub(crate) const WITH_TAG: u8 = 64;
/// In the argument of a load: it is committed at once.
pub(crate) const IS_COMMITTED: u8 = 8;

/// Calls of the agent's user.
pub(crate) mod user {
    pub(crate) const READ: u8 = 0;
    pub(crate) const WRITE: u8 = 1;
    pub(crate) const NOTIFY: u8 = 2;
    pub(crate) const DRAIN: u8 = 3;
    pub(crate) const CLOSE_REGION: u8 = 4;
    pub(crate) const LOAD: u8 = 5;
    pub(crate) const MARK_READY: u8 = 6;
    pub(crate) const END: u8 = 7;
    pub(crate) const COMMIT: u8 = 8;
    pub(crate) const CANCEL: u8 = 9;
    pub(crate) const COUNT: u8 = CANCEL + 1;
}

struct Side {
    agent: Agent,
    address: String,
    regions: Vec<Region>,
    works: Vec<Work<u64>>,
    closes: Vec<Work<()>>,
    /// Shared by all memory, and released by all of it at the end.
    owner: Arc<()>,
    num_loads: usize,
    events: Vec<Event>,
}

impl Side {
    fn new(agent: Agent, address: String) -> Self {
        let mut side = Self {
            agent,
            address,
            regions: Vec::new(),
            works: Vec::new(),
            closes: Vec::new(),
            owner: Arc::new(()),
            num_loads: 0,
            events: Vec::new(),
        };
        side.register(KV, false);
        side.register(ANOTHER, true);
        side
    }

    fn register(&mut self, name: &str, is_writable: bool) {
        let owner = Box::new(Arc::clone(&self.owner));
        let whole = Buffer::zeroed(COUNT * BLOCK);
        let buffer = whole.first(COUNT * BLOCK, owner).expect("all of it");
        let register = if is_writable {
            Agent::register_writable
        } else {
            Agent::register
        };
        let region = register(&self.agent, name, buffer, BLOCK as u64, BLOCK as u64);
        let region = region.expect("region");
        self.agent.round();
        let registered = region.result().expect("registered");
        self.regions.push(registered.expect("a region"));
    }

    fn peer(&self) -> Option<Peer> {
        self.agent.peers().into_iter().next()
    }

    /// Begins a transfer of some blocks, if the peer is connected and has the region.
    fn transfer(&mut self, argument: u8, is_read: bool) {
        let Some(peer) = self.peer() else { return };
        let ids: Vec<u32> = (0..u32::from(argument % 8)).map(|id| id * 2).collect();
        let local = (&self.regions[usize::from(argument >> 7)], ids.clone());
        let Ok(plan) = self.agent.prepare(&peer, local, (KV, ids)) else {
            return;
        };
        let options = Options {
            notify: (argument & WITH_TAG != 0).then(|| b"tag".to_vec()),
            timeout: (argument & 32 != 0).then_some(Duration::ZERO),
        };
        self.works.extend(if is_read {
            self.agent.read(&plan, options)
        } else {
            self.agent.write(&plan, options)
        });
    }

    fn load(&mut self, argument: u8) {
        let Some(peer) = self.peer() else { return };
        let request = LoadRequest {
            handoff: HANDOFFS[1],
            producer: self.address.clone(),
            incarnation: peer.incarnation(),
            parts: vec![LoadPart::of_all_regions(
                0,
                (0..u32::from(argument % 8)).collect(),
            )],
            is_committed: argument & IS_COMMITTED != 0,
            ..LoadRequest::default()
        };
        self.num_loads += usize::from(self.agent.load(request).is_ok());
    }

    /// Marks blocks as ready in one region after the other.
    fn mark_ready(&self, block_ids: Vec<u32>) -> Result<()> {
        let part = ReadyRange {
            handoff: HANDOFFS[0],
            first: 0,
            block_ids,
        };
        let (ready, regions) = (ReadyBlocks::new(vec![part])?, self.regions.iter());
        let open: Vec<Region> = regions.filter(|it| !it.is_closed()).cloned().collect();
        open.chunks(1)
            .try_for_each(|region| self.agent.mark_ready(&ready, region))
    }

    fn handoff(&mut self, what: u8, argument: u8) {
        let ids = (0..u32::from(argument % 8)).collect();
        let result = match what {
            user::MARK_READY => self.mark_ready(ids),
            user::END => self.agent.end(HANDOFFS[0], "withdrawn"),
            user::COMMIT => self.agent.commit(HANDOFFS[1]),
            _ => self
                .agent
                .cancel(HANDOFFS[1], "the client left", argument & 32 != 0),
        };
        assert!(result.is_ok());
    }
}

impl Victim for Side {
    fn round(&self) -> Round {
        self.agent.round()
    }

    fn act(&mut self, what: u8, argument: u8) {
        match what % user::COUNT {
            user::READ => self.transfer(argument, true),
            user::WRITE => self.transfer(argument, false),
            user::NOTIFY => {
                if let Some(peer) = self.peer() {
                    let tag = vec![7; argument.into()];
                    self.closes.extend(self.agent.notify(&peer, tag));
                }
            }
            user::DRAIN => drop(self.agent.notifications()),
            user::CLOSE_REGION => {
                let region = &self.regions[usize::from(argument & 1)];
                self.closes.extend(self.agent.close_region(region, None));
            }
            user::LOAD => self.load(argument),
            what => self.handoff(what, argument),
        }
        self.events.extend(self.agent.drain());
    }

    fn close(&mut self) {
        self.agent.close();
    }

    fn check_without_peer(&self) {
        assert!(self.works.iter().all(Work::is_completed), "a transfer");
        assert!(self.closes.iter().all(Work::is_completed), "an operation");
    }

    fn check(&mut self) {
        self.events.extend(self.agent.drain());
        let ends = |event: &&Event| match event {
            Event::LoadCompleted(_) | Event::LoadFailed(..) => true,
            // The handoff was being loaded.
            Event::Log(text) => text.starts_with("load refused"),
            _ => false,
        };
        let num_ended = self.events.iter().filter(ends).count();
        assert_eq!(num_ended, self.num_loads, "each load ends once");
        self.regions.clear();
        assert_eq!(Arc::strong_count(&self.owner), 1, "memory is kept");
    }
}

/// An agent that listens, or that connects.
///
/// # Panics
/// The agent breaks a promise.
pub(crate) fn agent(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let agent = || {
        Agent::new(AgentConfig {
            engine_id: "engine",
            integrity: flags.integrity(),
            ..AgentConfig::new("127.0.0.1:0", TOKEN, transport.clone())
        })
    };
    let agent = without_threads(agent).expect("agent");
    let (hostile, address) = if flags.is_server() {
        let (hostile, address) = Hostile::listen(SessionKind::Agent, Some(&transport));
        drop(agent.connect(&address).expect("connecting"));
        (hostile, address)
    } else {
        let hostile = Hostile::connect(SessionKind::Agent, Some(&transport), agent.address());
        (hostile, String::new())
    };
    run_session(Side::new(agent, address), hostile, flags, steps);
}
