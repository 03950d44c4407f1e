//! A buffer's service for other processes: their inserts and selects, which it passes to the shared state, and the leases
//! of what they have not acknowledged.

mod client;

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, Status};

use super::Items;
use super::copying::Copying;
use super::messages::{
    INSERT, INSERTED, NOTHING, OFFER, REFUSED, SELECT, SETTLE, TAKE, TAKEN, WITHDRAW, read_select,
    read_timeout, read_tokens, write_refusal,
};
use super::shared::Shared;
use super::store::{Action, Ticket};
use super::tensors::Tensors;
use super::transfer::{Arrived, Parcel, check_operation, check_seal, seal};
use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::node::{Io, LinkId, Service};
use crate::pool::Pool;
use crate::transport::Payload;
use client::{Client, Insert, Select};

pub(super) struct Server {
    shared: Arc<Shared>,
    is_summed: bool,
    clients: HashMap<LinkId, Client>,
    /// They get their checksums in turns. Whose turn was last is the last one here.
    turns: VecDeque<LinkId>,
    /// Whose tickets those are that have not met their other side.
    tickets: HashMap<Ticket, (LinkId, u64)>,
    pool: Pool,
    /// An insert of this process, of whose copy each round does a slice.
    copying: Option<Copying>,
}

fn after(timeout: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(timeout?)
}

fn say(io: &mut Io, link: LinkId, kind: u8, operation: u64) {
    let header = io.header(link, kind).u64(operation);
    io.message(link, header, Payload::None);
}

fn refuse(io: &mut Io, link: LinkId, operation: u64, error: &Error) {
    let header = io.header(link, REFUSED).u64(operation);
    io.message(link, header, Payload::Bytes(write_refusal(error)));
}

impl Server {
    pub(super) fn new(shared: Arc<Shared>, is_summed: bool) -> Self {
        Self {
            shared,
            is_summed,
            clients: HashMap::new(),
            turns: VecDeque::new(),
            tickets: HashMap::new(),
            pool: Pool::default(),
            copying: None,
        }
    }

    fn client(&mut self, link: LinkId) -> Result<&mut Client> {
        let unknown = || Error::protocol("a message of a client that is not connected");
        self.clients.get_mut(&link).ok_or_else(unknown)
    }

    fn insert(
        &mut self,
        io: &mut Io,
        link: LinkId,
        operation: u64,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<()> {
        let sum = header.u64()?;
        header.end()?;
        if let Err(error) = check_seal(sum, payload) {
            refuse(io, link, operation, &error);
            return Ok(());
        }
        let mut reader = Reader::new(payload);
        let deadline = after(read_timeout(&mut reader)?);
        let tokens = read_tokens(&mut reader)?;
        let parcel = Parcel::read(reader)?;
        let num_bytes = parcel.entry_bytes(&tokens);
        self.client(link)?.check_insert(operation, &tokens)?;
        let ticket = match self.shared.reserve(num_bytes, deadline) {
            Ok(ticket) => ticket,
            Err(error) => {
                refuse(io, link, operation, &error);
                return Ok(());
            }
        };
        self.tickets.insert(ticket, (link, operation));
        let client = self.client(link)?;
        client.tensors.incoming.add(operation, parcel);
        let insert = Insert {
            ticket,
            tokens: tokens.into(),
            num_bytes,
        };
        client.inserts.insert(operation, insert);
        Ok(())
    }

    fn select(&mut self, io: &mut Io, link: LinkId, operation: u64, payload: &[u8]) -> Result<()> {
        let (query, timeout) = read_select(payload)?;
        let client = self.client(link)?;
        client.check_select(operation)?;
        if let Err(error) = client.check_tokens(&query) {
            refuse(io, link, operation, &error);
            return Ok(());
        }
        let num_tokens = query.num_tokens();
        let ticket = self.shared.select(query, after(timeout))?;
        self.tickets.insert(ticket, (link, operation));
        let waiting = Select::Waiting { ticket, num_tokens };
        self.client(link)?.selects.insert(operation, waiting);
        Ok(())
    }

    /// Does what the shared state has for clients.
    fn take_mail(&mut self, io: &mut Io) {
        for action in self.shared.take_mail() {
            let (Action::Grant(ticket)
            | Action::Full(ticket)
            | Action::Nothing(ticket)
            | Action::Deliver { select: ticket, .. }) = &action;
            match self.tickets.remove(ticket) {
                Some((link, operation)) => self.act(io, link, operation, action),
                None => self.decline(&action),
            }
        }
    }

    /// The client is gone, or has withdrawn.
    fn decline(&self, action: &Action<Items>) {
        match action {
            Action::Grant(ticket) => self.shared.forget(*ticket),
            Action::Deliver { entry, .. } => self.shared.put_back(*entry),
            Action::Full(_) | Action::Nothing(_) => {}
        }
    }

    fn act(&mut self, io: &mut Io, link: LinkId, operation: u64, action: Action<Items>) {
        let Some(client) = self.clients.get_mut(&link) else {
            return self.decline(&action);
        };
        match action {
            Action::Grant(_) => {
                client.tensors.incoming.begin(operation);
                self.advance(io, link);
            }
            Action::Full(_) => {
                client.tensors.incoming.forget(operation);
                let num_bytes = client
                    .inserts
                    .remove(&operation)
                    .map_or(0, |insert| insert.num_bytes);
                refuse(io, link, operation, &self.shared.full(num_bytes));
            }
            Action::Nothing(_) => {
                client.selects.remove(&operation);
                say(io, link, NOTHING, operation);
            }
            Action::Deliver { entry, content, .. } => {
                self.offer(io, link, operation, entry, &content);
            }
        }
    }

    fn offer(&mut self, io: &mut Io, link: LinkId, operation: u64, entry: Ticket, items: &Items) {
        let Some(client) = self.clients.get_mut(&link) else {
            return;
        };
        let outgoing = &mut client.tensors.outgoing;
        match outgoing.write(io, link, operation, items, Writer::default()) {
            Ok(writer) => {
                let (sum, payload) = seal(writer);
                let header = io.header(link, OFFER).u64(operation).u64(sum);
                client.selects.insert(operation, Select::Leased(entry));
                io.message(link, header, Payload::Bytes(payload));
            }
            Err(error) => {
                outgoing.release(operation);
                client.selects.remove(&operation);
                self.shared.put_back(entry);
                refuse(io, link, operation, &error);
            }
        }
    }

    /// Goes on with what a client's inserts bring, and makes visible what is here whole.
    fn advance(&mut self, io: &mut Io, link: LinkId) {
        let Some(client) = self.clients.get_mut(&link) else {
            return;
        };
        for arrived in client.tensors.incoming.advance(io) {
            self.arrived(io, link, arrived);
        }
    }

    fn arrived(&mut self, io: &mut Io, link: LinkId, (operation, items): Arrived) {
        let client = self.clients.get_mut(&link);
        let Some(insert) = client.and_then(|client| client.inserts.remove(&operation)) else {
            return;
        };
        let committed =
            items.and_then(|items| self.shared.commit(insert.ticket, insert.tokens, items));
        match committed {
            Ok(()) => say(io, link, INSERTED, operation),
            Err(error) => {
                self.shared.forget(insert.ticket);
                refuse(io, link, operation, &error);
            }
        }
    }

    fn take(&mut self, io: &mut Io, link: LinkId, operation: u64) -> Result<()> {
        let client = self.client(link)?;
        let Some(select) = client.selects.get_mut(&operation) else {
            return Err(Error::protocol(format_args!(
                "select {operation} is unknown"
            )));
        };
        let Select::Leased(entry) = *select else {
            return Err(Error::protocol(format_args!(
                "select {operation} has no lease"
            )));
        };
        *select = Select::Taken(entry);
        client.tensors.outgoing.release(operation);
        self.shared.acknowledge();
        say(io, link, TAKEN, operation);
        Ok(())
    }

    fn settle(&mut self, link: LinkId, operation: u64, is_taken: bool) -> Result<()> {
        let client = self.client(link)?;
        // One that breaks the rules ends with the link, which puts its entry back.
        let may_settle = |select: &Select| match select {
            Select::Taken(_) => true,
            Select::Leased(_) => !is_taken,
            Select::Waiting { .. } => false,
        };
        if !client.selects.get(&operation).is_some_and(may_settle) {
            return Err(Error::protocol(format_args!(
                "select {operation} has no lease"
            )));
        }
        client.tensors.outgoing.release(operation);
        if let Some(select) = client.selects.remove(&operation) {
            self.abandon(select, is_taken);
        }
        Ok(())
    }

    /// A select that waits or was just offered an entry, or an insert that has no place yet. Others end as they go.
    fn withdraw(&mut self, io: &mut Io, link: LinkId, operation: u64) -> Result<()> {
        let client = self.client(link)?;
        if let Some(select) = client.selects.remove(&operation) {
            client.tensors.outgoing.release(operation);
            self.abandon(select, false);
        } else if client.tensors.incoming.forget(operation)
            && let Some(insert) = client.inserts.remove(&operation)
        {
            self.forget(insert.ticket);
            refuse(io, link, operation, &Error::Closed("withdrawn".to_owned()));
        }
        Ok(())
    }

    fn forget(&mut self, ticket: Ticket) {
        self.tickets.remove(&ticket);
        self.shared.forget(ticket);
    }

    /// Computes and tells some checksums of the client whose turn it is; whether there were any.
    fn sum_on(&mut self, io: &mut Io) -> bool {
        let clients = &mut self.clients;
        let had_some = |link: &LinkId| {
            let client = clients.get_mut(link);
            client.is_some_and(|client| client.tensors.outgoing.sum_on(io, *link))
        };
        let Some(at) = self.turns.iter().position(had_some) else {
            return false;
        };
        let link = self.turns.remove(at);
        self.turns.extend(link);
        true
    }

    /// A client is gone: what it has of the buffer goes back.
    fn release(&mut self, client: Client) {
        for insert in client.inserts.into_values() {
            self.forget(insert.ticket);
        }
        for select in client.selects.into_values() {
            self.abandon(select, true);
        }
    }

    /// A client ends: of what it was told to be its own, `keeps_taken` says whose it is.
    fn abandon(&mut self, select: Select, keeps_taken: bool) {
        match select {
            Select::Waiting { ticket, .. } => self.forget(ticket),
            Select::Leased(entry) => self.shared.put_back(entry),
            Select::Taken(entry) => self.shared.conclude(entry, keeps_taken),
        }
    }
}

impl Service for Server {
    type Command = Infallible;

    fn command(&mut self, _io: &mut Io, command: Infallible) {
        match command {}
    }

    fn link_up(&mut self, _io: &mut Io, link: LinkId, _peer: &Identity) {
        let tensors = Tensors::new(link, self.pool.clone(), self.is_summed);
        self.clients.insert(link, Client::new(tensors));
        self.turns.push_back(link);
    }

    fn link_down(&mut self, _io: &mut Io, link: LinkId, _error: Error) {
        if let Some(client) = self.clients.remove(&link) {
            self.turns.retain(|other| *other != link);
            self.release(client);
        }
    }

    fn frame(&mut self, _io: &mut Io, _link: LinkId, _frame: &[u8]) -> Result<()> {
        Err(Error::protocol("a client of a lookup buffer sent a frame"))
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        let (kind, id) = (reader.u8()?, reader.u64()?);
        match kind {
            INSERT => {
                check_operation(id)?;
                self.insert(io, link, id, reader, &data)?;
            }
            SELECT => {
                check_operation(id)?;
                self.select(io, link, id, &data)?;
            }
            TAKE => self.take(io, link, id)?,
            SETTLE => self.settle(link, id, reader.flag()?)?,
            WITHDRAW => self.withdraw(io, link, id)?,
            other => {
                let tensors = &mut self.client(link)?.tensors;
                if !tensors.message(io, link, (other, id), reader, &data)? {
                    let text = format_args!("message {other} to a lookup buffer");
                    return Err(Error::protocol(text));
                }
            }
        }
        drop(data);
        self.advance(io, link);
        self.take_mail(io);
        Ok(())
    }

    fn done(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        let owner = self.clients.iter_mut().find_map(|(link, client)| {
            client
                .tensors
                .incoming
                .done(io, token, result)
                .then_some(*link)
        });
        if let Some(link) = owner {
            self.advance(io, link);
            self.take_mail(io);
        }
    }

    fn work(&mut self, io: &mut Io) -> bool {
        let has_copied = self.shared.copy_on(&mut self.copying);
        self.take_mail(io);
        self.sum_on(io) || has_copied
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        if self.shared.next_deadline().is_some_and(|at| at <= io.now) {
            self.shared.expire();
            self.take_mail(io);
        }
        let idle = self.pool.expire(io.now);
        self.shared.next_deadline().into_iter().chain(idle).min()
    }
}

/// Also when the node panics: the buffer itself is as good as before.
impl Drop for Server {
    fn drop(&mut self) {
        for (_, client) in std::mem::take(&mut self.clients) {
            self.release(client);
        }
        // Those who are released now can have been delivered what others gave back.
        loop {
            let mail = self.shared.take_mail();
            if mail.is_empty() {
                break;
            }
            for action in mail {
                self.decline(&action);
            }
        }
        self.shared.end_copies(self.copying.take());
    }
}

#[cfg(test)]
#[cfg(feature = "fuzzing")]
mod tests;
