//! The agent's side of its node's thread: its state, and which part of it a command or a message is for.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::finals::{Finals, Queue};
use super::messages::{
    CORRUPT, CREDIT, DATA, DONE, FINAL, GONE, NEIGHBOUR, NOT_TAKEN, NOTED, NOTIFY, OFFER, READ,
    REFUSED, REGIONS, RELEASED, RemoteRegions, SELECT, SUMS, TAKEN, VOID,
};
use super::neighbours::Secret;
use super::offers::Offer;
use super::peer::Peer;
use super::peers::Connection;
use super::plan::Region;
use super::regions::{Closing, LocalRegion};
use super::serve::Serving;
use super::transfer::Transfer;
use super::transfers::ReadCommand;
use super::{Board, Ended, Event, LoadRequest};
use crate::codec::Reader;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::handoff::consumer::Consumer;
use crate::handoff::producer::Producer;
use crate::identity::{Identity, Incarnation};
use crate::node::{Io, LinkId, Service};
use crate::region::RegionId;
use crate::trace::{Trace, Track};
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
        link: LinkId,
        tag: Vec<u8>,
        completer: Completer<()>,
    },
    /// Notifications that the user has taken.
    Taken(Vec<(LinkId, u64)>),
    /// A step is final in these regions.
    Finalize(Finals, Vec<RegionId>),
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
    pub(super) link: LinkId,
    /// Where the producer listens.
    pub(super) producer: String,
    pub(super) incarnation: Incarnation,
    pub(super) started: Instant,
    /// Whether the producer was asked on this link.
    pub(super) has_selected: bool,
    /// When it first told of final blocks.
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
    pub(super) board: Arc<Board>,
    pub(super) ended: Ended,
    pub(super) regions: BTreeMap<RegionId, LocalRegion>,
    pub(super) next_region: RegionId,
    pub(super) closing: Vec<Closing>,
    /// Closed regions of peers that are still read.
    pub(super) letting_go: Vec<(LinkId, RegionId)>,
    pub(super) peers: HashMap<LinkId, Connection>,
    pub(super) by_address: HashMap<String, LinkId>,
    pub(super) transfers: HashMap<u64, Transfer>,
    pub(super) offers: HashMap<u64, Offer>,
    /// Of transfers and offers.
    pub(super) deadlines: Earliest,
    pub(super) serving: HashMap<(LinkId, u64), Serving>,
    /// Peers that may have to be told which notifications have come.
    pub(super) to_note: BTreeSet<LinkId>,
    /// Transfers with work for this thread, in the order of their turns.
    pub(super) turns: VecDeque<u64>,
    /// What peers want checksums of, in the order of its turns.
    pub(super) summing: VecDeque<(LinkId, u64)>,
    pub(super) secret: Secret,
    /// What has become final and has no checksums yet.
    pub(super) finals: Queue,
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    pub(super) loading: HashMap<HandoffId, Loading>,
    /// Loads for which something can be done, see [`go_on`](Self::go_on), and whether that is under way.
    pub(super) to_go_on: BTreeSet<HandoffId>,
    pub(super) is_going_on: bool,
}

impl Blocks {
    pub(super) fn new(events: Events<Event>, board: Arc<Board>, ended: Ended) -> Self {
        Self {
            events,
            trace: Trace::default(),
            board,
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
            summing: VecDeque::new(),
            secret: Secret::new(),
            finals: Queue::default(),
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

    fn command(&mut self, io: &mut Io, command: Command) {
        match command {
            Command::Register { region, completer } => {
                self.register_command(io, region, completer);
            }
            Command::Close {
                region,
                until,
                completer,
            } => self.close_region(io, region, until, completer),
            Command::Connect {
                address,
                incarnation,
                completer,
            } => self.connect(io, &address, incarnation, completer),
            Command::Read(command) => self.read_command(io, command),
            Command::Write(offer) => self.write_command(io, offer),
            Command::Notify {
                link,
                tag,
                completer,
            } => self.notify_command(io, link, tag, completer),
            Command::Taken(taken) => self.taken(taken),
            Command::Finalize(finals, regions) => self.finals.push(finals, regions),
            Command::End { handoff, reason } => {
                self.end(io, handoff, &reason);
                self.ended.unmark(&handoff);
            }
            Command::Load(request) => self.load(io, request),
            Command::Commit { handoff } => {
                self.trace.instant(Track::Node, "committed", &handoff, &[]);
                self.consumer.commit(&handoff);
                self.go_on(io, handoff);
            }
            Command::Cancel {
                handoff,
                reason,
                is_withdrawn,
            } => {
                if is_withdrawn {
                    self.consumer.withdraw(&handoff);
                }
                self.fail_load(io, handoff, &reason);
            }
            Command::Trace(trace) => self.trace = trace,
        }
    }

    fn link_up(&mut self, io: &mut Io, link: LinkId, peer: &Identity) {
        self.peer_up(io, link, peer);
    }

    fn link_down(&mut self, io: &mut Io, link: LinkId, error: Error) {
        self.events
            .push_minor(Event::Log(format!("session.closed {error}")));
        self.producer.link_down(link);
        self.serving.retain(|(other, _), _| *other != link);
        self.summing.retain(|(other, _)| *other != link);
        self.peer_down(link, &error);
        self.transfers_down(io, link, &error);
        self.offers_down(link, &error);
        self.regions_down(link);
        self.loads_down(io, link, &error);
    }

    fn frame(&mut self, io: &mut Io, link: LinkId, frame: &[u8]) -> Result<()> {
        let mut reader = Reader::new(frame);
        match reader.u8()? {
            REGIONS => {
                let regions = RemoteRegions::read(reader)?;
                self.take_regions(io, link, regions)
            }
            NEIGHBOUR => self.neighbour_frame(io, link, reader),
            RELEASED => {
                let region = reader.u32()?;
                reader.end()?;
                self.released(link, region)
            }
            other => Err(Error::protocol(format_args!("frame {other} to an agent"))),
        }
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        match reader.u8()? {
            kind @ (READ | DATA | CREDIT | REFUSED | SUMS) => {
                self.transfer_message(io, link, kind, reader, &data)
            }
            kind @ (SELECT | FINAL | GONE | DONE) => {
                self.handoff_message(io, link, kind, reader, &data)
            }
            kind @ (OFFER | TAKEN | NOT_TAKEN | CORRUPT) => {
                self.offer_message(io, link, kind, reader, &data)
            }
            kind @ (NOTIFY | VOID | NOTED) => self.notice_message(io, link, kind, reader, &data),
            other => Err(Error::protocol(format_args!("message {other} to an agent"))),
        }
    }

    fn done(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        self.got(io, token, result);
    }

    fn work(&mut self, io: &mut Io) -> bool {
        let has_finalized = self.finalize_on(io);
        let has_summed = self.sum_on(io);
        self.turn(io) || has_finalized || has_summed
    }

    fn has_work(&self) -> bool {
        !(self.turns.is_empty() && self.summing.is_empty() && self.finals.is_empty())
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        let (actions, parked) = self.producer.expire(io.now);
        if !actions.is_empty() {
            self.act(io, actions);
        }
        self.expire_transfers(io);
        let described = self.expire_peers(io);
        let fresh = self.expire_loads(io);
        self.note(io);
        self.release(io);
        let closed = self.end_closing(io.now);
        [self.deadlines.at(), parked, described, fresh, closed]
            .into_iter()
            .flatten()
            .min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push_minor(Event::Log(format!("session.refused {text}")));
    }

    fn stop(&mut self, io: &mut Io) {
        let reason = "the agent was closed";
        for handoff in self.consumer.handoffs() {
            self.consumer.fail(&handoff, reason);
        }
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            let closed = Err(io.closed(reason));
            self.end_owner(io, transfer.link, transfer.owner, closed);
        }
        let closed = io.closed(reason);
        for link in self.peers.keys().copied().collect::<Vec<_>>() {
            self.offers_down(link, &closed);
            self.peer_down(link, &closed);
        }
        self.end_all_closing(&io.unended_reads);
        self.board.inbox.close();
        for handoff in self.consumer.handoffs() {
            self.fail_load(io, handoff, &closed.to_string());
        }
    }
}
