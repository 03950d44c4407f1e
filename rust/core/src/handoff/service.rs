//! An agent's service: its core, and on top of it the handoffs that it produces and consumes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvpipe_ucx::Status;

use super::active_loads::ActiveLoads;
use super::agent::{Event, HandoffShared};
use super::grant_check::grant_holds;
use super::load_request::LoadRequest;
use super::messages::HandoffMessage;
use super::producer::{BlockSelection, FIRST_BLOCK_TIMEOUT, Producer, send_all};
use super::ready::{ReadyBlocks, ReadyQueue};
use crate::agent::{AgentCommand, AgentCore, grant};
use crate::error::{Error, FailureCause, Result};
use crate::ids::{HandoffId, RegionId, SessionKey};
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Payload, ReactorContext, Service};
use crate::sync::lock;
use crate::trace::{Trace, Track};
use crate::transport::DataPath;

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
    /// With a gate, nothing is written into its blocks until this has opened.
    Load(LoadRequest, Option<u64>),
    /// What a load waited for has ended.
    OpenGate {
        handoff: HandoffId,
        gate: u64,
        completed: std::result::Result<(), String>,
    },
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
    pub(super) shared: Arc<HandoffShared>,
    pub(super) integrity: Integrity,
    pub(super) trace: Trace,
    /// What has become ready and is not announced yet.
    pub(super) ready: ReadyQueue,
    pub(super) producer: Producer,
    pub(super) loads: ActiveLoads,
    /// Which load has a batch, by the tokens that name batches to the agent.
    pub(super) batches: HashMap<u64, HandoffId>,
}

impl HandoffService {
    pub(super) fn new(agent: AgentCore, shared: Arc<HandoffShared>, integrity: Integrity) -> Self {
        Self {
            agent,
            shared,
            integrity,
            trace: Trace::default(),
            ready: ReadyQueue::default(),
            producer: Producer::default(),
            loads: ActiveLoads::default(),
            batches: HashMap::new(),
        }
    }

    /// Handles what has ended, and shows others what has changed. Called after everything that may end a read.
    fn drain(&mut self, cx: &mut ReactorContext) {
        while let Some((token, outcome)) = self.agent.next_ended_read(cx) {
            self.batch_ended(cx, token, outcome);
        }
        for text in std::mem::take(&mut self.agent.logs) {
            self.log_line(text);
        }
        let num_leased = self.producer.num_leased();
        self.shared.num_leased.store(num_leased, Ordering::Relaxed);
    }

    /// Shows others how many sessions there are by data path.
    fn count_sessions(&self, cx: &ReactorContext) {
        let data_paths = self
            .agent
            .peers
            .keys()
            .map(|&session| cx.data_path(session));
        let (mut num_read, mut num_streamed) = (0, 0);
        for data_path in data_paths.flatten() {
            match data_path {
                DataPath::RemoteRead(_) => num_read += 1,
                DataPath::Stream(_) => num_streamed += 1,
            }
        }
        *lock(&self.shared.num_sessions) = (num_read, num_streamed);
    }

    pub(super) fn log_line(&self, text: String) {
        self.shared.log_line(text);
    }

    fn run_command(&mut self, cx: &mut ReactorContext, command: HandoffCommandKind) {
        match command {
            HandoffCommandKind::Agent(command) => self.agent.command(cx, command),
            HandoffCommandKind::MarkReady(ready, regions) => self.ready.push(ready, regions),
            HandoffCommandKind::End { handoff, reason } => {
                self.end(cx, handoff, &reason);
                // From now on the producer remembers it.
                self.shared.end_processed(handoff);
            }
            HandoffCommandKind::Load(request, gate) => self.load(cx, request, gate),
            HandoffCommandKind::OpenGate {
                handoff,
                gate,
                completed,
            } => self.open_gate(cx, handoff, gate, completed),
            HandoffCommandKind::Commit { handoff } => {
                self.trace
                    .instant(Track::Reactor, "committed", &handoff, &[]);
                if let Some(active) = self.loads.get_mut(&handoff) {
                    active.load.request.is_committed = true;
                }
                self.continue_load(cx, handoff);
            }
            HandoffCommandKind::Cancel {
                handoff,
                reason,
                is_withdrawn,
            } => {
                if is_withdrawn {
                    self.withdraw_load(&handoff);
                }
                self.fail_load(cx, handoff, FailureCause::Cancelled, &reason);
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
    ) {
        match message {
            HandoffMessage::Select { first, end } => {
                let selection = BlockSelection {
                    session,
                    handoff,
                    first,
                    end,
                    deadline: cx.now() + FIRST_BLOCK_TIMEOUT,
                };
                let messages = self.producer.select(selection);
                send_all(cx, messages);
            }
            HandoffMessage::BlocksReady { epoch, blocks } => {
                self.blocks_announced(cx, session, handoff, epoch, &blocks);
            }
            HandoffMessage::Ended { reason } => {
                let active = self.loads.get(&handoff);
                if active.is_some_and(|active| active.session() == session) {
                    self.withdraw_load(&handoff);
                    self.fail_load(cx, handoff, FailureCause::Ended, &reason);
                }
            }
            HandoffMessage::Ack => {
                let epoch = self.producer.epoch(&handoff);
                if let Some(messages) = self.producer.acknowledge(session, handoff) {
                    send_all(cx, messages);
                    self.agent.revoke(cx, grant(epoch));
                    self.trace
                        .instant(Track::Reactor, "acknowledged", &handoff, &[]);
                    self.shared.events.push(Event::Acknowledged { handoff });
                }
            }
            HandoffMessage::Validate { epoch, question } => {
                self.answer_validate(cx, session, handoff, epoch, question);
            }
            HandoffMessage::Valid { question } => {
                self.validated(cx, session, handoff, question, true);
            }
            HandoffMessage::Invalid { question } => {
                self.validated(cx, session, handoff, question, false);
            }
        }
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
        self.count_sessions(cx);
        self.drain(cx);
    }

    fn data_path_changed(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        self.agent.data_path_changed(cx, session);
        self.count_sessions(cx);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.producer.session_down(session);
        self.agent.session_down(cx, session, &error);
        self.count_sessions(cx);
        self.drain(cx);
        for handoff in self.loads.of_session(session) {
            self.session_lost(cx, handoff, &error);
        }
        self.drain(cx);
    }

    fn streams_lost(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        self.agent.engine.streams_lost(cx, session);
        self.drain(cx);
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: Payload,
    ) -> Result<()> {
        let mut header = Reader::new(header);
        let kind = header.u8()?;
        if HandoffMessage::is_kind(kind) {
            let (handoff, message) = HandoffMessage::decode(kind, header, &data)?;
            self.handoff_message(cx, session, handoff, message);
        } else {
            let (producer, shared, message) = (&self.producer, &self.shared, (kind, header));
            let holds = |grant| grant_holds(producer, shared, grant);
            if self.agent.message(cx, session, message, &data, holds)? {
                self.regions_described(cx, session);
            }
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
        self.agent.engine.read_ended(cx, token, result);
        self.drain(cx);
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        self.announce_ready(cx);
        self.agent.engine.run_slice(cx);
        self.drain(cx);
        self.has_work()
    }

    fn has_work(&self) -> bool {
        self.agent.engine.has_work() || !self.ready.is_empty()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let (messages, first_block) = self.producer.expire(cx.now());
        send_all(cx, messages);
        let fresh_session = self.expire_loads(cx);
        let agent = self.agent.timer(cx);
        self.drain(cx);
        [agent, first_block, fresh_session]
            .into_iter()
            .flatten()
            .min()
    }

    fn log(&mut self, text: String) {
        self.log_line(format!("session.refused {text}"));
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        let reason = "the agent was closed";
        for active in self.loads.values_mut() {
            active.load.fail(FailureCause::Cancelled, reason);
        }
        self.agent.engine.stop(&cx.closed(reason));
        self.drain(cx);
        self.agent.stop(cx, reason);
        for handoff in self.loads.handoffs() {
            if let Some(active) = self.loads.get_mut(&handoff) {
                active.load.cannot_validate();
            }
            self.fail_load(cx, handoff, FailureCause::Cancelled, reason);
        }
        self.drain(cx);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("batches", self.batches.len()),
            ("ready queue", self.ready.len()),
            ("handoffs ended by callers", self.shared.num_ended()),
            ("handoff events", self.shared.events.len()),
        ];
        sizes.extend(self.loads.sizes());
        sizes.extend(self.producer.sizes());
        sizes.extend(self.agent.sizes());
        sizes
    }
}
