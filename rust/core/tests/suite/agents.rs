//! Two agents with a region each, and what tests do with them.

use kvpipe_core::Result;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::blocks::{Options, Peer, Region};
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Work;
use kvpipe_ucx::Buffer;

use crate::common::{TIMEOUT, TOKEN, bytes, eventually, local, pattern};

pub const BLOCK: usize = 4096;
pub const COUNT: usize = 64;

pub fn agent(transport: &(impl Clone + Into<Transport>)) -> Agent {
    let (listen, transport) = (local(), transport.clone().into());
    Agent::new(AgentConfig::new(&listen, TOKEN, transport)).expect("agent")
}

pub fn register(agent: &Agent, name: &str, buffer: &Buffer, block: usize, stride: usize) -> Region {
    agent
        .register(name, buffer.clone(), block as u64, stride as u64)
        .expect("register")
        .wait_for(TIMEOUT)
        .expect("registered")
}

/// Blocks of `BLOCK` bytes, which peers may write.
pub fn register_writable(agent: &Agent, name: &str, buffer: &Buffer) -> Region {
    agent
        .register_writable(name, buffer.clone(), BLOCK as u64, BLOCK as u64)
        .expect("register")
        .wait_for(TIMEOUT)
        .expect("registered")
}

pub fn connect(agent: &Agent, peer: &Agent) -> Peer {
    let address = peer.address().expect("address").to_string();
    let connected = agent.connect(&address).expect("connect");
    connected.wait_for(TIMEOUT).expect("connected")
}

pub fn tagged(tag: &[u8]) -> Options {
    Options {
        notify: Some(tag.to_vec()),
        timeout: None,
    }
}

/// The tags of the next `count` notifications.
pub fn tags(agent: &Agent, count: usize) -> Vec<Vec<u8>> {
    let mut seen = Vec::new();
    eventually("notifications", || {
        let come = agent.notifications().expect("open");
        seen.extend(come.into_iter().map(|notification| notification.tag));
        (seen.len() >= count).then_some(())
    });
    seen
}

pub struct Pair {
    /// Has `from` as its region "kv".
    pub source: Agent,
    /// Has `to` as its region "kv".
    pub destination: Agent,
    pub from: Buffer,
    pub to: Buffer,
    pub region: Region,
    pub source_region: Region,
    /// The source, as the destination's peer.
    pub peer: Peer,
}

/// Two agents whose regions are cut into blocks of `BLOCK` bytes with these strides; the source's is writable.
pub fn pair(
    transport: &(impl Clone + Into<Transport>),
    from_stride: usize,
    to_stride: usize,
) -> Pair {
    pair_of(transport, (COUNT, BLOCK), (from_stride, to_stride))
}

/// The same with so many blocks of so many bytes.
pub fn pair_of(
    transport: &(impl Clone + Into<Transport>),
    (num_blocks, block_bytes): (usize, usize),
    (from_stride, to_stride): (usize, usize),
) -> Pair {
    let (source, destination) = (agent(transport), agent(transport));
    let from = Buffer::from_vec(pattern(num_blocks * from_stride, 1));
    let to = Buffer::zeroed(num_blocks * to_stride);
    let source_region = source
        .register_writable("kv", from.clone(), block_bytes as u64, from_stride as u64)
        .expect("register")
        .wait_for(TIMEOUT)
        .expect("registered");
    let region = register(&destination, "kv", &to, block_bytes, to_stride);
    let peer = connect(&destination, &source);
    Pair {
        source,
        destination,
        from,
        to,
        region,
        source_region,
        peer,
    }
}

impl Pair {
    pub fn begin_read(&self, to: &[u32], from: &[u32], options: Options) -> Result<Work<u64>> {
        let (local, remote) = ((&self.region, to.to_vec()), ("kv", from.to_vec()));
        let plan = self.destination.prepare(&self.peer, local, remote)?;
        self.destination.read(&plan, options)
    }

    pub fn read(&self, to: &[u32], from: &[u32]) -> Result<u64> {
        self.begin_read(to, from, Options::default())?
            .wait_for(TIMEOUT)
    }

    /// Writes blocks of the destination's region into the source's.
    pub fn begin_write(
        &self,
        local: &[u32],
        remote: &[u32],
        options: Options,
    ) -> Result<Work<u64>> {
        let (local, remote) = ((&self.region, local.to_vec()), ("kv", remote.to_vec()));
        let plan = self.destination.prepare(&self.peer, local, remote)?;
        self.destination.write(&plan, options)
    }

    pub fn write(&self, local: &[u32], remote: &[u32]) -> Result<u64> {
        self.begin_write(local, remote, Options::default())?
            .wait_for(TIMEOUT)
    }

    /// Reads, and checks each byte of the destination: what was read, and that nothing else was written.
    pub fn read_and_check(&self, to: &[u32], from: &[u32], strides: (usize, usize)) {
        self.to.write(0, &vec![0xaa; self.to.len()]);
        let read = self.read(to, from).expect("read");
        assert_eq!(read, (to.len() * BLOCK) as u64);
        assert_moved((&self.to, to, strides.1), (&self.from, from, strides.0));
    }

    /// The same the other way.
    pub fn write_and_check(&self, local: &[u32], remote: &[u32], strides: (usize, usize)) {
        self.from.write(0, &vec![0xaa; self.from.len()]);
        let written = self.write(local, remote).expect("write");
        assert_eq!(written, (local.len() * BLOCK) as u64);
        assert_moved(
            (&self.from, remote, strides.0),
            (&self.to, local, strides.1),
        );
    }
}

fn assert_moved(to: (&Buffer, &[u32], usize), from: (&Buffer, &[u32], usize)) {
    let (source, mut expected) = (bytes(from.0), vec![0xaa; to.0.len()]);
    for (&to_id, &from_id) in to.1.iter().zip(from.1) {
        let (at, source_at) = (to_id as usize * to.2, from_id as usize * from.2);
        expected[at..at + BLOCK].copy_from_slice(&source[source_at..source_at + BLOCK]);
    }
    assert!(bytes(to.0) == expected, "{:?} from {:?}", to.1, from.1);
}
