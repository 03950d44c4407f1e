//! A store server with clients over every data path, and clients that violate the protocol. More is tested from Python.

use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::checksum;
use kvpipe_core::entries::store::{StoreClient, StoreServer};
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Then;
use kvpipe_ucx::Buffer;

use crate::common::{
    Raw, TIMEOUT, TOKEN, bytes, eventually, on_both_paths, on_every_path, pattern,
};

const EXISTS: u8 = 64;
const RESERVE: u8 = 65;
const WRITE: u8 = 66;
const COMMIT: u8 = 67;
const PUT: u8 = 68;
const CHECKSUM: u8 = 69;
const SELECT: u8 = 70;
const CONSUME: u8 = 79;
const EXACT: u8 = 0;
const OLDEST: u8 = 1;
const OPEN: u8 = 0;
const LEASE: u8 = 1;
const RENEW: u8 = 73;
const DONE: u8 = 80;
const REFUSED: u8 = 81;
const RESERVED: u8 = 83;
const OFFER: u8 = 85;
const LIST: u8 = 77;
const CANCEL: u8 = 91;

const CAPACITY: u64 = 64 << 20;
const RESERVATION: Duration = Duration::from_secs(30);
const NO_TIME: u64 = u64::MAX;
/// Inside a message, between one message and huge pages, and in several slices.
const SIZES: [usize; 5] = [0, 7, 32 << 10, (1 << 20) + 3, 9 << 20];

fn serve(transport: &Transport) -> StoreServer {
    StoreServer::serve(
        "127.0.0.1:0",
        TOKEN,
        transport.clone(),
        CAPACITY,
        None,
        RESERVATION,
        None,
    )
    .expect("serve")
}

fn connect(transport: &Transport, server: &StoreServer) -> StoreClient {
    let connected = StoreClient::connect(server.address(), TOKEN, transport.clone(), TIMEOUT);
    let (client, connected) = connected.expect("client");
    connected.wait_for(TIMEOUT).expect("connected");
    client
}

fn put(client: &StoreClient, key: &[u8], data: Vec<u8>) -> bool {
    let put = client.put(
        key.to_vec(),
        Buffer::from_vec(data),
        b"record".to_vec(),
        None,
    );
    put.expect("put").wait_for(TIMEOUT).expect("put")
}

#[test]
fn values_of_all_sizes_arrive_as_they_were_put_or_written_in_parts() {
    on_every_path(|transport| {
        let server = serve(transport);
        let (writer, reader) = (connect(transport, &server), connect(transport, &server));
        for (seed, len) in SIZES.into_iter().enumerate() {
            let data = pattern(len, seed as u64);
            let (whole, parts) = (vec![b'w', seed as u8], vec![b'p', seed as u8]);
            assert!(put(&writer, &whole, data.clone()));
            assert!(!put(&reader, &whole, vec![1]));
            let (reserved, _) = writer
                .reserve(parts.clone(), len as u64, None, None)
                .expect("reserve");
            let reservation = reserved.wait_for(TIMEOUT).expect("reserved").expect("new");
            for part in [&data[..len / 3], &data[len / 3..]] {
                let buffer = Buffer::from_vec(part.to_vec());
                let written = writer.write(reservation, buffer).expect("write");
                written.wait_for(TIMEOUT).expect("written");
            }
            let committed = writer.commit(reservation, b"record".to_vec());
            committed
                .expect("commit")
                .wait_for(TIMEOUT)
                .expect("committed");
            for key in [whole, parts] {
                let (selected, operation) = reader.select(key, None).expect("select");
                let value = selected
                    .wait_for(TIMEOUT)
                    .expect("selected")
                    .expect("there");
                assert_eq!(value.record, b"record");
                let out = Buffer::zeroed(len);
                let read = reader.read(&value, out.clone()).expect("read");
                read.wait_for(TIMEOUT).expect("verified");
                assert!(bytes(&out) == data, "{len} bytes");
                let released = reader.release(operation, Then::Wait).expect("release");
                released.wait_for(TIMEOUT).expect("released");
            }
        }
    });
}

#[test]
fn a_client_that_closes_holds_nothing_and_its_value_goes_to_who_waits() {
    on_every_path(|transport| {
        let server = serve(transport);
        let (leaving, waiting) = (connect(transport, &server), connect(transport, &server));
        assert!(put(&leaving, b"key", pattern(5 << 20, 1)));
        let lease = Duration::from_secs(1000);
        let (taken, _) = leaving.take(b"key".to_vec(), lease, None).expect("take");
        assert!(taken.wait_for(TIMEOUT).expect("taken").is_some());
        let (reserved, _) = leaving
            .reserve(b"other".to_vec(), 9 << 20, None, None)
            .expect("reserve");
        assert!(reserved.wait_for(TIMEOUT).expect("reserved").is_some());
        let (next, operation) = waiting.take(b"key".to_vec(), lease, None).expect("take");
        leaving.close();
        assert!(next.wait_for(TIMEOUT).expect("returned").is_some());
        let acknowledged = waiting.acknowledge(operation).expect("acknowledge");
        acknowledged.wait_for(TIMEOUT).expect("deleted");
        eventually("an empty store", || {
            let info = server.stats().expect("stats");
            (info.num_bytes == 0).then_some(())
        });
    });
}

/// A header with the checksum of its payload.
fn sealed(kind: u8, operation: u64, payload: &[u8]) -> Vec<u8> {
    let header = Writer::new(kind).u64(operation);
    header.u64(checksum::of(payload)).finish()
}

fn plain(kind: u8, operation: u64) -> Vec<u8> {
    Writer::new(kind).u64(operation).finish()
}

fn raw(server: &StoreServer) -> Raw {
    let address = server.address().parse().expect("address");
    Raw::connect(address, SessionKind::Store)
}

fn a_reserve(raw: &Raw, operation: u64, num_bytes: u64) {
    let payload = Writer::default().bytes(b"raw").u64(num_bytes);
    let payload = payload.u64(NO_TIME).u64(NO_TIME).finish();
    raw.send(&plain(RESERVE, operation), &payload);
}

fn a_select(key: &[u8], timeout: u64) -> Vec<u8> {
    Writer::new(EXACT).bytes(key).u8(OPEN).u64(timeout).finish()
}

fn a_put(bytes: &[u8]) -> Vec<u8> {
    let writer = Writer::default().bytes(b"raw").u64(NO_TIME).u64(0);
    let writer = writer.u8(1).bytes(b"").u32(1);
    writer.u8(0).bytes(bytes).finish()
}

#[test]
fn a_client_that_sends_nonsense_is_cut_off_and_others_go_on() {
    on_both_paths(|search| {
        let transport: Transport = search.clone().into();
        let server = serve(&transport);
        let client = connect(&transport, &server);
        let select = a_select(b"none", NO_TIME);
        let no_key = a_select(b"", NO_TIME);
        let endless = Writer::new(EXACT).bytes(b"key").u8(LEASE);
        let endless = endless.u64(NO_TIME).u64(0).finish();
        let oldest = Writer::new(OLDEST).u8(OPEN).u64(NO_TIME).finish();
        let unhashed = Writer::default().bytes(b"raw").u64(NO_TIME).u64(0);
        let unhashed = unhashed
            .u8(0)
            .bytes(b"")
            .u32(1)
            .u8(0)
            .bytes(b"abc")
            .finish();
        let waiting = Writer::default().bytes(b"raw").u64(NO_TIME).u64(NO_TIME);
        let waiting = waiting.u8(1).bytes(b"").u32(1).u8(0).bytes(b"abc").finish();
        let two = Writer::default().bytes(b"raw").u64(NO_TIME).u64(0);
        let two = two
            .u8(1)
            .bytes(b"")
            .u32(2)
            .u8(0)
            .bytes(b"a")
            .u8(0)
            .bytes(b"b")
            .finish();
        let small = |writer: Writer| {
            let offered = writer.u8(1).u64(32 << 10).u64(4096).u8(0).u8(0);
            offered.bytes(&[1]).finish()
        };
        let small_write = small(Writer::default().u64(1));
        let small_put = Writer::default().bytes(b"raw").u64(NO_TIME).u64(0);
        let small_put = small(small_put.u8(1).bytes(b"").u32(1));
        let cancel = Writer::new(CANCEL).u64(1).u8(1).finish();
        let many = Writer::default().u32(u32::MAX).finish();
        let other = Writer::default().u64(1).u8(9).finish();
        let nonsense: Vec<(Vec<u8>, Vec<u8>)> = vec![
            (vec![SELECT], vec![]),
            (plain(SELECT, 1), no_key),
            (plain(SELECT, 1), [&select[..], &[0]].concat()),
            (plain(SELECT, 1), endless),
            (plain(SELECT, 1), oldest),
            (plain(CONSUME, 1), vec![]),
            (sealed(PUT, 1, &unhashed), unhashed),
            (sealed(PUT, 1, &waiting), waiting),
            (sealed(PUT, 1, &two), two),
            (sealed(PUT, 1, &small_put), small_put),
            (sealed(WRITE, 1, &small_write), small_write),
            (cancel, vec![]),
            (plain(EXISTS, 1), many),
            (plain(LIST, 1), vec![1]),
            (plain(RENEW, 1), vec![]),
            (sealed(WRITE, 1, &other), other),
            (plain(DONE, 1), vec![]),
            (plain(200, 1), vec![]),
        ];
        for (header, payload) in nonsense {
            let mut raw = raw(&server);
            raw.send(&header, &payload);
            assert!(raw.is_closed(), "{header:?}");
        }
        let mut twice = raw(&server);
        for _ in 0..2 {
            twice.send(&plain(SELECT, 1), &select);
        }
        assert!(twice.is_closed());
        assert!(put(&client, b"key", pattern(1 << 20, 1)));
    });
}

#[test]
fn bytes_that_differ_from_their_checksum_are_not_committed() {
    on_both_paths(|search| {
        let transport: Transport = search.clone().into();
        let server = serve(&transport);
        let raw = raw(&server);
        let put = a_put(b"abc");
        // On the way.
        let changed = a_put(b"abd");
        raw.send(&sealed(PUT, 1, &put), &changed);
        assert_eq!(raw.message(REFUSED).1[0], 3);
        // Before they were sent.
        raw.send(&sealed(PUT, 2, &put), &put);
        raw.send(&Writer::new(CHECKSUM).u64(2).u64(7).finish(), &[]);
        assert_eq!(raw.message(REFUSED).1[0], 3);
        a_reserve(&raw, 3, 3);
        raw.message(RESERVED);
        let write = Writer::default().u64(3).u8(0).bytes(b"abc").finish();
        raw.send(&sealed(WRITE, 4, &write), &write);
        raw.message(DONE);
        let commit = Writer::default().u64(3).u64(7).bytes(b"").finish();
        raw.send(&sealed(COMMIT, 5, &commit), &commit);
        assert_eq!(raw.message(REFUSED).1[0], 3);
        raw.send(&sealed(PUT, 6, &put), &put);
        let whole = checksum::of(b"abc");
        raw.send(&Writer::new(CHECKSUM).u64(6).u64(whole).finish(), &[]);
        raw.message(DONE);
        raw.send(&plain(SELECT, 7), &a_select(b"raw", 0));
        let (_, offer) = raw.message(OFFER);
        assert_eq!((offer[0], &offer[1..9]), (1, &whole.to_le_bytes()[..]));
    });
}

#[test]
fn a_write_or_a_commit_of_no_reservation_is_late_and_ends_no_session() {
    on_both_paths(|search| {
        let transport: Transport = search.clone().into();
        let server = serve(&transport);
        let raw = raw(&server);
        let write = Writer::default().u64(1).u8(0).bytes(b"abc").finish();
        raw.send(&sealed(WRITE, 2, &write), &write);
        assert_eq!(raw.message(REFUSED).1[0], 4);
        let commit = Writer::default().u64(1).u64(7).bytes(b"").finish();
        raw.send(&sealed(COMMIT, 3, &commit), &commit);
        assert_eq!(raw.message(REFUSED).1[0], 4);
        // More than was reserved, and a second write before the first has been read.
        a_reserve(&raw, 4, 2);
        raw.message(RESERVED);
        let write = Writer::default().u64(4).u8(0).bytes(b"abc").finish();
        raw.send(&sealed(WRITE, 5, &write), &write);
        assert_eq!(raw.message(REFUSED).1[0], 1);
        a_reserve(&raw, 6, CAPACITY);
        assert_eq!(raw.message(REFUSED).1[0], 1);
    });
}

#[test]
fn calls_on_a_closed_client_are_closed() {
    on_every_path(|transport| {
        let server = serve(transport);
        let client = connect(transport, &server);
        let (waiting, _) = client.select(b"key".to_vec(), None).expect("select");
        client.close();
        let ended = waiting.wait_for(TIMEOUT).unwrap_err();
        assert!(matches!(ended, Error::Closed(_)), "{ended:?}");
        let refused = client.exists(vec![b"key".to_vec()]).unwrap_err();
        assert!(matches!(refused, Error::Closed(_)), "{refused:?}");
    });
}
