//! The client of one or more lookup servers on its reactor: sends each operation, and ends it with the answers.

mod inserts;
mod selects;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use super::command_queue::{CommandQueue, LookupCommand};
use super::messages::LookupMessage;
use super::tensors::{TRANSFERS_IN_FLIGHT, Tensors};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::{Links, Payload};
use crate::transfer::region::Layout;
use crate::transfer::source::SourceRequest;
use crate::transfer::{Completion, Cx, TransferService};
use crate::transport::Memory;
use crate::work::Completer;
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
    /// When to look at the grace periods of selects.
    next_looks: Earliest,
    /// Entries that callers have neither consumed nor returned, by the server that leases them.
    delivered: HashMap<u64, SessionKey>,
    tensors: Tensors,
    failure: Option<Error>,
}

impl LookupClient {
    pub(super) fn new(command_queue: Arc<CommandQueue>, is_checksummed: bool) -> Self {
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
            tensors: Tensors::new(is_checksummed),
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
                    LookupMessage::Settle { is_consumed }.send(cx.links, session, operation);
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

    fn receive(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        message: LookupMessage<'_>,
    ) -> Result<()> {
        match message {
            LookupMessage::Inserted => self.insert_answered(cx, session, operation, Ok(())),
            LookupMessage::Refused(error) if self.inserts.sent.contains_key(&operation) => {
                self.insert_answered(cx, session, operation, Err(error));
            }
            LookupMessage::Refused(error) => self.select_refused(cx, session, operation, error),
            LookupMessage::Offer { tensors } => {
                return self.offer(cx, session, operation, Ok(&tensors));
            }
            LookupMessage::Nothing => self.nothing(session, operation),
            LookupMessage::Consumed => return self.consumed(cx, session, operation),
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
        self.tensors.session_up(session);
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
        self.tensors.session_down(session);
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
        match LookupMessage::decode(kind, header, &data) {
            Ok(message) => self.receive(cx, session, operation, message)?,
            Err(error @ Error::Corrupt(_)) => self.offer(cx, session, operation, Err(error))?,
            Err(error) => return Err(error),
        }
        self.count_waiting();
        Ok(())
    }

    fn source(&mut self, request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        self.tensors.exposed.requested(request)
    }

    fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        self.tensors.transferred(cx, completion);
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        while let Some((session, operation, items)) = self.tensors.next_arrived() {
            self.arrived(cx, session, operation, items);
        }
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
        self.tensors.stop();
        self.fail(&closed);
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = vec![
            ("servers", self.servers.len()),
            ("lookup commands", self.command_queue.len()),
            ("queued inserts", self.inserts.queue.len()),
            ("sent inserts", self.inserts.sent.len()),
            ("pending selects", self.selects.len()),
            ("delivered entries", self.delivered.len()),
        ];
        sizes.extend(self.tensors.sizes());
        sizes
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
