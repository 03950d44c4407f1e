//! The client's side: operations that are asked of one or more servers.

mod selects;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::desk::{Command, Desk};
use super::inserts::{Insert, Inserts};
use super::messages::{
    INSERTED, NOTHING, OFFER, REFUSED, SETTLE, TAKEN, WITHDRAW, read_refusal, write_select,
};
use super::tensors::Tensors;
use crate::codec::Reader;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::node::{Io, LinkId, Patience, Service};
use crate::pool::Pool;
use crate::transport::Payload;
use crate::work::Completer;
use selects::Select;

struct Server {
    is_up: bool,
    tensors: Tensors,
}

pub(super) struct Client {
    desk: Arc<Desk>,
    is_summed: bool,
    /// In the order of their addresses.
    links: Vec<LinkId>,
    servers: HashMap<LinkId, Server>,
    connecting: Option<Completer<()>>,
    inserts: Inserts,
    selects: HashMap<u64, Select>,
    /// When the selects have to be looked at.
    looks: Earliest,
    /// Entries that callers have not looked at, by the server that keeps them.
    delivered: HashMap<u64, LinkId>,
    pool: Pool,
    failure: Option<Error>,
}

fn say(io: &mut Io, link: LinkId, kind: u8, operation: u64) {
    let header = io.header(link, kind).u64(operation);
    io.message(link, header, Payload::None);
}

fn settle(io: &mut Io, link: LinkId, operation: u64, is_taken: bool) {
    let header = io.header(link, SETTLE).u64(operation).u8(is_taken.into());
    io.message(link, header, Payload::None);
}

impl Client {
    pub(super) fn new(desk: Arc<Desk>, is_summed: bool) -> Self {
        Self {
            desk,
            is_summed,
            links: Vec::new(),
            servers: HashMap::new(),
            connecting: None,
            inserts: Inserts::default(),
            selects: HashMap::new(),
            looks: Earliest::default(),
            delivered: HashMap::new(),
            pool: Pool::default(),
            failure: None,
        }
    }

    fn take_command(&mut self, io: &mut Io, command: Command) {
        match command {
            Command::Connect {
                addresses,
                completer,
            } => self.connect(io, &addresses, completer),
            Command::Insert(insert) => self.insert(io, insert),
            Command::Select {
                operation,
                query,
                timeout,
                completer,
            } => {
                let payload = write_select(&query, timeout);
                let patience = timeout.map(|timeout| Patience::new(io.now, io.now + timeout));
                self.select(io, operation, &payload, patience, completer);
            }
            Command::Withdraw(operation) => self.withdraw(io, operation),
            Command::Settle {
                operation,
                is_taken,
            } => {
                if let Some(link) = self.delivered.remove(&operation) {
                    settle(io, link, operation, is_taken);
                }
            }
        }
    }

    fn connect(&mut self, io: &mut Io, addresses: &[String], completer: Completer<()>) {
        self.connecting = Some(completer);
        for address in addresses {
            let link = io.connect(address);
            self.links.push(link);
            let server = Server {
                is_up: false,
                tensors: Tensors::new(link, self.pool.clone(), self.is_summed),
            };
            self.servers.insert(link, server);
        }
    }

    /// Why nothing can be asked of the servers now.
    fn obstacle(&self) -> Option<Error> {
        let text = "not all servers have accepted the connection yet";
        let connecting = self.connecting.as_ref();
        let early = connecting.map(|_| Error::Connect(text.to_owned()));
        self.failure.clone().or(early)
    }

    fn insert(&mut self, io: &mut Io, insert: Insert) {
        if let Some(error) = self.obstacle() {
            return insert.completer.complete(Err(error));
        }
        self.inserts.add(insert);
        self.post(io);
    }

    fn post(&mut self, io: &mut Io) {
        let first = self.links.first();
        if let Some((&link, server)) =
            first.and_then(|link| Some((link, self.servers.get_mut(link)?)))
        {
            self.inserts.post(io, link, &mut server.tensors.outgoing);
        }
        self.tell_failed();
    }

    fn tell_failed(&mut self) {
        for (completer, error) in self.inserts.take_failed() {
            self.end(completer, Err(error));
        }
    }

    fn inserted(&mut self, io: &mut Io, link: LinkId, operation: u64, result: Result<()>) {
        if let Some(server) = self.servers.get_mut(&link) {
            server.tensors.outgoing.release(operation);
        }
        if let Some(completer) = self.inserts.answered(operation) {
            self.desk
                .count(|info| info.num_inserted += u64::from(result.is_ok()));
            self.end(completer, result);
        }
        self.post(io);
    }

    fn refused(&mut self, io: &mut Io, link: LinkId, operation: u64, error: Error) {
        if self.inserts.is_sent(operation) {
            return self.inserted(io, link, operation, Err(error));
        }
        let Some(select) = self.selects.get_mut(&operation) else {
            return;
        };
        // Another one has offered, and this one's answer was on its way when it was told.
        if !select.asked.remove(&link) {
            return;
        }
        for other in select.asked.drain() {
            say(io, other, WITHDRAW, operation);
        }
        if let Some(select) = self.selects.remove(&operation) {
            self.end(select.completer, Err(error));
        }
    }

    /// Goes on with what a server's offers bring.
    fn advance(&mut self, io: &mut Io, link: LinkId) {
        let Some(server) = self.servers.get_mut(&link) else {
            return;
        };
        for arrived in server.tensors.incoming.advance(io) {
            self.arrived(io, link, arrived);
        }
    }

    /// Ends all that was asked for. Nobody reads what was inserted any more.
    fn fail(&mut self, error: &Error) {
        self.desk.count(|info| {
            info.state = "closed";
            info.num_waiting = 0;
        });
        if let Some(completer) = self.connecting.take() {
            completer.complete(Err(error.clone()));
        }
        for server in self.servers.values_mut() {
            server.tensors.outgoing.clear();
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
        self.desk.count(|info| info.num_waiting = waiting);
    }

    fn server(&mut self, link: LinkId) -> Result<&mut Server> {
        let unknown = || Error::protocol("a message of a server that is not connected");
        self.servers.get_mut(&link).ok_or_else(unknown)
    }
}

impl Service for Client {
    type Command = Infallible;

    fn command(&mut self, _io: &mut Io, command: Infallible) {
        match command {}
    }

    fn link_up(&mut self, io: &mut Io, link: LinkId, _peer: &Identity) {
        if let Some(server) = self.servers.get_mut(&link) {
            server.is_up = true;
        }
        if let Some(road) = io.road(link) {
            self.desk
                .count(|info| road.transport().clone_into(&mut info.transport));
        }
        if self.servers.values().all(|server| server.is_up)
            && let Some(completer) = self.connecting.take()
        {
            self.desk.count(|info| info.state = "open");
            completer.complete(Ok(()));
        }
    }

    /// Without one of its servers a client can neither promise that there is nothing nor where an entry went: it ends.
    fn link_down(&mut self, io: &mut Io, link: LinkId, error: Error) {
        self.servers.remove(&link);
        self.delivered.retain(|_, from| *from != link);
        let failure = self.failure.get_or_insert(error).clone();
        for &other in self.servers.keys() {
            io.close(other, "another of the client's servers is lost");
        }
        // Until then one of them may read what a caller changes as soon as he is told.
        if self.servers.is_empty() {
            self.fail(&failure);
        }
    }

    fn frame(&mut self, _io: &mut Io, _link: LinkId, _frame: &[u8]) -> Result<()> {
        Err(Error::protocol(
            "the server of a lookup buffer sent a frame",
        ))
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        let (kind, id) = (reader.u8()?, reader.u64()?);
        match kind {
            INSERTED => self.inserted(io, link, id, Ok(())),
            REFUSED => self.refused(io, link, id, read_refusal(&data)?),
            OFFER => self.offer(io, link, id, reader, &data)?,
            NOTHING => self.nothing(link, id),
            TAKEN => self.taken(io, link, id)?,
            other => {
                let tensors = &mut self.server(link)?.tensors;
                if !tensors.message(io, link, (other, id), reader, &data)? {
                    let text = format_args!("message {other} to a client of a lookup buffer");
                    return Err(Error::protocol(text));
                }
            }
        }
        drop(data);
        self.advance(io, link);
        self.count_waiting();
        Ok(())
    }

    fn done(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        let owner = self.servers.iter_mut().find_map(|(link, server)| {
            server
                .tensors
                .incoming
                .done(io, token, result)
                .then_some(*link)
        });
        if let Some(link) = owner {
            self.advance(io, link);
        }
    }

    fn work(&mut self, io: &mut Io) -> bool {
        let mut commands = self.desk.take();
        if !commands.is_empty() {
            for command in commands.drain(..) {
                self.take_command(io, command);
            }
            self.count_waiting();
        }
        self.servers
            .iter_mut()
            .any(|(link, server)| server.tensors.outgoing.sum_on(io, *link))
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        let next = self.inserts.expire(io.now);
        // The first one may have given up, and the next one be less.
        self.post(io);
        let first = self.links.first().copied();
        let unanswered = first.and_then(|link| self.inserts.watch(io, link));
        self.expire_selects(io);
        let idle = self.pool.expire(io.now);
        let looks = self.looks.at().into_iter().chain(unanswered);
        next.into_iter().chain(idle).chain(looks).min()
    }

    fn stop(&mut self, io: &mut Io) {
        self.desk.close();
        self.fail(&io.closed("the lookup buffer is closed"));
    }
}

/// Also without [`stop`](Service::stop), as when the node panics: else what is handed in later would wait for ever.
impl Drop for Client {
    fn drop(&mut self) {
        self.desk.close();
    }
}

#[cfg(test)]
#[cfg(feature = "fuzzing")]
mod tests;
