//! Transfers as callers see them: blocks are checked, ordered and joined on the caller's thread, once for each
//! direction, so that neither the agent's thread nor a second use of a plan pays for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::notices::check_tag;
use super::peer::Peer;
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::{Incarnation, RegionId, SessionKey};
use crate::session::Links;
use crate::transfer::message::BLOCKS_CAP;
use crate::transfer::region::{Layout, Pieces, RemoteRegion, check_sizes, coalesce};

#[derive(Debug)]
struct Registered {
    id: RegionId,
    name: String,
    layout: Layout,
    agent: Incarnation,
    is_closed: AtomicBool,
}

/// A region of this agent; clones are the same one.
#[derive(Debug, Clone)]
pub struct Region(Arc<Registered>);

impl Region {
    pub(super) fn new(id: RegionId, name: &str, layout: Layout, agent: Incarnation) -> Self {
        Self(Arc::new(Registered {
            id,
            name: name.to_owned(),
            layout,
            agent,
            is_closed: AtomicBool::new(false),
        }))
    }

    /// Under which peers know it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its layout.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// True if it was closed.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Acquire)
    }

    pub(crate) fn id(&self) -> RegionId {
        self.0.id
    }

    /// True if this call closed it.
    pub(super) fn close(&self) -> bool {
        !self.0.is_closed.swap(true, Ordering::AcqRel)
    }

    /// # Errors
    /// It belongs to another agent.
    pub(super) fn check_agent(&self, agent: Incarnation) -> Result<()> {
        if self.0.agent == agent {
            return Ok(());
        }
        let name = self.name();
        Err(Error::Config(format!(
            "region {name:?} is registered with another agent; register its memory with this one too"
        )))
    }

    /// # Errors
    /// It belongs to another agent, or was closed.
    pub(crate) fn check(&self, agent: Incarnation) -> Result<()> {
        self.check_agent(agent)?;
        let name = self.name();
        if self.is_closed() {
            return Err(closed_region(name));
        }
        Ok(())
    }
}

pub(super) fn closed_region(name: &str) -> Error {
    Error::Config(format!(
        "region {name:?} was closed; register its memory again"
    ))
}

/// It was there when the transfer was asked for.
pub(crate) fn region_gone() -> Error {
    Error::Config("a region of the transfer has been closed meanwhile".to_owned())
}

/// It was there when the transfer was asked for, or the notification.
pub(super) fn peer_gone(links: &Links, session: SessionKey) -> Error {
    Error::lost(
        &links.peer(session),
        "it is gone; connect again for a new peer",
    )
}

/// Options of one run of a transfer.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Tag for the peer's user once the blocks are in their place.
    pub notify: Option<Vec<u8>>,
    /// Within which it must be done.
    pub timeout: Option<Duration>,
}

impl Options {
    pub(super) fn check(&self) -> Result<Option<Instant>> {
        self.notify.as_deref().map_or(Ok(()), check_tag)?;
        Ok(self.timeout.map(|timeout| clock::now() + timeout))
    }
}

/// Blocks of a region of ours beside blocks of a peer's, in either direction.
#[derive(Debug)]
pub struct Plan {
    pub(super) peer: Peer,
    pub(super) local: Region,
    pub(super) remote: Arc<RemoteRegion>,
    local_ids: Vec<u32>,
    remote_ids: Vec<u32>,
    reading: OnceLock<Result<Arc<Pieces>>>,
    writing: OnceLock<Result<Arc<Pieces>>>,
}

impl Plan {
    /// # Errors
    /// An error of the blocks in both directions.
    pub(super) fn new(
        peer: &Peer,
        local: (&Region, Vec<u32>),
        remote: (&str, Vec<u32>),
    ) -> Result<Self> {
        let ((local, local_ids), (name, remote_ids)) = (local, remote);
        local.check(peer.agent())?;
        let remote = peer.region(name)?;
        check_sizes(local.layout(), &remote.layout)?;
        if local_ids.len() != remote_ids.len() || local_ids.len() > BLOCKS_CAP {
            return Err(Error::Config(format!(
                "{} local ids for {} remote ids; as many are needed, {BLOCKS_CAP} at most",
                local_ids.len(),
                remote_ids.len()
            )));
        }
        check_ids(local.layout(), &local_ids, local.name())?;
        check_ids(&remote.layout, &remote_ids, name)?;
        Ok(Self {
            peer: peer.clone(),
            local: local.clone(),
            remote,
            local_ids,
            remote_ids,
            reading: OnceLock::new(),
            writing: OnceLock::new(),
        })
    }

    /// The peer that exposes the blocks.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.local_ids.len()
    }

    /// The pieces of a read.
    ///
    /// # Errors
    /// A local id is repeated, the region was closed, or the peer is lost.
    pub(super) fn reading(&self) -> Result<Arc<Pieces>> {
        self.check()?;
        let to = (self.local.layout(), &self.local_ids[..]);
        let from = (&self.remote.layout, &self.remote_ids[..]);
        let pieces = || coalesce(to, from).map(Arc::new);
        self.reading.get_or_init(pieces).clone()
    }

    /// The pieces of a write.
    ///
    /// # Errors
    /// A remote id is repeated, the peer does not take blocks into its region, or as for a read.
    pub(super) fn writing(&self) -> Result<Arc<Pieces>> {
        self.check()?;
        if !self.remote.is_writable {
            return Err(not_writable(&self.remote.name));
        }
        let to = (&self.remote.layout, &self.remote_ids[..]);
        let from = (self.local.layout(), &self.local_ids[..]);
        let pieces = || coalesce(to, from).map(Arc::new);
        self.writing.get_or_init(pieces).clone()
    }

    fn check(&self) -> Result<()> {
        self.local.check(self.peer.agent())?;
        self.peer.check()?;
        let regions = self.peer.regions();
        if regions.iter().any(|region| region.id == self.remote.id) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "region {:?} of peer {} was closed by its owner",
            self.remote.name,
            self.peer.address()
        )))
    }
}

pub(super) fn not_writable(name: &str) -> Error {
    Error::Config(format!(
        "region {name:?} is not writable; its owner registers it with writable=True to take blocks of others"
    ))
}

fn check_ids(layout: &Layout, ids: &[u32], region: &str) -> Result<()> {
    let highest = ids.iter().copied().max().unwrap_or_default();
    if ids.is_empty() || u64::from(highest) < layout.num_blocks {
        return Ok(());
    }
    Err(Error::Config(format!(
        "block id {highest} is out of range: region {region:?} has {} blocks, ids start at 0",
        layout.num_blocks
    )))
}
