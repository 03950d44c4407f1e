//! The agent's side of its reactor's thread: its state, and which part of it a command or a message is for. A service
//! above runs it, and whatever else moves blocks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::inbox::Drained;
use super::messages::{
    AgentMessage, DIVIDE, DIVIDED, REGIONS, RELEASED, read_divided, read_regions,
};
use super::notices::Notice;
use super::offers::Write;
use super::peer::Peer;
use super::peers::PeerState;
use super::plan::Region;
use super::reads::{ActiveRead, BlockTransfer, Caller, ReadOwner};
use super::regions::{Closing, LocalRegion};
use super::shared::SharedAgentState;
use crate::error::{Error, Result};
use crate::ids::{Incarnation, RegionId, SessionKey};
use crate::net::codec::Reader;
use crate::reactor::Timers;
use crate::session::{Links, Payload};
use crate::transfer::Cx;
use crate::work::Completer;

/// Transfers from one peer under way at once; more wait.
pub(crate) const TRANSFERS_IN_FLIGHT: usize = 4;

/// Requests of users about blocks and notifications.
#[derive(Debug)]
pub(crate) enum BlocksCommand {
    Register {
        region: LocalRegion,
        completer: Completer<Region>,
    },
    Close {
        region: RegionId,
        until: Option<Instant>,
        completer: Completer<()>,
    },
    Connect {
        address: String,
        incarnation: Option<Incarnation>,
        completer: Completer<Peer>,
    },
    Read(BlockTransfer, Caller),
    Write(Write),
    Notify {
        session: SessionKey,
        tag: Vec<u8>,
        completer: Completer<()>,
    },
    /// Notifications that the user has drained.
    Drained(Vec<Drained>),
}

/// Consequence of a message for handoffs.
pub(crate) enum AgentEvent {
    Nothing,
    /// The peer has described its regions, or answered that it cannot divide their blocks.
    RegionsDescribed,
    /// The blocks of these regions of ours have these slices from now on.
    Divided(Vec<(RegionId, Vec<RegionId>)>),
}

/// All of it.
pub(crate) struct AgentCore {
    pub(super) shared: Arc<SharedAgentState>,
    pub(crate) regions: BTreeMap<RegionId, LocalRegion>,
    pub(super) next_region: RegionId,
    pub(super) closing: Vec<Closing>,
    /// Closed regions of peers that are still read.
    pub(super) releasing_regions: Vec<(SessionKey, RegionId)>,
    pub(crate) peers: HashMap<SessionKey, PeerState>,
    pub(super) by_address: HashMap<String, SessionKey>,
    /// Reads under way, by the owner that the engine knows.
    pub(super) reads: HashMap<u64, ActiveRead>,
    /// Deadlines of writes, by peer and id.
    pub(super) write_deadlines: Timers<(SessionKey, u64)>,
    /// Deadlines by which peers have to describe their regions.
    pub(super) described_by: Timers<SessionKey>,
    /// Peers whose notifications may have to be acknowledged.
    pub(super) to_note: BTreeSet<SessionKey>,
    /// Peers whose notifications may wait for room in the inbox.
    pub(super) undelivered: BTreeSet<SessionKey>,
    /// Lines for people.
    pub(crate) logs: Vec<String>,
}

impl AgentCore {
    pub(super) fn new(shared: Arc<SharedAgentState>) -> Self {
        Self {
            shared,
            regions: BTreeMap::new(),
            next_region: 0,
            closing: Vec::new(),
            releasing_regions: Vec::new(),
            peers: HashMap::new(),
            by_address: HashMap::new(),
            reads: HashMap::new(),
            write_deadlines: Timers::default(),
            described_by: Timers::default(),
            to_note: BTreeSet::new(),
            undelivered: BTreeSet::new(),
            logs: Vec::new(),
        }
    }

    pub(crate) fn command(&mut self, cx: &mut Cx<'_>, command: BlocksCommand) {
        match command {
            BlocksCommand::Register { region, completer } => {
                completer.complete(self.register(cx, region));
            }
            BlocksCommand::Close {
                region,
                until,
                completer,
            } => self.close_region(cx, region, until, completer),
            BlocksCommand::Connect {
                address,
                incarnation,
                completer,
            } => self.connect(cx.links, &address, incarnation, completer),
            BlocksCommand::Read(transfer, caller) => {
                let session = transfer.peer.session();
                self.read(cx, session, Ok(transfer), ReadOwner::Caller(caller));
            }
            BlocksCommand::Write(write) => self.write_command(cx, write),
            BlocksCommand::Notify {
                session,
                tag,
                completer,
            } => self.notice(cx, session, Notice::Tag(tag), Some(completer)),
            BlocksCommand::Drained(drained) => self.drained(drained),
        }
    }

    pub(crate) fn session_down(&mut self, session: SessionKey, error: &Error) {
        self.logs.push(format!("session.closed {error}"));
        self.peer_down(session, error);
        self.regions_down(session);
    }

    /// Handles a message, and returns its consequence for handoffs.
    pub(crate) fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: &Payload,
    ) -> Result<AgentEvent> {
        match kind {
            REGIONS => {
                self.receive_regions(cx, session, read_regions(header)?)?;
                return Ok(AgentEvent::RegionsDescribed);
            }
            RELEASED => {
                let region = header.u32()?;
                header.end()?;
                self.released(session, region)?;
            }
            DIVIDE => {
                let count = header.u32()?;
                header.end()?;
                return Ok(AgentEvent::Divided(self.divide(cx, session, count)));
            }
            DIVIDED => {
                let (count, reason) = read_divided(header)?;
                self.divided(session, count, reason)?;
                return Ok(AgentEvent::RegionsDescribed);
            }
            _ => self.handle_message(cx, session, (kind, header), data)?,
        }
        Ok(AgentEvent::Nothing)
    }

    fn handle_message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &Payload,
    ) -> Result<()> {
        match AgentMessage::decode(kind, header, data)? {
            AgentMessage::Offer(offer) => self.offered(cx, session, offer),
            AgentMessage::Withdraw { offer } => {
                self.withdraw_offered(cx, session, offer);
                Ok(())
            }
            AgentMessage::Accepted { offer } => self.answered(cx, session, offer, Ok(())),
            AgentMessage::Declined { offer, reason } => {
                let error = Error::Config(format!("the peer declined the write: {reason}"));
                self.answered(cx, session, offer, Err(error))
            }
            AgentMessage::Corrupt { offer, reason } => {
                self.answered(cx, session, offer, Err(Error::Corrupt(reason)))
            }
            AgentMessage::Notify { number, tag } => self.arrive(session, number, Some(tag)),
            AgentMessage::Void { number } => self.arrive(session, number, None),
            AgentMessage::Noted { received, drained } => self.noted(cx, session, received, drained),
        }
    }

    /// Handles the deadlines that have passed, and what peers are owed.
    pub(crate) fn expire(&mut self, cx: &mut Cx<'_>) {
        self.expire_writes(cx);
        self.expire_peers(cx.links);
        self.note(cx.links);
        self.release(cx);
        self.end_closing(cx.links.now());
    }

    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        let writes = self.write_deadlines.next();
        let described = self.described_by.next();
        [writes, described, self.closing_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The sizes of its maps and queues.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_peers = |size: fn(&PeerState) -> usize| self.peers.values().map(size).sum();
        let closing = self.closing.iter().map(Closing::region);
        let regions = self.regions.values().chain(closing);
        vec![
            ("regions", self.regions.len()),
            ("busy blocks", regions.map(LocalRegion::num_busy).sum()),
            ("closing regions", self.closing.len()),
            ("releasing regions", self.releasing_regions.len()),
            ("agent peers", self.peers.len()),
            ("agent addresses", self.by_address.len()),
            ("reads", self.reads.len()),
            ("writes", of_peers(|peer| peer.writes.len())),
            ("write deadlines", self.write_deadlines.len()),
            ("deadlines of regions", self.described_by.len()),
            ("peers to note", self.to_note.len()),
            ("undelivered peers", self.undelivered.len()),
            ("agent logs", self.logs.len()),
            ("shared peers", self.shared.peers().len()),
            ("inbox", self.shared.inbox.len()),
            ("queued for peers", of_peers(PeerState::num_queued)),
            ("offers of peers", of_peers(|peer| peer.offers_here.len())),
            ("outboxes", of_peers(|peer| peer.outbox.len())),
            ("arrivals", of_peers(|peer| peer.arrivals.len())),
            ("divisions of peers", of_peers(|peer| peer.divisions.len())),
        ]
    }

    /// Ends everything that is left when the engine has stopped and its reads have been drained.
    pub(crate) fn stop(&mut self, links: &Links, reason: &str) {
        let closed = links.closed(reason);
        for session in self.peers.keys().copied().collect::<Vec<_>>() {
            self.peer_down(session, &closed);
        }
        self.end_all_closing(links.pending_reads());
        self.shared.inbox.close();
    }
}
