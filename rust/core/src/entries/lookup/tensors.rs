//! Tensors of entries on their way over the sessions of a client or a server, in both directions.

use std::collections::{HashMap, VecDeque};

use kvpipe_ucx::Buffer;

use super::transfer::{EntryTransfer, INLINE, INLINE_CAP, NOTHING, OFFERED, source_id};
use super::{Items, NUM_ITEMS, not_host};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::codec::Writer;
use crate::transfer::exposed::{BufferDescription, ExposedBuffers};
use crate::transfer::{Completion, Cx};

/// Transfers from one peer under way at once. Entries come one after the other, and their tensors too.
pub(super) const TRANSFERS_IN_FLIGHT: usize = 4;

/// One session's.
#[derive(Debug, Default)]
struct SessionTensors {
    /// Entries that the peer has described of operations that have not begun.
    waiting: HashMap<u64, EntryTransfer>,
    /// Entries to be transferred, in this order, with their operations.
    queue: VecDeque<(u64, EntryTransfer)>,
    /// The transfer of a tensor of the first entry.
    transferring: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) exposed: ExposedBuffers,
    sessions: HashMap<SessionKey, SessionTensors>,
    /// True if peers verify checksums of what this side exposes.
    is_checksummed: bool,
    /// Entries that have arrived, or failed to, with their operations.
    arrived: VecDeque<(SessionKey, u64, Result<Items>)>,
}

/// Sessions, messages and slices of work.
impl Tensors {
    pub(super) fn new(is_checksummed: bool) -> Self {
        Self {
            exposed: ExposedBuffers::default(),
            sessions: HashMap::new(),
            is_checksummed,
            arrived: VecDeque::new(),
        }
    }

    /// The sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_sessions = |size: fn(&SessionTensors) -> usize| {
            let sessions = self.sessions.values();
            sessions.map(size).sum()
        };
        vec![
            ("tensor sessions", self.sessions.len()),
            ("described tensors", of_sessions(|it| it.waiting.len())),
            ("queued tensors", of_sessions(|it| it.queue.len())),
            ("arrived entries", self.arrived.len()),
            ("exposed buffers", self.exposed.len()),
        ]
    }

    pub(super) fn session_up(&mut self, session: SessionKey) {
        self.sessions.insert(session, SessionTensors::default());
        self.exposed.session_up(session);
    }

    pub(super) fn session_down(&mut self, session: SessionKey) {
        self.sessions.remove(&session);
        self.exposed.session_down(session);
    }

    /// The reactor has ended: nothing is exposed any more.
    pub(super) fn stop(&mut self) {
        self.exposed.clear();
        self.sessions.clear();
    }
}

/// Tensors that this side exposes.
impl Tensors {
    /// Encodes the tensors of an operation for its message. Those that are too large are exposed until
    /// [`release`](Self::release).
    pub(super) fn write(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        items: &Items,
    ) -> Result<Vec<u8>> {
        let (mut writer, mut space) = (Writer::default(), INLINE_CAP);
        for (index, item) in items.0.iter().enumerate() {
            item.meta.check()?;
            writer = match &item.buffer {
                None => writer.u8(NOTHING),
                Some(buffer) if buffer.len() <= space => {
                    space -= buffer.len();
                    let bytes = buffer.bytes(0, buffer.len()).ok_or_else(not_host)?;
                    item.meta.write(writer.u8(INLINE)).shared(bytes)
                }
                Some(buffer) => {
                    let source = source_id(operation, index);
                    let described = self.expose(cx, session, source, buffer.clone())?;
                    described.write(item.meta.write(writer.u8(OFFERED)))
                }
            };
        }
        Ok(writer.finish())
    }

    fn expose(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        source: u64,
        buffer: Buffer,
    ) -> Result<BufferDescription> {
        let integrity = if self.is_checksummed {
            Integrity::Checksum
        } else {
            Integrity::None
        };
        self.exposed.expose(cx, session, source, buffer, integrity)
    }

    /// The peer has, or will never have, the tensors of an operation.
    pub(super) fn release(&mut self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) {
        for source in (0..NUM_ITEMS).map(|index| source_id(operation, index)) {
            self.exposed.withdraw(cx, session, source);
        }
    }
}

/// Tensors that peers have described and this side transfers: of a session one entry after the other, in the order of
/// [`begin`](Self::begin), and of an entry one tensor after the other.
impl Tensors {
    /// Keeps an entry until its operation begins, or is forgotten.
    pub(super) fn add(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        entry: EntryTransfer,
    ) {
        let Some(tensors) = self.sessions.get_mut(&session) else {
            return;
        };
        for (index, buffer) in entry.offered() {
            let source = source_id(operation, *index);
            cx.transfers.add_source(session, source, buffer.source());
        }
        tensors.waiting.insert(operation, entry);
    }

    /// Drops an entry that has not begun; whether there was one.
    pub(super) fn forget(&mut self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) -> bool {
        let tensors = self.sessions.get_mut(&session);
        let forgotten = tensors.and_then(|tensors| tensors.waiting.remove(&operation));
        if forgotten.is_some() {
            remove_sources(cx, session, operation);
        }
        forgotten.is_some()
    }

    /// Fails an entry that has begun: it arrives with this error when nothing reads its tensors any more.
    pub(super) fn cancel(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        operation: u64,
        error: &Error,
    ) {
        let Some(tensors) = self.sessions.get_mut(&session) else {
            return;
        };
        let at = tensors.queue.iter().position(|(it, _)| *it == operation);
        match (at, tensors.transferring) {
            (Some(0), Some(transfer)) => {
                cx.transfers.fail(cx.links, transfer, error);
            }
            (Some(at), _) => {
                tensors.queue.remove(at);
                remove_sources(cx, session, operation);
                self.arrived
                    .push_back((session, operation, Err(error.clone())));
            }
            (None, _) => {}
        }
    }

    /// Has an entry transferred.
    pub(super) fn begin(&mut self, cx: &mut Cx<'_>, session: SessionKey, operation: u64) {
        if let Some(tensors) = self.sessions.get_mut(&session)
            && let Some(entry) = tensors.waiting.remove(&operation)
        {
            tensors.queue.push_back((operation, entry));
            self.advance(cx, session);
        }
    }

    /// The next entry that has arrived, or has failed to, with its session and operation.
    pub(super) fn next_arrived(&mut self) -> Option<(SessionKey, u64, Result<Items>)> {
        self.arrived.pop_front()
    }

    /// The transfer of a tensor has ended.
    pub(super) fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let session = completion.session;
        let Some(tensors) = self.sessions.get_mut(&session) else {
            return;
        };
        tensors.transferring = None;
        let len = completion.pieces.num_bytes as usize;
        let outcome = completion.outcome.map_err(|error| {
            error.into_error(|corruption| {
                let at = corruption.at;
                format!(
                    "what came differs from its checksum at byte {at} of {len}; nothing was delivered, send it again"
                )
            })
        });
        match outcome {
            Ok(()) => {
                let buffer = cx.lend(completion.memory, len);
                if let Some((_, entry)) = tensors.queue.front_mut() {
                    entry.fill_first(buffer);
                }
            }
            Err(error) => {
                // The peer exposes nothing usable any more.
                if matches!(error, Error::Protocol(_) | Error::PeerLost { .. }) {
                    cx.links.fail(session, error.clone());
                }
                self.finish(cx, session, Err(error));
            }
        }
        self.advance(cx, session);
    }

    /// Begins what can be.
    fn advance(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        while let Some(tensors) = self.sessions.get_mut(&session)
            && tensors.transferring.is_none()
            && let Some((operation, entry)) = tensors.queue.front()
        {
            let Some((index, buffer)) = entry.offered().next() else {
                self.finish(cx, session, Ok(()));
                continue;
            };
            let memory = match cx.memory(buffer.len) {
                Ok(memory) => memory,
                Err(error) => {
                    self.finish(cx, session, Err(error));
                    continue;
                }
            };
            let source = source_id(*operation, *index);
            let transfer = cx.transfers.add(buffer.transfer(session, source, memory));
            tensors.transferring = Some(transfer);
            cx.transfers.enqueue(cx.links, transfer);
        }
    }

    /// Ends the first entry of the queue.
    fn finish(&mut self, cx: &mut Cx<'_>, session: SessionKey, outcome: Result<()>) {
        let tensors = self.sessions.get_mut(&session);
        if let Some((operation, entry)) = tensors.and_then(|tensors| tensors.queue.pop_front()) {
            remove_sources(cx, session, operation);
            let items = outcome.map(|()| entry.into_items());
            self.arrived.push_back((session, operation, items));
        }
    }
}

/// The tensors of an operation are not read any more.
fn remove_sources(cx: &mut Cx<'_>, session: SessionKey, operation: u64) {
    let closed = Error::Closed("the operation has ended".to_owned());
    for index in 0..NUM_ITEMS {
        let source = source_id(operation, index);
        cx.transfers
            .remove_source(cx.links, session, source, &closed);
    }
}
