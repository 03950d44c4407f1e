//! Entries on their way to this client: of a server one entry after the other is read, and of an entry one part after the
//! other.

use std::collections::VecDeque;

use kvpipe_ucx::Buffer;

use super::super::Items;
use super::LookupClient;
use crate::entries::carrying::remove_sources;
use crate::entries::content::{PARTS_CAP, read_metas, read_outcome};
use crate::entries::items::Metas;
use crate::entries::messages::Carried;
use crate::entries::source_id;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::transfer::exposed::BufferDescription;
use crate::transfer::{Completion, Cx};

/// An entry that a server has offered.
#[derive(Debug)]
pub(super) struct Fetch {
    session: SessionKey,
    metas: Metas,
    /// The parts that are here.
    buffers: Vec<Option<Buffer>>,
    /// The parts that are to come, by their index.
    rest: VecDeque<(usize, BufferDescription)>,
    /// True once it is its turn.
    is_begun: bool,
}

impl LookupClient {
    /// Fetches an entry in its turn.
    ///
    /// # Errors
    /// `Protocol`: it is none of a lookup buffer.
    pub(super) fn fetch(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): (SessionKey, u64),
        record: &[u8],
        parts: Vec<Carried<'_>>,
    ) -> Result<()> {
        let metas = read_metas(record)?;
        if metas.iter().flatten().count() != parts.len() {
            return Err(Error::protocol("an entry without one part for each tensor"));
        }
        let mut fetch = Fetch {
            session,
            metas,
            buffers: Vec::new(),
            rest: VecDeque::new(),
            is_begun: false,
        };
        for (index, part) in parts.into_iter().enumerate() {
            fetch.buffers.push(match part {
                Carried::Inline(bytes) => Some(Buffer::from_vec(bytes.into_owned())),
                Carried::Offered(buffer) => {
                    let source = source_id(operation, index);
                    cx.transfers.add_source(session, source, buffer.source());
                    fetch.rest.push_back((index, buffer));
                    None
                }
            });
        }
        self.fetches.insert(operation, fetch);
        self.fetch_order
            .entry(session)
            .or_default()
            .push_back(operation);
        Ok(())
    }

    /// Reads the next part, or ends the fetch.
    fn fetch_next(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let Some(fetch) = self.fetches.get_mut(&operation) else {
            return;
        };
        fetch.is_begun = true;
        let Some((index, buffer)) = fetch.rest.front() else {
            return self.end_fetch(cx, operation, Ok(()));
        };
        match cx.memory(buffer.len) {
            Ok(memory) => {
                let source = source_id(operation, *index);
                let request = buffer.transfer(fetch.session, source, memory);
                let transfer = cx.transfers.add(request);
                cx.transfers.enqueue(cx.links, transfer);
            }
            Err(error) => self.end_fetch(cx, operation, Err(error)),
        }
    }

    /// The read of a part has ended.
    pub(super) fn fetched(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let operation = completion.owner / PARTS_CAP as u64;
        let fetch = self.fetches.get_mut(&operation);
        let Some(fetch) = fetch.filter(|fetch| fetch.session == completion.session) else {
            return;
        };
        let len = completion.pieces.num_bytes as usize;
        let outcome = read_outcome(completion.outcome, completion.pieces.num_bytes);
        match outcome {
            Ok(()) => {
                let buffer = cx.lend(completion.memory, len);
                if buffer.is_none() {
                    let none = Error::Exhausted(format!("no memory for {len} bytes"));
                    return self.end_fetch(cx, operation, Err(none));
                }
                if let Some((index, _)) = fetch.rest.pop_front() {
                    fetch.buffers[index] = buffer;
                }
                self.fetch_next(cx, operation);
            }
            Err(error) => {
                // The server exposes nothing usable any more.
                if matches!(error, Error::Protocol(_) | Error::PeerLost { .. }) {
                    cx.links.fail(completion.session, error.clone());
                }
                self.end_fetch(cx, operation, Err(error));
            }
        }
    }

    /// A server is lost: its entries do not come.
    pub(super) fn end_fetches(&mut self, session: SessionKey) {
        self.fetches.retain(|_, fetch| fetch.session != session);
        self.fetch_order.remove(&session);
    }

    fn end_fetch(&mut self, cx: &mut Cx<'_>, operation: u64, outcome: Result<()>) {
        let Some(fetch) = self.fetches.remove(&operation) else {
            return;
        };
        let closed = Error::Closed("the operation has ended".to_owned());
        remove_sources(cx, (fetch.session, operation), &closed);
        let items =
            outcome.map(|()| Items::of_metas(fetch.metas, fetch.buffers.into_iter().flatten()));
        self.arrived(cx, fetch.session, operation, items);
    }

    /// Begins the first fetch from each server, unless it has begun.
    pub(super) fn advance_fetches(&mut self, cx: &mut Cx<'_>) {
        let sessions: Vec<_> = self.fetch_order.keys().copied().collect();
        for session in sessions {
            while let Some(first) = self.first_fetch(session) {
                self.fetch_next(cx, first);
            }
        }
    }

    /// The first fetch from a server, if it has not begun. Forgets those that have ended.
    fn first_fetch(&mut self, session: SessionKey) -> Option<u64> {
        let line = self.fetch_order.get_mut(&session)?;
        while let Some(first) = line.front() {
            match self.fetches.get(first) {
                Some(fetch) => return (!fetch.is_begun).then_some(*first),
                None => line.pop_front(),
            };
        }
        self.fetch_order.remove(&session);
        None
    }
}
