//! Frames of an established session that are none, and parts of streams that keep to no rules: they end their session, or
//! their transfer, alone.

use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::blocks::Agent;
use kvpipe_core::blocks::Options;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::work::Work;
use kvpipe_ucx::{Buffer, Search};
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::agents::{BLOCK, COUNT, agent, connect, pair, register};
use crate::blocks_proof::Source;
use crate::common::{
    self, Raw, TIMEOUT, bytes, eventually, message_frame, on_both_paths, part_frame, pattern,
};

const NOTIFY: u8 = 40;
const VOID: u8 = 41;
const READ: u8 = 32;
const DATA: u8 = 33;
const CREDIT: u8 = 34;
const CANCEL: u8 = 45;
const CANCELLED: u8 = 46;
const REFUSED: u8 = 35;

const MESSAGE: u8 = 33;
const STREAM: u8 = 37;
/// Largest frame.
const FRAME_CAP: u32 = 33 << 20;

/// The header of a part of a stream.
fn data(transfer: u64, offset: u64) -> Vec<u8> {
    let header = Writer::new(DATA).u64(transfer).u64(offset);
    header.u64(0).finish()
}

/// A frame of this length, as far as it is sent.
fn announced(len: u32, begun: &[u8]) -> Vec<u8> {
    [&len.to_le_bytes()[..], begun].concat()
}

fn whole(frame: &[u8]) -> Vec<u8> {
    announced(frame.len() as u32, frame)
}

#[test]
fn a_frame_that_is_none_ends_its_own_session_alone() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    let address = pair.source.address().expect("address");
    let stream_head = [&[STREAM, 25], &data(1, 0)[..]].concat();
    let long_header = Writer::new(MESSAGE).u32(100).raw(&[NOTIFY; 99]).finish();
    let endless_header = Writer::new(MESSAGE)
        .u32(u32::MAX)
        .raw(&[NOTIFY; 9])
        .finish();
    let cases = [
        // Parts of streams.
        (
            announced(FRAME_CAP + 1, &stream_head),
            "a part of a stream in a frame of 34603009",
        ),
        (
            announced(u32::MAX, &stream_head[..2]),
            "a part of a stream in a frame of",
        ),
        (
            announced(27, &[STREAM, 25]),
            "a part of a stream in a frame of 27",
        ),
        (
            announced(10, &[STREAM, 255]),
            "a part of a stream in a frame of 10",
        ),
        (whole(&[STREAM]), "message ends early"),
        (whole(&[STREAM, 0]), "a part of a stream in a frame of 2"),
        (whole(&part_frame(&data(1, 0), b"part", 2)), "flag 2"),
        (whole(&part_frame(&data(1, 0), b"", 255)), "flag 255"),
        (
            whole(&part_frame(&[], b"part", 0)),
            "a part of a message that is no stream",
        ),
        (
            whole(&part_frame(&[DATA, 1, 0], b"part", 0)),
            "message ends early",
        ),
        (
            whole(&part_frame(&data(1, 0)[..24], b"part", 0)),
            "message ends early",
        ),
        (
            whole(&part_frame(&[&data(1, 0)[..], &[0]].concat(), b"part", 0)),
            "1 bytes follow",
        ),
        // Messages.
        (whole(&long_header), "100 bytes expected, 99 left"),
        (whole(&endless_header), "a field of 4294967295 bytes"),
        (whole(&[MESSAGE, 1, 0]), "message ends early"),
        (whole(&message_frame(&[], b"payload")), "message ends early"),
        (
            announced(FRAME_CAP + 1, &[MESSAGE]),
            "a frame of 34603009 bytes is announced",
        ),
        // Others.
        (whole(&[]), "frame None"),
        (whole(&[38, 0, 0]), "message ends early"),
        (whole(&[38, 0, 0, 0, 0, 0]), "1 bytes follow"),
        (whole(&[39, 0, 0]), "frame Some(39)"),
        (whole(&[1]), "frame Some(1)"),
    ];
    for (sent, named) in cases {
        let mut raw = Raw::connect(address, SessionKind::Agent);
        raw.write(&sent);
        let reason = raw.goodbye();
        let is_named = reason.contains("protocol error") && reason.contains(named);
        assert!(is_named, "{sent:?}: {reason}");
        assert!(raw.is_closed());
        pair.read_and_check(&[1, 5], &[2, 0], (BLOCK, BLOCK));
    }
    assert_eq!(pair.peer.lost(), None);
}

/// Its bytes would be lost, and what the end says of them.
#[test]
fn a_part_of_a_message_that_is_no_stream_ends_its_own_session_alone() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    let address = pair.source.address().expect("address");
    for (kind, payload, end) in [(NOTIFY, &b"tag"[..], 0), (NOTIFY, b"", 0), (VOID, b"", 1)] {
        let header = Writer::new(kind).u64(0).finish();
        let mut raw = Raw::connect(address, SessionKind::Agent);
        raw.send_frame(&part_frame(&header, payload, end));
        assert!(raw.is_closed(), "{kind} {payload:?} {end}");
        let come = pair.source.notifications().expect("open");
        assert!(come.is_empty(), "{kind} {payload:?} {end}");
    }
    pair.read_and_check(&[1, 5], &[2, 0], (BLOCK, BLOCK));
}

#[test]
fn a_peer_that_leaves_within_a_frame_ends_its_own_session_alone() {
    let Some(search) = common::ucx() else { return };
    let pair = pair(&search, BLOCK, BLOCK);
    let address = pair.source.address().expect("address");
    let message = whole(&message_frame(&[NOTIFY; 9], b"tag"));
    let part = whole(&part_frame(&data(1, 0), &vec![7; 100_000], 0));
    for (frame, cuts) in [
        (&message, [1, 4, 5, 9, 20]),
        (&part, [5, 6, 30, 31, 100_031]),
    ] {
        for cut in cuts {
            let raw = Raw::connect(address, SessionKind::Agent);
            raw.send(&Writer::new(1).u32(0).finish(), b""); // its regions: none
            let up = || (pair.source.peers().len() == 2).then_some(());
            eventually("the peer", up);
            raw.write(&frame[..cut]);
            drop(raw);
            let gone = || (pair.source.peers().len() == 1).then_some(());
            eventually("its end", gone);
        }
    }
    pair.read_and_check(&[1, 5], &[2, 0], (BLOCK, BLOCK));
    assert_eq!(pair.peer.lost(), None);
}

/// An agent that reads one block of a peer as a stream.
struct Reading {
    agent: Agent,
    source: Source,
    work: Work<u64>,
    transfer: u64,
    to: Buffer,
}

impl Reading {
    fn begin(search: &Search, options: Options) -> Self {
        let agent = agent(search);
        // Blocks of a GPU come as a stream whatever the road.
        let (source, plan, to) = Source::meet("cuda:0", search, &agent, &[7], &[3]);
        let work = agent.read(&plan, options).expect("read");
        Self {
            transfer: transfer(&source.raw),
            agent,
            source,
            work,
            to,
        }
    }

    fn part(&self) -> Vec<u8> {
        whole(&part_frame(
            &data(self.transfer, 0),
            &self.source.block(3),
            0,
        ))
    }

    /// Works until the agent has seen what the peer has sent.
    fn is_seen(&self) {
        let header = Writer::new(READ).u64(99).u64(9).u8(0).finish();
        self.source.raw.send(&header, &0u32.to_le_bytes());
        self.source.raw.message(REFUSED);
    }

    /// Another peer reads a block of the agent.
    fn serves_others(&self) {
        let friend = agent(&common::ucx().expect("UCX"));
        let region = register(&friend, "kv", &Buffer::zeroed(BLOCK), BLOCK, BLOCK);
        let peer = connect(&friend, &self.agent);
        let plan = friend.prepare(&peer, (&region, vec![0]), ("own", vec![1]));
        let read = friend.read(&plan.expect("plan"), Options::default());
        assert_eq!(read.expect("read").wait_for(TIMEOUT), Ok(BLOCK as u64));
    }
}

/// The transfer of the next READ.
fn transfer(raw: &Raw) -> u64 {
    let (header, _) = raw.message(READ);
    Reader::new(&header).u64().expect("a transfer")
}

#[test]
fn a_part_that_comes_in_pieces_is_placed_and_delays_nothing_else() {
    let Some(search) = common::ucx() else { return };
    let reading = Reading::begin(&search, Options::default());
    let part = reading.part();
    let cuts = [0, 3, 5, 20, 31, 32, 1000, 1001, part.len() - 1, part.len()];
    for pair in cuts.windows(2) {
        reading.source.raw.write(&part[pair[0]..pair[1]]);
        reading.serves_others();
        assert_eq!(
            reading.work.is_completed(),
            pair[1] == part.len(),
            "{pair:?}"
        );
    }
    assert_eq!(reading.work.wait_for(TIMEOUT), Ok(BLOCK as u64));
    let mut expected = vec![0; COUNT * BLOCK];
    expected[7 * BLOCK..8 * BLOCK].copy_from_slice(&reading.source.block(3));
    assert!(bytes(&reading.to) == expected);
}

#[test]
fn what_comes_of_a_part_after_its_read_has_ended_is_not_placed() {
    let Some(search) = common::ucx() else { return };
    let options = Options {
        timeout: Some(Duration::from_millis(300)),
        ..Options::default()
    };
    let reading = Reading::begin(&search, options);
    let (part, raw) = (reading.part(), &reading.source.raw);
    raw.write(&part[..1000]);
    let error = reading.work.wait_for(TIMEOUT).expect_err("late");
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    eventually("no more is placed", || {
        reading.work.is_settled().then_some(())
    });
    let other = pattern(COUNT * BLOCK, 9);
    reading.to.write(0, &other);
    raw.write(&part[1000..]);
    reading.is_seen();
    assert!(bytes(&reading.to) == other);
    reading.serves_others();
}

#[test]
fn a_peer_that_leaves_within_a_part_is_lost_and_others_go_on() {
    let Some(search) = common::ucx() else { return };
    let reading = Reading::begin(&search, Options::default());
    let part = reading.part();
    reading.source.raw.write(&part[..part.len() - 1]);
    let Reading {
        agent,
        source,
        work,
        ..
    } = reading;
    drop(source);
    let error = work.wait_for(TIMEOUT).expect_err("lost");
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    assert!(agent.peers().is_empty());
}

/// A frame about a transfer.
type FrameOf<'a> = dyn Fn(u64) -> Vec<u8> + 'a;

#[test]
fn a_part_that_its_stream_does_not_expect_ends_the_session() {
    let Some(search) = common::ucx() else { return };
    let block = BLOCK as u64;
    let part =
        |offset, len: usize| move |transfer| part_frame(&data(transfer, offset), &vec![7; len], 0);
    let headerless = |transfer| part_frame(&data(transfer, 0)[..17], &[7; BLOCK], 0);
    let longer = |transfer| part_frame(&[&data(transfer, 0)[..], &[0]].concat(), &[7; BLOCK], 0);
    let endless = |transfer| part_frame(&data(transfer, 0), &[7; BLOCK], 2);
    // It would come without a place.
    let message = |transfer| message_frame(&data(transfer, 0), &[7; BLOCK]);
    let cases: [(&FrameOf<'_>, &str); 10] = [
        (&part(0, 0), "0 bytes at 0"),
        (&part(0, BLOCK + 1), "4097 bytes at 0"),
        (&part(0, 8 << 20), "8388608 bytes at 0"),
        (&part(block - 1, 2), "2 bytes at 4095 of 4096"),
        (&part(block, 1), "1 bytes at 4096"),
        (&part(u64::MAX, 1), "1 bytes at 18446744073709551615"),
        (&headerless, "message ends early"),
        (&longer, "1 bytes follow"),
        (&endless, "flag 2"),
        (&message, "which was not to come"),
    ];
    for (frame, named) in cases {
        let reading = Reading::begin(&search, Options::default());
        let raw = &reading.source.raw;
        raw.send_frame(&frame(reading.transfer));
        let reason = raw.goodbye();
        let is_named = reason.contains("protocol error") && reason.contains(named);
        assert!(is_named, "{named}: {reason}");
        let error = reading.work.wait_for(TIMEOUT).expect_err("cut off");
        assert!(matches!(error, Error::Protocol(_)), "{error}");
        // Nothing is written beside the block.
        let (mut to, block) = (bytes(&reading.to), 7 * BLOCK..8 * BLOCK);
        to[block].fill(0);
        assert!(to.iter().all(|byte| *byte == 0));
        reading.serves_others();
    }
}

/// As a source does whose memory is taken back while a part is being sent. The message that follows says why.
#[test]
fn a_part_that_its_source_aborts_counts_nothing_and_other_transfers_go_on() {
    on_both_paths(|search| {
        let reader = agent(search);
        let (source, plan, to) = Source::meet("cuda:0", search, &reader, &[7, 9], &[3, 4]);
        let raw = &source.raw;
        let begin = || reader.read(&plan, Options::default()).expect("read");
        let send_all = |transfer| {
            raw.send_part(&data(transfer, 0), &source.block(3));
            raw.send_part(&data(transfer, BLOCK as u64), &source.block(4));
        };
        let abort = |transfer, offset: usize, len| {
            let part = part_frame(&data(transfer, offset as u64), &vec![0; len], 1);
            raw.send_frame(&part);
        };
        // All of it, its first part, its last part, and one after which more comes.
        for (before, len, after) in [
            (0, 2 * BLOCK, 0),
            (0, 100, 0),
            (BLOCK, BLOCK, 0),
            (100, 100, 2 * BLOCK - 200),
        ] {
            let (failing, other) = (begin(), begin());
            let (of_failing, of_other) = (transfer(raw), transfer(raw));
            if before > 0 {
                raw.send_part(&data(of_failing, 0), &vec![1; before]);
            }
            abort(of_failing, before, len);
            if after > 0 {
                let offset = (before + len) as u64;
                raw.send_part(&data(of_failing, offset), &vec![1; after]);
            }
            let reason = Writer::default().str("it has its memory back").finish();
            raw.send(&Writer::new(REFUSED).u64(of_failing).finish(), &reason);
            let error = failing.wait_for(TIMEOUT).expect_err("aborted");
            let is_named = |text: &str| text.contains("has its memory back");
            assert!(
                matches!(&error, Error::Config(text) if is_named(text)),
                "{error}"
            );
            assert!(!other.is_completed());
            send_all(of_other);
            assert_eq!(other.wait_for(TIMEOUT), Ok(2 * BLOCK as u64));
            assert!(bytes(&to)[7 * BLOCK..8 * BLOCK] == *source.block(3));
            assert!(bytes(&to)[9 * BLOCK..10 * BLOCK] == *source.block(4));
        }
        let next = begin();
        send_all(transfer(raw));
        assert_eq!(next.wait_for(TIMEOUT), Ok(2 * BLOCK as u64));
    });
}

/// A part of a stream that has come: its transfer, offset, bytes and end.
fn parse_part(frame: &[u8]) -> Option<(u64, usize, Vec<u8>, u8)> {
    let mut reader = Reader::new(frame);
    if reader.u8() != Ok(STREAM) {
        return None;
    }
    assert_eq!(reader.fixed(), Ok([25, DATA]));
    let (transfer, offset) = (reader.u64().expect("it"), reader.u64().expect("its place"));
    reader.u64().expect("a checksum");
    let (end, payload) = reader.rest().split_last().expect("an end");
    Some((transfer, offset as usize, payload.to_vec(), *end))
}

/// An owner that has its memory back may change it: the rest of the part is something else.
#[test]
fn a_part_within_which_its_reader_cancels_ends_as_aborted_and_the_next_stream_is_whole() {
    const LEN: usize = 16 << 20;
    let Some(search) = common::ucx() else { return };
    let source = agent(&search);
    let content = pattern(LEN, 5);
    let memory = Buffer::from_vec(content.clone());
    register(&source, "kv", &memory, LEN, LEN);
    let raw = Raw::connect(source.address().expect("address"), SessionKind::Agent);
    // So little that a part does not fit.
    set_socket_recv_buffer_size(&raw.stream, 32 << 10).expect("a small buffer");
    let read = |transfer: u64| {
        let header = Writer::new(READ).u64(transfer).u64(0).u8(0).finish();
        let ids = Writer::default().list(&[0u32], |w, id| w.u32(*id)).finish();
        raw.send(&header, &ids);
    };
    read(1);
    std::thread::sleep(Duration::from_millis(200));
    raw.send(&Writer::new(CANCEL).u64(1).finish(), b"");
    std::thread::sleep(Duration::from_millis(200));
    read(2);
    let cancelled = message_frame(&Writer::new(CANCELLED).u64(1).finish(), b"");
    let (mut next, mut num_aborted) = (0, 0);
    loop {
        let frame = raw.next_frame();
        if frame == cancelled {
            break;
        }
        let Some((transfer, offset, payload, end)) = parse_part(&frame) else {
            continue;
        };
        assert_eq!((transfer, offset, num_aborted), (1, next, 0));
        let expected = &content[offset..][..payload.len()];
        if end == 0 {
            assert!(payload == expected);
        } else {
            let is_same = |(one, other): &(&u8, &u8)| one == other;
            let num_same = payload.iter().zip(expected).take_while(is_same).count();
            assert!(num_same < payload.len(), "all of it had been sent");
            assert!(payload[num_same..].iter().all(|byte| *byte == 0));
            num_aborted += 1;
        }
        next += payload.len();
    }
    assert_eq!(num_aborted, 1, "{next} bytes had been sent");
    let mut received = Vec::new();
    while received.len() < LEN {
        let Some((transfer, offset, payload, end)) = parse_part(&raw.next_frame()) else {
            continue;
        };
        assert_eq!((transfer, offset, end), (2, received.len(), 0));
        received.extend_from_slice(&payload);
        let credit = Writer::new(CREDIT).u64(2).u64(payload.len() as u64);
        raw.send(&credit.finish(), b"");
    }
    assert!(received == content);
}
