//! Tensors on their way over one session, both ways.

use kvpipe_ucx::AmData;

use super::transfer::{Incoming, Outgoing};
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::reactor::ReactorContext;
use crate::transfer::fetch::{ACCEPT, CHECKSUMS, CREDIT, DATA};
use crate::transfer::pool::Pool;

#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

impl Tensors {
    pub(super) fn new(session: SessionKey, pool: Pool, is_checksummed: bool) -> Self {
        Self {
            incoming: Incoming::new(session, pool),
            outgoing: Outgoing::new(is_checksummed),
        }
    }

    /// Takes a message about a tensor under way; false for any other kind of message.
    pub(super) fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (kind, id): (u8, u64),
        mut reader: Reader<'_>,
        data: &AmData,
    ) -> Result<bool> {
        match kind {
            DATA => self.incoming.place(cx, id, reader, data)?,
            CHECKSUMS => self.incoming.checksums(id, data)?,
            ACCEPT => self.outgoing.accept(cx, session, id)?,
            CREDIT => self.outgoing.credit(cx, session, id, reader.u64()?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}
