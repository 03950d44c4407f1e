//! The client of one or more lookup servers on its reactor: sends each operation, and ends it with the answers.

mod fetches;
mod inserts;
mod selects;

use std::collections::{HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use super::command_queue::{CommandQueue, LookupCommand};
use crate::earliest::Earliest;
use crate::entries::TRANSFERS_IN_FLIGHT;
use crate::entries::messages::EntryMessage;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::transfer::exposed::ExposedBuffers;
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Completer;
use fetches::Fetch;
use inserts::Inserts;
use selects::PendingSelect;

pub(super) struct LookupClient {
    command_queue: Arc<CommandQueue>,
    /// In the order of their addresses.
    sessions: Vec<SessionKey>,
    /// Those that are not lost.
    servers: HashSet<SessionKey>,
    num_up: usize,
    connecting: Option<Completer<()>>,
    inserts: Inserts,
    selects: HashMap<u64, PendingSelect>,
    /// Time of the next check of the grace periods of selects.
    next_looks: Earliest,
    /// Entries that callers have neither consumed nor returned, by the server that leases them.
    delivered: HashMap<u64, SessionKey>,
    /// Entries that are being read from servers, by the select.
    fetches: HashMap<u64, Fetch>,
    /// In the order of the offers; the first one of each server is being read.
    fetch_order: HashMap<SessionKey, VecDeque<u64>>,
    /// Tensors of inserts that the server may read.
    exposed: ExposedBuffers,
    /// With which the server verifies them.
    integrity: Integrity,
    failure: Option<Error>,
}

impl LookupClient {
    pub(super) fn new(command_queue: Arc<CommandQueue>, is_checksummed: bool) -> Self {
        let integrity = Integrity::of_checksums(is_checksummed);
        Self {
            command_queue,
            sessions: Vec::new(),
            servers: HashSet::new(),
            num_up: 0,
            connecting: None,
            inserts: Inserts::default(),
            selects: HashMap::new(),
            next_looks: Earliest::default(),
            delivered: HashMap::new(),
            fetches: HashMap::new(),
            fetch_order: HashMap::new(),
            exposed: ExposedBuffers::default(),
            integrity,
            failure: None,
        }
    }

    fn run_command(&mut self, cx: &mut Cx<'_>, command: LookupCommand) {
        match command {
            LookupCommand::Connect {
                addresses,
                completer,
            } => self.connect(cx, &addresses, completer),
            LookupCommand::Insert(insert) => self.insert(cx, insert),
            LookupCommand::Select(select) => self.select(cx, select),
            LookupCommand::Withdraw(operation) => self.withdraw(cx, operation),
            LookupCommand::Settle {
                operation,
                is_consumed,
            } => {
                if let Some(session) = self.delivered.remove(&operation) {
                    self.settle(cx, (session, operation), is_consumed);
                }
            }
        }
    }

    fn connect(&mut self, cx: &mut Cx<'_>, addresses: &[String], completer: Completer<()>) {
        self.connecting = Some(completer);
        for address in addresses {
            let session = cx.links.connect(address);
            self.sessions.push(session);
            self.servers.insert(session);
        }
    }

    /// # Errors
    /// The servers cannot be asked now: a session was lost, or is not established yet.
    fn check_usable(&self) -> Result<()> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.connecting.is_some() {
            let text = "not all servers have accepted the connection yet";
            return Err(Error::Connect(text.to_owned()));
        }
        Ok(())
    }

    /// Keeps the entry of a select, or gives it back. The server does not answer.
    fn settle(&self, cx: &mut Cx<'_>, (session, target): (SessionKey, u64), is_consumed: bool) {
        let message = if is_consumed {
            EntryMessage::Acknowledge { target }
        } else {
            EntryMessage::Release { target }
        };
        message.send(cx.links, session, self.command_queue.next_operation());
    }

    fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        message: EntryMessage<'_>,
    ) -> Result<()> {
        // Inserts go to the first server.
        let is_first = self.sessions.first() == Some(&session);
        let is_insert = is_first && self.inserts.sent.contains_key(&operation);
        match message {
            EntryMessage::Done if is_insert => self.insert_answered(cx, session, operation, Ok(())),
            EntryMessage::Done => self.consumed(cx, session, operation)?,
            EntryMessage::Refused(error) if is_insert => {
                self.insert_answered(cx, session, operation, Err(error));
            }
            EntryMessage::Refused(error) => self.select_refused(cx, session, operation, error),
            EntryMessage::Offer {
                checksum: None,
                record,
                parts,
            } => return self.offer(cx, session, operation, Ok((&record, parts))),
            EntryMessage::Nothing => self.nothing(session, operation),
            other => {
                let text = format_args!("message {} to a client of a lookup buffer", other.kind());
                return Err(Error::protocol(text));
            }
        }
        Ok(())
    }

    /// Ends all operations. No server reads what was inserted any more.
    fn fail(&mut self, error: &Error) {
        self.command_queue.update_info(|info| {
            info.state = "closed";
            info.num_waiting = 0;
        });
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        self.fail_inserts(error);
        let selects = self.selects.drain();
        for completer in selects.filter_map(|(_, select)| select.completer) {
            completer.complete(Err(error.clone()));
        }
    }

    /// Ends an operation. Its caller may look at the counters then, so they are updated before.
    fn end<T>(&self, completer: Option<Completer<T>>, result: Result<T>) {
        self.count_waiting();
        if let Some(completer) = completer {
            completer.complete(result);
        }
    }

    fn count_waiting(&self) {
        let waiting = self.inserts.queue.len() + self.inserts.sent.len() + self.selects.len();
        self.command_queue
            .update_info(|info| info.num_waiting = waiting);
    }
}

impl TransferService for LookupClient {
    type Command = Infallible;
    const TRANSFERS_IN_FLIGHT: usize = TRANSFERS_IN_FLIGHT;

    fn command(&mut self, _cx: &mut Cx<'_>, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, cx: &mut Cx<'_>, session: SessionKey, _peer: &Identity) {
        self.num_up += 1;
        self.exposed.session_up(session);
        self.data_path_changed(cx, session);
        if self.num_up == self.sessions.len()
            && let Some(completer) = self.connecting.take()
        {
            self.command_queue.update_info(|info| info.state = "open");
            completer.complete(Ok(()));
        }
    }

    fn data_path_changed(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        if let Some(data_path) = cx.links.data_path(session) {
            self.command_queue
                .update_info(|info| data_path.transport().clone_into(&mut info.transport));
        }
    }

    /// Without one of its servers, a client can neither know that no entry matches nor where an entry went: it fails.
    fn session_down(&mut self, cx: &mut Cx<'_>, session: SessionKey, error: Error) {
        self.exposed.session_down(session);
        self.end_fetches(session);
        self.servers.remove(&session);
        self.delivered.retain(|_, from| *from != session);
        let failure = self.failure.get_or_insert(error).clone();
        for &other in &self.servers {
            cx.links
                .close(other, "another of the client's servers is lost");
        }
        // Before its session has ended, a server may read memory that a caller changes once its operation ends.
        if self.servers.is_empty() {
            self.fail(&failure);
        }
    }

    fn message(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        (kind, mut header): (u8, Reader<'_>),
        data: Payload,
    ) -> Result<()> {
        let operation = header.u64()?;
        match EntryMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, session, operation, message)?,
            Err(error @ Error::Corrupt(_)) => self.offer(cx, session, operation, Err(error))?,
            Err(error) => return Err(error),
        }
        self.count_waiting();
        Ok(())
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        self.exposed.requested(request)
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        self.fetched(cx, completion);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        self.advance_fetches(cx);
    }

    /// Runs the commands of callers, which come by a queue of their own.
    fn run_slice(&mut self, cx: &mut Cx<'_>) -> bool {
        let commands = self.command_queue.drain();
        if !commands.is_empty() {
            for command in commands {
                self.run_command(cx, command);
            }
            self.count_waiting();
        }
        false
    }

    fn expire(&mut self, cx: &mut Cx<'_>) {
        self.expire_inserts(cx);
        self.expire_selects(cx);
    }

    fn next_deadline(&mut self, _links: &Links) -> Option<Instant> {
        let next_insert = self.inserts.next_deadline();
        next_insert.into_iter().chain(self.next_looks.at()).min()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        self.command_queue.close();
        let closed = cx.links.closed("the lookup buffer is closed");
        cx.transfers.stop(&closed);
        self.exposed.clear();
        self.fetches.clear();
        self.fetch_order.clear();
        self.fail(&closed);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("servers", self.servers.len()),
            ("lookup commands", self.command_queue.len()),
            ("queued inserts", self.inserts.queue.len()),
            ("sent inserts", self.inserts.sent.len()),
            ("pending selects", self.selects.len()),
            ("delivered entries", self.delivered.len()),
            ("entries on their way", self.fetches.len()),
            ("servers with entries on their way", self.fetch_order.len()),
            ("exposed buffers", self.exposed.len()),
        ]
    }
}

/// Runs when the reactor panics too, without [`stop`](TransferService::stop): later commands would wait for ever.
impl Drop for LookupClient {
    fn drop(&mut self) {
        self.command_queue.close();
    }
}

#[cfg(test)]
mod tests;
