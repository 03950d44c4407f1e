//! The destination: which pieces are asked for, which are here, and which of them are verified.

use std::sync::Arc;

use kvpipe_ucx::{AmData, MemoryKind, Status};

use super::{
    ACCEPT, CREDIT, ChecksumMode, DATA, GET_PIECE, GETS_IN_FLIGHT, Held, Offer, num_pieces, piece,
};
use crate::checksum;
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::data_path::is_read;
use crate::transfer::region::Pieces;
use crate::transfer::stream::Incoming;
use crate::transport::{Memory, Payload, RemoteKey};

/// A buffer that is being fetched.
#[derive(Debug)]
pub(crate) struct Fetch {
    memory: Arc<Memory>,
    /// Names it on its session; chosen by its owner.
    id: u64,
    offer: Offer,
    data_path: By,
    failure: Option<Error>,
}

#[derive(Debug)]
enum By {
    Reads(Reads),
    Messages(Incoming),
}

#[derive(Debug)]
struct Reads {
    key: RemoteKey,
    /// The next piece to ask for.
    next: usize,
    /// Token and piece.
    under_way: Vec<(u64, usize)>,
    /// The checksum of each piece that is here; empty where there is nothing to compare with.
    checksums: Vec<Option<u64>>,
    num_compared: usize,
    /// Where a piece begins that differs from its checksum.
    corrupt: Option<usize>,
}

/// The key by which the buffer is read, unless it is to come as messages.
fn usable_key(
    cx: &mut ReactorContext,
    session: SessionKey,
    offer: &Offer,
    memory: &Memory,
) -> Result<Option<RemoteKey>> {
    if offer.checksum_mode == ChecksumMode::Messages {
        return Ok(None);
    }
    let (to, data_path) = (memory.buffer().kind(), cx.data_path(session));
    let mut key = None;
    if offer.held == Held::Cuda && !offer.key.is_empty() && to != MemoryKind::Host {
        // A key that cannot be used here is no fault of the peer's: CUDA opens not all memory everywhere.
        key = cx.unpack_rkey(session, &offer.key, to).ok();
    }
    let reaches = || {
        let key = key.as_ref();
        key.is_some_and(|key| cx.reaches(session, memory, (offer.address, key)))
    };
    if !is_read(data_path.as_ref(), offer.held == Held::Cuda, to, reaches) {
        return Ok(None);
    }
    key.map_or_else(
        || cx.unpack_rkey(session, &offer.key, to).map(Some),
        |key| Ok(Some(key)),
    )
}

impl Fetch {
    /// Begins to fetch an offered buffer into the first bytes of `memory`.
    pub(crate) fn begin(
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        offer: Offer,
        memory: Arc<Memory>,
    ) -> Result<Self> {
        let data_path = if let Some(key) = usable_key(cx, session, &offer, &memory)? {
            let num_checksums = if offer.checksum_mode == ChecksumMode::None {
                0
            } else {
                num_pieces(offer.len)
            };
            By::Reads(Reads {
                key,
                next: 0,
                under_way: Vec::new(),
                checksums: vec![None; num_checksums],
                num_compared: 0,
                corrupt: None,
            })
        } else {
            let pieces = Arc::new(Pieces::whole(offer.len as u64));
            let (memory, is_checksummed) = (
                Arc::clone(&memory),
                offer.checksum_mode != ChecksumMode::None,
            );
            By::Messages(Incoming::begin(
                cx,
                session,
                (DATA, id),
                memory,
                pieces,
                is_checksummed,
            ))
        };
        let mut fetch = Self {
            memory,
            id,
            offer,
            data_path,
            failure: None,
        };
        match fetch.data_path {
            By::Reads(_) => fetch.read_on(cx, session),
            By::Messages(_) => {
                let header = cx.header(session, ACCEPT).u64(id);
                cx.message(session, header, Payload::None);
            }
        }
        Ok(fetch)
    }

    /// Its name on its session.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.offer.len
    }

    /// Bytes that are not here and have not been asked for either.
    pub(crate) fn left(&self) -> usize {
        match &self.data_path {
            By::Reads(reads) => self.offer.len.saturating_sub(reads.next * GET_PIECE),
            By::Messages(incoming) => self.offer.len - incoming.num_taken() as usize,
        }
    }

    /// Nothing more is asked for; the first reason counts.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Whether it has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Keeps a few reads under way.
    fn read_on(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let By::Reads(reads) = &mut self.data_path else {
            return;
        };
        while self.failure.is_none()
            && reads.under_way.len() < GETS_IN_FLIGHT
            && reads.next < num_pieces(self.offer.len)
        {
            let (at, size) = piece(self.offer.len, reads.next);
            let (token, remote) = (cx.token(), self.offer.address + at as u64);
            if !cx.get(session, &self.memory, at, size, remote, &reads.key, token) {
                return;
            }
            reads.under_way.push((token, reads.next));
            reads.next += 1;
        }
    }

    /// A read has ended; false when it is none of this buffer. Without a session nothing more is asked for.
    pub(crate) fn done(
        &mut self,
        cx: &mut ReactorContext,
        session: Option<SessionKey>,
        token: u64,
        result: std::result::Result<(), Status>,
    ) -> bool {
        let By::Reads(reads) = &mut self.data_path else {
            return false;
        };
        let Some(at) = reads.under_way.iter().position(|(own, _)| *own == token) else {
            return false;
        };
        let (_, index) = reads.under_way.remove(at);
        match (result, session) {
            (Ok(()), session) => {
                self.is_here(index);
                self.check_still_exposed(cx, session);
            }
            (Err(status), Some(session)) => {
                let error = Error::lost(&cx.peer(session), status);
                self.fail(error.clone());
                cx.fail(session, error);
            }
            (Err(status), None) => self.fail(Error::lost("the peer", status)),
        }
        if let Some(session) = session {
            self.read_on(cx, session);
        }
        true
    }

    /// Without checksums, what was read counts only if its owner still exposes it.
    fn check_still_exposed(&mut self, cx: &ReactorContext, session: Option<SessionKey>) {
        let By::Reads(reads) = &self.data_path else {
            return;
        };
        let is_last = reads.under_way.is_empty() && reads.next == num_pieces(self.offer.len);
        if let Some(session) = session
            && is_last
            && self.offer.checksum_mode == ChecksumMode::None
            && let Err(error) = cx.check_still_exposed(session)
        {
            self.fail(error);
        }
    }

    /// Computes the checksum of a piece that has just been read, while it is in the cache.
    fn is_here(&mut self, index: usize) {
        let (at, size) = piece(self.offer.len, index);
        let By::Reads(reads) = &mut self.data_path else {
            return;
        };
        if let Some(checksum) = reads.checksums.get_mut(index) {
            *checksum = self.memory.buffer().bytes(at, size).map(checksum::of);
            self.compare(index);
        }
    }

    /// The owner's checksums of the next pieces.
    pub(crate) fn receive_checksums(&mut self, data: &[u8]) -> Result<()> {
        let known = self.offer.receive_checksums(data)?;
        known.for_each(|index| self.compare(index));
        Ok(())
    }

    fn compare(&mut self, index: usize) {
        let By::Reads(reads) = &mut self.data_path else {
            return;
        };
        let theirs = self.offer.checksums.get(index);
        let ours = reads.checksums.get(index).and_then(Option::as_ref);
        if let (Some(theirs), Some(ours)) = (theirs, ours) {
            reads.num_compared += 1;
            if theirs != ours {
                reads.corrupt.get_or_insert(piece(self.offer.len, index).0);
            }
        }
    }

    /// Stream path: takes a message, whose piece may be in place already. An owner that has ended the session may have changed
    /// what UCX still sends.
    pub(crate) fn take(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        let By::Messages(incoming) = &mut self.data_path else {
            return Err(Error::protocol(format_args!(
                "a message with data of buffer {}, which is read",
                self.id
            )));
        };
        incoming.take(header, data)?;
        incoming.credit(cx, session, (CREDIT, self.id));
        let is_unproved = incoming.is_here() && !incoming.is_checksummed();
        if (is_unproved || incoming.corrupt().is_some())
            && let Err(error) = cx.check_still_exposed(session)
        {
            self.fail(error.clone());
            cx.fail(session, error); // more of it may come before its end is seen
        }
        Ok(())
    }

    /// How it ended, once nothing writes into its memory any more: all is here and verified, or why not.
    ///
    /// A failed fetch of the stream path ends at once: what comes later finds no fetch to place it.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        let (is_quiet, is_here) = match &self.data_path {
            By::Reads(reads) => (
                reads.under_way.is_empty(),
                reads.next == num_pieces(self.offer.len)
                    && reads.num_compared == reads.checksums.len(),
            ),
            By::Messages(incoming) => (true, incoming.is_here()),
        };
        if !is_quiet || !(is_here || self.failure.is_some()) {
            return None;
        }
        if let Some(error) = &self.failure {
            return Some(Err(error.clone()));
        }
        Some(self.corrupt().map_or(Ok(()), |at| {
            Err(Error::Corrupt(format!(
                "what came differs from its checksum at byte {at} of {}; nothing was delivered, send it again",
                self.offer.len
            )))
        }))
    }

    fn corrupt(&self) -> Option<usize> {
        match &self.data_path {
            By::Reads(reads) => reads.corrupt,
            By::Messages(incoming) => incoming.corrupt().map(|at| at as usize),
        }
    }

    /// The memory, once it is here.
    pub(crate) fn into_memory(self) -> Arc<Memory> {
        self.memory
    }
}
