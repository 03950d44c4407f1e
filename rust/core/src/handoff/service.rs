//! An agent's service: its core, and on top of it the handoffs that it produces and consumes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::agent::{EndedHandoffs, Event, LoadRequest};
use super::consumer::{Consumer, ReadBatch};
use super::loads::Loading;
use super::messages::HandoffMessage;
use super::producer::{BlockSelection, Producer};
use super::ready::{ReadyBlocks, ReadyQueue};
use crate::agent::{AgentCommand, AgentCore};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::ids::HandoffId;
use crate::ids::RegionId;
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{ReactorContext, Service};
use crate::trace::{Trace, Track};

/// What users of an agent and its handoffs ask for.
#[derive(Debug)]
pub struct HandoffCommand(pub(super) HandoffCommandKind);

#[derive(Debug)]
pub(super) enum HandoffCommandKind {
    Agent(AgentCommand),
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

impl From<AgentCommand> for HandoffCommand {
    fn from(command: AgentCommand) -> Self {
        Self(HandoffCommandKind::Agent(command))
    }
}

pub(super) struct HandoffService {
    pub(super) agent: AgentCore,
    pub(super) events: Events<Event>,
    pub(super) trace: Trace,
    pub(super) ended: EndedHandoffs,
    pub(super) num_leased: Arc<AtomicUsize>,
    /// What has become ready and has no checksums yet.
    pub(super) ready: ReadyQueue,
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    pub(super) loading: HashMap<HandoffId, Loading>,
    /// Reads of loads under way, by the tokens that name them to the agent.
    pub(super) batches: HashMap<u64, (HandoffId, ReadBatch)>,
}

impl HandoffService {
    pub(super) fn new(
        agent: AgentCore,
        events: Events<Event>,
        ended: EndedHandoffs,
        num_leased: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            agent,
            events,
            trace: Trace::default(),
            ended,
            num_leased,
            ready: ReadyQueue::default(),
            producer: Producer::default(),
            consumer: Consumer::default(),
            loading: HashMap::new(),
            batches: HashMap::new(),
        }
    }

    /// Goes on with what reads have ended. To be called after everything that may end one.
    fn drain(&mut self, cx: &mut ReactorContext) {
        while let Some((task, outcome)) = self.agent.next_task_end(cx) {
            self.batch_ended(cx, task, outcome);
        }
        for text in self.agent.drain_logs() {
            self.events.push_minor(Event::Log(text));
        }
    }

    fn run_command(&mut self, cx: &mut ReactorContext, command: HandoffCommandKind) {
        match command {
            HandoffCommandKind::Agent(command) => self.agent.command(cx, command),
            HandoffCommandKind::MarkReady(ready, regions) => self.ready.push(ready, regions),
            HandoffCommandKind::End { handoff, reason } => {
                self.end(cx, handoff, &reason);
                self.ended.unmark(&handoff);
            }
            HandoffCommandKind::Load(request) => self.load(cx, request),
            HandoffCommandKind::Commit { handoff } => {
                self.trace
                    .instant(Track::Reactor, "committed", &handoff, &[]);
                self.consumer.commit(&handoff);
                self.continue_load(cx, handoff);
            }
            HandoffCommandKind::Cancel {
                handoff,
                reason,
                is_withdrawn,
            } => {
                if is_withdrawn {
                    self.consumer.withdraw(&handoff);
                }
                self.fail_load(cx, handoff, &reason);
            }
            HandoffCommandKind::Trace(trace) => self.trace = trace,
        }
    }

    fn handoff_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        handoff: HandoffId,
        message: HandoffMessage,
    ) -> Result<()> {
        match message {
            HandoffMessage::Select { first, end, .. } => {
                let selection = BlockSelection {
                    session,
                    handoff,
                    first,
                    end,
                };
                let actions = self.producer.select(selection, cx.now());
                self.act(cx, actions);
            }
            HandoffMessage::BlocksReady { epoch, blocks } => {
                self.announced(cx, session, handoff, epoch, &blocks)?;
            }
            HandoffMessage::Ended { reason } => {
                if self.is_loading_from(session, &handoff) {
                    self.consumer.withdraw(&handoff);
                    self.fail_load(cx, handoff, &reason);
                }
            }
            HandoffMessage::Ack => {
                if self.producer.acknowledge(session, handoff) {
                    self.trace
                        .instant(Track::Reactor, "acknowledged", &handoff, &[]);
                    self.events.push(Event::Acknowledged { handoff });
                    self.act(cx, Vec::new());
                }
            }
        }
        Ok(())
    }
}

impl Service for HandoffService {
    type Command = HandoffCommand;

    fn command(&mut self, cx: &mut ReactorContext, command: HandoffCommand) {
        self.run_command(cx, command.0);
        self.drain(cx);
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        self.agent.session_up(cx, session, peer);
        self.drain(cx);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.producer.session_down(session);
        self.agent.session_down(cx, session, &error);
        self.drain(cx);
        self.loads_down(cx, session, &error);
        self.drain(cx);
    }

    fn frame(&mut self, cx: &mut ReactorContext, session: SessionKey, frame: &[u8]) -> Result<()> {
        if self.agent.frame(cx, session, frame)? {
            self.regions_known(cx, session);
        }
        self.drain(cx);
        Ok(())
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: AmData,
    ) -> Result<()> {
        let mut header = Reader::new(header);
        let kind = header.u8()?;
        if HandoffMessage::is_kind(kind) {
            let (handoff, message) = HandoffMessage::decode(kind, header, &data)?;
            self.handoff_message(cx, session, handoff, message)?;
        } else {
            self.agent.message(cx, session, (kind, header), &data)?;
        }
        self.drain(cx);
        Ok(())
    }

    fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        self.agent.done(cx, token, result);
        self.drain(cx);
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        let has_marked = self.checksum_ready(cx);
        let has_moved = self.agent.engine.run_slice(cx);
        self.drain(cx);
        has_moved || has_marked
    }

    fn has_work(&self) -> bool {
        self.agent.engine.has_work() || !self.ready.is_empty()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let (actions, parked) = self.producer.expire(cx.now());
        if !actions.is_empty() {
            self.act(cx, actions);
        }
        let fresh = self.expire_loads(cx);
        let agent = self.agent.timer(cx);
        self.drain(cx);
        [agent, parked, fresh].into_iter().flatten().min()
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
        self.agent.stop(cx, reason);
        self.drain(cx);
        self.agent.finish_stop(cx, reason);
        let closed = cx.closed(reason).to_string();
        for handoff in self.consumer.handoffs() {
            self.fail_load(cx, handoff, &closed);
        }
        self.drain(cx);
    }
}
