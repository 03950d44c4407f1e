//! Reaction of a pipe to a sender that breaks the protocol.

use std::sync::Arc;
use std::time::Duration;

use crc_fast::{CrcAlgorithm, checksum};
use kvpipe_core::Error;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::tensor::Received;
use kvpipe_core::transport::{MemoryPath, Transport};
use kvpipe_core::work::{Then, Work};
use kvpipe_ucx::{Buffer, MemoryKind, Search};

use crate::common::pipes::{content, meta, receive, send, sender_to};
use crate::common::{self, Raw, TIMEOUT, TOKEN, eventually, on_both_paths, part_frame, pattern};

const EAGER: u8 = 1;
const OFFER: u8 = 2;
const READ: u8 = 32;
const DATA: u8 = 33;
const SOURCE_CHECKSUMS: u8 = 44;
const WITHDRAW: u8 = 7;
const WITHDRAWN: u8 = 8;
const CORRUPT: u8 = 10;
const REFUSED: u8 = 11;
const ACCEPTED: u8 = 6;

/// Kinds of offered memory.
const HOST: u8 = 0;
const CUDA: u8 = 1;

fn eager(sequence: u64, content: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let payload = described(content.len()).bytes(content).finish();
    (unsummed(EAGER, sequence), payload)
}

/// The header of a tensor without checksum.
fn unsummed(kind: u8, sequence: u64) -> Vec<u8> {
    Writer::new(kind).u64(sequence).u8(0).u64(0).finish()
}

fn summed(kind: u8, sequence: u64, sum: u64) -> Vec<u8> {
    Writer::new(kind).u64(sequence).u8(1).u64(sum).finish()
}

fn sum(payload: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, payload)
}

/// The payload of an offer: length, address, how it is proved, key.
fn offer(len: u64, address: u64, proof: u8, key: &[u8]) -> Vec<u8> {
    let offer = described(len as usize).u64(len).u64(address);
    offer.u8(HOST).u8(proof).bytes(key).finish()
}

/// Offers five bytes of CUDA memory as the first tensor; its receive, and the header of the part that it asks for.
fn offer_cuda(raw: &Raw, rx: &Pipe) -> (Work<Arc<Received>>, Vec<u8>) {
    let offer = described(5).u64(5).u64(1 << 40).u8(CUDA).u8(0).bytes(&[]);
    raw.send(&unsummed(OFFER, 0), &offer.finish());
    let received = receive(rx);
    let header = Writer::new(DATA).u64(raw.transfer()).u64(0).u64(0);
    (received, header.finish())
}

fn described(len: usize) -> Writer {
    Writer::default()
        .u8(2)
        .str("uint8")
        .list(&[len as u64], |w, n| w.u64(*n))
}

fn raw(search: &Search) -> (Raw, Pipe) {
    let receiver =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    let address = receiver.address().expect("address");
    (Raw::connect(address, SessionKind::Pipe), receiver)
}

#[test]
fn a_message_before_the_session_is_established_ends_it() {
    let Some(search) = common::ucx() else { return };
    let rx =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    let mut raw = Raw::begin(rx.address().expect("address"), SessionKind::Pipe);
    let (header, payload) = eager(0, b"early");
    raw.send(&header, &payload);
    assert!(raw.is_closed());
}

#[test]
fn a_message_of_a_peer_that_has_not_reported_its_data_path_ends_the_session() {
    let Some(search) = common::ucx() else { return };
    let rx =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    let address = rx.address().expect("address");
    let mut raw = Raw::connect_without_data_path(address, SessionKind::Pipe);
    let (header, payload) = eager(0, b"early");
    raw.send(&header, &payload);
    assert!(raw.is_closed());
}

impl Raw {
    /// The number of the transfer that the receiver asks for next.
    fn transfer(&self) -> u64 {
        let (header, _) = self.message(READ);
        Reader::new(&header).u64().expect("a transfer")
    }

    fn message_while(&self, begin: impl FnOnce() -> Work<Arc<Received>>, expected: &[u8]) {
        let received = begin();
        self.message(ACCEPTED);
        assert_eq!(content(&received), expected);
    }
}

#[test]
fn a_sender_that_leaves_before_it_is_established_leaves_its_place() {
    let Some(search) = common::ucx() else { return };
    let rx =
        Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO).expect("listen");
    drop(Raw::begin(
        rx.address().expect("address"),
        SessionKind::Pipe,
    ));
    std::thread::sleep(Duration::from_millis(100));
    let tx = sender_to(&search.into(), &rx);
    let _sent = send(&tx, pattern(10, 1));
    assert_eq!(content(&receive(&rx)), pattern(10, 1));
}

#[test]
fn an_offer_of_cuda_memory_comes_to_the_host_as_messages_however_small() {
    on_both_paths(|search| {
        let (raw, rx) = raw(search);
        let (received, header) = offer_cuda(&raw, &rx);
        raw.send(&header, b"on it");
        raw.message(ACCEPTED);
        assert_eq!(content(&received), b"on it");
    });
}

/// The part that was being sent comes before the message that says why it is aborted.
#[test]
fn a_tensor_that_its_sender_withdraws_within_a_part_is_not_refused_and_the_pipe_goes_on() {
    on_both_paths(|search| {
        let (raw, rx) = raw(search);
        let (received, header) = offer_cuda(&raw, &rx);
        raw.send_frame(&part_frame(&header, &[0; 5], 1));
        let refused = raw.message_within(REFUSED, Duration::from_millis(100));
        assert_eq!(refused, None);
        raw.send(&Writer::new(WITHDRAW).u64(0).finish(), b"");
        assert_eq!(raw.message(WITHDRAWN).0, 0u64.to_le_bytes());
        let error = received.wait_for(TIMEOUT).expect_err("withdrawn");
        assert!(matches!(error, Error::Timeout(_)), "{error}");
        raw.send(&eager(1, b"next").0, &eager(1, b"next").1);
        raw.message_while(|| receive(&rx), b"next");
    });
}

fn is_corrupt(received: &Work<Arc<Received>>) -> bool {
    matches!(received.wait_for(TIMEOUT), Err(Error::Corrupt(text)) if text.contains("checksum"))
}

#[test]
fn a_small_tensor_that_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on() {
    let Some(search) = common::ucx() else { return };
    let (raw, rx) = raw(&search);
    raw.send(&summed(EAGER, 0, 7), &eager(0, b"flipped").1);
    let received = receive(&rx);
    raw.message(ACCEPTED);
    assert!(is_corrupt(&received));
    raw.send(&eager(1, b"next").0, &eager(1, b"next").1);
    raw.message_while(|| receive(&rx), b"next");
}

/// The payload says "uint8"; that is where it is changed.
fn described_otherwise(payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    payload[5] ^= 1;
    payload
}

#[test]
fn a_tensor_whose_description_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on() {
    let Some(search) = common::ucx() else { return };
    let large = offer(64 << 10, 4096, 1, &[0; 16]);
    for (kind, payload, answer) in [
        (EAGER, eager(0, b"small").1, ACCEPTED),
        (OFFER, large, CORRUPT),
    ] {
        let (raw, rx) = raw(&search);
        let header = summed(kind, 0, sum(&payload));
        raw.send(&header, &described_otherwise(&payload));
        let received = receive(&rx);
        assert_eq!(raw.message(answer).0, 0u64.to_le_bytes());
        assert!(is_corrupt(&received));
        let (_, next) = eager(1, b"next");
        raw.send(&summed(EAGER, 1, sum(&next)), &next);
        raw.message_while(|| receive(&rx), b"next");
    }
}

#[test]
fn a_large_tensor_that_differs_from_its_checksum_is_not_delivered_and_the_pipe_goes_on() {
    on_both_paths(|search| {
        let (raw, rx) = raw(search);
        let len = 64 << 10;
        let buffer = Buffer::from_vec(pattern(len, 3));
        let address = buffer.address() as u64;
        let is_read = !common::is_tcp();
        let proof = if is_read { 1 } else { 2 };
        let header = unsummed(OFFER, 0);
        raw.send(&header, &offer(len as u64, address, proof, &[]));
        let received = receive(&rx);
        if is_read {
            let wrong = Writer::default().list(&[7], |w, sum| w.u64(*sum)).finish();
            let header = Writer::new(SOURCE_CHECKSUMS).u64(0).u64(0);
            raw.send(&header.finish(), &wrong);
        } else {
            let header = Writer::new(DATA).u64(raw.transfer()).u64(0).u64(7);
            let header = header.finish();
            raw.send(&header, &pattern(len, 3));
        }
        raw.message(CORRUPT);
        assert!(is_corrupt(&received));
        raw.send(&eager(1, b"next").0, &eager(1, b"next").1);
        raw.message_while(|| receive(&rx), b"next");
    });
}

#[test]
fn a_sender_that_ignores_its_credit_or_its_bounds_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let too_many: Vec<_> = (0..100).map(|i| eager(i, b"x")).collect();
    let header = unsummed(OFFER, 0);
    let wraps = vec![(header, offer(1 << 40, u64::MAX - 4096, 0, &[0; 16]))];
    let unasked = vec![(
        Writer::new(DATA).u64(0).u64(u64::MAX).u64(0).finish(),
        b"data".to_vec(),
    )];
    let skips = vec![eager(1, b"x")];
    let unknown = vec![(vec![99; 9], vec![])];
    let cut = vec![(vec![EAGER, 0], vec![])];
    for messages in [too_many, wraps, unasked, skips, unknown, cut] {
        let (mut raw, rx) = raw(&search);
        for (header, payload) in &messages {
            raw.send(header, payload);
        }
        assert!(raw.is_closed());
        let error = eventually("the end", || receive(&rx).wait_for(TIMEOUT).err());
        assert!(matches!(error, Error::Protocol(_)), "{error}");
    }
}

#[test]
fn a_tensor_larger_than_the_machine_is_refused_by_its_size_and_the_next_one_is_received() {
    let Some(search) = common::ucx() else { return };
    let (raw, receiver) = raw(&search);
    let refused = receive(&receiver);
    let len: u64 = 1 << 60;
    raw.send(&unsummed(OFFER, 0), &offer(len, 4096, 0, b"key"));
    let error = refused.wait_for(TIMEOUT).expect_err("too large");
    let is_named =
        |text: &str| text.contains("1152921504606846976 bytes is larger than the memory");
    assert!(
        matches!(&error, Error::Exhausted(text) if is_named(text)),
        "{error}"
    );
    let (header, reason) = raw.message(REFUSED);
    assert_eq!(header, 0_u64.to_le_bytes());
    assert!(is_named(&String::from_utf8_lossy(&reason)), "{reason:?}");
    let (header, payload) = eager(1, b"next");
    raw.send(&header, &payload);
    assert_eq!(content(&receive(&receiver)), b"next");
}

#[test]
fn a_sender_learns_by_name_that_its_tensor_is_larger_than_the_receivers_machine() {
    let transport = Transport::Memory(MemoryPath::RemoteRead);
    let receiver =
        Pipe::listen("127.0.0.1:0", TOKEN, transport.clone(), Duration::ZERO).expect("listen");
    let address = receiver.address().expect("address").to_string();
    let connected = Pipe::connect(
        &address,
        TOKEN,
        transport,
        kvpipe_core::Integrity::None,
        Duration::ZERO,
        TIMEOUT,
    );
    let (sender, connected) = connected.expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    // SAFETY: nothing reads it: no checksums are made, and the receiver refuses it by its size.
    let buffer = unsafe { Buffer::from_raw_parts(4096, 1 << 46, MemoryKind::Host, Box::new(())) };
    let sent = sender.send(meta(1 << 46), buffer, Deadline::default(), Then::GoOn);
    let refused = receive(&receiver);
    let at_the_receiver = refused
        .wait_for(TIMEOUT)
        .expect_err("too large")
        .to_string();
    let error = sent.expect("send").wait_for(TIMEOUT).expect_err("refused");
    let is_named = matches!(&error, Error::Exhausted(text) if text.contains(&at_the_receiver));
    assert!(is_named, "{error}");
    assert!(
        at_the_receiver.contains("70368744177664 bytes"),
        "{at_the_receiver}"
    );
    let next = send(&sender, pattern(100_000, 1));
    assert_eq!(content(&receive(&receiver)), pattern(100_000, 1));
    next.wait_for(TIMEOUT).expect("the pipe is usable");
}
