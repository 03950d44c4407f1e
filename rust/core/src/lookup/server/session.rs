//! The clients of a served lookup buffer: the open operations of each, and the limits on them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvpipe_ucx::Status;

use super::super::messages::TOKENS_CAP;
use super::super::state::ClientAction;
use super::super::store::Ticket;
use super::super::tensors::Tensors;
use super::super::transfer::EntryTransfer;
use super::super::{INSERTS_IN_FLIGHT, LookupQuery, SELECT_TOKENS_CAP, SELECTS_CAP};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::ReactorContext;

#[derive(Debug, Clone, Copy)]
pub(super) enum ClientSelect {
    Waiting {
        ticket: Ticket,
        num_tokens: usize,
    },
    /// Offered to the client. If its session is lost, the entry goes back.
    Leased(Ticket),
    /// The client has the whole entry. It may still return it.
    Consumed(Ticket),
}

impl ClientSelect {
    fn num_waiting_tokens(&self) -> usize {
        match self {
            Self::Waiting { num_tokens, .. } => *num_tokens,
            Self::Leased(_) | Self::Consumed(_) => 0,
        }
    }
}

/// A withdrawn operation that has not met its other side.
pub(super) enum Withdrawn {
    Select(ClientSelect),
    Insert(Ticket),
}

#[derive(Debug)]
pub(super) struct ClientInsert {
    pub(super) ticket: Ticket,
    pub(super) tokens: Arc<[i64]>,
}

pub(super) struct ClientSession {
    pub(super) tensors: Tensors,
    pub(super) inserts: HashMap<u64, ClientInsert>,
    pub(super) selects: HashMap<u64, ClientSelect>,
}

impl ClientSession {
    pub(super) fn new(tensors: Tensors) -> Self {
        Self {
            tensors,
            inserts: HashMap::new(),
            selects: HashMap::new(),
        }
    }

    /// Whether the operation of an action is still open.
    pub(super) fn awaits(&self, operation: u64, action: &ClientAction) -> bool {
        match action {
            ClientAction::Grant(_) | ClientAction::Full(_) => self.inserts.contains_key(&operation),
            ClientAction::Deliver(..) | ClientAction::Miss => self.selects.contains_key(&operation),
        }
    }

    /// # Errors
    /// `Protocol`: a client that respects the limits does not send this insert.
    pub(super) fn check_insert(&self, operation: u64, tokens: &[i64]) -> Result<()> {
        let open = self.inserts.values().map(|insert| insert.tokens.len());
        let num_tokens = open.sum::<usize>() + tokens.len();
        let is_too_much = self.inserts.len() >= INSERTS_IN_FLIGHT || num_tokens > TOKENS_CAP;
        if is_too_much || self.inserts.contains_key(&operation) {
            return Err(Error::protocol(format_args!(
                "insert {operation} is too much"
            )));
        }
        Ok(())
    }

    /// # Errors
    /// `Protocol`: as of [`check_insert`](Self::check_insert). `Exhausted`: too many tokens of queries would wait.
    pub(super) fn check_select(&self, operation: u64, query: &LookupQuery) -> Result<()> {
        if self.selects.len() >= SELECTS_CAP || self.selects.contains_key(&operation) {
            return Err(Error::protocol(format_args!(
                "select {operation} is too much"
            )));
        }
        let waiting = self.selects.values().map(ClientSelect::num_waiting_tokens);
        let (num_waiting, num_more) = (waiting.sum::<usize>(), query.num_tokens());
        if num_waiting + num_more > SELECT_TOKENS_CAP {
            return Err(Error::Exhausted(format!(
                "selects of this client with {num_waiting} tokens wait, {num_more} more cannot: at most {SELECT_TOKENS_CAP} together; let some end first, or ask with fewer tokens"
            )));
        }
        Ok(())
    }

    pub(super) fn add_insert(
        &mut self,
        operation: u64,
        insert: ClientInsert,
        entry: EntryTransfer,
    ) {
        self.tensors.incoming.add(operation, entry);
        self.inserts.insert(operation, insert);
    }

    /// The client has the whole entry of a lease.
    ///
    /// # Errors
    /// `Protocol`: the operation has no lease.
    pub(super) fn consume(&mut self, operation: u64) -> Result<()> {
        let select = self.selects.get_mut(&operation);
        let Some((select, entry)) = select.and_then(|select| match *select {
            ClientSelect::Leased(entry) => Some((select, entry)),
            ClientSelect::Waiting { .. } | ClientSelect::Consumed(_) => None,
        }) else {
            return Err(no_lease(operation));
        };
        *select = ClientSelect::Consumed(entry);
        self.tensors.outgoing.release(operation);
        Ok(())
    }

    /// Ends a select whose entry the client keeps or returns.
    ///
    /// # Errors
    /// `Protocol`: the operation has no such lease. The session then ends, which returns the entry.
    pub(super) fn settle(&mut self, operation: u64, is_consumed: bool) -> Result<ClientSelect> {
        let may_settle = |select: &ClientSelect| match select {
            ClientSelect::Consumed(_) => true,
            ClientSelect::Leased(_) => !is_consumed,
            ClientSelect::Waiting { .. } => false,
        };
        let select = self.selects.get(&operation).copied().filter(may_settle);
        let select = select.ok_or_else(|| no_lease(operation))?;
        self.tensors.outgoing.release(operation);
        self.selects.remove(&operation);
        Ok(select)
    }

    /// Cancels a select that waits or was just offered an entry, or an insert without space. Other operations end in their
    /// own way.
    pub(super) fn withdraw(&mut self, operation: u64) -> Option<Withdrawn> {
        if let Some(select) = self.selects.remove(&operation) {
            self.tensors.outgoing.release(operation);
            return Some(Withdrawn::Select(select));
        }
        if !self.tensors.incoming.forget(operation) {
            return None;
        }
        let insert = self.inserts.remove(&operation)?;
        Some(Withdrawn::Insert(insert.ticket))
    }
}

#[derive(Default)]
pub(super) struct ClientSessions {
    clients: HashMap<SessionKey, ClientSession>,
    /// The order in which sessions get slices of checksums; the one served last is the last.
    checksum_order: VecDeque<SessionKey>,
}

impl ClientSessions {
    pub(super) fn add(&mut self, session: SessionKey, client: ClientSession) {
        self.clients.insert(session, client);
        self.checksum_order.push_back(session);
    }

    pub(super) fn remove(&mut self, session: SessionKey) -> Option<ClientSession> {
        self.checksum_order.retain(|other| *other != session);
        self.clients.remove(&session)
    }

    pub(super) fn into_all(self) -> impl Iterator<Item = ClientSession> {
        self.clients.into_values()
    }

    pub(super) fn get(&mut self, session: SessionKey) -> Option<&mut ClientSession> {
        self.clients.get_mut(&session)
    }

    /// # Errors
    /// `Protocol`: the session has no client.
    pub(super) fn of(&mut self, session: SessionKey) -> Result<&mut ClientSession> {
        let unknown = || Error::protocol("a message of a client that is not connected");
        self.get(session).ok_or_else(unknown)
    }

    /// Computes and sends some checksums for the next client that needs them; whether there was one.
    pub(super) fn run_checksum_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let clients = &mut self.clients;
        let had_some = |session: &SessionKey| {
            let client = clients.get_mut(session);
            client.is_some_and(|client| client.tensors.outgoing.run_checksum_slice(cx, *session))
        };
        let Some(at) = self.checksum_order.iter().position(had_some) else {
            return false;
        };
        let session = self.checksum_order.remove(at);
        self.checksum_order.extend(session);
        true
    }

    /// Gives the end of a remote read to the client that it is for.
    pub(super) fn done(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) -> Option<SessionKey> {
        self.clients.iter_mut().find_map(|(session, client)| {
            let incoming = &mut client.tensors.incoming;
            incoming.done(cx, token, result).then_some(*session)
        })
    }
}

fn no_lease(operation: u64) -> Error {
    Error::protocol(format_args!("select {operation} has no lease"))
}
