//! A buffer's service for other processes: their inserts and selects, which it passes to the shared state, and the leases
//! of what they have not acknowledged.

mod client;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, Status};

use super::Items;
use super::copying::EntryCopy;
use super::messages::{
    CONSUME, CONSUMED, INSERT, INSERTED, NOTHING, OFFER, REFUSED, SELECT, SETTLE, WITHDRAW,
    read_select, read_timeout, read_tokens, write_refusal,
};
use super::shared::LookupShared;
use super::store::{StoreAction, Ticket};
use super::tensors::Tensors;
use super::transfer::{Arrived, EntryTransfer, check_operation, check_seal, seal};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::Identity;
use crate::session::{ReactorContext, Service};
use crate::transfer::Message;
use crate::transport::Payload;
use client::{ClientInsert, ClientSelect, ClientSession};

pub(super) struct LookupServer {
    shared: Arc<LookupShared>,
    clients: HashMap<SessionKey, ClientSession>,
    /// Whose tickets those are that have not met their other side.
    tickets: HashMap<Ticket, (SessionKey, u64)>,
    tensors: Tensors,
    /// An insert of this process, of whose copy each round does a slice.
    copying: Option<EntryCopy>,
}

fn after(timeout: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(timeout?)
}

fn say(cx: &mut ReactorContext, session: SessionKey, kind: u8, operation: u64) {
    let header = cx.header(session, kind).u64(operation);
    cx.message(session, header, Payload::None);
}

fn refuse(cx: &mut ReactorContext, session: SessionKey, operation: u64, error: &Error) {
    let header = cx.header(session, REFUSED).u64(operation);
    cx.message(session, header, Payload::Bytes(write_refusal(error)));
}

impl LookupServer {
    pub(super) fn new(shared: Arc<LookupShared>, is_checksummed: bool) -> Self {
        Self {
            shared,
            clients: HashMap::new(),
            tickets: HashMap::new(),
            tensors: Tensors::new(is_checksummed),
            copying: None,
        }
    }

    fn client(&mut self, session: SessionKey) -> Result<&mut ClientSession> {
        let unknown = || Error::protocol("a message of a client that is not connected");
        self.clients.get_mut(&session).ok_or_else(unknown)
    }

    fn insert(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<()> {
        let checksum = header.u64()?;
        header.end()?;
        if let Err(error) = check_seal(checksum, payload) {
            refuse(cx, session, operation, &error);
            return Ok(());
        }
        let mut reader = Reader::new(payload);
        let deadline = after(read_timeout(&mut reader)?);
        let tokens = read_tokens(&mut reader)?;
        let entry = EntryTransfer::read(reader)?;
        let num_bytes = entry.entry_bytes(&tokens);
        self.client(session)?.check_insert(operation, &tokens)?;
        let ticket = match self.shared.reserve(num_bytes, deadline) {
            Ok(ticket) => ticket,
            Err(error) => {
                refuse(cx, session, operation, &error);
                return Ok(());
            }
        };
        self.tickets.insert(ticket, (session, operation));
        self.tensors.add(session, operation, entry);
        let client = self.client(session)?;
        let insert = ClientInsert {
            ticket,
            tokens: tokens.into(),
            num_bytes,
        };
        client.inserts.insert(operation, insert);
        Ok(())
    }

    fn select(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        payload: &[u8],
    ) -> Result<()> {
        let (query, timeout) = read_select(payload)?;
        let client = self.client(session)?;
        client.check_select(operation)?;
        if let Err(error) = client.check_tokens(&query) {
            refuse(cx, session, operation, &error);
            return Ok(());
        }
        let num_tokens = query.num_tokens();
        let ticket = self.shared.select(query, after(timeout))?;
        self.tickets.insert(ticket, (session, operation));
        let waiting = ClientSelect::Waiting { ticket, num_tokens };
        self.client(session)?.selects.insert(operation, waiting);
        Ok(())
    }

    /// Does what the shared state has for clients.
    fn take_mail(&mut self, cx: &mut ReactorContext) {
        for action in self.shared.take_mail() {
            let (StoreAction::Grant(ticket)
            | StoreAction::Full(ticket)
            | StoreAction::Nothing(ticket)
            | StoreAction::Deliver { select: ticket, .. }) = &action;
            match self.tickets.remove(ticket) {
                Some((session, operation)) => self.act(cx, session, operation, action),
                None => self.decline(&action),
            }
        }
    }

    /// The client is gone, or has withdrawn.
    fn decline(&self, action: &StoreAction<Items>) {
        match action {
            StoreAction::Grant(ticket) => self.shared.forget(*ticket),
            StoreAction::Deliver { entry, .. } => self.shared.put_back(*entry),
            StoreAction::Full(_) | StoreAction::Nothing(_) => {}
        }
    }

    fn act(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        action: StoreAction<Items>,
    ) {
        let Some(client) = self.clients.get_mut(&session) else {
            return self.decline(&action);
        };
        match action {
            StoreAction::Grant(_) => {
                self.tensors.begin(cx, session, operation);
                self.advance(cx);
            }
            StoreAction::Full(_) => {
                self.tensors.forget(cx, session, operation);
                let num_bytes = client
                    .inserts
                    .remove(&operation)
                    .map_or(0, |insert| insert.num_bytes);
                refuse(cx, session, operation, &self.shared.full(num_bytes));
            }
            StoreAction::Nothing(_) => {
                client.selects.remove(&operation);
                say(cx, session, NOTHING, operation);
            }
            StoreAction::Deliver { entry, content, .. } => {
                self.offer(cx, session, operation, entry, &content);
            }
        }
    }

    fn offer(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
        entry: Ticket,
        items: &Items,
    ) {
        let Some(client) = self.clients.get_mut(&session) else {
            return;
        };
        let written = self
            .tensors
            .write(cx, session, operation, items, Writer::default());
        match written {
            Ok(writer) => {
                let (checksum, payload) = seal(writer);
                let header = cx.header(session, OFFER).u64(operation).u64(checksum);
                client
                    .selects
                    .insert(operation, ClientSelect::Leased(entry));
                cx.message(session, header, Payload::Bytes(payload));
            }
            Err(error) => {
                self.tensors.release(session, operation);
                client.selects.remove(&operation);
                self.shared.put_back(entry);
                refuse(cx, session, operation, &error);
            }
        }
    }

    /// Goes on with what a client's inserts bring, and makes visible what is here whole.
    fn advance(&mut self, cx: &mut ReactorContext) {
        while let Some((session, arrived)) = self.tensors.next_arrived(cx) {
            self.arrived(cx, session, arrived);
        }
    }

    fn arrived(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (operation, items): Arrived,
    ) {
        let client = self.clients.get_mut(&session);
        let Some(insert) = client.and_then(|client| client.inserts.remove(&operation)) else {
            return;
        };
        let committed =
            items.and_then(|items| self.shared.commit(insert.ticket, insert.tokens, items));
        match committed {
            Ok(()) => say(cx, session, INSERTED, operation),
            Err(error) => {
                self.shared.forget(insert.ticket);
                refuse(cx, session, operation, &error);
            }
        }
    }

    fn take(&mut self, cx: &mut ReactorContext, session: SessionKey, operation: u64) -> Result<()> {
        let client = self.client(session)?;
        let Some(select) = client.selects.get_mut(&operation) else {
            return Err(Error::protocol(format_args!(
                "select {operation} is unknown"
            )));
        };
        let ClientSelect::Leased(entry) = *select else {
            return Err(Error::protocol(format_args!(
                "select {operation} has no lease"
            )));
        };
        *select = ClientSelect::Consumed(entry);
        self.tensors.release(session, operation);
        self.shared.acknowledge();
        say(cx, session, CONSUMED, operation);
        Ok(())
    }

    fn settle(&mut self, session: SessionKey, operation: u64, is_consumed: bool) -> Result<()> {
        let client = self.client(session)?;
        // One that breaks the rules ends with the session, which puts its entry back.
        let may_settle = |select: &ClientSelect| match select {
            ClientSelect::Consumed(_) => true,
            ClientSelect::Leased(_) => !is_consumed,
            ClientSelect::Waiting { .. } => false,
        };
        if !client.selects.get(&operation).is_some_and(may_settle) {
            return Err(Error::protocol(format_args!(
                "select {operation} has no lease"
            )));
        }
        let select = client.selects.remove(&operation);
        self.tensors.release(session, operation);
        if let Some(select) = select {
            self.abandon(select, is_consumed);
        }
        Ok(())
    }

    /// A select that waits or was just offered an entry, or an insert that has no place yet. Others end as they go.
    fn withdraw(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        operation: u64,
    ) -> Result<()> {
        let client = self.client(session)?;
        if let Some(select) = client.selects.remove(&operation) {
            self.tensors.release(session, operation);
            self.abandon(select, false);
        } else if self.tensors.forget(cx, session, operation)
            && let Some(insert) = self.client(session)?.inserts.remove(&operation)
        {
            self.forget(insert.ticket);
            refuse(
                cx,
                session,
                operation,
                &Error::Closed("withdrawn".to_owned()),
            );
        }
        Ok(())
    }

    fn forget(&mut self, ticket: Ticket) {
        self.tickets.remove(&ticket);
        self.shared.forget(ticket);
    }

    /// A client is gone: what it has of the buffer goes back.
    fn release(&mut self, client: ClientSession) {
        for insert in client.inserts.into_values() {
            self.forget(insert.ticket);
        }
        for select in client.selects.into_values() {
            self.abandon(select, true);
        }
    }

    /// A client ends: of what it was told to be its own, `keeps_consumed` says whose it is.
    fn abandon(&mut self, select: ClientSelect, keeps_consumed: bool) {
        match select {
            ClientSelect::Waiting { ticket, .. } => self.forget(ticket),
            ClientSelect::Leased(entry) => self.shared.put_back(entry),
            ClientSelect::Consumed(entry) => self.shared.conclude(entry, keeps_consumed),
        }
    }
}

impl Service for LookupServer {
    type Command = Infallible;

    fn command(&mut self, _io: &mut ReactorContext, command: Infallible) {
        match command {}
    }

    fn session_up(&mut self, _io: &mut ReactorContext, session: SessionKey, _peer: &Identity) {
        self.clients.insert(session, ClientSession::default());
        self.tensors.session_up(session);
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.tensors.session_down(cx, session, &error);
        if let Some(client) = self.clients.remove(&session) {
            self.release(client);
        }
    }

    fn frame(&mut self, _io: &mut ReactorContext, _link: SessionKey, _frame: &[u8]) -> Result<()> {
        Err(Error::protocol("a client of a lookup buffer sent a frame"))
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
            self.take_mail(cx);
            return Ok(());
        }
        let id = reader.u64()?;
        match kind {
            INSERT => {
                check_operation(id)?;
                self.insert(cx, session, id, reader, &data)?;
            }
            SELECT => {
                check_operation(id)?;
                self.select(cx, session, id, &data)?;
            }
            CONSUME => self.take(cx, session, id)?,
            SETTLE => self.settle(session, id, reader.flag()?)?,
            WITHDRAW => self.withdraw(cx, session, id)?,
            other => {
                let text = format_args!("message {other} to a lookup buffer");
                return Err(Error::protocol(text));
            }
        }
        drop(data);
        self.advance(cx);
        self.take_mail(cx);
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
        self.take_mail(cx);
    }

    fn poll(&mut self, cx: &mut ReactorContext) -> bool {
        let has_copied = self.shared.copy_on(&mut self.copying);
        self.take_mail(cx);
        let has_worked = self.tensors.run_slice(cx);
        if has_worked {
            self.advance(cx);
            self.take_mail(cx);
        }
        has_worked || has_copied
    }

    fn has_work(&self) -> bool {
        self.tensors.has_work()
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        if self.shared.next_deadline().is_some_and(|at| at <= cx.now()) {
            self.shared.expire();
            self.take_mail(cx);
        }
        let idle = self.tensors.expire(cx.now());
        self.shared.next_deadline().into_iter().chain(idle).min()
    }
}

/// Also when the reactor panics: the buffer itself is as good as before.
impl Drop for LookupServer {
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
mod tests;
