use std::cell::RefCell;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use kvpipe_ucx::{Buffer, SharedBytes};
use proptest::prelude::*;

use super::*;
use crate::net::framing::{FRAME_CAP, SessionFrame};
use crate::session::stream_sinks::SharedSink;
use crate::session::{Links, StreamSink};

const SESSION: SessionKey = 20;
const KIND: u8 = 33;

/// Collects the bytes of a stream, in memory that it gives or by copies.
struct Collected {
    memory: Buffer,
    len: usize,
    gives_memory: bool,
    /// Bytes that came by copies.
    num_copied: usize,
}

impl Collected {
    fn new(gives_memory: bool) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            memory: Buffer::zeroed(4 << 20),
            len: 0,
            gives_memory,
            num_copied: 0,
        }))
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.bytes(0, self.len).unwrap().to_vec()
    }
}

impl StreamSink for Collected {
    fn begin(&mut self, _header: Reader<'_>, _len: usize) -> Result<u64> {
        Ok(0)
    }
    fn next_ranges(&self, _part: u64, cap: usize, ranges: &mut Vec<Range>) -> Option<Buffer> {
        let half = cap / 2;
        ranges.extend([(self.len, half), (self.len + half, cap - half)]);
        self.gives_memory.then(|| self.memory.clone())
    }
    fn placed(&mut self, _part: u64, len: usize) {
        self.len += len;
    }
    fn put(&mut self, _part: u64, data: SharedBytes<'_>) -> Result<()> {
        assert!(self.memory.copy_from(self.len, data));
        self.len += data.len();
        self.num_copied += data.len();
        Ok(())
    }
}

fn name(id: u64) -> Vec<u8> {
    [&[KIND][..], &id.to_le_bytes()].concat()
}

fn framed(frame: &SessionFrame<'_>) -> Vec<u8> {
    let frame = frame.encode();
    [&(frame.len() as u32).to_le_bytes()[..], &frame].concat()
}

fn part(id: u64, payload: &[u8], is_aborted: bool) -> Vec<u8> {
    framed(&SessionFrame::Stream {
        header: &name(id),
        payload,
        is_aborted,
    })
}

fn message(header: &[u8]) -> Vec<u8> {
    let payload = &[];
    framed(&SessionFrame::Message { header, payload })
}

/// Receives these bytes, of which `len` are on the socket at a time: headers of messages, and parts.
fn receive(links: &Links, bytes: &[u8], len: usize) -> Vec<(Vec<u8>, Option<bool>)> {
    let (mut near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let (mut inbox, mut received) = (Inbox::default(), Vec::new());
    for bytes in bytes.chunks(len) {
        near.write_all(bytes).unwrap();
        while inbox.read(far.as_fd()).is_ok() {
            loop {
                if let Some(part) = inbox.next_part(SESSION, &links.sinks).unwrap() {
                    received.push((part.header, Some(part.is_aborted)));
                } else if let Some(frame) = inbox.next_frame(FRAME_CAP).unwrap() {
                    let SessionFrame::Message { header, .. } = SessionFrame::decode(frame).unwrap()
                    else {
                        panic!("no message");
                    };
                    received.push((header.to_vec(), None));
                } else {
                    break;
                }
            }
        }
    }
    received
}

proptest! {
    #[test]
    fn parts_lie_where_they_belong_and_all_frames_come_in_order_however_they_are_cut(
        payloads in prop::collection::vec(0..3000usize, 1..5), len in 1..4000usize, gives_memory: bool
    ) {
        let links = Links::manual(None);
        let collected = Collected::new(gives_memory);
        let sink: SharedSink = collected.clone();
        let _registered = links.register_sink(SESSION, (KIND, 7), sink);
        let (mut bytes, mut content, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (at, len) in payloads.into_iter().enumerate() {
            let payload = vec![at as u8 + 1; len];
            bytes.extend(part(7, &payload, at == 1));
            // Of another stream, which nothing takes.
            bytes.extend(part(8, &payload, false));
            bytes.extend(message(&[at as u8]));
            content.extend(payload);
            expected.extend([(name(7), Some(at == 1)), (name(8), Some(false)), (vec![at as u8], None)]);
        }
        prop_assert_eq!(receive(&links, &bytes, len), expected);
        prop_assert_eq!(collected.borrow().bytes(), content);
    }
}

#[test]
fn a_large_part_is_received_into_the_memory_of_its_sink_but_for_its_beginning() {
    let links = Links::manual(None);
    let collected = Collected::new(true);
    let sink: SharedSink = collected.clone();
    let _registered = links.register_sink(SESSION, (KIND, 7), sink);
    let payload = vec![5; 1 << 20];
    let bytes = part(7, &payload, false);
    receive(&links, &bytes, 100 << 10);
    let collected = collected.borrow();
    assert_eq!(collected.bytes(), payload);
    assert!(
        collected.num_copied <= READ_AHEAD,
        "{}",
        collected.num_copied
    );
}

#[test]
fn a_stream_that_is_let_go_within_a_part_gets_nothing_more_and_its_memory_is_free() {
    let links = Links::manual(None);
    let collected = Collected::new(true);
    let sink: SharedSink = collected.clone();
    let registered = links.register_sink(SESSION, (KIND, 7), sink);
    let bytes = [part(7, &[5; 100], false), message(b"next")].concat();
    let (mut near, far) = UnixStream::pair().unwrap();
    let mut inbox = Inbox::default();
    near.write_all(&bytes[..50]).unwrap();
    inbox.read(far.as_fd()).unwrap();
    assert_eq!(inbox.next_part(SESSION, &links.sinks), Ok(None));
    let (before, memory) = (collected.borrow().len, collected.borrow().memory.clone());
    assert!(before > 0);
    drop((registered, collected));
    near.write_all(&bytes[50..]).unwrap();
    inbox.read(far.as_fd()).unwrap();
    assert!(inbox.next_part(SESSION, &links.sinks).unwrap().is_some());
    inbox.read(far.as_fd()).unwrap();
    assert!(inbox.next_frame(FRAME_CAP).unwrap().is_some());
    assert_eq!(memory.bytes(before, 1).unwrap().to_vec(), [0]);
}

#[test]
fn the_beginning_of_a_part_that_is_too_long_or_too_short_is_refused() {
    let links = Links::manual(None);
    for (length, header_len) in [(FRAME_CAP as u32 + 1, 9), (11, 9), (0, 9)] {
        let (mut near, far) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::default();
        let head = [&length.to_le_bytes()[..], &[37, header_len], &name(7)].concat();
        near.write_all(&head).unwrap();
        inbox.read(far.as_fd()).unwrap();
        assert!(inbox.next_part(SESSION, &links.sinks).is_err(), "{length}");
    }
}
