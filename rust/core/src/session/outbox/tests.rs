use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::net::framing::{FRAME_CAP, FrameReader, SessionFrame};

const LEN: usize = 300 << 10;

fn tag(transfer: u64) -> StreamTag {
    StreamTag {
        source: transfer % 2,
        transfer,
    }
}

/// A part of so many ranges, whose bytes are the transfer's number.
fn part(transfer: u64, num_ranges: usize) -> StreamPart {
    let len = LEN / num_ranges;
    StreamPart {
        tag: tag(transfer),
        header: vec![33, transfer as u8],
        buffer: Buffer::from_vec(vec![transfer as u8; LEN]),
        ranges: (0..num_ranges).map(|at| (at * len, len)).collect(),
    }
}

/// An outbox with its connection, which takes little at once.
struct Fixture {
    outbox: Outbox,
    near: UnixStream,
    far: UnixStream,
    received: FrameReader,
}

impl Fixture {
    fn new() -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        Self {
            outbox: Outbox::default(),
            near,
            far,
            received: FrameReader::default(),
        }
    }

    fn send(&mut self) {
        self.outbox.send(self.near.as_fd(), None).unwrap();
    }

    fn message(&mut self, header: &[u8]) {
        let payload = &[];
        let frame = SessionFrame::Message { header, payload }.encode();
        assert!(self.outbox.push(&frame, None).unwrap());
    }

    /// Arrivals until everything has been sent: headers, payloads, and true for parts that are aborted.
    fn receive(&mut self) -> Vec<(Vec<u8>, Vec<u8>, bool)> {
        let mut frames = Vec::new();
        loop {
            self.send();
            let buffer = self.received.buffer();
            let received = socket::receive(self.far.as_fd(), None, buffer, 1 << 20);
            while let Some(frame) = self.received.next(FRAME_CAP).unwrap() {
                frames.push(match SessionFrame::decode(frame).unwrap() {
                    SessionFrame::Message { header, payload } => {
                        (header.to_vec(), payload.to_vec(), false)
                    }
                    SessionFrame::Stream {
                        header,
                        payload,
                        is_aborted,
                    } => (header.to_vec(), payload.to_vec(), is_aborted),
                    other => panic!("{other:?}"),
                });
            }
            if received.is_err() && self.outbox.is_empty() {
                return frames;
            }
        }
    }
}

#[test]
fn a_message_overtakes_parts_that_have_not_begun_and_waits_for_the_one_that_has() {
    let mut it = Fixture::new();
    it.outbox.push_part(part(1, 1));
    it.outbox.push_part(part(2, 3));
    it.send();
    it.message(b"message");
    let received = it.receive();
    let headers: Vec<_> = received.iter().map(|(header, ..)| &header[..]).collect();
    assert_eq!(headers, [&[33, 1][..], b"message", &[33, 2]]);
    for (transfer, at) in [(1, 0), (2, 2)] {
        assert_eq!(received[at].1, vec![transfer; LEN]);
        assert!(!received[at].2);
    }
}

#[test]
fn a_part_of_more_ranges_than_one_call_takes_arrives_whole() {
    let mut it = Fixture::new();
    it.outbox.push_part(part(1, 3000));
    let received = it.receive();
    assert_eq!(received[0].1, vec![1; 3000 * (LEN / 3000)]);
}

#[test]
fn memory_that_is_taken_back_is_read_no_more_and_its_part_ends_as_aborted() {
    let mut it = Fixture::new();
    let first = part(1, 2);
    let memory = first.buffer.clone();
    it.outbox.push_part(first);
    it.outbox.push_part(part(3, 1));
    it.outbox.push_part(part(2, 1));
    it.send();
    it.outbox.abort(|tag| tag.source == 1);
    // Now another request's.
    assert!(memory.write(0, &vec![9; LEN]));
    let received = it.receive();
    let headers: Vec<_> = received.iter().map(|(header, ..)| &header[..]).collect();
    assert_eq!(headers, [[33, 1], [33, 2]]);
    let (_, aborted, is_aborted) = &received[0];
    assert!(is_aborted);
    assert_eq!(aborted.len(), LEN);
    let num_sent = aborted.iter().take_while(|byte| **byte == 1).count();
    assert!(num_sent > 0 && num_sent < LEN, "{num_sent}");
    assert!(aborted[num_sent..].iter().all(|byte| *byte == 0));
    assert_eq!(received[1], (vec![33, 2], vec![2; LEN], false));
}

#[test]
fn parts_that_have_not_begun_are_not_sent_when_their_transfer_is_over() {
    let mut it = Fixture::new();
    it.outbox.push_part(part(1, 1));
    it.outbox.push_part(part(2, 1));
    it.outbox.abort(|tag| tag.transfer == 1);
    let received = it.receive();
    assert_eq!(received, [(vec![33, 2], vec![2; LEN], false)]);
}

#[test]
fn a_call_sends_no_more_than_other_connections_may_wait_for() {
    let mut it = Fixture::new();
    // A peer that takes everything.
    let far = it.far.try_clone().unwrap();
    far.set_nonblocking(false).unwrap();
    let reading = std::thread::spawn(move || std::io::copy(&mut &far, &mut std::io::sink()));
    it.near.set_nonblocking(false).unwrap();
    for transfer in 0..20 {
        it.outbox.push_part(part(transfer, 1));
    }
    it.send();
    assert!(it.outbox.len() > 10);
    it.near.shutdown(std::net::Shutdown::Both).unwrap();
    let _ = reading.join();
}
