//! Tensors on their way over one link, both ways.

use kvpipe_ucx::AmData;

use super::transfer::{Incoming, Outgoing};
use crate::codec::Reader;
use crate::error::Result;
use crate::fetch::{ACCEPT, CREDIT, DATA, SUMS};
use crate::node::{Io, LinkId};
use crate::pool::Pool;

#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

impl Tensors {
    pub(super) fn new(link: LinkId, pool: Pool, is_summed: bool) -> Self {
        Self {
            incoming: Incoming::new(link, pool),
            outgoing: Outgoing::new(is_summed),
        }
    }

    /// Takes a message about a tensor under way; false for any other kind of message.
    pub(super) fn message(
        &mut self,
        io: &mut Io,
        link: LinkId,
        (kind, id): (u8, u64),
        mut reader: Reader<'_>,
        data: &AmData,
    ) -> Result<bool> {
        match kind {
            DATA => self.incoming.place(io, id, reader, data)?,
            SUMS => self.incoming.sums(id, data)?,
            ACCEPT => self.outgoing.accept(io, link, id)?,
            CREDIT => self.outgoing.credit(io, link, id, reader.u64()?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}
