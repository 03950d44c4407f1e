//! The client's side: operations that are asked of one or more servers.

mod selects;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::command_queue::{CommandQueue, LookupCommand};
use super::inserts::{InsertQueue, QueuedInsert};
use super::messages::{
    CONSUMED, INSERTED, NOTHING, OFFER, REFUSED, SETTLE, WITHDRAW, read_refusal, write_select,
};
use super::tensors::Tensors;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::identity::Identity;
use crate::session::grace::GracePeriod;
use crate::session::{ReactorContext, Service};
use crate::transfer::Message;
use crate::transport::Payload;
use crate::work::Completer;
use selects::PendingSelect;

struct ServerSession {
    is_up: bool,
}

pub(super) struct LookupClient {
    command_queue: Arc<CommandQueue>,
    /// In the order of their addresses.
    sessions: Vec<SessionKey>,
    servers: HashMap<SessionKey, ServerSession>,
    connecting: Option<Completer<()>>,
    inserts: InsertQueue,
    selects: HashMap<u64, PendingSelect>,
    /// When the selects have to be looked at.
    looks: Earliest,
    /// Entries that callers have not looked at, by the server that keeps them.
    delivered: HashMap<u64, SessionKey>,
    tensors: Tensors,
    failure: Option<Error>,
}

fn say(cx: &mut ReactorContext, session: SessionKey, kind: u8, operation: u64) {
    let header = cx.header(session, kind).u64(operation);
    cx.message(session, header, Payload::None);
}

fn settle(cx: &mut ReactorContext, session: SessionKey, operation: u64, is_consumed: bool) {
    let header = cx
        .header(session, SETTLE)
        .u64(operation)
        .u8(is_consumed.into());
    cx.message(session, header, Payload::None);
}

impl LookupClient {
    pub(super) fn new(command_queue: Arc<CommandQueue>, is_checksummed: bool) -> Self {
        Self {
            command_queue,
            sessions: Vec::new(),
            servers: HashMap::new(),
            connecting: None,
            inserts: InsertQueue::default(),
            selects: HashMap::new(),
            looks: Earliest::default(),
            delivered: HashMap::new(),
            tensors: Tensors::new(is_checksummed),
            failure: None,
        }
    }

    fn take_command(&mut self, cx: &mut ReactorContext, command: LookupCommand) {
        match command {
            LookupCommand::Connect {
                addresses,
                completer,
            } => self.connect(cx, &addresses, completer),
            LookupCommand::Insert(insert) => self.insert(cx, insert),
            LookupCommand::Select {
                operation,
                query,
                timeout,
                completer,
            } => {
                let payload = write_select(&query, timeout);
                let grace = timeout.map(|timeout| GracePeriod::new(cx.now(), cx.now() + timeout));
                self.select(cx, operation, &payload, grace, completer);
            }
            LookupCommand::Withdraw(operation) => self.withdraw(cx, operation),
            LookupCommand::Settle {
                operation,
                is_consumed,
            } => {
                if let Some(session) = self.delivered.remove(&operation) {
                    settle(cx, session, operation, is_consumed);
                }
            }
        }
    }

    fn connect(&mut self, cx: &mut ReactorContext, addresses: &[String], completer: Completer<()>) {
        self.connecting = Some(completer);
        for address in addresses {
            let session = cx.connect(address);
            self.sessions.push(session);
            self.servers.insert(session, ServerSession { is_up: false });
        }
    }

    /// Why nothing can be asked of the servers now.
    fn obstacle(&self) -> Option<Error> {
        let text = "not all servers have accepted the connection yet";
        let connecting = self.connecting.as_ref();
        let early = connecting.map(|_| Error::Connect(text.to_owned()));
        self.failure.clone().or(early)
    }

    fn insert(&mut self, cx: &mut ReactorContext, insert: QueuedInsert) {
        if let Some(error) = self.obstacle() {
            return insert.completer.complete(Err(error));
        }
        self.inserts.add(insert);
        self.post(cx);
    }

    fn post(&mut self, cx: &mut ReactorContext) {
        let first = self.sessions.first().copied();
        if let Some(session) = first.filter(|session| self.servers.contains_key(session)) {
            self.inserts.post(cx, session, &mut self.tensors);
        }
        self.tell_failed();
    }

    fn tell_failed(&mut self) {
        for (completer, error) in self.inserts.take_failed() {
            self.end(completer, Err(error));
        }
    }

    fn inserted(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        result: Result<()>,
    ) {
        self.tensors.release(session, operation);
        if let Some(completer) = self.inserts.answered(operation) {
            self.command_queue
                .count(|info| info.num_inserted += u64::from(result.is_ok()));
            self.end(completer, result);
        }
        self.post(cx);
    }

    fn refused(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        error: Error,
    ) {
        if self.inserts.is_sent(operation) {
            return self.inserted(cx, session, operation, Err(error));
        }
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        // Another one has offered, and this one's answer was on its way when it was told.
        if !select.asked.remove(&session) {
            return;
        }
        for other in select.asked.drain() {
            say(cx, other, WITHDRAW, operation);
        }
        if let Some(select) = self.selects.remove(&operation) {
            self.end(select.completer, Err(error));
        }
    }

    /// Goes on with what a server's offers bring.
    fn advance(&mut self, cx: &mut ReactorContext) {
        while let Some((session, arrived)) = self.tensors.next_arrived(cx) {
            self.arrived(cx, session, arrived);
        }
    }

    /// Ends all that was asked for. Nobody reads what was inserted any more.
    fn fail(&mut self, error: &Error) {
        self.command_queue.count(|info| {
            info.state = "closed";
            info.num_waiting = 0;
        });
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        self.inserts.fail(error);
        let selects = self.selects.drain();
        for completer in selects.filter_map(|(_, select)| select.completer) {
            completer.complete(Err(error.clone()));
        }
    }

    /// Tells the caller, who may look at the counters then.
    fn end<T>(&self, completer: impl Into<Option<Completer<T>>>, result: Result<T>) {
        self.count_waiting();
        if let Some(completer) = completer.into() {
            completer.complete(result);
        }
    }

    fn count_waiting(&self) {
        let waiting = self.inserts.len() + self.selects.len();
        self.command_queue.count(|info| info.num_waiting = waiting);
    }
}

impl Service for LookupClient {
    type Command = Infallible;

    fn command(&mut self, _io: &mut ReactorContext, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, _peer: &Identity) {
        if let Some(server) = self.servers.get_mut(&session) {
            server.is_up = true;
        }
        self.tensors.session_up(session);
        if let Some(data_path) = cx.data_path(session) {
            self.command_queue
                .count(|info| data_path.transport().clone_into(&mut info.transport));
        }
        if self.servers.values().all(|server| server.is_up)
            && let Some(completer) = self.connecting.take()
        {
            self.command_queue.count(|info| info.state = "open");
            completer.complete(Ok(()));
        }
    }

    /// Without one of its servers a client can neither promise that there is nothing nor where an entry went: it ends.
    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.tensors.session_down(cx, session, &error);
        self.servers.remove(&session);
        self.delivered.retain(|_, from| *from != session);
        let failure = self.failure.get_or_insert(error).clone();
        for &other in self.servers.keys() {
            cx.close(other, "another of the client's servers is lost");
        }
        // Until then one of them may read what a caller changes as soon as he is told.
        if self.servers.is_empty() {
            self.fail(&failure);
        }
    }

    fn frame(&mut self, _io: &mut ReactorContext, _link: SessionKey, _frame: &[u8]) -> Result<()> {
        Err(Error::protocol(
            "the server of a lookup buffer sent a frame",
        ))
    }

    fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: &[u8],
        data: AmData,
    ) -> Result<()> {
        let mut reader = Reader::new(header);
        let kind = reader.u8()?;
        if Message::is_kind(kind) {
            self.tensors.message(cx, session, (kind, reader), &data)?;
            drop(data);
            self.advance(cx);
            self.count_waiting();
            return Ok(());
        }
        let id = reader.u64()?;
        match kind {
            INSERTED => self.inserted(cx, session, id, Ok(())),
            REFUSED => self.refused(cx, session, id, read_refusal(&data)?),
            OFFER => self.offer(cx, session, id, reader, &data)?,
            NOTHING => self.nothing(session, id),
            CONSUMED => self.taken(cx, session, id)?,
            other => {
                let text = format_args!("message {other} to a client of a lookup buffer");
                return Err(Error::protocol(text));
            }
        }
        drop(data);
        self.advance(cx);
        self.count_waiting();
        Ok(())
    }

    fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        self.tensors.read_ended(cx, token, result);
        self.advance(cx);
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        let mut commands = self.command_queue.take();
        if !commands.is_empty() {
            for command in commands.drain(..) {
                self.take_command(cx, command);
            }
            self.count_waiting();
        }
        let has_worked = self.tensors.run_slice(cx);
        self.advance(cx);
        has_worked
    }

    fn has_work(&self) -> bool {
        self.tensors.has_work()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let next = self.inserts.expire(cx.now());
        // The first one may have given up, and the next one be less.
        self.post(cx);
        let first = self.sessions.first().copied();
        let unanswered = first.and_then(|session| self.inserts.watch(cx, session));
        self.expire_selects(cx);
        let idle = self.tensors.expire(cx.now());
        let looks = self.looks.at().into_iter().chain(unanswered);
        next.into_iter().chain(idle).chain(looks).min()
    }

    fn stop(&mut self, cx: &mut ReactorContext) {
        self.command_queue.close();
        let closed = cx.closed("the lookup buffer is closed");
        self.tensors.stop(&closed);
        self.fail(&closed);
    }
}

/// Also without [`stop`](Service::stop), as when the reactor panics: else what is handed in later would wait for ever.
impl Drop for LookupClient {
    fn drop(&mut self) {
        self.command_queue.close();
    }
}

#[cfg(test)]
mod tests;
