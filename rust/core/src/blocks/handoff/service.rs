//! An agent's service: its core, and on top of it the handoffs that it produces and consumes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::active_loads::ActiveLoads;
use super::batches::ActiveBatch;
use super::digests::DigestQueue;
use super::grant_check::grant_holds;
use super::load_request::{LoadId, LoadRequest};
use super::messages::HandoffMessage;
use super::producer::{BlockSelection, Producer, SelectedPositions, send_all};
use super::ready::{ReadyBlocks, ReadyQueue};
use super::shared::{Event, HandoffShared};
use crate::blocks::agent_core::{AgentEvent, TRANSFERS_IN_FLIGHT};
use crate::blocks::regions::{grant, revoke};
use crate::blocks::{AgentCommand, AgentCore};
use crate::error::{Error, FailureCause, Result};
use crate::ids::{HandoffId, RegionId, SessionKey};
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::sync::lock;
use crate::trace::{Trace, Track};
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::{DataPath, Memory};

/// Requests of users about handoffs.
#[derive(Debug)]
pub(crate) enum HandoffCommand {
    /// A step is ready in these regions.
    MarkReady(ReadyBlocks, Vec<RegionId>),
    End {
        handoff: HandoffId,
        reason: String,
    },
    /// With a gate, nothing is written into its blocks until this has opened.
    Load(LoadRequest, Option<u64>),
    /// The event that a load waited for has ended.
    OpenGate {
        load: LoadId,
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
    /// The digests of this launch are known.
    Digested(u64),
}

pub(in crate::blocks) struct HandoffService {
    pub(super) agent: AgentCore,
    pub(super) shared: Arc<HandoffShared>,
    pub(super) integrity: Integrity,
    /// Time that producers wait for the first block of a load.
    pub(super) first_block_timeout: Duration,
    pub(super) trace: Trace,
    /// Ready blocks that are not announced yet.
    pub(super) ready: ReadyQueue,
    pub(super) digests: DigestQueue,
    pub(super) producer: Producer,
    pub(super) loads: ActiveLoads,
    /// Batches of loads that are being read, by the owners of their transfers.
    pub(super) batches: HashMap<u64, ActiveBatch>,
    /// Sessions that have ended; their loads go on once their reads are handed over.
    lost_sessions: Vec<(SessionKey, Error)>,
}

impl HandoffService {
    pub(in crate::blocks) fn new(
        agent: AgentCore,
        shared: Arc<HandoffShared>,
        integrity: Integrity,
        first_block_timeout: Duration,
    ) -> Self {
        Self {
            agent,
            shared,
            integrity,
            first_block_timeout,
            trace: Trace::default(),
            ready: ReadyQueue::default(),
            digests: DigestQueue::default(),
            producer: Producer::default(),
            loads: ActiveLoads::default(),
            batches: HashMap::new(),
            lost_sessions: Vec::new(),
        }
    }

    /// Shows others how many sessions there are by data path.
    fn count_sessions(&self, links: &Links) {
        let data_paths = self
            .agent
            .peers
            .keys()
            .map(|&session| links.data_path(session));
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

    fn run_command(&mut self, cx: &mut Cx<'_>, command: HandoffCommand) {
        match command {
            HandoffCommand::MarkReady(ready, regions) => self.ready.push(ready, regions),
            HandoffCommand::End { handoff, reason } => {
                self.end(cx, handoff, &reason);
                // From now on the producer remembers it.
                self.shared.end_processed(handoff);
            }
            HandoffCommand::Load(request, gate) => self.load(cx, request, gate),
            HandoffCommand::OpenGate {
                load,
                gate,
                completed,
            } => self.open_gate(cx, load, gate, completed),
            HandoffCommand::Commit { handoff } => {
                self.trace
                    .instant(Track::Reactor, "committed", &handoff, &[]);
                for id in self.loads.of_handoff(handoff) {
                    if let Some(active) = self.loads.get_mut(&id) {
                        active.load.request.is_committed = true;
                    }
                    self.continue_load(cx, id);
                }
            }
            HandoffCommand::Cancel {
                handoff,
                reason,
                is_withdrawn,
            } => {
                for id in self.loads.of_handoff(handoff) {
                    if is_withdrawn {
                        self.withdraw_load(id);
                    }
                    self.fail_load(cx, id, FailureCause::Cancelled, &reason);
                }
            }
            HandoffCommand::Trace(trace) => self.trace = trace,
            HandoffCommand::Digested(number) => self.digested(cx, number),
        }
    }

    fn handoff_message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        handoff: HandoffId,
        message: HandoffMessage,
    ) {
        match message {
            HandoffMessage::Select {
                parts,
                first_block_timeout,
            } => {
                let regions = &self.agent.regions;
                let selection = BlockSelection {
                    session,
                    handoff,
                    positions: SelectedPositions::of(&parts, |region| regions.contains_key(region)),
                    deadline: cx.links.now() + first_block_timeout,
                };
                let messages = self.producer.select(selection);
                send_all(cx.links, messages);
            }
            HandoffMessage::BlocksReady { epoch, blocks } => {
                self.blocks_announced(cx, session, handoff, epoch, &blocks);
            }
            HandoffMessage::Ended { reason } => {
                if let Some(id) = self.loads.at(session, handoff) {
                    self.withdraw_load(id);
                    self.fail_load(cx, id, FailureCause::Ended, &reason);
                }
            }
            HandoffMessage::Ack => {
                let epoch = self.producer.epoch(&handoff);
                if let Some(messages) = self.producer.acknowledge(session, handoff) {
                    send_all(cx.links, messages);
                    revoke(cx, grant(epoch));
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

impl TransferService for HandoffService {
    type Command = AgentCommand;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, cx: &mut Cx<'_>, command: AgentCommand) {
        match command {
            AgentCommand::Handoff(command) => self.run_command(cx, command),
            AgentCommand::Blocks(command) => self.agent.command(cx, command),
        }
    }

    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, peer: &Identity) {
        self.agent.session_up(cx.links, session, peer);
        self.count_sessions(cx.links);
    }

    fn data_path_changed(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        self.agent.data_path_changed(cx.links, session);
        self.count_sessions(cx.links);
    }

    fn session_down(&mut self, cx: &mut Cx<'_>, session: SessionKey, error: Error) {
        self.producer.session_down(session);
        self.agent.session_down(session, &error);
        self.count_sessions(cx.links);
        self.lost_sessions.push((session, error));
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        if HandoffMessage::is_kind(kind) {
            let (handoff, message) = HandoffMessage::decode(kind, header, &data)?;
            self.handoff_message(cx, session, handoff, message);
            return Ok(());
        }
        match self.agent.message(cx, session, (kind, header), &data)? {
            AgentEvent::RegionsDescribed => self.regions_described(cx, session),
            AgentEvent::Divided(divided) => self.announce_slices(cx, divided),
            AgentEvent::Nothing => {}
        }
        Ok(())
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let holds = |grant| grant_holds(&self.producer, &self.shared, grant);
        self.agent
            .exposed_to(request.session, request.source, holds)
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        match self.batches.remove(&completion.owner) {
            Some(reading) => self.batch_ended(cx, reading, completion),
            None => self.agent.transferred(cx, completion),
        }
    }

    fn late(&mut self, cx: &mut Cx<'_>, owner: u64, error: Error) {
        self.agent.late(cx, owner, error);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        // The end of a session is logged before the loads that it fails.
        for text in std::mem::take(&mut self.agent.logs) {
            self.log_line(text);
        }
        for (session, error) in std::mem::take(&mut self.lost_sessions) {
            for id in self.loads.of_session(session) {
                self.session_lost(cx, id, &error);
            }
        }
        let num_leased = self.producer.num_leased();
        self.shared.num_leased.store(num_leased, Ordering::Relaxed);
    }

    fn run_slice(&mut self, cx: &mut Cx<'_>) -> bool {
        self.announce_ready(cx);
        false
    }

    fn has_work(&self) -> bool {
        self.may_announce()
    }

    fn expire(&mut self, cx: &mut Cx<'_>) {
        let messages = self.producer.expire(cx.links.now());
        send_all(cx.links, messages);
        self.expire_loads(cx);
        self.agent.expire(cx);
    }

    fn next_deadline(&mut self, _links: &Links) -> Option<Instant> {
        let first_block = self.producer.next_deadline();
        let fresh_session = self.loads.next_deadline();
        [first_block, fresh_session, self.agent.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    fn log(&mut self, text: String) {
        self.log_line(format!("session.refused {text}"));
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let reason = "the agent was closed";
        for active in self.loads.values_mut() {
            active.load.fail(FailureCause::Cancelled, reason);
        }
        cx.transfers.stop(&cx.links.closed(reason));
        // Reads end before the regions and peers of the agent do.
        while let Some(completion) = cx.transfers.next_completion() {
            self.transferred(cx, completion);
        }
        self.end_digests(cx, reason);
        self.advance(cx);
        self.agent.stop(cx.links, reason);
        for id in self.loads.ids() {
            if let Some(active) = self.loads.get_mut(&id) {
                active.load.cannot_validate();
            }
            self.fail_load(cx, id, FailureCause::Cancelled, reason);
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("batches", self.batches.len()),
            ("ready queue", self.ready.len()),
            ("digests", self.digests.len()),
            ("shifts of digests", self.digests.num_shifts()),
            ("handoffs ended by callers", self.shared.num_ended()),
            ("handoff events", self.shared.events.len()),
        ];
        sizes.extend(self.loads.sizes());
        sizes.extend(self.producer.sizes());
        sizes.extend(self.agent.sizes());
        sizes
    }
}
