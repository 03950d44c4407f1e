//! The parts of an operation: in its message while that has place for them, exposed to the other side otherwise.

use std::sync::Arc;

use kvpipe_ucx::Buffer;

use super::content::PARTS_CAP;
use super::items::not_host;
use super::messages::Carried;
use super::source_id;
use super::state::Holder;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::transfer::Cx;
use crate::transfer::exposed::ExposedBuffers;
use crate::transport::Memory;

/// A part as a message carries it that has `space` left for parts. One that is too large is exposed, in this memory if
/// it is registered already.
///
/// # Errors
/// `Unavailable`: it is not in host memory. Others: the transport cannot register it.
pub(super) fn carry(
    cx: &mut Cx<'_>,
    exposed: &mut ExposedBuffers,
    (session, source): (SessionKey, u64),
    integrity: Integrity,
    (buffer, memory): (&Buffer, Option<&Arc<Memory>>),
    space: &mut usize,
) -> Result<Carried<'static>> {
    let len = buffer.len();
    let bytes = buffer.bytes(0, len).ok_or_else(not_host)?;
    if let Some(rest) = space.checked_sub(len) {
        *space = rest;
        return Ok(Carried::Inline(bytes.to_vec().into()));
    }
    let memory = match memory {
        Some(memory) => Arc::clone(memory),
        None => cx.links.register(buffer.clone())?,
    };
    let described = exposed.expose(cx, session, source, (memory, len), integrity)?;
    Ok(Carried::Offered(described))
}

/// Ends the exposure of the parts of an operation.
pub(super) fn withdraw_parts(
    cx: &mut Cx<'_>,
    exposed: &mut ExposedBuffers,
    (session, operation): Holder,
) {
    for source in sources_of(operation) {
        exposed.withdraw(cx, session, source);
    }
}

/// Nothing of an operation is read from its client or server any more.
pub(super) fn remove_sources(cx: &mut Cx<'_>, (session, operation): Holder, error: &Error) {
    for source in sources_of(operation) {
        cx.transfers.remove_source(cx.links, session, source, error);
    }
}

fn sources_of(operation: u64) -> impl Iterator<Item = u64> {
    (0..PARTS_CAP).map(move |part| source_id(operation, part))
}
