//! The control port on its reactor: gives commands, frames and timers to the halves of the control plane, and sends what
//! they put into the outbox.

use std::collections::HashMap;
use std::time::Instant;

use super::checks::{AllowedHosts, Check, Checks};
use super::consumer::ConsumerRole;
use super::deferred_queries::{DeferredQueries, DeferredQuery, ReplyCondition};
use super::messages::ControlMessage;
use super::producer::ProducerRole;
use super::queries::{PendingQueries, PendingQuery};
use super::{
    ControlEvent, ControlQuery, ControlReply, ControlTimeouts, HandoffUpdate, Opening,
    SequenceState,
};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::ids::{HandoffId, RecentHandoffs, SessionKey};
use crate::net::identity::Identity;
use crate::session::{Links, Payload, Service};
use crate::trace::{Trace, Track};

#[derive(Debug)]
pub(super) enum ControlCommand {
    /// Sets the description of this engine, as JSON.
    Describe(String),
    AllowChecks(AllowedHosts),
    Expect(HandoffId),
    Open(HandoffId, Opening),
    Progress {
        handoff: HandoffId,
        ends_at: Instant,
    },
    Finish(HandoffId, SequenceState),
    Withdraw {
        handoff: HandoffId,
        reason: String,
    },
    Watch {
        handoff: HandoffId,
        producer: String,
    },
    Unwatch {
        handoff: HandoffId,
        is_acknowledged: bool,
    },
    /// Sets the result of a handoff, as JSON.
    SetResult(HandoffId, String),
    Query(PendingQuery),
    Trace(Trace),
}

/// Output of the halves of the control plane: messages to peers, events for the scheduler, and trace marks.
#[derive(Default)]
pub(super) struct ControlOutbox {
    pub(super) messages: Vec<(SessionKey, ControlMessage)>,
    pub(super) events: Events<ControlEvent>,
    trace: Trace,
}

impl ControlOutbox {
    pub(super) fn send(&mut self, session: SessionKey, message: ControlMessage) {
        self.messages.push((session, message));
    }

    /// Tells a consumer that watches a handoff.
    pub(super) fn update(
        &mut self,
        session: SessionKey,
        handoff: HandoffId,
        update: HandoffUpdate,
    ) {
        self.send(session, ControlMessage::Update { handoff, update });
    }

    pub(super) fn trace(&self, name: &str, handoff: &HandoffId) {
        self.trace.instant(Track::Reactor, name, handoff, &[]);
    }

    fn log(&self, text: String) {
        self.events.push_minor(ControlEvent::Log(text));
    }

    fn flush(&mut self, links: &mut Links) {
        for (session, message) in self.messages.drain(..) {
            links.send(session, &message.encode());
        }
    }
}

pub(super) struct ControlService {
    timeouts: ControlTimeouts,
    description: String,
    results: RecentHandoffs<String>,
    producer: ProducerRole,
    consumer: ConsumerRole,
    queries: PendingQueries,
    deferred: DeferredQueries,
    checks: Checks,
    by_address: HashMap<String, SessionKey>,
    /// The addresses of sessions that began here.
    addresses: HashMap<SessionKey, String>,
    out: ControlOutbox,
}

impl ControlService {
    pub(super) fn new(events: Events<ControlEvent>, timeouts: ControlTimeouts) -> Self {
        Self {
            timeouts,
            description: "{}".to_owned(),
            results: RecentHandoffs::default(),
            producer: ProducerRole::new(&timeouts),
            consumer: ConsumerRole::new(timeouts.handoff),
            queries: PendingQueries::default(),
            deferred: DeferredQueries::default(),
            checks: Checks::default(),
            by_address: HashMap::new(),
            addresses: HashMap::new(),
            out: ControlOutbox {
                events,
                ..ControlOutbox::default()
            },
        }
    }

    /// The session to an address: the present one, unless it has failed, or a new one.
    fn session_to(&mut self, links: &mut Links, address: &str) -> SessionKey {
        let known = self.by_address.get(address);
        if let Some(&session) = known.filter(|session| !links.has_failed(**session)) {
            return session;
        }
        let session = links.connect(address);
        self.by_address.insert(address.to_owned(), session);
        self.addresses.insert(session, address.to_owned());
        session
    }

    fn watch(&mut self, links: &mut Links, handoff: HandoffId, producer: &str) {
        let session = self.session_to(links, producer);
        self.consumer.watch(links.now(), handoff, session);
        if links.is_up(session) {
            self.consumer.send(&mut self.out, handoff);
        }
    }

    /// Connects to a producer on behalf of a peer, and replies whether that succeeds.
    fn check(&mut self, links: &mut Links, check: Check) {
        if let Some(check) = self.checks.admit(&mut self.out, check) {
            let to_producer = self.session_to(links, &check.producer);
            let is_up = links.is_up(to_producer);
            self.checks.add(&mut self.out, to_producer, check, is_up);
        }
    }

    fn receive(&mut self, links: &mut Links, session: SessionKey, message: ControlMessage) {
        let now = links.now();
        let (producer, consumer, out) = (&mut self.producer, &mut self.consumer, &mut self.out);
        match message {
            ControlMessage::Watch(handoff) => {
                out.trace("watched", &handoff);
                producer.watch(out, now, session, handoff);
            }
            ControlMessage::Unwatch {
                handoff,
                is_acknowledged,
            } => producer.unwatch(out, session, handoff, is_acknowledged),
            ControlMessage::Update { handoff, update } => {
                consumer.update(out, session, handoff, update);
            }
            ControlMessage::Query { id, query } => self.reply_or_defer(links, session, id, query),
            ControlMessage::Reply { id, reply } => self.queries.reply(session, id, reply),
        }
    }

    fn reply_or_defer(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        id: u64,
        query: ControlQuery,
    ) {
        let now = links.now();
        let deadline = now + self.timeouts.open;
        let deferred = |handoff, condition| DeferredQuery {
            session,
            id,
            handoff,
            condition,
            deadline,
        };
        let out = &mut self.out;
        let reply = match query {
            ControlQuery::Describe => ControlReply::Description(self.description.clone()),
            ControlQuery::Release(handoff) => {
                let is_known = self.producer.release(out, handoff, "it was released");
                ControlReply::Known(is_known)
            }
            ControlQuery::Result(handoff) => {
                ControlReply::Result(self.results.get(&handoff).cloned())
            }
            // A time that no clock can represent is no prediction.
            ControlQuery::Progress { handoff, remaining } => {
                let ends_at = now.checked_add(remaining);
                let predict = |ends_at| self.producer.predict_end(&handoff, ends_at);
                ControlReply::Known(ends_at.is_some_and(predict))
            }
            ControlQuery::Subscribe { handoff, lead } => {
                let condition = ReplyCondition::PrefillEnd { lead };
                return self.deferred.add(out, now, deferred(handoff, condition));
            }
            ControlQuery::Check(producer) => {
                let check = Check {
                    session,
                    id,
                    producer,
                };
                return self.check(links, check);
            }
            ControlQuery::Watched(handoff) => {
                let condition = ReplyCondition::Consumer;
                return self.deferred.add(out, now, deferred(handoff, condition));
            }
        };
        out.send(session, ControlMessage::Reply { id, reply });
    }
}

impl Service for ControlService {
    type Command = ControlCommand;

    fn command(&mut self, links: &mut Links, command: ControlCommand) {
        let (producer, out) = (&mut self.producer, &mut self.out);
        match command {
            ControlCommand::Describe(json) => self.description = json,
            ControlCommand::AllowChecks(hosts) => self.checks.allow(hosts),
            ControlCommand::Expect(handoff) => producer.expect(handoff),
            ControlCommand::Open(handoff, opening) => producer.open(out, handoff, opening),
            ControlCommand::Progress { handoff, ends_at } => {
                producer.predict_end(&handoff, ends_at);
            }
            ControlCommand::Finish(handoff, state) => {
                producer.finish(out, links.now(), handoff, state);
            }
            ControlCommand::Withdraw { handoff, reason } => {
                producer.end_handoff(out, handoff, &reason);
            }
            ControlCommand::Watch { handoff, producer } => self.watch(links, handoff, &producer),
            ControlCommand::Unwatch {
                handoff,
                is_acknowledged,
            } => self.consumer.unwatch(out, handoff, is_acknowledged),
            ControlCommand::SetResult(handoff, json) => self.results.insert(handoff, json),
            ControlCommand::Query(query) => {
                let session = self.session_to(links, &query.address);
                let is_up = links.is_up(session);
                self.queries.add(&mut self.out, session, query, is_up);
            }
            ControlCommand::Trace(trace) => out.trace = trace,
        }
        self.out.flush(links);
    }

    fn session_up(&mut self, links: &mut Links, session: SessionKey, peer: &Identity) {
        let (address, engine) = (links.peer(session), &peer.engine_id);
        let text = format!("control.open peer={address} engine_id={engine}");
        self.out.log(text);
        self.consumer.session_up(&mut self.out, session);
        self.queries.session_up(&mut self.out, session);
        self.checks.session_up(&mut self.out, session);
        self.out.flush(links);
    }

    fn session_down(&mut self, links: &mut Links, session: SessionKey, error: Error) {
        let out = &mut self.out;
        if !self.checks.session_down(out, session, &error) {
            out.log(format!("control.closed {error}"));
        }
        if let Some(address) = self.addresses.remove(&session)
            && self.by_address.get(&address) == Some(&session)
        {
            self.by_address.remove(&address);
        }
        self.deferred.session_down(session);
        self.producer.session_down(out, session);
        self.consumer.session_down(out, session, &error);
        self.queries.session_down(session, &error);
        self.out.flush(links);
    }

    fn message(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        header: &[u8],
        _payload: Payload,
    ) -> Result<()> {
        self.receive(links, session, ControlMessage::decode(header)?);
        self.out.flush(links);
        Ok(())
    }

    fn timer(&mut self, links: &mut Links) -> Option<Instant> {
        let (out, now) = (&mut self.out, links.now());
        let deadlines = [
            self.producer.expire(out, now),
            self.consumer.expire(out, now),
            self.queries.expire(now),
            // Last, so that replies tell of what has just expired.
            self.deferred.poll(out, now, &mut self.producer),
        ];
        self.out.flush(links);
        deadlines.into_iter().flatten().min()
    }

    fn log(&mut self, text: String) {
        self.out.log(format!("control.refused {text}"));
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("results", self.results.len()),
            ("control addresses", self.by_address.len()),
            ("addresses of control sessions", self.addresses.len()),
            ("control messages", self.out.messages.len()),
            ("control events", self.out.events.len()),
        ];
        sizes.extend(self.consumer.sizes());
        sizes.extend(self.queries.sizes());
        sizes.extend(self.deferred.sizes());
        sizes.extend(self.checks.sizes());
        sizes.extend(self.producer.sizes());
        sizes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::session::SessionTimeouts;

    #[test]
    fn an_address_whose_session_has_failed_is_connected_to_again() {
        let timeouts = ControlTimeouts {
            session: SessionTimeouts::default(),
            lease: Duration::ZERO,
            open: Duration::ZERO,
            handoff: Duration::ZERO,
        };
        let (mut links, mut service) = (
            Links::manual(None),
            ControlService::new(Events::default(), timeouts),
        );
        let session = service.session_to(&mut links, "127.0.0.1:9");
        assert_eq!(service.session_to(&mut links, "127.0.0.1:9"), session);
        let lost = Error::lost("127.0.0.1:9", "connection closed");
        links.fail(session, lost.clone());
        let again = service.session_to(&mut links, "127.0.0.1:9");
        assert_ne!(again, session);
        service.session_down(&mut links, session, lost.clone());
        assert_eq!(service.session_to(&mut links, "127.0.0.1:9"), again);
        service.session_down(&mut links, again, lost);
        assert!(service.by_address.is_empty() && service.addresses.is_empty());
    }
}
