//! A served lookup buffer and clients that violate the protocol. Well-behaved clients are tested from Python.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::entries::lookup::{Items, LookupBuffer, LookupQuery};
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::tensor::{Meta, Received};
use kvpipe_core::transport::{MemoryPath, Transport};
use kvpipe_core::work::Then;
use kvpipe_ucx::{Buffer, Search};

use crate::common::{self, Raw, TIMEOUT, TOKEN, eventually, on_both_paths};

const EXISTS: u8 = 64;
const RESERVE: u8 = 65;
const WRITE: u8 = 66;
const COMMIT: u8 = 67;
const PUT: u8 = 68;
const CHECKSUM: u8 = 69;
const SELECT: u8 = 70;
const RELEASE: u8 = 72;
const RENEW: u8 = 73;
const ACKNOWLEDGE: u8 = 74;
const CORRUPT: u8 = 75;
const DELETE: u8 = 76;
const LIST: u8 = 77;
const STATS: u8 = 78;
const CONSUME: u8 = 79;
const DONE: u8 = 80;
const REFUSED: u8 = 81;
const OFFER: u8 = 85;
const CANCEL: u8 = 91;
const NEVER: u64 = u64::MAX;
/// Of the transfers that follow an offer.
const SOURCE_CHECKSUMS: u8 = 44;
const CAPACITY: u64 = 1 << 20;
/// Bytes of a key beside which no other entry fits.
const FULL: usize = CAPACITY as usize - 3000;

fn serve(search: &Search) -> LookupBuffer {
    serve_with(search, true)
}

fn serve_with(search: &Search, is_checksummed: bool) -> LookupBuffer {
    let local = LookupBuffer::new(CAPACITY);
    local
        .serve("127.0.0.1:0", TOKEN, search.clone().into(), is_checksummed)
        .expect("serve");
    local
}

fn raw(local: &LookupBuffer) -> Raw {
    let address = local.address().parse().expect("address");
    Raw::connect(address, SessionKind::Lookup)
}

fn items(key: Vec<u8>) -> Items {
    let nothing = || Received {
        meta: Meta::default(),
        buffer: None,
    };
    let meta = Meta {
        family: 2,
        dtype: "uint8".to_owned(),
        shape: vec![key.len() as u64],
    };
    let mut items = [(); 5].map(|()| Arc::new(nothing()));
    items[2] = Arc::new(Received {
        meta,
        buffer: Some(Buffer::from_vec(key)),
    });
    Items(items)
}

fn insert(local: &LookupBuffer, tokens: &[i64], key: Vec<u8>) {
    let inserted = local
        .insert(tokens.to_vec(), items(key), None, Then::GoOn)
        .expect("insert");
    assert!(inserted.is_completed());
}

/// Header and payload of an insert with this record and no parts.
fn an_insert(operation: u64, record: &[u8]) -> (Vec<u8>, Vec<u8>) {
    a_put(operation, &1u64.to_le_bytes(), (0, record))
}

fn a_put(operation: u64, key: &[u8], (is_hashed, record): (u8, &[u8])) -> (Vec<u8>, Vec<u8>) {
    let payload = Writer::default().bytes(key).u64(NEVER).u64(NEVER);
    let payload = payload.u8(is_hashed).bytes(record).u32(0).finish();
    let sum = crc_of(&payload);
    (Writer::new(PUT).u64(operation).u64(sum).finish(), payload)
}

/// CRC-64/NVME, bit by bit.
fn crc_of(bytes: &[u8]) -> u64 {
    let step = |crc: u64| (crc >> 1) ^ (0x9a6c_9329_ac4b_c9b5 & (crc & 1).wrapping_neg());
    let byte = |crc: u64, byte: &u8| (0..8).fold(crc ^ u64::from(*byte), |crc, _| step(crc));
    !bytes.iter().fold(u64::MAX, byte)
}

/// A select of the oldest entry.
fn a_select(operation: u64) -> (Vec<u8>, Vec<u8>) {
    let (oldest, lease) = (1, 1);
    let payload = Writer::new(oldest).u8(lease).u64(NEVER).u64(NEVER).finish();
    (Writer::new(SELECT).u64(operation).finish(), payload)
}

fn about(kind: u8, operation: u64) -> Vec<u8> {
    Writer::new(kind).u64(operation).finish()
}

/// Waits until the server says that a select does not hold an entry. ACKNOWLEDGE and RELEASE are not answered.
fn is_not_held(client: &Raw, operation: u64) {
    client.send(&about(CONSUME, operation), &[]);
    assert_eq!(client.message(REFUSED).1[0], 4);
}

/// ACKNOWLEDGE or RELEASE of a select, under another number.
fn settle(kind: u8, select: u64) -> Vec<u8> {
    Writer::new(kind).u64(100 + select).u64(select).finish()
}

/// The record of an entry with one tensor, which no part of [`an_insert`] is.
fn one_tensor() -> Vec<u8> {
    let meta = Writer::new(1).u8(2).str("uint8").u32(1).u64(3).finish();
    [&meta[..], &[0; 4]].concat()
}

fn with_a_time_to_live() -> (Vec<u8>, Vec<u8>) {
    let payload = Writer::default().bytes(&1u64.to_le_bytes());
    let payload = payload.u64(1_000_000).u64(NEVER).u8(0);
    let payload = payload.bytes(&[0; 5]).u32(0).finish();
    let sum = crc_of(&payload);
    (Writer::new(PUT).u64(1).u64(sum).finish(), payload)
}

/// A query of this kind, with a lease.
fn a_query(kind: u8, key: &[u8]) -> Vec<u8> {
    let query = Writer::new(kind).bytes(key);
    query.u8(1).u64(NEVER).u64(NEVER).finish()
}

/// A select of the oldest entry without a lease.
fn beside_others() -> Vec<u8> {
    Writer::new(1).u8(0).u64(NEVER).finish()
}

#[test]
fn a_client_that_sends_nonsense_is_cut_off_and_others_go_on() {
    on_both_paths(|search| {
        let local = serve(search);
        let nonsense: Vec<(Vec<u8>, Vec<u8>)> = vec![
            (vec![PUT], vec![]),
            an_insert(1, &[0; 4]),
            an_insert(1, &[0; 6]),
            an_insert(1, &[9; 5]),
            a_put(1, &[0; 7], (0, &[0; 5])),
            a_put(1, &1u64.to_le_bytes(), (1, &[0; 5])),
            an_insert(1, &one_tensor()),
            with_a_time_to_live(),
            (about(SELECT, 1), vec![]),
            (about(SELECT, 1), a_query(2, &[])),
            (about(SELECT, 1), a_query(0, b"a key")),
            (about(SELECT, 1), beside_others()),
            (about(EXISTS, 1), Writer::default().u32(0).finish()),
            (about(OFFER, 7), vec![]),
            an_insert(u64::MAX / 5, &[0; 5]),
            a_select(u64::MAX),
            (about(99, 7), vec![]),
        ];
        for (header, payload) in nonsense {
            let mut raw = raw(&local);
            raw.send(&header, &payload);
            assert!(raw.is_closed(), "{header:?} {payload:?}");
        }
        insert(&local, &[1], vec![7; 100]);
        let raw = raw(&local);
        let (header, payload) = a_select(1);
        raw.send(&header, &payload);
        raw.message(OFFER);
    });
}

/// Messages that only a store takes.
fn of_stores() -> Vec<(Vec<u8>, Vec<u8>)> {
    let sealed = |kind: u8, payload: Vec<u8>| {
        let header = Writer::new(kind).u64(1).u64(crc_of(&payload)).finish();
        (header, payload)
    };
    let about_another = |kind| Writer::new(kind).u64(1).u64(2);
    let reserve = Writer::default().bytes(b"key").u64(9).u64(NEVER).u64(NEVER);
    let write = Writer::default().u64(2).u8(0).bytes(b"bytes");
    let commit = Writer::default().u64(2).u64(3).bytes(b"record");
    let list = Writer::default().bytes(b"prefix").u64(0);
    let keys = || Writer::default().u32(1).bytes(b"key").finish();
    vec![
        (about(EXISTS, 1), keys()),
        (about(RESERVE, 1), reserve.finish()),
        sealed(WRITE, write.finish()),
        sealed(COMMIT, commit.finish()),
        (about_another(CHECKSUM).finish(), vec![]),
        (about_another(RENEW).u64(1).finish(), vec![]),
        (about_another(CORRUPT).finish(), vec![]),
        (about(DELETE, 1), keys()),
        (about(LIST, 1), list.finish()),
        (about(STATS, 1), vec![]),
    ]
}

#[test]
fn a_client_that_sends_what_only_a_store_takes_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search);
    for (header, payload) in of_stores() {
        let mut raw = raw(&local);
        raw.send(&header, &payload);
        assert!(raw.is_closed(), "{header:?}");
    }
}

#[test]
fn a_client_whose_inserts_wait_beside_64_others_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search);
    insert(&local, &[1], vec![7; FULL]);
    let mut raw = raw(&local);
    let wait = |raw: &Raw, operation| {
        let (header, payload) = an_insert(operation, &[0; 5]);
        raw.send(&header, &payload);
    };
    (1..=64).for_each(|operation| wait(&raw, operation));
    eventually("all wait", || {
        (local.info().num_waiting == 64).then_some(())
    });
    wait(&raw, 65);
    assert!(raw.is_closed());
}

#[test]
fn checksums_of_large_tensors_are_sent_unless_they_are_switched_off() {
    let Some(search) = common::ucx() else { return };
    for is_checksummed in [true, false] {
        let local = serve_with(&search, is_checksummed);
        insert(&local, &[1], vec![7; 256 << 10]);
        let raw = raw(&local);
        let (header, payload) = a_select(1);
        raw.send(&header, &payload);
        raw.message(OFFER);
        // Over TCP each message carries its own checksum.
        if is_checksummed && !common::is_tcp() {
            raw.message(SOURCE_CHECKSUMS);
        } else {
            let told = raw.message_within(SOURCE_CHECKSUMS, Duration::from_millis(300));
            assert!(told.is_none());
        }
    }
}

#[test]
fn a_corrupt_insert_is_refused_and_the_session_stays() {
    on_both_paths(|search| {
        let local = serve(search);
        let raw = raw(&local);
        let (header, mut payload) = an_insert(1, &[0; 5]);
        payload[9] ^= 1;
        raw.send(&header, &payload);
        let (operation, refusal) = raw.message(REFUSED);
        assert_eq!((&operation[..], refusal[0]), (&1u64.to_le_bytes()[..], 3));
        let (header, payload) = an_insert(2, &[0; 5]);
        raw.send(&header, &payload);
        assert_eq!(raw.message(DONE).0, 2u64.to_le_bytes());
        assert_eq!(local.info().num_entries, Some(1));
    });
}

#[test]
fn an_insert_that_is_never_fetched_keeps_its_space_only_as_long_as_its_session() {
    on_both_paths(|search| {
        let local = serve(search);
        insert(&local, &[1], vec![7; 100_000]);
        let first = raw(&local);
        let (header, payload) = a_select(1);
        first.send(&header, &payload);
        first.message(OFFER);
        assert_eq!(
            (local.info().num_entries, local.info().num_leased),
            (Some(0), Some(1))
        );
        drop(first);
        eventually("it goes back", || {
            (local.info().num_entries == Some(1)).then_some(())
        });
    });
}

#[test]
fn an_entry_is_the_clients_that_acknowledges_it_and_goes_back_if_it_is_released() {
    let Some(search) = common::ucx() else { return };
    for (kind, expected) in [(ACKNOWLEDGE, (Some(0), 1)), (RELEASE, (Some(1), 0))] {
        let local = serve(&search);
        insert(&local, &[1], vec![7; 100]);
        let client = raw(&local);
        let (header, payload) = a_select(1);
        client.send(&header, &payload);
        client.message(OFFER);
        client.send(&settle(kind, 1), &[]);
        is_not_held(&client, 1);
        let info = local.info();
        assert_eq!((info.num_entries, info.num_consumed), expected);
        assert_eq!(info.num_leased, Some(0));
    }
}

#[test]
fn an_entry_that_is_not_leased_is_neither_consumed_nor_acknowledged() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search);
    let client = raw(&local);
    for header in [about(CONSUME, 7), settle(ACKNOWLEDGE, 7)] {
        client.send(&header, &[]);
        assert_eq!(client.message(REFUSED).1[0], 4);
    }
    assert_eq!(local.info().num_consumed, 0);
}

#[test]
fn a_waiting_select_that_is_released_gets_no_entry() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search);
    let client = raw(&local);
    let (header, payload) = a_select(1);
    client.send(&header, &payload);
    client.send(&settle(RELEASE, 1), &[]);
    is_not_held(&client, 1);
    insert(&local, &[1], vec![7; 100]);
    assert_eq!(local.info().num_entries, Some(1));
}

#[test]
fn a_lost_client_keeps_consumed_entries_and_returns_leased_ones() {
    on_both_paths(|search| {
        let local = serve(search);
        insert(&local, &[1], vec![1; 10]);
        insert(&local, &[2], vec![2; 10]);
        let client = raw(&local);
        for operation in [1, 2] {
            let (header, payload) = a_select(operation);
            client.send(&header, &payload);
            assert_eq!(client.message(OFFER).0[..8], operation.to_le_bytes());
        }
        client.send(&about(CONSUME, 1), &[]);
        assert_eq!(client.message(DONE).0, 1u64.to_le_bytes());
        drop(client);
        eventually("one goes back, and one is consumed", || {
            let info = local.info();
            let found = (info.num_entries, info.num_leased, info.num_consumed);
            (found == (Some(1), Some(0), 1)).then_some(())
        });
        let left = local
            .select(LookupQuery::Tokens(vec![2]), None, Then::GoOn)
            .expect("select");
        assert!(left.is_completed());
    });
}

#[test]
fn a_consumed_entry_that_its_caller_returns_goes_back() {
    on_both_paths(|search| {
        let local = serve(search);
        insert(&local, &[1], vec![1; 10]);
        let client = raw(&local);
        for operation in [1, 2] {
            let (header, payload) = a_select(operation);
            client.send(&header, &payload);
            client.message(OFFER);
            client.send(&about(CONSUME, operation), &[]);
            client.message(DONE);
            client.send(&settle(RELEASE, operation), &[]);
        }
        eventually("it goes back", || {
            (local.info().num_entries == Some(1)).then_some(())
        });
        assert_eq!(local.info().num_consumed, 0);
    });
}

#[test]
fn a_withdrawn_insert_lets_the_next_one_in() {
    on_both_paths(|search| {
        let local = serve(search);
        insert(&local, &[1], vec![0; FULL]);
        let address = local.address();
        let (remote, connected) =
            LookupBuffer::connect(vec![address], TOKEN, search.clone().into(), true, TIMEOUT)
                .expect("connect");
        connected.wait_for(TIMEOUT).expect("connected");
        let first = remote
            .insert(vec![2], items(vec![0; 100_000]), None, Then::GoOn)
            .expect("insert");
        let second = remote
            .insert(vec![3], items(vec![0; 10]), None, Then::GoOn)
            .expect("insert");
        eventually("both wait", || {
            (local.info().num_waiting == 2).then_some(())
        });
        first.withdraw();
        eventually("it ends", || first.is_completed().then_some(()));
        let taken = local
            .select(LookupQuery::Any, Some(Duration::ZERO), Then::GoOn)
            .expect("select");
        taken
            .result()
            .expect("there")
            .expect("no error")
            .expect("an entry")
            .consume();
        eventually("the second has its place", || {
            second.is_completed().then_some(())
        });
        assert_eq!(local.info().num_inserted, 2);
        assert_eq!(second.result(), Some(Ok(())));
        let raw = raw(&local);
        // Unknown ones are of no meaning.
        raw.send(&Writer::new(CANCEL).u64(99).u8(1).finish(), &[]);
        let (header, payload) = a_select(1);
        raw.send(&header, &payload);
        raw.message(OFFER);
    });
}

#[test]
fn an_operation_before_the_client_is_connected_fails_and_says_why() {
    on_both_paths(|search| {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = silent.local_addr().expect("address").to_string();
        let transport = search.clone().into();
        let (remote, _) =
            LookupBuffer::connect(vec![address], TOKEN, transport, true, TIMEOUT).expect("begun");
        let selected = remote
            .select(LookupQuery::Any, None, Then::GoOn)
            .expect("select");
        let inserted = remote
            .insert(vec![1], items(vec![1]), None, Then::GoOn)
            .expect("insert");
        eventually("it ends", || inserted.is_completed().then_some(()));
        assert!(matches!(inserted.result(), Some(Err(Error::Connect(_)))));
        assert!(matches!(selected.result(), Some(Err(Error::Connect(_)))));
    });
}

#[test]
fn of_threads_that_serve_a_buffer_at_once_one_does_and_the_others_learn_the_address() {
    let local = LookupBuffer::new(CAPACITY);
    let serve = || {
        let transport = Transport::Memory(MemoryPath::RemoteRead);
        local.serve("127.0.0.1:0", TOKEN, transport, true)
    };
    let served: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(serve)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panic");
        threads.into_iter().map(join).collect()
    });
    let at = local.address();
    let already = Error::Config(format!("the buffer is served at {at} already"));
    let num_told = served
        .iter()
        .filter(|served| **served == Err(already.clone()))
        .count();
    assert_eq!((num_told, served.contains(&Ok(()))), (7, true));
}
