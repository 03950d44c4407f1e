use super::*;
use crate::checksum;
use crate::session::{FarEnd, Payload};
use crate::transfer::message::DATA;
use crate::transfer::region::Run;
use crate::transport::{MemoryPath, Transport};

const SESSION: SessionKey = 20;
const ID: u64 = 7;

/// A reactor with a session, and 16 bytes of memory.
struct Fixture {
    links: Links,
    memory: Arc<Memory>,
    _far: FarEnd,
}

impl Fixture {
    fn new() -> Self {
        let transport = Transport::Memory(MemoryPath::Stream);
        let context = transport.open().unwrap();
        let memory = context.register(Buffer::zeroed(16)).unwrap();
        let mut links = Links::manual(Some(context));
        let far = links.add_manual(SESSION, None);
        Self {
            links,
            memory,
            _far: far,
        }
    }

    /// Takes a stream of 8 bytes: four go to 12, four to 2.
    fn begin(&self, checksums: Checksums) -> IncomingStream {
        let run = |to| Run {
            to,
            from: 0,
            len: 4,
        };
        let pieces = Pieces {
            runs: vec![run(12), run(2)],
            num_bytes: 8,
            ..Pieces::whole(8, 8)
        };
        let memory = (Arc::clone(&self.memory), Arc::new(pieces));
        IncomingStream::begin(&self.links, SESSION, ID, memory, (checksums, false))
    }

    fn place(&self, header: &[u8], data: &[u8]) -> Result<Payload> {
        self.links.place(SESSION, header, data)
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.buffer().bytes(0, 16).unwrap().to_vec()
    }
}

fn header(offset: u64, data: &[u8]) -> Vec<u8> {
    let fields = [ID, offset, checksum::of(data)].map(u64::to_le_bytes);
    [&[DATA], &fields.concat()[..]].concat()
}

#[test]
fn bytes_are_placed_where_they_belong_whether_they_are_copied_or_received_there() {
    let it = Fixture::new();
    let mut incoming = it.begin(Checksums::OfStream);
    it.place(&header(0, b"abc"), b"abc").unwrap();
    {
        let mut sink = incoming.destination.borrow_mut();
        let header = header(3, b"defgh");
        let part = sink.begin(Reader::new(&header[9..]), 5).unwrap();
        let mut ranges = Vec::new();
        let memory = sink.next_ranges(part, 16, &mut ranges).unwrap();
        assert_eq!(ranges, [(15, 1), (2, 4)]);
        assert!(memory.write(15, b"d") && memory.write(2, b"e"));
        sink.placed(part, 2);
        ranges.clear();
        sink.next_ranges(part, 2, &mut ranges).unwrap();
        assert_eq!(ranges, [(3, 2)]);
        assert!(memory.write(3, b"fg"));
        sink.placed(part, 2);
        sink.put(part, b"h"[..].into()).unwrap();
    }
    assert_eq!(it.bytes(), *b"\0\0efgh\0\0\0\0\0\0abcd");
    assert_eq!(incoming.received_bytes, 0);
    for len in [3, 5] {
        incoming.receive(len).unwrap();
    }
    assert_eq!(incoming.received_bytes, 8);
    assert_eq!(incoming.corruption(), None);
    assert!(incoming.receive(1).is_err(), "there is no more");
}

#[test]
fn a_part_of_which_bytes_have_come_or_that_is_too_long_is_refused_before_anything_is_written() {
    let it = Fixture::new();
    let _incoming = it.begin(Checksums::OfStream);
    it.place(&header(3, b"\0"), b"\0").unwrap();
    for (offset, data) in [
        (3, &b"b"[..]),
        (2, b"bc"),
        (0, b""),
        (0, b"123456789"),
        (u64::MAX, b"1"),
    ] {
        assert!(it.place(&header(offset, data), data).is_err(), "{offset}");
    }
    assert!(it.place(&header(0, b"a")[..1 + 8 + 8], b"a").is_err());
    assert_eq!(it.bytes(), [0; 16]);
}

/// As they come on connections that are not equally fast.
#[test]
fn parts_that_come_at_once_and_in_any_order_are_placed_verified_and_hashed_for_the_owner() {
    for checksums in [
        Checksums::OfStream,
        Checksums::OfOwner(RunningChecksum::default()),
    ] {
        let it = Fixture::new();
        let incoming = it.begin(checksums);
        let parts = [(6, &b"gh"[..]), (3, b"def"), (0, b"abc")];
        {
            let mut sink = incoming.destination.borrow_mut();
            let mut begin = |(offset, data): (u64, &'static [u8])| {
                let header = header(offset, data);
                let part = sink.begin(Reader::new(&header[9..]), data.len()).unwrap();
                (part, data)
            };
            let [last, middle, first] = parts.map(&mut begin);
            for (part, data) in [middle, first, last] {
                let (one, rest) = data.split_at(1);
                sink.put(part, one.into()).unwrap();
                sink.put(part, rest.into()).unwrap();
            }
        }
        assert_eq!(it.bytes(), *b"\0\0efgh\0\0\0\0\0\0abcd");
        let of_all = incoming.of_all().map(RunningChecksum::get);
        let is_hashed = of_all == Some(checksum::of(b"abcdefgh"));
        assert!(is_hashed || !matches!(checksums, Checksums::OfOwner(_)));
        assert_eq!(incoming.corruption(), None);
    }
}

#[test]
fn of_parts_that_differ_from_their_checksums_the_first_counts_whichever_comes_first() {
    let it = Fixture::new();
    let incoming = it.begin(Checksums::OfStream);
    it.place(&header(4, b"efgh"), b"efgx").unwrap();
    it.place(&header(0, b"abcd"), b"abcx").unwrap();
    assert_eq!(incoming.corruption().unwrap().at, 0);
}

#[test]
fn what_is_of_another_session_or_stream_is_not_placed() {
    let it = Fixture::new();
    let _incoming = it.begin(Checksums::OfStream);
    for at in [0, 1] {
        let mut header = header(0, b"abcd");
        header[at] ^= 1;
        it.place(&header, b"abcd").unwrap();
    }
    it.links
        .place(SESSION + 1, &header(0, b"abcd"), b"abcd")
        .unwrap();
    it.place(b"", b"abcd").unwrap();
    assert_eq!(it.bytes(), [0; 16]);
}

#[test]
fn nothing_is_placed_once_the_stream_was_let_go() {
    let it = Fixture::new();
    let incoming = it.begin(Checksums::OfStream);
    it.place(&header(0, b"abcd"), b"abcd").unwrap();
    let before = it.bytes();
    drop(incoming);
    it.place(&header(4, b"efgh"), b"efgh").unwrap();
    assert_eq!(it.bytes(), before);
}

#[test]
fn a_part_that_differs_from_its_checksum_is_remembered() {
    let it = Fixture::new();
    let incoming = it.begin(Checksums::OfStream);
    it.place(&header(0, b"abcd"), b"abcd").unwrap();
    it.place(&header(4, b"efgh"), b"efgx").unwrap();
    let corruption = incoming.corruption().unwrap();
    assert_eq!((corruption.at, corruption.is_exact), (4, false));
}

#[test]
fn an_owner_has_one_checksum_of_what_was_before_and_all_parts() {
    let it = Fixture::new();
    let mut before = RunningChecksum::default();
    before.add(b"before"[..].into());
    let stream = it.begin(Checksums::OfOwner(before));
    for (offset, part) in [(0, &b"abc"[..]), (3, b"defgh")] {
        it.place(&header(offset, b"of another part"), part).unwrap();
    }
    assert_eq!(
        stream.of_all().unwrap().get(),
        checksum::of(b"beforeabcdefgh")
    );
    assert_eq!(stream.corruption(), None);
}
