//! The agent's side of its reactor's thread: its state, and which part of it a command or a message is for.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::messages::{
    ACK, BLOCKS_READY, CHECKSUMS, CORRUPT, CREDIT, DATA, HANDOFF_ENDED, NOT_TAKEN, NOTED, NOTIFY,
    OFFER, PROCESS_VM, READ, REFUSED, REGIONS, RELEASED, RemoteRegions, SELECT, TAKEN, VOID,
};
use super::offers::Offer;
use super::peer::Peer;
use super::peers::PeerState;
use super::plan::Region;
use super::process_vm::Secret;
use super::ready::{Queue, ReadyBlocks};
use super::regions::{Closing, LocalRegion};
use super::serve::Serving;
use super::transfer::Transfer;
use super::transfers::ReadCommand;
use super::{Ended, Event, LoadRequest, SharedState};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::handoff::consumer::Consumer;
use crate::handoff::producer::Producer;
use crate::net::codec::Reader;
use crate::net::identity::{Identity, Incarnation};
use crate::reactor::{ReactorContext, Service, SessionKey};
use crate::trace::{Trace, Track};
use crate::transfer::region::RegionId;
use crate::work::Completer;

#[derive(Debug)]
pub(super) enum Command {
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
    Read(ReadCommand),
    Write(Offer),
    Notify {
        session: SessionKey,
        tag: Vec<u8>,
        completer: Completer<()>,
    },
    /// Notifications that the user has taken.
    Taken(Vec<(SessionKey, u64)>),
    /// A step is ready in these regions.
    MarkReady(ReadyBlocks, Vec<RegionId>),
    End {
        handoff: HandoffId,
        reason: String,
    },
    Load(LoadRequest),
    Commit {
        handoff: HandoffId,
    },
    Cancel {
        handoff: HandoffId,
        reason: String,
        is_withdrawn: bool,
    },
    Trace(Trace),
}

pub(super) struct Loading {
    pub(super) session: SessionKey,
    /// Where the producer listens.
    pub(super) producer: String,
    pub(super) incarnation: Incarnation,
    pub(super) started: Instant,
    /// Whether the producer was asked on this session.
    pub(super) has_selected: bool,
    /// When it first told of ready blocks.
    pub(super) announced: Option<Instant>,
    /// Why a session was lost, and when a fresh one has to be here.
    pub(super) lost: Option<(String, Instant)>,
    /// It has failed, and waits for reads to end only.
    pub(super) has_failed: bool,
}

impl Loading {
    /// When the fresh session that it waits for has to be here.
    pub(super) fn fresh_by(&self) -> Option<Instant> {
        let is_waiting = !self.has_selected && !self.has_failed;
        let lost = self.lost.as_ref().filter(|_| is_waiting);
        lost.map(|(_, by)| *by)
    }
}

pub(super) struct Blocks {
    pub(super) events: Events<Event>,
    pub(super) trace: Trace,
    pub(super) shared: Arc<SharedState>,
    pub(super) ended: Ended,
    pub(super) regions: BTreeMap<RegionId, LocalRegion>,
    pub(super) next_region: RegionId,
    pub(super) closing: Vec<Closing>,
    /// Closed regions of peers that are still read.
    pub(super) letting_go: Vec<(SessionKey, RegionId)>,
    pub(super) peers: HashMap<SessionKey, PeerState>,
    pub(super) by_address: HashMap<String, SessionKey>,
    pub(super) transfers: HashMap<u64, Transfer>,
    pub(super) offers: HashMap<u64, Offer>,
    /// Of transfers and offers.
    pub(super) deadlines: Earliest,
    pub(super) serving: HashMap<(SessionKey, u64), Serving>,
    /// Peers that may have to be told which notifications have come.
    pub(super) to_note: BTreeSet<SessionKey>,
    /// Transfers with work for this thread, in the order of their turns.
    pub(super) turns: VecDeque<u64>,
    /// What peers want checksums of, in the order of its turns.
    pub(super) checksum_jobs: VecDeque<(SessionKey, u64)>,
    pub(super) secret: Secret,
    /// What has become ready and has no checksums yet.
    pub(super) ready: Queue,
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    pub(super) loading: HashMap<HandoffId, Loading>,
    /// Loads for which something can be done, see [`go_on`](Self::go_on), and whether that is under way.
    pub(super) to_go_on: BTreeSet<HandoffId>,
    pub(super) is_going_on: bool,
}

impl Blocks {
    pub(super) fn new(events: Events<Event>, shared: Arc<SharedState>, ended: Ended) -> Self {
        Self {
            events,
            trace: Trace::default(),
            shared,
            ended,
            regions: BTreeMap::new(),
            next_region: 0,
            closing: Vec::new(),
            letting_go: Vec::new(),
            peers: HashMap::new(),
            by_address: HashMap::new(),
            transfers: HashMap::new(),
            offers: HashMap::new(),
            deadlines: Earliest::default(),
            serving: HashMap::new(),
            to_note: BTreeSet::new(),
            turns: VecDeque::new(),
            checksum_jobs: VecDeque::new(),
            secret: Secret::new(),
            ready: Queue::default(),
            producer: Producer::default(),
            consumer: Consumer::default(),
            loading: HashMap::new(),
            to_go_on: BTreeSet::new(),
            is_going_on: false,
        }
    }
}

impl Service for Blocks {
    type Command = Command;

    fn command(&mut self, cx: &mut ReactorContext, command: Command) {
        match command {
            Command::Register { region, completer } => {
                self.register_command(cx, region, completer);
            }
            Command::Close {
                region,
                until,
                completer,
            } => self.close_region(cx, region, until, completer),
            Command::Connect {
                address,
                incarnation,
                completer,
            } => self.connect(cx, &address, incarnation, completer),
            Command::Read(command) => self.read_command(cx, command),
            Command::Write(offer) => self.write_command(cx, offer),
            Command::Notify {
                session,
                tag,
                completer,
            } => self.notify_command(cx, session, tag, completer),
            Command::Taken(taken) => self.taken(taken),
            Command::MarkReady(ready, regions) => self.ready.push(ready, regions),
            Command::End { handoff, reason } => {
                self.end(cx, handoff, &reason);
                self.ended.unmark(&handoff);
            }
            Command::Load(request) => self.load(cx, request),
            Command::Commit { handoff } => {
                self.trace
                    .instant(Track::Reactor, "committed", &handoff, &[]);
                self.consumer.commit(&handoff);
                self.go_on(cx, handoff);
            }
            Command::Cancel {
                handoff,
                reason,
                is_withdrawn,
            } => {
                if is_withdrawn {
                    self.consumer.withdraw(&handoff);
                }
                self.fail_load(cx, handoff, &reason);
            }
            Command::Trace(trace) => self.trace = trace,
        }
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        self.peer_up(cx, session, peer);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.events
            .push_minor(Event::Log(format!("session.closed {error}")));
        self.producer.session_down(session);
        self.serving.retain(|(other, _), _| *other != session);
        self.checksum_jobs.retain(|(other, _)| *other != session);
        self.peer_down(session, &error);
        self.transfers_down(cx, session, &error);
        self.offers_down(session, &error);
        self.regions_down(session);
        self.loads_down(cx, session, &error);
    }

    fn frame(&mut self, cx: &mut ReactorContext, session: SessionKey, frame: &[u8]) -> Result<()> {
        let mut reader = Reader::new(frame);
        match reader.u8()? {
            REGIONS => {
                let regions = RemoteRegions::read(reader)?;
                self.take_regions(cx, session, regions)
            }
            PROCESS_VM => self.process_vm_frame(cx, session, reader),
            RELEASED => {
                let region = reader.u32()?;
                reader.end()?;
                self.released(session, region)
            }
            other => Err(Error::protocol(format_args!("frame {other} to an agent"))),
        }
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: AmData,
    ) -> Result<()> {
        let mut reader = Reader::new(header);
        match reader.u8()? {
            kind @ (READ | DATA | CREDIT | REFUSED | CHECKSUMS) => {
                self.transfer_message(cx, session, kind, reader, &data)
            }
            kind @ (SELECT | BLOCKS_READY | HANDOFF_ENDED | ACK) => {
                self.handoff_message(cx, session, kind, reader, &data)
            }
            kind @ (OFFER | TAKEN | NOT_TAKEN | CORRUPT) => {
                self.offer_message(cx, session, kind, reader, &data)
            }
            kind @ (NOTIFY | VOID | NOTED) => self.notice_message(cx, session, kind, reader, &data),
            other => Err(Error::protocol(format_args!("message {other} to an agent"))),
        }
    }

    fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        self.got(cx, token, result);
    }

    fn work(&mut self, cx: &mut ReactorContext) -> bool {
        let has_finalized = self.finalize_on(cx);
        let has_summed = self.run_checksum_slice(cx);
        self.turn(cx) || has_finalized || has_summed
    }

    fn has_work(&self) -> bool {
        !(self.turns.is_empty() && self.checksum_jobs.is_empty() && self.ready.is_empty())
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let (actions, parked) = self.producer.expire(cx.now);
        if !actions.is_empty() {
            self.act(cx, actions);
        }
        self.expire_transfers(cx);
        let described = self.expire_peers(cx);
        let fresh = self.expire_loads(cx);
        self.note(cx);
        self.release(cx);
        let closed = self.end_closing(cx.now);
        [self.deadlines.at(), parked, described, fresh, closed]
            .into_iter()
            .flatten()
            .min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push_minor(Event::Log(format!("session.refused {text}")));
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        let reason = "the agent was closed";
        for handoff in self.consumer.handoffs() {
            self.consumer.fail(&handoff, reason);
        }
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            let closed = Err(cx.closed(reason));
            self.end_owner(cx, transfer.session, transfer.owner, closed);
        }
        let closed = cx.closed(reason);
        for session in self.peers.keys().copied().collect::<Vec<_>>() {
            self.offers_down(session, &closed);
            self.peer_down(session, &closed);
        }
        self.end_all_closing(&cx.pending_reads);
        self.shared.inbox.close();
        for handoff in self.consumer.handoffs() {
            self.fail_load(cx, handoff, &closed.to_string());
        }
    }
}
