//! Decisions of the engine, without threads: one session whose peer is a worker that the test looks into.

mod destination;
mod failures;
mod source;
mod wrong_canary;

use std::borrow::Cow;

use kvpipe_ucx::Buffer;

use super::*;
use crate::checksum;
use crate::session::FarEnd;
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
    links: Links,
    engine: TransferEngine,
    /// The worker at the other end of its endpoint.
    _peer: Worker,
    far: FarEnd,
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
        let open = || transport.open().unwrap();
        let (context, peer) = (open(), open().worker().unwrap().unwrap());
        let bytes = (0..NUM_BLOCKS * BLOCK).map(|at| (at / 7) as u8).collect();
        let source = context.register(Buffer::from_vec(bytes)).unwrap();
        let mut links = Links::manual(Some(context));
        let far = links.add_manual(SESSION, Some(&peer.address().unwrap()));
        let mut engine = TransferEngine::new(MAX_IN_FLIGHT);
        engine.session_up(SESSION);
        let mut fixture = Self {
            links,
            engine,
            _peer: peer,
            far,
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
            grant: 0,
            memory: self.links.register(memory).unwrap(),
            pieces: Arc::new(pieces.unwrap()),
            checksums: Checksums::All,
            is_verified_by_owner: false,
            is_retry: false,
            deadline: None,
        }
    }

    fn begin(&mut self, request: TransferRequest) -> u64 {
        let id = self.engine.add(request);
        self.engine.enqueue(&mut self.links, id);
        id
    }

    /// Messages that have arrived at the peer since the last call.
    fn sent(&mut self) -> Vec<(u64, Message<'static>, Vec<u8>)> {
        let sent = self.links.sent(SESSION, &mut self.far).into_iter();
        let decode = |(header, payload): (Vec<u8>, Vec<u8>)| {
            let rest = Reader::new(&header[1..]);
            let (id, message) = Message::decode(header[0], rest, &payload).unwrap();
            (id, message, payload)
        };
        sent.map(decode).collect()
    }

    /// Transfers that the source has been asked to serve since the last call, with what is wanted.
    fn requests(&mut self) -> Vec<(u64, Wanted)> {
        let read = |(transfer, message, _)| match message {
            Message::Read { wanted, .. } => Some((transfer, wanted)),
            _ => None,
        };
        self.sent().into_iter().filter_map(read).collect()
    }

    fn receive(
        &mut self,
        id: u64,
        message: &Message<'_>,
        payload: &[u8],
    ) -> Result<Option<SourceRequest>> {
        self.receive_from(SESSION, id, message, payload)
    }

    fn receive_from(
        &mut self,
        session: SessionKey,
        id: u64,
        message: &Message<'_>,
        payload: &[u8],
    ) -> Result<Option<SourceRequest>> {
        let (header, encoded) = message.to_bytes(id);
        let payload = [&encoded, payload].concat();
        let data = if let Message::Data { .. } = message {
            self.links.place(session, &header, &payload)?
        } else {
            Payload::Bytes(payload)
        };
        let header = (header[0], Reader::new(&header[1..]));
        self.engine.message(&mut self.links, session, header, &data)
    }

    fn block(&self, id: usize) -> Vec<u8> {
        let block = self.source.buffer().bytes(id * BLOCK, BLOCK);
        block.unwrap().to_vec()
    }

    /// All bytes of a request's stream.
    fn data(&mut self, transfer: u64) -> Result<Option<SourceRequest>> {
        let data = [3, 1, 0].map(|id| self.block(id)).concat();
        let message = Message::Data {
            offset: 0,
            checksum: checksum::of(&data),
        };
        self.receive(transfer, &message, &data)
    }

    fn checksums(&mut self, transfer: u64, checksums: Vec<u64>) -> Result<Option<SourceRequest>> {
        let first = 0;
        self.receive(transfer, &Message::Checksums { first, checksums }, &[])
    }

    fn source_checksums(&mut self, checksums: Vec<u64>) -> Result<Option<SourceRequest>> {
        let first = 0;
        self.receive(SOURCE, &Message::SourceChecksums { first, checksums }, &[])
    }

    fn block_checksums(&self) -> Vec<u64> {
        [3, 1, 0].map(|id| checksum::of(&self.block(id))).to_vec()
    }

    /// Ends all reads that are in flight.
    fn end_reads(&mut self) {
        while let Some((token, result)) = self.links.next_ended_read() {
            self.engine.read_ended(&mut self.links, token, result);
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
