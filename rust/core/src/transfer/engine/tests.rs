//! What the engine decides, without threads: one session whose peer is a worker that the test looks into.

mod wrong_canary;

use std::borrow::Cow;
use std::net::Ipv4Addr;

use kvpipe_ucx::{AmData, Buffer, Event};

use super::*;
use crate::checksum;
use crate::transfer::Checksums;
use crate::transfer::exposed::ExposedBuffer;
use crate::transfer::message::{Message, Wanted};
use crate::transfer::region::{Layout, coalesce};
use crate::transfer::remote_source::Verification;
use crate::transport::{MemoryPath, Transport, Worker};

const SESSION: SessionKey = 20;
const SOURCE: u64 = 3;
const BLOCK: usize = 1 << 10;
const NUM_BLOCKS: usize = 4;
const MAX_IN_FLIGHT: usize = 2;

struct Fixture {
    cx: ReactorContext,
    engine: TransferEngine,
    peer: Worker,
    /// The peer's, exposed to us.
    source: Arc<Memory>,
}

fn layout() -> Layout {
    let block = BLOCK as u64;
    Layout::new(NUM_BLOCKS as u64 * block, block, block).unwrap()
}

fn failed(completion: Option<Completion>) -> Error {
    match completion.expect("a completion").outcome {
        Err(TransferError::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn config(text: &str) -> Error {
    Error::Config(text.to_owned())
}

impl Fixture {
    fn new(path: MemoryPath) -> Self {
        let transport = Transport::Memory(path);
        let open = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
        let (context, peer) = (open(), open().worker().unwrap());
        let bytes = (0..NUM_BLOCKS * BLOCK).map(|at| (at / 7) as u8).collect();
        let source = context.register(Buffer::from_vec(bytes)).unwrap();
        let mut cx = ReactorContext::manual(Some(context));
        cx.add_manual(SESSION, [1; 16], Some(&peer.address().unwrap()));
        let mut engine = TransferEngine::new(MAX_IN_FLIGHT);
        engine.session_up(SESSION);
        let mut fixture = Self {
            cx,
            engine,
            peer,
            source,
        };
        fixture.add_source(Verification::OnRequest);
        fixture
    }

    fn add_source(&mut self, verification: Verification) {
        let (base, rkey) = (
            self.source.buffer().address() as u64,
            self.source.pack_rkey(),
        );
        let source = RemoteSource {
            verification,
            num_units: 3,
            ..RemoteSource::new(base, rkey.unwrap(), false)
        };
        self.engine.add_source(SESSION, SOURCE, source);
    }

    /// Blocks 3, 1 and 0 of the source as blocks 0, 2 and 3 of memory of ours.
    fn request(&self, owner: u64) -> TransferRequest {
        let memory = Buffer::zeroed(NUM_BLOCKS * BLOCK);
        let pieces = coalesce((&layout(), &[0, 2, 3]), (&layout(), &[3, 1, 0]));
        TransferRequest {
            owner,
            session: SESSION,
            source: SOURCE,
            memory: self.cx.register(memory).unwrap(),
            pieces: Arc::new(pieces.unwrap()),
            checksums: Checksums::All,
            is_verified_by_owner: false,
            is_retry: false,
            deadline: None,
        }
    }

    fn begin(&mut self, request: TransferRequest) -> u64 {
        let id = self.engine.add(request);
        self.engine.enqueue(&mut self.cx, id);
        id
    }

    /// What has come at the peer since the last call.
    fn sent(&self) -> Vec<(u64, Message<'static>, Vec<u8>)> {
        self.peer.progress();
        let mut sent = Vec::new();
        while let Some(event) = self.peer.next_event() {
            if let Event::Message { header, data } = event
                && Message::is_kind(header[16])
            {
                let rest = Reader::new(&header[17..]);
                let (id, message) = Message::decode(header[16], rest, &data).unwrap();
                sent.push((id, message, data.to_vec()));
            }
        }
        sent
    }

    /// Transfers that the source has been asked to serve since the last call, with what is wanted.
    fn requests(&self) -> Vec<(u64, Wanted)> {
        let read = |(transfer, message, _)| match message {
            Message::Read { wanted, .. } => Some((transfer, wanted)),
            _ => None,
        };
        self.sent().into_iter().filter_map(read).collect()
    }

    fn receive(&mut self, id: u64, message: &Message<'_>, payload: &[u8]) -> Result<Handled> {
        let (header, encoded) = message.to_bytes(id);
        let payload = [&encoded, payload].concat();
        let header = (header[0], Reader::new(&header[1..]));
        let data = AmData::Bytes(payload);
        self.engine.message(&mut self.cx, SESSION, header, &data)
    }

    fn block(&self, id: usize) -> Vec<u8> {
        let block = self.source.buffer().bytes(id * BLOCK, BLOCK);
        block.unwrap().to_vec()
    }

    /// All bytes of a request's stream.
    fn data(&mut self, transfer: u64) -> Result<Handled> {
        let data = [3, 1, 0].map(|id| self.block(id)).concat();
        let message = Message::Data {
            offset: 0,
            checksum: checksum::of(&data),
        };
        self.receive(transfer, &message, &data)
    }

    fn checksums(&mut self, transfer: u64, checksums: Vec<u64>) -> Result<Handled> {
        let first = 0;
        self.receive(transfer, &Message::Checksums { first, checksums }, &[])
    }

    fn source_checksums(&mut self, checksums: Vec<u64>) -> Result<Handled> {
        let first = 0;
        self.receive(SOURCE, &Message::SourceChecksums { first, checksums }, &[])
    }

    fn block_checksums(&self) -> Vec<u64> {
        [3, 1, 0].map(|id| checksum::of(&self.block(id))).to_vec()
    }

    /// Ends all reads that are in flight.
    fn end_reads(&mut self) {
        while let Some((token, result)) = self.cx.next_ended_read() {
            self.engine.read_ended(&mut self.cx, token, result);
        }
    }

    fn assert_moved(&mut self, owner: u64) {
        let completion = self.engine.next_completion().expect("a completion");
        assert_eq!((completion.owner, completion.outcome), (owner, Ok(())));
        let to = completion.memory.buffer();
        for (to_id, from_id) in [(0, 3), (2, 1), (3, 0)] {
            let block = to.bytes(to_id * BLOCK, BLOCK).unwrap();
            assert_eq!(block.to_vec(), self.block(from_id));
        }
    }
}

#[test]
fn a_stream_is_complete_when_all_of_it_has_come() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let id = it.begin(it.request(7));
    assert_eq!(it.requests(), [(id, Wanted::ChecksummedBytes)]);
    assert!(it.engine.next_completion().is_none());
    it.data(id).unwrap();
    it.assert_moved(7);
    // Sent before the source could know: dropped.
    assert!(matches!(it.data(id), Ok(Handled::Done)));
    assert!(matches!(it.data(id + 1), Ok(Handled::UnknownTransfer)));
}

#[test]
fn a_transfer_without_bytes_is_complete_when_its_turn_may_come() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let pieces = coalesce((&layout(), &[]), (&layout(), &[])).unwrap();
    let id = it.engine.add(TransferRequest {
        pieces: Arc::new(pieces),
        ..it.request(7)
    });
    assert!(it.engine.next_completion().is_none(), "it is held");
    it.engine.enqueue(&mut it.cx, id);
    let completion = it.engine.next_completion().expect("a completion");
    assert_eq!((completion.owner, completion.outcome), (7, Ok(())));
    assert_eq!(it.requests(), []);
}

#[test]
fn a_read_is_complete_when_its_bytes_and_their_checksums_are_here() {
    for checksums_are_first in [false, true] {
        let mut it = Fixture::new(MemoryPath::RemoteRead);
        let id = it.begin(it.request(7));
        assert_eq!(it.requests(), [(id, Wanted::Checksums)]);
        let checksums = it.block_checksums();
        let halves = [true, false].map(|is_checksums| is_checksums == checksums_are_first);
        for is_checksums in halves {
            assert!(it.engine.next_completion().is_none());
            if is_checksums {
                it.checksums(id, checksums.clone()).unwrap();
            } else {
                it.end_reads();
            }
        }
        it.assert_moved(7);
    }
}

#[test]
fn a_read_names_the_first_block_that_differs() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(it.request(7));
    let mut checksums = it.block_checksums();
    checksums[1] ^= 1;
    it.checksums(id, checksums).unwrap();
    it.end_reads();
    // What differs is the source's fault only while it exposes its memory, and this one has no connection.
    assert!(matches!(
        failed(it.engine.next_completion()),
        Error::PeerLost { .. }
    ));
}

#[test]
fn checksums_that_come_unasked_verify_a_read_whenever_they_come() {
    for comes_first in [true, false] {
        let mut it = Fixture::new(MemoryPath::RemoteRead);
        it.add_source(Verification::Pushed);
        let checksums = it.block_checksums();
        if comes_first {
            it.source_checksums(checksums.clone()).unwrap();
        }
        it.begin(it.request(7));
        assert_eq!(it.requests(), []);
        it.end_reads();
        if !comes_first {
            assert!(it.engine.next_completion().is_none());
            it.source_checksums(checksums).unwrap();
        }
        it.assert_moved(7);
    }
}

#[test]
fn a_retry_streams_whatever_the_path_of_the_session() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let request = TransferRequest {
        is_retry: true,
        ..it.request(7)
    };
    let id = it.begin(request);
    assert_eq!(it.requests(), [(id, Wanted::ChecksummedBytes)]);
}

#[test]
fn checksums_of_a_stream_only_are_asked_for_by_a_stream_only() {
    for (path, wanted) in [
        (MemoryPath::RemoteRead, None),
        (MemoryPath::Stream, Some(Wanted::ChecksummedBytes)),
    ] {
        let mut it = Fixture::new(path);
        let id = it.begin(TransferRequest {
            checksums: Checksums::OfStream,
            is_verified_by_owner: true,
            ..it.request(7)
        });
        let expected: Vec<_> = wanted.map(|wanted| (id, wanted)).into_iter().collect();
        assert_eq!(it.requests(), expected);
        if wanted.is_some() {
            it.data(id).unwrap();
            it.assert_moved(7);
        }
    }
}

#[test]
fn transfers_from_a_peer_begin_in_order_and_a_few_at_a_time() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let ids = [0, 1, 2, 3].map(|owner| it.begin(it.request(owner)));
    let bytes = Wanted::ChecksummedBytes;
    assert_eq!(it.requests(), [(ids[0], bytes), (ids[1], bytes)]);
    it.data(ids[1]).unwrap();
    assert_eq!(it.requests(), [(ids[2], bytes)]);
    it.assert_moved(1);
    let refused = Message::Refused("no such block".to_owned());
    it.receive(ids[0], &refused, &[]).unwrap();
    assert_eq!(it.requests(), [(ids[3], bytes)]);
    let error = failed(it.engine.next_completion());
    assert_eq!(error, config("the peer refused: no such block"));
}

#[test]
fn a_transfer_that_is_held_does_not_keep_others_from_beginning() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let held = it.engine.add(it.request(0));
    let ids = [1, 2].map(|owner| it.begin(it.request(owner)));
    assert_eq!(it.requests().len(), ids.len());
    it.engine.withdraw(&mut it.cx, held, &config("withdrawn"));
    assert_eq!(failed(it.engine.next_completion()), config("withdrawn"));
}

#[test]
fn a_failed_read_completes_when_nothing_is_in_flight_any_more() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(it.request(7));
    it.engine.fail(&mut it.cx, id, &config("first"));
    it.engine.fail(&mut it.cx, id, &config("second"));
    assert!(
        it.engine.next_completion().is_none(),
        "reads may still write"
    );
    assert!(it.engine.is_reading(SESSION, SOURCE));
    it.end_reads();
    assert_eq!(failed(it.engine.next_completion()), config("first"));
    assert!(it.engine.is_reading(SESSION, SOURCE), "its source may send");
    it.receive(id, &Message::Cancelled, &[]).unwrap();
    assert!(!it.engine.is_reading(SESSION, SOURCE));
}

#[test]
fn a_source_that_is_removed_fails_what_has_not_begun() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let ids = [0, 1, 2].map(|owner| it.begin(it.request(owner)));
    it.engine
        .remove_source(&mut it.cx, SESSION, SOURCE, &config("closed"));
    assert_eq!(failed(it.engine.next_completion()), config("closed"));
    assert!(it.engine.next_completion().is_none());
    for (id, owner) in ids.into_iter().zip([0, 1]) {
        it.data(id).unwrap();
        it.assert_moved(owner);
    }
}

fn late(it: &Fixture, owner: u64) -> TransferRequest {
    TransferRequest {
        deadline: Some(it.cx.now()),
        ..it.request(owner)
    }
}

fn is_timeout(completion: Option<Completion>) -> bool {
    matches!(failed(completion), Error::Timeout(_))
}

#[test]
fn a_late_transfer_that_has_not_begun_fails_alone() {
    let mut it = Fixture::new(MemoryPath::Stream);
    it.engine.add(late(&it, 0));
    let healthy = it.begin(it.request(1));
    assert_eq!(it.engine.expire(&mut it.cx), None);
    assert!(is_timeout(it.engine.next_completion()));
    assert!(!it.cx.has_failed(SESSION));
    it.data(healthy).unwrap();
    it.assert_moved(1);
}

#[test]
fn a_late_stream_is_cancelled_and_fails_alone() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let cancelled = it.begin(late(&it, 0));
    let healthy = it.begin(it.request(1));
    it.sent();
    it.engine.expire(&mut it.cx);
    assert_eq!(it.sent(), [(cancelled, Message::Cancel, Vec::new())]);
    assert!(is_timeout(it.engine.next_completion()));
    assert!(!it.cx.has_failed(SESSION));
    // What was under way is dropped, and CANCEL may cross the last of it.
    it.data(cancelled).unwrap();
    it.receive(cancelled, &Message::Cancelled, &[]).unwrap();
    assert!(it.engine.next_completion().is_none());
    it.data(healthy).unwrap();
    it.assert_moved(1);
    assert!(it.engine.peers[&SESSION].cancelling.is_empty());
}

#[test]
fn a_cancelled_stream_keeps_its_place_until_its_source_has_answered() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let ids = [0, 1, 2].map(|owner| it.begin(it.request(owner)));
    it.sent();
    it.engine.fail(&mut it.cx, ids[0], &config("failed"));
    assert_eq!(it.requests(), []);
    it.receive(ids[0], &Message::Cancelled, &[]).unwrap();
    assert_eq!(it.requests(), [(ids[2], Wanted::ChecksummedBytes)]);
    for id in [ids[0], ids[1], ids[2] + 1] {
        let unasked = it.receive(id, &Message::Cancelled, &[]);
        assert!(matches!(unasked, Err(Error::Protocol(_))), "{id}");
    }
}

#[test]
fn what_a_source_has_sent_in_full_is_not_cancelled() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(it.request(0));
    it.checksums(id, it.block_checksums()).unwrap();
    it.sent();
    it.engine.fail(&mut it.cx, id, &config("failed"));
    assert_eq!(it.sent(), []);
    assert!(it.engine.peers[&SESSION].cancelling.is_empty());
}

#[test]
fn a_late_read_fails_at_once_and_is_over_when_nothing_can_write_any_more() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(late(&it, 7));
    it.sent();
    it.engine.expire(&mut it.cx);
    let (owner, error) = it.engine.next_late().expect("it is late");
    assert_eq!(owner, 7);
    assert!(matches!(error, Error::Timeout(_)));
    assert!(it.engine.next_completion().is_none(), "reads may write");
    assert_eq!(it.sent(), [(id, Message::Cancel, Vec::new())]);
    assert!(!it.cx.has_failed(SESSION));
    it.end_reads();
    assert!(is_timeout(it.engine.next_completion()));
    assert!(it.engine.next_late().is_none());
}

/// Serves a stream that is longer than the window, of which nothing has been placed.
fn serve_long_stream(it: &mut Fixture, transfer: u64) {
    let Ok(Handled::Request(request)) = it.receive(transfer, &read(Wanted::Bytes), &[]) else {
        panic!("it may ask");
    };
    let len = 8 << 20;
    let memory = it.cx.register(Buffer::zeroed(3 * len)).unwrap();
    let (len, total) = (len as u64, 3 * len as u64);
    let layout = Layout::new(total, len, len).unwrap();
    it.engine.serve(&mut it.cx, &request, Ok((memory, layout)));
}

#[test]
fn a_source_sends_nothing_more_of_what_is_cancelled_and_says_so() {
    let mut it = Fixture::new(MemoryPath::Stream);
    serve_long_stream(&mut it, 1);
    assert!(!it.sent().is_empty());
    it.receive(1, &Message::Cancel, &[]).unwrap();
    it.receive(1, &Message::Credit(4 << 20), &[]).unwrap();
    assert_eq!(it.sent(), [(1, Message::Cancelled, Vec::new())]);
    let message = read(Wanted::Checksums);
    let Ok(Handled::Request(request)) = it.receive(2, &message, &[]) else {
        panic!("it may ask");
    };
    let source = Ok((Arc::clone(&it.source), layout()));
    it.engine.serve(&mut it.cx, &request, source);
    it.receive(2, &Message::Cancel, &[]).unwrap();
    while it.engine.run_slice(&mut it.cx) {}
    assert_eq!(it.sent(), [(2, Message::Cancelled, Vec::new())]);
    // All of it had been sent when CANCEL came.
    it.receive(3, &Message::Cancel, &[]).unwrap();
    assert_eq!(it.sent(), [(3, Message::Cancelled, Vec::new())]);
}

#[test]
fn a_buffer_is_read_once_by_a_request() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let (exposed, _) = ExposedBuffer::new(
        &it.cx,
        SESSION,
        Buffer::zeroed(8),
        crate::integrity::Integrity::Auto,
    )
    .unwrap();
    for (transfer, ids, is_refused) in [(1, &[0][..], false), (2, &[0, 0], true), (3, &[1], true)] {
        let message = Message::Read {
            source: SOURCE,
            wanted: Wanted::Bytes,
            ids: Cow::Borrowed(ids),
        };
        let Ok(Handled::Request(request)) = it.receive(transfer, &message, &[]) else {
            panic!("not a request")
        };
        assert_eq!(exposed.requested(&request).is_err(), is_refused, "{ids:?}");
    }
}

#[test]
fn checksums_that_one_peer_asks_for_are_computed_in_turns() {
    const LARGE: u64 = 6 << 20; // more than a slice
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    for (transfer, num_bytes) in [(1, LARGE), (2, 8)] {
        let message = Message::Read {
            source: SOURCE,
            wanted: Wanted::Checksums,
            ids: Cow::Borrowed(&[0]),
        };
        let Ok(Handled::Request(request)) = it.receive(transfer, &message, &[]) else {
            panic!("not a request")
        };
        let memory = it.cx.register(Buffer::zeroed(num_bytes as usize)).unwrap();
        it.engine
            .serve(&mut it.cx, &request, Ok((memory, Layout::whole(num_bytes))));
    }
    let mut order = Vec::new();
    while it.engine.has_work() {
        it.engine.run_slice(&mut it.cx);
        order.extend(
            it.sent()
                .into_iter()
                .filter(|(_, message, _)| matches!(message, Message::Checksums { .. }))
                .map(|(transfer, ..)| transfer),
        );
    }
    assert_eq!(
        order,
        [2, 1],
        "the small one waits for a slice of the large one, not for all of it"
    );
}

#[test]
fn the_end_of_a_session_is_that_of_its_transfers_after_their_reads() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    it.begin(it.request(0));
    it.engine.add(it.request(1));
    let lost = Error::lost("peer", "gone");
    it.engine.session_down(&mut it.cx, SESSION, &lost);
    let held = it
        .engine
        .next_completion()
        .expect("nothing was read for it");
    assert_eq!(held.owner, 1);
    assert!(it.engine.next_completion().is_none());
    it.end_reads();
    assert_eq!(failed(it.engine.next_completion()), lost);
}

fn read(wanted: Wanted) -> Message<'static> {
    Message::Read {
        source: 9,
        wanted,
        ids: vec![2, 0].into(),
    }
}

#[test]
fn a_peer_gets_what_it_asks_for_and_no_more_at_once_than_it_may() {
    let mut it = Fixture::new(MemoryPath::Stream);
    for (transfer, wanted) in [(1, Wanted::ChecksummedBytes), (2, Wanted::Checksums)] {
        let Ok(Handled::Request(request)) = it.receive(transfer, &read(wanted), &[]) else {
            panic!("it may ask");
        };
        assert_eq!(request.source, 9);
        let memory = Arc::clone(&it.source);
        it.engine
            .serve(&mut it.cx, &request, Ok((memory, layout())));
    }
    let data = [it.block(2), it.block(0)].concat();
    let expected = Message::Data {
        offset: 0,
        checksum: checksum::of(&data),
    };
    assert_eq!(it.sent(), [(1, expected, data)]);
    for transfer in 2..=MAX_IN_FLIGHT as u64 {
        let message = read(Wanted::Checksums);
        assert!(it.receive(transfer, &message, &[]).is_err());
    }
    while it.engine.run_slice(&mut it.cx) {}
    let checksums = [2, 0].map(|id| checksum::of(&it.block(id))).to_vec();
    let (id, message, _) = it.sent().remove(0);
    let first = 0;
    assert_eq!((id, message), (2, Message::Checksums { first, checksums }));
    assert!(!it.engine.has_work());
}

#[test]
fn a_peer_that_asks_for_what_is_not_there_is_refused() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let Ok(Handled::Request(request)) = it.receive(1, &read(Wanted::Bytes), &[]) else {
        panic!("it may ask");
    };
    it.engine
        .serve(&mut it.cx, &request, Err(config("no such source")));
    let (id, message, _) = it.sent().remove(0);
    let reason = "no such source".to_owned();
    assert_eq!((id, message), (1, Message::Refused(reason)));
}
