//! The receiving end: what has come, who waits for it, and the one large tensor that is being fetched.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Buffer, Memory, Payload, RemoteKey, Status};

use super::{
    ACCEPT, CREDIT, DATA, Deadline, EAGER, EAGER_CAP, GET_PIECE, GETS_IN_FLIGHT,
    MESSAGES_IN_FLIGHT, Meta, OFFER, Shared, TAKEN, WINDOW, WITHDRAW, WITHDRAWN,
};
use crate::codec::Reader;
use crate::data::Road;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::node::{Io, LinkId, Service};
use crate::work::Completer;

/// The frame with which a sender ends the pipe in order; all tensors have been taken before it.
pub(super) const END: &[u8] = b"end";
/// Largest packed remote key.
const RKEY_CAP: usize = 4096;

/// A tensor that was received.
#[derive(Debug)]
pub struct Received {
    /// What it is.
    pub meta: Meta,
    /// Its bytes, when they were not received into memory of the caller.
    pub buffer: Option<Buffer>,
}

#[derive(Debug)]
pub(super) enum Command {
    Receive {
        out: Option<(Meta, Buffer)>,
        deadline: Deadline,
        completer: Completer<Arc<Received>>,
    },
}

struct Wanted {
    out: Option<(Meta, Buffer)>,
    deadline: Deadline,
    completer: Completer<Arc<Received>>,
}

struct Arrived {
    sequence: u64,
    meta: Meta,
    content: Content,
}

enum Content {
    Eager(Vec<u8>),
    Offer {
        len: usize,
        address: u64,
        key: Vec<u8>,
    },
}

/// The large tensor under way.
struct Fetch {
    sequence: u64,
    meta: Meta,
    memory: Arc<Memory>,
    is_fresh: bool,
    len: usize,
    address: u64,
    key: Option<RemoteKey>,
    /// Bytes asked for (get road) or placed (message road).
    begun: usize,
    in_flight: usize,
    uncredited: usize,
    deadline: Deadline,
    completer: Completer<Arc<Received>>,
    failure: Option<Error>,
    is_withdrawn: bool,
}

pub(super) struct Receiver {
    shared: Shared,
    /// The one sender, from the moment it was let in.
    sender: Option<LinkId>,
    /// The same, while its session is established.
    link: Option<LinkId>,
    arrived: VecDeque<Arrived>,
    wanted: VecDeque<Wanted>,
    deadlines: Earliest,
    fetch: Option<Fetch>,
    /// The last tensor that was withdrawn while it was fetched; messages of it may still come.
    withdrawn: Option<u64>,
    next_sequence: u64,
    has_ended: bool,
    failure: Option<Error>,
}

impl Receiver {
    pub(super) fn new(shared: Shared) -> Self {
        Self {
            shared,
            sender: None,
            link: None,
            arrived: VecDeque::new(),
            wanted: VecDeque::new(),
            deadlines: Earliest::default(),
            fetch: None,
            withdrawn: None,
            next_sequence: 0,
            has_ended: false,
            failure: None,
        }
    }

    /// Brings what has come and who waits together, in order, until one of them is missing.
    fn pair(&mut self, io: &mut Io) {
        while self.fetch.is_none() && !self.wanted.is_empty() && !self.arrived.is_empty() {
            let Some(wanted) = self.wanted.pop_front() else {
                return;
            };
            let Some(arrived) = self.arrived.pop_front() else {
                return;
            };
            if let Some(error) = mismatch(&wanted, &arrived) {
                self.arrived.push_front(arrived);
                wanted.completer.complete(Err(error));
                continue;
            }
            let (sequence, meta) = (arrived.sequence, arrived.meta);
            match arrived.content {
                Content::Eager(bytes) => self.deliver(io, sequence, meta, bytes, wanted),
                Content::Offer { len, address, key } => {
                    self.begin(io, sequence, meta, (len, address, key), wanted);
                }
            }
        }
        if self.arrived.is_empty() && self.fetch.is_none() {
            self.report_end();
        }
        self.shared.get().in_flight = self.wanted.len() + usize::from(self.fetch.is_some());
    }

    fn report_end(&mut self) {
        let Some(error) = &self.failure else { return };
        for wanted in self.wanted.drain(..) {
            wanted.completer.complete(Err(error.clone()));
        }
    }

    fn deliver(&mut self, io: &mut Io, sequence: u64, meta: Meta, bytes: Vec<u8>, wanted: Wanted) {
        self.acknowledge(io, sequence, bytes.len());
        let buffer = match wanted.out {
            Some((_, out)) if !out.write(0, &bytes) => {
                let text = "out= is not in host memory; this version receives nowhere else";
                let error = Error::Unavailable(text.to_owned());
                return wanted.completer.complete(Err(error));
            }
            Some(_) => None,
            None => Some(Buffer::from_vec(bytes)),
        };
        let received = Received { meta, buffer };
        wanted.completer.complete(Ok(Arc::new(received)));
    }

    fn acknowledge(&mut self, io: &mut Io, sequence: u64, len: usize) {
        if let Some(link) = self.link {
            let header = io.header(link, TAKEN).u64(sequence);
            io.message(link, header, Payload::None, 0);
        }
        let mut info = self.shared.get();
        info.num_tensors += 1;
        info.num_bytes += len as u64;
    }

    fn begin(
        &mut self,
        io: &mut Io,
        sequence: u64,
        meta: Meta,
        (len, address, key): (usize, u64, Vec<u8>),
        wanted: Wanted,
    ) {
        let Some(link) = self.link else { return };
        let is_fresh = wanted.out.is_none();
        let buffer = match wanted.out {
            Some((_, buffer)) => Ok(buffer),
            None => allocate(len),
        };
        let buffer = match buffer {
            Ok(buffer) => buffer,
            Err(error) => {
                // Nothing is consumed: a caller with memory of its own can still take it.
                let content = Content::Offer { len, address, key };
                self.arrived.push_front(Arrived {
                    sequence,
                    meta,
                    content,
                });
                return wanted.completer.complete(Err(error));
            }
        };
        let is_get = matches!(io.road(link), Some(Road::Get(_)));
        let prepared = io.register(buffer).and_then(|memory| {
            let key = is_get.then(|| io.unpack_rkey(link, &key)).transpose()?;
            Ok((memory, key))
        });
        let (memory, key) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                io.fail(link, error.clone());
                return wanted.completer.complete(Err(error));
            }
        };
        self.fetch = Some(Fetch {
            sequence,
            meta,
            memory,
            is_fresh,
            len,
            address,
            key,
            begun: 0,
            in_flight: 0,
            uncredited: 0,
            deadline: wanted.deadline,
            completer: wanted.completer,
            failure: None,
            is_withdrawn: false,
        });
        if is_get {
            self.read_on(io, link);
        } else {
            let header = io.header(link, ACCEPT).u64(sequence);
            io.message(link, header, Payload::None, 0);
        }
    }

    /// Get road: keeps a few reads under way.
    fn read_on(&mut self, io: &mut Io, link: LinkId) {
        let Some(fetch) = &mut self.fetch else { return };
        let Some(key) = &fetch.key else { return };
        while fetch.failure.is_none() && fetch.in_flight < GETS_IN_FLIGHT && fetch.begun < fetch.len
        {
            let len = GET_PIECE.min(fetch.len - fetch.begun);
            let token = io.token();
            let remote = fetch.address + fetch.begun as u64;
            if !io.get(link, &fetch.memory, fetch.begun, len, remote, key, token) {
                return;
            }
            fetch.begun += len;
            fetch.in_flight += 1;
        }
    }

    /// Message road: puts a piece where it belongs, after checking that it belongs.
    fn place(
        &mut self,
        io: &mut Io,
        link: LinkId,
        sequence: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        let is_wanted = |fetch: &&mut Fetch| fetch.sequence == sequence && fetch.key.is_none();
        let Some(fetch) = self.fetch.as_mut().filter(is_wanted) else {
            if self.withdrawn == Some(sequence) {
                // Sent before the sender knew that its withdrawal had been taken.
                return Ok(());
            }
            return Err(Error::protocol(format_args!(
                "data of tensor {sequence}, which nobody asked for"
            )));
        };
        if offset != fetch.begun as u64
            || data.is_empty()
            || !fetch.memory.buffer().write(fetch.begun, data)
        {
            return Err(Error::protocol(format_args!(
                "{} bytes at {offset} of tensor {sequence} of {} bytes, {} expected next",
                data.len(),
                fetch.len,
                fetch.begun
            )));
        }
        fetch.begun += data.len();
        fetch.uncredited += data.len();
        if fetch.begun < fetch.len && fetch.uncredited >= WINDOW / 4 {
            let header = io
                .header(link, CREDIT)
                .u64(sequence)
                .u64(fetch.uncredited as u64);
            fetch.uncredited = 0;
            io.message(link, header, Payload::None, 0);
        }
        Ok(())
    }

    fn finish(&mut self, io: &mut Io) {
        let is_over = |fetch: &mut Fetch| {
            let is_complete = fetch.begun == fetch.len && fetch.in_flight == 0;
            is_complete || (fetch.failure.is_some() && fetch.in_flight == 0)
        };
        let Some(fetch) = self.fetch.take_if(is_over) else {
            return;
        };
        if let (true, Some(link)) = (fetch.is_withdrawn, self.link) {
            let header = io.header(link, WITHDRAWN).u64(fetch.sequence);
            io.message(link, header, Payload::None, 0);
        }
        if let Some(error) = fetch.failure {
            fetch.completer.complete(Err(error));
        } else {
            self.acknowledge(io, fetch.sequence, fetch.len);
            let buffer = fetch.is_fresh.then(|| fetch.memory.buffer().clone());
            fetch.completer.complete(Ok(Arc::new(Received {
                meta: fetch.meta,
                buffer,
            })));
        }
        self.pair(io);
    }

    fn eager(&mut self, sequence: u64, data: &[u8]) -> Result<()> {
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let bytes = reader.bytes(EAGER_CAP)?.to_vec();
        reader.end()?;
        self.arrive(Arrived {
            sequence,
            meta,
            content: Content::Eager(bytes),
        })
    }

    fn offer(&mut self, sequence: u64, mut header: Reader<'_>, data: &[u8]) -> Result<()> {
        let len = usize::try_from(header.u64()?)
            .map_err(|_| Error::protocol("a tensor larger than memory"))?;
        let address = header.u64()?;
        header.end()?;
        let mut reader = Reader::new(data);
        let meta = Meta::read(&mut reader)?;
        let key = reader.bytes(RKEY_CAP)?.to_vec();
        reader.end()?;
        if address.checked_add(len as u64).is_none()
            || isize::try_from(len).is_err()
            || len <= EAGER_CAP
        {
            return Err(Error::protocol(format_args!(
                "an offer of {len} bytes at {address:#x}"
            )));
        }
        self.arrive(Arrived {
            sequence,
            meta,
            content: Content::Offer { len, address, key },
        })
    }

    fn arrive(&mut self, arrived: Arrived) -> Result<()> {
        if arrived.sequence != self.next_sequence || self.arrived.len() >= MESSAGES_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "tensor {} came, {} was next and {} wait",
                arrived.sequence,
                self.next_sequence,
                self.arrived.len()
            )));
        }
        self.next_sequence += 1;
        self.arrived.push_back(arrived);
        Ok(())
    }

    fn withdraw(&mut self, io: &mut Io, link: LinkId, sequence: u64) {
        if let Some(fetch) = self
            .fetch
            .as_mut()
            .filter(|fetch| fetch.sequence == sequence)
        {
            // Answered once no read is under way: only then may the sender have its memory back.
            let text = "the sender withdrew the tensor while it was received; it is lost, the pipe is usable";
            fetch.failure.get_or_insert(Error::Timeout(text.to_owned()));
            fetch.is_withdrawn = true;
            self.withdrawn = Some(sequence);
            return self.finish(io);
        }
        let Some(at) = self
            .arrived
            .iter()
            .position(|arrived| arrived.sequence == sequence)
        else {
            return;
        };
        self.arrived.remove(at);
        let header = io.header(link, WITHDRAWN).u64(sequence);
        io.message(link, header, Payload::None, 0);
    }

    fn expire(&mut self, io: &mut Io) {
        let now = io.now;
        if self.deadlines.take_if_past(now) {
            let late = |wanted: &Wanted| wanted.deadline.meet_by.is_some_and(|at| at <= now);
            let (expired, kept): (VecDeque<_>, VecDeque<_>) = self.wanted.drain(..).partition(late);
            for wanted in expired {
                let text = "no tensor came in time; the pipe is usable";
                let error = Error::Timeout(text.to_owned());
                wanted.completer.complete(Err(error));
            }
            for wanted in &kept {
                self.deadlines.add(wanted.deadline.meet_by);
            }
            self.wanted = kept;
        }
        let is_late = |fetch: &Fetch| fetch.deadline.done_by.is_some_and(|at| at <= now);
        if let (Some(link), Some(fetch)) = (self.link, &mut self.fetch)
            && fetch.failure.is_none()
            && is_late(fetch)
        {
            let text = format!(
                "a tensor of {} bytes was not received in time; the pipe is closed",
                fetch.len
            );
            fetch.failure = Some(Error::Timeout(text.clone()));
            io.fail(link, Error::Timeout(text));
        }
    }
}

/// Memory for a tensor whose size the sender names: more than there is must be an error and not the end of the process.
fn allocate(len: usize) -> Result<Buffer> {
    let mut probe: Vec<u8> = Vec::new();
    let is_possible = probe.try_reserve_exact(len).is_ok();
    drop(std::hint::black_box(probe));
    if is_possible {
        return Ok(Buffer::zeroed(len));
    }
    Err(Error::Exhausted(format!(
        "no memory for a tensor of {len} bytes; it was not consumed"
    )))
}

fn mismatch(wanted: &Wanted, arrived: &Arrived) -> Option<Error> {
    let (meta, buffer) = wanted.out.as_ref()?;
    let len = match &arrived.content {
        Content::Eager(bytes) => bytes.len(),
        Content::Offer { len, .. } => *len,
    };
    if *meta == arrived.meta && buffer.len() == len {
        return None;
    }
    let show = |meta: &Meta| match meta.family {
        0 => "None".to_owned(),
        1 => format!("torch {} {:?}", meta.dtype, meta.shape),
        _ => format!("numpy {} {:?}", meta.dtype, meta.shape),
    };
    Some(Error::Config(format!(
        "out= is {}, the next tensor is {}; it was not consumed, receive it with a matching out= or without",
        show(meta),
        show(&arrived.meta)
    )))
}

impl Service for Receiver {
    type Command = Command;

    fn command(
        &mut self,
        io: &mut Io,
        Command::Receive {
            out,
            deadline,
            completer,
        }: Command,
    ) {
        self.deadlines.add(deadline.meet_by);
        self.wanted.push_back(Wanted {
            out,
            deadline,
            completer,
        });
        self.pair(io);
    }

    fn accept(&mut self, link: LinkId, _peer: &Identity) -> std::result::Result<(), String> {
        if self.sender.is_some() {
            return Err(
                "this pipe already has a sender; a pipe has one for its whole life".to_owned(),
            );
        }
        self.sender = Some(link);
        Ok(())
    }

    fn dismissed(&mut self, link: LinkId) {
        self.sender.take_if(|sender| *sender == link);
    }

    fn link_up(&mut self, io: &mut Io, link: LinkId, _peer: &Identity) {
        self.link = Some(link);
        let mut info = self.shared.get();
        info.state = "open";
        info.peer = io.peer(link);
        info.transport = io
            .road(link)
            .map_or_else(String::new, |road| road.transport().to_owned());
    }

    fn link_down(&mut self, io: &mut Io, _link: LinkId, error: Error) {
        let error = if self.has_ended {
            Error::EndOfPipe
        } else {
            error
        };
        self.failure.get_or_insert(error.clone());
        self.link = None;
        // What came whole can still be received; an offer cannot, its memory is gone with the sender.
        self.arrived
            .retain(|arrived| matches!(arrived.content, Content::Eager(_)));
        if let Some(fetch) = &mut self.fetch {
            fetch.failure.get_or_insert(error);
        }
        self.shared.get().state = "closed";
        self.finish(io);
        self.pair(io);
    }

    fn frame(&mut self, _io: &mut Io, _link: LinkId, frame: &[u8]) -> Result<()> {
        if frame != END {
            return Err(Error::protocol(
                "the sender of a pipe sent an unknown frame",
            ));
        }
        self.has_ended = true;
        Ok(())
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        let kind = reader.u8()?;
        let sequence = reader.u64()?;
        match kind {
            EAGER => self.eager(sequence, &data)?,
            OFFER => self.offer(sequence, reader, &data)?,
            DATA => {
                let offset = reader.u64()?;
                self.place(io, link, sequence, offset, &data)?;
                self.finish(io);
            }
            WITHDRAW => self.withdraw(io, link, sequence),
            other => {
                return Err(Error::protocol(format_args!(
                    "message {other} to the receiver of a pipe"
                )));
            }
        }
        drop(data);
        self.pair(io);
        Ok(())
    }

    fn done(&mut self, io: &mut Io, _token: u64, result: std::result::Result<(), Status>) {
        let Some(fetch) = &mut self.fetch else { return };
        fetch.in_flight -= 1;
        if let Err(status) = result {
            let peer = self
                .link
                .map_or_else(|| "unknown".to_owned(), |link| io.peer(link));
            let error = Error::lost(&peer, status);
            fetch.failure.get_or_insert(error.clone());
            if let Some(link) = self.link {
                io.fail(link, error);
            }
        }
        if let Some(link) = self.link {
            self.read_on(io, link);
        }
        // Also of a link that has gone: the last read that ends is what its receive has waited for.
        self.finish(io);
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        self.expire(io);
        let fetch = self
            .fetch
            .iter()
            .filter(|fetch| fetch.failure.is_none())
            .filter_map(|fetch| fetch.deadline.done_by);
        fetch.chain(self.deadlines.at()).min()
    }

    fn stop(&mut self, _io: &mut Io) {
        let closed = || Error::Closed("the pipe is closed".to_owned());
        for wanted in self.wanted.drain(..) {
            wanted.completer.complete(Err(closed()));
        }
        if let Some(fetch) = self.fetch.take() {
            fetch.completer.complete(Err(closed()));
        }
    }
}
