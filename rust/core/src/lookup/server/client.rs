//! One client of a served buffer: what it has open, and how much that may be.

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
    /// Offered. When the client is lost, the entry goes back.
    Leased(Ticket),
    /// The client has it whole and was told that it is his. He may still give it back.
    Consumed(Ticket),
}

impl ClientSelect {
    /// Tokens that are kept for it.
    fn num_tokens(&self) -> usize {
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
    pub(super) num_bytes: u64,
}

#[derive(Default)]
pub(super) struct ClientSession {
    pub(super) inserts: HashMap<u64, ClientInsert>,
    pub(super) selects: HashMap<u64, ClientSelect>,
}

impl ClientSession {
    /// # Errors
    /// It is one more than a client that keeps to the rules sends.
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
    /// As of [`check_insert`](Self::check_insert).
    pub(super) fn check_select(&self, operation: u64) -> Result<()> {
        if self.selects.len() >= SELECTS_CAP || self.selects.contains_key(&operation) {
            return Err(Error::protocol(format_args!(
                "select {operation} is too much"
            )));
        }
        Ok(())
    }

    /// # Errors
    /// `Exhausted`: with the tokens of this query too many would wait.
    pub(super) fn check_tokens(&self, query: &LookupQuery) -> Result<()> {
        let num_waiting: usize = self.selects.values().map(ClientSelect::num_tokens).sum();
        let num_more = query.num_tokens();
        if num_waiting + num_more > SELECT_TOKENS_CAP {
            return Err(Error::Exhausted(format!(
                "selects of this client with {num_waiting} tokens wait, {num_more} more cannot: at most {SELECT_TOKENS_CAP} together; let some end first, or ask with fewer tokens"
            )));
        }
        Ok(())
    }
}
