//! The agent's side of its node's thread: its state, and which part of it a command or a message is for.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvpipe_ucx::{AmData, Buffer, Status};

use super::handoffs::Finalizing;
use super::messages::{
    CREDIT, DATA, DONE, FINAL, GONE, READ, REFUSED, REGIONS, RemoteRegions, SELECT,
};
use super::peers::Peer;
use super::serve::Serving;
use super::transfer::Transfer;
use super::transfers::ReadCommand;
use super::{Ended, Event, LoadRequest, PeerInfo};
use crate::codec::Reader;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::handoff::consumer::Consumer;
use crate::handoff::producer::Producer;
use crate::identity::{Identity, Incarnation};
use crate::node::{Io, LinkId, Service};
use crate::region::Layout;
use crate::transport::Memory;
use crate::work::Completer;

#[derive(Debug)]
pub(super) enum Command {
    Register {
        name: String,
        layout: Layout,
        buffer: Buffer,
        completer: Completer<u16>,
    },
    Connect {
        address: String,
        completer: Completer<PeerInfo>,
    },
    Read(ReadCommand),
    Finalize {
        handoff: HandoffId,
        generation: u32,
        first: u32,
        block_ids: Vec<u32>,
    },
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
    },
}

pub(super) struct LocalRegion {
    pub(super) name: String,
    pub(super) layout: Layout,
    pub(super) memory: Arc<Memory>,
    /// The packed key.
    pub(super) rkey: Vec<u8>,
}

pub(super) struct Loading {
    pub(super) link: LinkId,
    pub(super) incarnation: Incarnation,
    pub(super) started: Instant,
    pub(super) has_selected: bool,
}

pub(super) struct Blocks {
    pub(super) events: Events<Event>,
    pub(super) num_lent: Arc<Mutex<usize>>,
    pub(super) ended: Ended,
    pub(super) regions: Vec<LocalRegion>,
    pub(super) peers: HashMap<LinkId, Peer>,
    pub(super) by_address: HashMap<String, LinkId>,
    pub(super) transfers: HashMap<u64, Transfer>,
    pub(super) deadlines: Earliest,
    /// Token of a get to its transfer and bytes.
    pub(super) gets: HashMap<u64, (u64, u64)>,
    pub(super) serving: HashMap<(LinkId, u64), Serving>,
    pub(super) finalizing: VecDeque<Finalizing>,
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    pub(super) loading: HashMap<HandoffId, Loading>,
}

impl Blocks {
    pub(super) fn new(events: Events<Event>, num_lent: Arc<Mutex<usize>>, ended: Ended) -> Self {
        Self {
            events,
            num_lent,
            ended,
            regions: Vec::new(),
            peers: HashMap::new(),
            by_address: HashMap::new(),
            transfers: HashMap::new(),
            deadlines: Earliest::default(),
            gets: HashMap::new(),
            serving: HashMap::new(),
            finalizing: VecDeque::new(),
            producer: Producer::default(),
            consumer: Consumer::default(),
            loading: HashMap::new(),
        }
    }
}

impl Service for Blocks {
    type Command = Command;

    fn command(&mut self, io: &mut Io, command: Command) {
        match command {
            Command::Register {
                name,
                layout,
                buffer,
                completer,
            } => completer.complete(self.register(io, name, layout, buffer)),
            Command::Connect { address, completer } => self.connect(io, &address, completer),
            Command::Read(command) => self.read_command(io, command),
            Command::Finalize {
                handoff,
                generation,
                first,
                block_ids,
            } => self.finalizing.push_back(Finalizing {
                handoff,
                generation,
                first,
                block_ids: block_ids.into(),
            }),
            Command::End { handoff, reason } => {
                self.end(io, handoff, &reason);
                self.ended.unmark(&handoff);
            }
            Command::Load(request) => self.load(io, request),
            Command::Commit { handoff } => {
                self.consumer.commit(&handoff);
                self.end_load_if_over(io, handoff);
            }
            Command::Cancel { handoff, reason } => self.fail_load(io, handoff, &reason),
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
        self.peer_down(link, &error);
        self.transfers_down(io, link, &error);
        self.loads_down(io, link, &error);
    }

    fn frame(&mut self, io: &mut Io, link: LinkId, frame: &[u8]) -> Result<()> {
        let mut reader = Reader::new(frame);
        match reader.u8()? {
            REGIONS => {
                let regions = RemoteRegions::read(reader)?;
                self.take_regions(io, link, regions);
                Ok(())
            }
            other => Err(Error::protocol(format_args!("frame {other} to an agent"))),
        }
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        match reader.u8()? {
            kind @ (READ | DATA | CREDIT | REFUSED) => {
                self.transfer_message(io, link, kind, reader, &data)
            }
            kind @ (SELECT | FINAL | GONE | DONE) => {
                self.handoff_message(io, link, kind, reader, &data)
            }
            other => Err(Error::protocol(format_args!("message {other} to an agent"))),
        }
    }

    fn done(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        self.got(io, token, result);
    }

    fn work(&mut self, io: &mut Io) -> bool {
        self.finalize_on(io)
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        let (actions, parked) = self.producer.expire(io.now);
        if !actions.is_empty() {
            self.act(io, actions);
        }
        self.expire_transfers(io);
        let described = self.expire_peers(io);
        self.deadlines
            .at()
            .into_iter()
            .chain(parked)
            .chain(described)
            .min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push_minor(Event::Log(format!("session.refused {text}")));
    }

    fn stop(&mut self, io: &mut Io) {
        let reason = "the agent was closed";
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            self.end_owner(io, transfer.owner, Err(Error::Closed(reason.to_owned())));
        }
        for handoff in self.consumer.handoffs() {
            self.fail_load(io, handoff, reason);
        }
    }
}
