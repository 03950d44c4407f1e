//! One client of a served lookup buffer: its inserts, and the limits on them.

use std::collections::HashMap;

use super::super::INSERTS_IN_FLIGHT;
use super::super::messages::TOKENS_CAP;
use crate::error::{Error, Result};

#[derive(Debug)]
pub(super) struct ClientInsert {
    pub(super) num_tokens: usize,
    /// The client wants it no more: it is refused when it has its space.
    pub(super) is_cancelled: bool,
}

#[derive(Default)]
pub(super) struct ClientSession {
    pub(super) inserts: HashMap<u64, ClientInsert>,
}

impl ClientSession {
    /// # Errors
    /// `Protocol`: a client that respects the limits does not send this insert.
    pub(super) fn check_insert(&self, operation: u64, num_tokens: usize) -> Result<()> {
        let open = self.inserts.values().map(|insert| insert.num_tokens);
        let is_too_much = self.inserts.len() >= INSERTS_IN_FLIGHT
            || open.sum::<usize>() + num_tokens > TOKENS_CAP;
        if is_too_much || self.inserts.contains_key(&operation) {
            return Err(Error::protocol(format_args!(
                "insert {operation} is too much"
            )));
        }
        Ok(())
    }
}
