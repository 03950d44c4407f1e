//! Entries on their way to this client: one part after the other is read from the server.

use std::collections::VecDeque;

use kvpipe_ucx::Buffer;

use super::super::Items;
use super::LookupClient;
use crate::entries::content::{Metas, PARTS_CAP, read_metas};
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
}

impl LookupClient {
    /// Begins to fetch an entry.
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
        self.fetch_next(cx, operation);
        Ok(())
    }

    /// Reads the next part, or ends the fetch.
    fn fetch_next(&mut self, cx: &mut Cx<'_>, operation: u64) {
        let Some(fetch) = self.fetches.get(&operation) else {
            return;
        };
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
                if let Some((index, _)) = fetch.rest.pop_front() {
                    fetch.buffers[index] = cx.lend(completion.memory, len);
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
    }

    fn end_fetch(&mut self, cx: &mut Cx<'_>, operation: u64, outcome: Result<()>) {
        let Some(fetch) = self.fetches.remove(&operation) else {
            return;
        };
        let closed = Error::Closed("the operation has ended".to_owned());
        for source in (0..fetch.buffers.len()).map(|part| source_id(operation, part)) {
            let transfers = &mut *cx.transfers;
            transfers.remove_source(cx.links, fetch.session, source, &closed);
        }
        let items =
            outcome.map(|()| Items::of_metas(fetch.metas, fetch.buffers.into_iter().flatten()));
        self.arrived(cx, fetch.session, operation, items);
    }
}
