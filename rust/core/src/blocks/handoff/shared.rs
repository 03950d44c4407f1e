//! State of handoffs that the reactor's thread and callers share.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::load_request::{LoadCounts, LoadFailure};
use super::service::HandoffCommand;
use crate::blocks::{AgentCommand, SessionTransport};
use crate::events::Events;
use crate::ids::HandoffId;
use crate::reactor::CommandHandle;
use crate::sync::lock;

/// An event on the reactor's thread, for the caller that drains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Every block of a load is here and verified; the sequence state is not, as far as this thread knows.
    BlocksVerified(LoadReport),
    /// A load is complete: every block is here and verified. The producer has been sent ACK, unless the load is shared.
    LoadCompleted(LoadReport),
    /// A load is over and incomplete; nothing writes into its blocks any more.
    LoadFailed(LoadReport, LoadFailure),
    /// A consumer has everything of a handoff that is leased here.
    Acknowledged {
        /// The handoff.
        handoff: HandoffId,
    },
    /// One line for people.
    Log(String),
}

/// The facts of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadReport {
    /// Its handoff.
    pub handoff: HandoffId,
    /// The producer's worker, as the request of the load named it.
    pub rank: u16,
    /// Its counters.
    pub counts: LoadCounts,
    /// The transport of its session.
    pub transport: SessionTransport,
    /// Time since the load began.
    pub elapsed: Duration,
}

/// State that the reactor's thread and callers share.
#[derive(Debug, Default)]
pub(in crate::blocks) struct HandoffShared {
    pub(super) events: Events<Event>,
    /// Number of ends of a handoff that callers have marked and the reactor's thread has not processed.
    ended: Mutex<HashMap<HandoffId, usize>>,
    pub(super) num_leased: AtomicUsize,
    /// Sessions in which this side reads its peer's memory, and sessions in which it gets streams.
    pub(super) num_sessions: Mutex<(usize, usize)>,
    /// To the reactor, once it runs.
    pub(in crate::blocks) commands: OnceLock<CommandHandle<AgentCommand>>,
}

impl HandoffShared {
    /// A caller ends a handoff: its blocks may change when this returns.
    pub(super) fn mark_ended(&self, handoff: HandoffId) {
        *lock(&self.ended).entry(handoff).or_default() += 1;
    }

    /// The producer knows of one of these ends.
    pub(super) fn end_processed(&self, handoff: HandoffId) {
        if let Entry::Occupied(mut ends) = lock(&self.ended).entry(handoff) {
            *ends.get_mut() -= 1;
            if *ends.get() == 0 {
                ends.remove();
            }
        }
    }

    /// The digests of a launch are known. A thread of the CUDA driver's calls.
    pub(super) fn digested(&self, number: u64) {
        if let Some(commands) = self.commands.get() {
            drop(commands.send(AgentCommand::Handoff(HandoffCommand::Digested(number))));
        }
    }

    pub(super) fn log_line(&self, text: String) {
        self.events.push_minor(Event::Log(text));
    }

    #[cfg(test)]
    pub(super) fn num_ended(&self) -> usize {
        lock(&self.ended).len()
    }

    /// True if a caller has ended a handoff whose end the producer does not know of.
    pub(super) fn has_ended(&self, handoff: &HandoffId) -> bool {
        lock(&self.ended).contains_key(handoff)
    }
}
