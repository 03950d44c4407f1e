//! A stream at its destination: pieces of memory as a sequence of messages, each with its place in the sequence and a
//! checksum. They are put where they belong while UCX still has them in its receive buffer, which saves a copy; the event
//! that follows says only that they are there.

use std::cell::RefCell;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

use kvpipe_ucx::{AmData, DeviceWrites, SharedBytes};

use super::message::DATA;
use super::outgoing_stream::WINDOW;
use super::region::{Cursor, Pieces};
use super::transfer::Corruption;
use super::verifier::Checksums;
use crate::checksum::{self, RunningChecksum};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::{ReactorContext, RegisteredSink, StreamSink};
use crate::transport::Memory;

/// What is expected of a stream, and where it goes.
#[derive(Debug)]
struct StreamDestination {
    /// Of memory on a GPU: what has been written may still be on its way there. Dropped before the memory.
    writes: Option<DeviceWrites>,
    memory: Arc<Memory>,
    pieces: Arc<Pieces>,
    /// What has been placed.
    cursor: Cursor,
    checksums: Checksums,
    /// Where the first piece begins that differs from its checksum.
    corruption: Option<Corruption>,
}

impl StreamDestination {
    /// Puts a piece where it belongs. Pieces come in order, so that any other is an error of the peer.
    fn put(&mut self, offset: u64, checksum: u64, data: SharedBytes<'_>) -> Result<()> {
        let (len, num_bytes) = (data.len() as u64, self.pieces.num_bytes);
        let placed_bytes = self.cursor.bytes_behind();
        if offset != placed_bytes || len == 0 || len > num_bytes - offset {
            return Err(Error::protocol(format_args!(
                "{len} bytes at {offset} of {num_bytes}, {placed_bytes} expected next"
            )));
        }
        let cursor = self.write(data)?;
        if cursor.bytes_behind() == num_bytes
            && let Some(writes) = &mut self.writes
        {
            writes.finish().map_err(not_written)?;
        }
        self.cursor = cursor;
        match &mut self.checksums {
            Checksums::None => {}
            Checksums::OfOwner(running) => running.add(data),
            Checksums::OfStream | Checksums::All => {
                if checksum::of_shared(data) != checksum {
                    self.corruption.get_or_insert(Corruption {
                        at: offset,
                        is_exact: false,
                    });
                }
            }
        }
        Ok(())
    }

    /// Writes a piece, and returns the position after it.
    fn write(&mut self, mut data: SharedBytes<'_>) -> Result<Cursor> {
        let (mut cursor, runs) = (self.cursor, &self.pieces.runs);
        while !data.is_empty()
            && let Some(run) = cursor.piece(runs, data.len() as u64)
        {
            let (piece, rest) = data.split_at(run.len as usize);
            let offset = run.to as usize;
            match &mut self.writes {
                Some(writes) => writes.write(offset, piece).map_err(not_written)?,
                None if self.memory.buffer().copy_from(offset, piece) => {}
                None => return Err(not_written("it is not writable there")),
            }
            cursor.advance(runs, run.len);
            data = rest;
        }
        Ok(cursor)
    }
}

fn not_written(reason: impl Display) -> Error {
    Error::Unavailable(format!("the destination cannot be written: {reason}"))
}

impl StreamSink for StreamDestination {
    fn place(&mut self, mut header: Reader<'_>, data: SharedBytes<'_>) -> Result<()> {
        let (offset, checksum) = (header.u64()?, header.u64()?);
        header.end()?;
        self.put(offset, checksum, data)
    }
}

/// A stream at its destination, which receives it until this is dropped.
#[derive(Debug)]
pub(super) struct IncomingStream {
    _registered: RegisteredSink,
    destination: Rc<RefCell<StreamDestination>>,
    /// Bytes of the messages that have come, and those of them that the source has no credit for yet.
    pub(super) received_bytes: u64,
    uncredited_bytes: u64,
}

impl IncomingStream {
    /// Receives the stream of a transfer into `memory`. Where checksums are compared, each piece has one.
    pub(super) fn begin(
        cx: &ReactorContext,
        session: SessionKey,
        transfer: u64,
        (memory, pieces): (Arc<Memory>, Arc<Pieces>),
        checksums: Checksums,
    ) -> Self {
        let destination = Rc::new(RefCell::new(StreamDestination {
            writes: DeviceWrites::begin(memory.buffer()),
            memory,
            pieces,
            cursor: Cursor::default(),
            checksums,
            corruption: None,
        }));
        Self {
            _registered: cx.register_sink(session, (DATA, transfer), destination.clone()),
            destination,
            received_bytes: 0,
            uncredited_bytes: 0,
        }
    }

    /// A piece has come, which may be in place already; bytes of credit for the source, if it is due.
    pub(super) fn receive(
        &mut self,
        offset: u64,
        checksum: u64,
        data: &AmData,
    ) -> Result<Option<u64>> {
        let mut destination = self.destination.borrow_mut();
        if let AmData::Bytes(bytes) = data {
            destination.put(offset, checksum, bytes[..].into())?;
        }
        let len = data.num_bytes() as u64;
        if self.received_bytes + len > destination.cursor.bytes_behind() {
            let text = "a message of a stream that ended before this one";
            return Err(Error::protocol(text));
        }
        self.received_bytes += len;
        self.uncredited_bytes += len;
        let is_here = self.received_bytes == destination.pieces.num_bytes;
        let is_due = self.uncredited_bytes >= WINDOW / 4 && !is_here;
        Ok(is_due.then(|| std::mem::take(&mut self.uncredited_bytes)))
    }

    /// Whether each piece has a checksum.
    pub(super) fn is_checksummed(&self) -> bool {
        let checksums = self.destination.borrow().checksums;
        matches!(checksums, Checksums::OfStream | Checksums::All)
    }

    /// What the owner compares, once all is here.
    pub(super) fn of_all(&self) -> Option<RunningChecksum> {
        self.destination.borrow().checksums.of_owner()
    }

    /// Where the first piece begins that differs from its checksum.
    pub(super) fn corruption(&self) -> Option<Corruption> {
        self.destination.borrow().corruption
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use kvpipe_ucx::Buffer;

    use super::*;
    use crate::transfer::region::Run;
    use crate::transport::{MemoryPath, Transport};

    const SESSION_KEY: SessionKey = 20;
    const SESSION: [u8; 16] = [1; 16];

    /// A reactor with a session, and 16 bytes of memory.
    fn reactor() -> (ReactorContext, Arc<Memory>) {
        let transport = Transport::Memory(MemoryPath::Stream);
        let context = transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
        let memory = context.register(Buffer::zeroed(16)).unwrap();
        let mut cx = ReactorContext::manual(Some(context));
        cx.add_manual(SESSION_KEY, SESSION, None);
        (cx, memory)
    }

    /// Takes a stream of 8 bytes: four go to 12, four to 2.
    fn begin(cx: &ReactorContext, memory: &Arc<Memory>) -> IncomingStream {
        begin_with(cx, memory, Checksums::OfStream)
    }

    fn begin_with(
        cx: &ReactorContext,
        memory: &Arc<Memory>,
        checksums: Checksums,
    ) -> IncomingStream {
        let run = |to| Run {
            to,
            from: 0,
            len: 4,
        };
        let runs = vec![run(12), run(2)];
        let pieces = Pieces {
            runs,
            num_bytes: 8,
            ..Pieces::whole(8, 8)
        };
        let memory = (Arc::clone(memory), Arc::new(pieces));
        IncomingStream::begin(cx, SESSION_KEY, 7, memory, checksums)
    }

    fn header(offset: u64, data: &[u8]) -> Vec<u8> {
        let fields = [7, offset, checksum::of(data)]
            .map(u64::to_le_bytes)
            .concat();
        [&SESSION[..], &[DATA], &fields].concat()
    }

    fn bytes(memory: &Memory) -> Vec<u8> {
        memory.buffer().bytes(0, 16).unwrap().to_vec()
    }

    #[test]
    fn pieces_are_placed_where_they_belong_before_they_are_events() {
        let (cx, memory) = reactor();
        let (mut incoming, place) = (begin(&cx, &memory), cx.placer());
        assert!(place(&header(0, b"abc"), b"abc"));
        assert!(place(&header(3, b"defgh"), b"defgh"));
        assert_eq!(bytes(&memory), *b"\0\0efgh\0\0\0\0\0\0abcd");
        assert!(incoming.received_bytes < 8);
        for len in [3, 5] {
            incoming.receive(0, 0, &AmData::Placed(len)).unwrap();
        }
        assert_eq!(incoming.received_bytes, 8);
        assert_eq!(incoming.corruption(), None);
    }

    #[test]
    fn what_does_not_come_next_or_is_too_much_is_not_placed_and_is_an_error_as_an_event() {
        let (cx, memory) = reactor();
        let (mut incoming, place) = (begin(&cx, &memory), cx.placer());
        for (offset, data) in [
            (1, &b"b"[..]),
            (0, b""),
            (0, b"123456789"),
            (u64::MAX, b"1"),
        ] {
            let header = header(offset, data);
            assert!(!place(&header, data), "{offset}");
            let data = AmData::Bytes(data.to_vec());
            assert!(incoming.receive(offset, 0, &data).is_err());
        }
        assert!(!place(&header(0, b"a")[..16 + 1 + 8 + 8], b"a"));
        assert_eq!(bytes(&memory), [0; 16]);
    }

    #[test]
    fn what_is_of_another_session_or_stream_is_not_placed() {
        let (cx, memory) = reactor();
        let (_incoming, place) = (begin(&cx, &memory), cx.placer());
        for at in [0, 15, 16, 17] {
            let mut header = header(0, b"abcd");
            header[at] ^= 1;
            assert!(!place(&header, b"abcd"), "{at}");
        }
        assert!(!place(b"", b"abcd"));
        assert_eq!(bytes(&memory), [0; 16]);
    }

    #[test]
    fn nothing_is_placed_once_the_stream_was_let_go() {
        let (cx, memory) = reactor();
        let (incoming, place) = (begin(&cx, &memory), cx.placer());
        assert!(place(&header(0, b"abcd"), b"abcd"));
        let before = bytes(&memory);
        drop(incoming);
        assert!(!place(&header(4, b"efgh"), b"efgh"));
        assert_eq!(bytes(&memory), before);
    }

    #[test]
    fn a_piece_that_differs_from_its_checksum_is_remembered() {
        let (cx, memory) = reactor();
        let (incoming, place) = (begin(&cx, &memory), cx.placer());
        assert!(place(&header(0, b"abcd"), b"abcd"));
        assert!(place(&header(4, b"efgh"), b"efgx"));
        let corruption = incoming.corruption().unwrap();
        assert_eq!((corruption.at, corruption.is_exact), (4, false));
    }

    #[test]
    fn an_owner_has_one_checksum_of_what_was_before_and_all_pieces() {
        let (cx, memory) = reactor();
        let mut before = RunningChecksum::default();
        before.add(b"before"[..].into());
        let stream = begin_with(&cx, &memory, Checksums::OfOwner(before));
        let place = cx.placer();
        for (offset, piece) in [(0, &b"abc"[..]), (3, b"defgh")] {
            assert!(place(&header(offset, b"of another piece"), piece));
        }
        assert_eq!(
            stream.of_all().unwrap().get(),
            checksum::of(b"beforeabcdefgh")
        );
        assert_eq!(stream.corruption(), None);
    }
}
