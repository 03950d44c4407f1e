//! Block transfers and notifications, as other threads ask for them.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvpipe_ucx::{Buffer, Digests};

use super::agent_core::BlocksCommand;
use super::metadata::Metadata;
use super::notices::check_tag;
use super::offers::Write;
use super::reads::{BlockTransfer, Caller};
use super::regions::LocalRegion;
use super::{Agent, AgentCommand, Notification, Options, Peer, Plan, Region, Stats};
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::Incarnation;
use crate::integrity::Integrity;
use crate::net::address::check_address;
use crate::transfer::region::{Layout, NAME_CAP, Pieces};
use crate::work::{Completer, Waited, Work};

impl Agent {
    fn send(&self, command: BlocksCommand) -> Result<()> {
        self.reactor.send(AgentCommand::Blocks(command))
    }

    /// Sends a command that ends a work.
    fn ask<T>(&self, command: impl FnOnce(Completer<T>) -> BlocksCommand) -> Result<Work<T>> {
        let (done, completer) = self.reactor.work();
        self.send(command(completer))?;
        Ok(done)
    }

    /// Registers memory as blocks that peers may read; peers learn of it. Where a device pins the memory, this takes its
    /// time, on the caller's thread: sessions go on meanwhile.
    pub fn register(
        &self,
        name: &str,
        buffer: Buffer,
        block_bytes: u64,
        stride: u64,
    ) -> Result<Work<Region>> {
        self.register_as(name, buffer, (block_bytes, stride), false)
    }

    /// Registers memory as blocks that peers may read, and may write by offers that this agent reads.
    pub fn register_writable(
        &self,
        name: &str,
        buffer: Buffer,
        block_bytes: u64,
        stride: u64,
    ) -> Result<Work<Region>> {
        self.register_as(name, buffer, (block_bytes, stride), true)
    }

    fn register_as(
        &self,
        name: &str,
        buffer: Buffer,
        (block_bytes, stride): (u64, u64),
        is_writable: bool,
    ) -> Result<Work<Region>> {
        if name.is_empty() || name.len() > NAME_CAP {
            let len = name.len();
            return Err(Error::Config(format!(
                "a region's name of {len} bytes, 1 to {NAME_CAP} are possible"
            )));
        }
        let layout = Layout::new(buffer.len() as u64, block_bytes, stride)?;
        let kind = buffer.kind();
        let memory = self.reactor.register(buffer)?;
        let prepared = Digests::prepare(kind);
        if let Err(error) = prepared
            && self.integrity.resolved(kind) == Integrity::Checksum
        {
            return Err(Error::Unavailable(format!(
                "integrity=checksum: this GPU computes no digests of blocks ({error}); set auto, validate or none"
            )));
        }
        self.register_region(LocalRegion::new(name, layout, is_writable, memory)?)
    }

    pub(crate) fn register_region(&self, region: LocalRegion) -> Result<Work<Region>> {
        self.ask(|completer| BlocksCommand::Register { region, completer })
    }

    /// Takes a region back. The work ends when nothing reads or writes its memory any more, or with `Timeout`: then the
    /// memory is kept until that is so, for which a second call waits again.
    ///
    /// # Errors
    /// The region belongs to another agent; its agent was closed, `Timeout` if that did not end all reads.
    pub fn close_region(&self, region: &Region, timeout: Option<Duration>) -> Result<Work<()>> {
        region.check_agent(self.incarnation)?;
        let (done, completer) = self.reactor.work();
        let was_open = region.close();
        let sent = self.send(BlocksCommand::Close {
            region: region.id(),
            until: timeout.map(|timeout| clock::now() + timeout),
            completer,
        });
        match sent {
            // The agent has ended, and its regions with it.
            Err(Error::Closed(text)) => {
                self.check_reads_ended()?;
                if was_open {
                    return Err(Error::Closed(text));
                }
                let (done, completer) = self.reactor.work();
                completer.complete(Ok(()));
                Ok(done)
            }
            sent => sent.map(|()| done),
        }
    }

    /// Connects to a peer; the work ends once its regions are known.
    pub fn connect(&self, address: &str) -> Result<Work<Peer>> {
        self.connect_to(address, None)
    }

    /// Connects to the agent that [`metadata`](Self::metadata) is of, and to no other life of it.
    ///
    /// # Errors
    /// The bytes are no metadata.
    pub fn add_peer(&self, metadata: &[u8]) -> Result<Work<Peer>> {
        let metadata = Metadata::from_bytes(metadata)?;
        self.connect_to(&metadata.address, Some(metadata.incarnation))
    }

    fn connect_to(&self, address: &str, incarnation: Option<Incarnation>) -> Result<Work<Peer>> {
        check_address(address)?;
        self.ask(|completer| BlocksCommand::Connect {
            address: address.to_owned(),
            incarnation,
            completer,
        })
    }

    /// Address and incarnation of this agent, for users who bring their own exchange.
    pub fn metadata(&self) -> Vec<u8> {
        let address = self.address();
        Metadata {
            address: address.map_or_else(String::new, |address| address.to_string()),
            incarnation: self.incarnation,
        }
        .to_bytes()
    }

    /// All connected peers; either side may have started the connection.
    pub fn peers(&self) -> Vec<Peer> {
        let peers = self.shared.peers();
        let is_there = |peer: &&Peer| peer.lost().is_none();
        peers.values().filter(is_there).cloned().collect()
    }

    /// Checks the blocks of a transfer, which can then be made many times, in both directions.
    ///
    /// # Errors
    /// `Config` names what is wrong whichever way the blocks go; `PeerLost`.
    pub fn prepare(
        &self,
        peer: &Peer,
        local: (&Region, Vec<u32>),
        remote: (&str, Vec<u32>),
    ) -> Result<Plan> {
        if peer.agent() != self.incarnation {
            let address = peer.address();
            return Err(Error::Config(format!(
                "peer {address} is a peer of another agent; connect to it from this one"
            )));
        }
        Plan::new(peer, local, remote)
    }

    /// Reads a peer's blocks into ours. The work ends with the number of bytes once they are here.
    ///
    /// # Errors
    /// An error of the blocks or the tag; nothing has begun.
    pub fn read(&self, plan: &Plan, options: Options) -> Result<Work<u64>> {
        let deadline = options.check()?;
        let transfer = self.transfer(plan, plan.reading()?, deadline);
        self.ask(|completer| BlocksCommand::Read(transfer, Caller::new(completer, options.notify)))
    }

    /// Offers our blocks to a peer, which reads them. The work ends with the number of bytes once they are there.
    ///
    /// # Errors
    /// As for [`read`](Self::read); what the peer alone can know, the work tells.
    pub fn write(&self, plan: &Plan, options: Options) -> Result<Work<u64>> {
        let deadline = options.check()?;
        let transfer = self.transfer(plan, plan.writing()?, deadline);
        self.ask(|completer| {
            let caller = Caller::new(completer, options.notify);
            BlocksCommand::Write(Write { transfer, caller })
        })
    }

    fn transfer(
        &self,
        plan: &Plan,
        pieces: Arc<Pieces>,
        deadline: Option<Instant>,
    ) -> BlockTransfer {
        BlockTransfer {
            peer: plan.peer.clone(),
            region: plan.local.id(),
            remote_region: plan.remote.id,
            pieces,
            is_checksummed: self.integrity != Integrity::None,
            deadline,
        }
    }

    /// Sends a tag to a peer's user. The work ends when the peer has it, which waits while its user does not take
    /// what was sent before.
    ///
    /// # Errors
    /// The tag is too long, or the peer is lost.
    pub fn notify(&self, peer: &Peer, tag: Vec<u8>) -> Result<Work<()>> {
        check_tag(&tag)?;
        peer.check()?;
        self.ask(|completer| BlocksCommand::Notify {
            session: peer.session(),
            tag,
            completer,
        })
    }

    /// Takes the notifications that have come; there may be none.
    ///
    /// # Errors
    /// There are none, and the agent was closed.
    pub fn notifications(&self) -> Result<Vec<Notification>> {
        let (notifications, drained) = self.shared.inbox.drain()?;
        if !drained.is_empty() {
            // A closed agent sends no acknowledgement; the caller still gets the notifications that had arrived.
            let _ = self.send(BlocksCommand::Drained(drained));
        }
        Ok(notifications)
    }

    /// Waits until there are notifications, the agent was closed, `deadline` has passed, or a signal arrived.
    pub fn wait_for_notifications(&self, deadline: Option<Instant>) -> Result<Waited> {
        self.shared.inbox.wait(deadline)
    }

    /// A file descriptor that is readable while there are notifications, and once the agent is closed. It belongs to
    /// the agent.
    pub fn notifications_fd(&self) -> RawFd {
        self.shared.inbox.fd()
    }

    /// Counters over all peers, those that are lost included.
    pub fn stats(&self) -> Stats {
        self.shared.counters.read()
    }

    /// Number of regions that are registered and not closed.
    pub fn num_regions(&self) -> usize {
        self.shared.num_regions.load(Ordering::Relaxed)
    }
}
