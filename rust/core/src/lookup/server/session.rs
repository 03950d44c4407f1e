//! One client of a served lookup buffer: its open operations, and the limits on them.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::messages::TOKENS_CAP;
use super::super::store::Ticket;
use super::super::{INSERTS_IN_FLIGHT, LookupQuery, SELECT_TOKENS_CAP, SELECTS_CAP};
use crate::error::{Error, Result};

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

#[derive(Debug)]
pub(super) struct ClientInsert {
    pub(super) ticket: Ticket,
    pub(super) tokens: Arc<[i64]>,
    /// The client wants it no more: it is refused when it has its space.
    pub(super) is_cancelled: bool,
}

#[derive(Default)]
pub(super) struct ClientSession {
    pub(super) inserts: HashMap<u64, ClientInsert>,
    pub(super) selects: HashMap<u64, ClientSelect>,
}

impl ClientSession {
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

    /// The client has the whole entry of a lease.
    ///
    /// # Errors
    /// `Protocol`: the operation has no lease.
    pub(super) fn consume(&mut self, operation: u64) -> Result<()> {
        let Some(&ClientSelect::Leased(entry)) = self.selects.get(&operation) else {
            return Err(no_lease(operation));
        };
        self.selects
            .insert(operation, ClientSelect::Consumed(entry));
        Ok(())
    }

    /// Ends a select whose entry the client keeps or returns.
    ///
    /// # Errors
    /// `Protocol`: the operation has no such lease. The session then ends, which returns the entry.
    pub(super) fn settle(&mut self, operation: u64, is_consumed: bool) -> Result<ClientSelect> {
        match self.selects.get(&operation) {
            Some(ClientSelect::Consumed(_)) => {}
            Some(ClientSelect::Leased(_)) if !is_consumed => {}
            _ => return Err(no_lease(operation)),
        }
        let select = self.selects.remove(&operation);
        select.ok_or_else(|| no_lease(operation))
    }
}

fn no_lease(operation: u64) -> Error {
    Error::protocol(format_args!("select {operation} has no lease"))
}
