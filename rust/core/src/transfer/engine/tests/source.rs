//! Requests of a peer.

use super::*;
use crate::transfer::outgoing_stream::WINDOW;

fn read(wanted: Wanted) -> Message<'static> {
    read_of(9, wanted)
}

fn read_of(source: u64, wanted: Wanted) -> Message<'static> {
    Message::Read {
        source,
        wanted,
        ids: vec![2, 0].into(),
    }
}

/// The request of a peer that may ask.
fn request(it: &mut Fixture, transfer: u64, message: &Message<'_>) -> SourceRequest {
    let Ok(Some(request)) = it.receive(transfer, message, &[]) else {
        panic!("it may ask");
    };
    request
}

/// Serves a stream that is longer than the window, of which nothing has been placed.
fn serve_long_stream(it: &mut Fixture, transfer: u64, source: u64) -> Buffer {
    let request = request(it, transfer, &read_of(source, Wanted::Bytes));
    let len = 8 << 20;
    let buffer = Buffer::zeroed(3 * len);
    let memory = it.links.register(buffer.clone()).unwrap();
    let (len, total) = (len as u64, 3 * len as u64);
    let layout = Layout::new(total, len, len).unwrap();
    it.engine
        .serve(&mut it.links, &request, Ok((memory, layout)));
    buffer
}

#[test]
fn a_source_sends_nothing_more_of_what_is_cancelled_and_says_so() {
    let mut it = Fixture::new(MemoryPath::Stream);
    serve_long_stream(&mut it, 1, 9);
    assert!(!it.sent().is_empty());
    it.receive(1, &Message::Cancel, &[]).unwrap();
    it.receive(1, &Message::Credit(4 << 20), &[]).unwrap();
    assert_eq!(it.sent(), [(1, Message::Cancelled, Vec::new())]);
    let message = read(Wanted::Checksums);
    let request = request(&mut it, 2, &message);
    let source = Ok((Arc::clone(&it.source), layout()));
    it.engine.serve(&mut it.links, &request, source);
    it.receive(2, &Message::Cancel, &[]).unwrap();
    while it.engine.run_slice(&mut it.links) {}
    assert_eq!(it.sent(), [(2, Message::Cancelled, Vec::new())]);
    // All of it had been sent when CANCEL came.
    it.receive(3, &Message::Cancel, &[]).unwrap();
    assert_eq!(it.sent(), [(3, Message::Cancelled, Vec::new())]);
}

#[test]
fn nothing_more_of_a_withdrawn_source_is_sent_and_another_one_goes_on() {
    const CREDIT: u64 = 1 << 20;
    const REUSED: u8 = 9;
    let mut it = Fixture::new(MemoryPath::Stream);
    let memory = serve_long_stream(&mut it, 1, 9);
    serve_long_stream(&mut it, 2, 10);
    it.engine
        .withdraw_sources(&mut it.links, |source| source == 9);
    assert!(memory.write(0, &vec![REUSED; memory.len()]));
    for transfer in [1, 2] {
        it.receive(transfer, &Message::Credit(CREDIT), &[]).unwrap();
    }
    let mut num_bytes = 0;
    while num_bytes < WINDOW + CREDIT {
        for (transfer, _, payload) in it.sent() {
            assert!(!payload.contains(&REUSED));
            if transfer == 2 {
                num_bytes += payload.len() as u64;
            }
        }
    }
}

#[test]
fn a_buffer_is_read_once_by_a_request() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let (exposed, _) = ExposedBuffer::new(
        &it.links,
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
        let request = request(&mut it, transfer, &message);
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
        let request = request(&mut it, transfer, &message);
        let memory = it
            .links
            .register(Buffer::zeroed(num_bytes as usize))
            .unwrap();
        it.engine.serve(
            &mut it.links,
            &request,
            Ok((memory, Layout::whole(num_bytes))),
        );
    }
    let mut order = Vec::new();
    while it.engine.has_work() {
        it.engine.run_slice(&mut it.links);
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
fn a_peer_gets_what_it_asks_for_and_no_more_at_once_than_it_may() {
    let mut it = Fixture::new(MemoryPath::Stream);
    for (transfer, wanted) in [(1, Wanted::ChecksummedBytes), (2, Wanted::Checksums)] {
        let request = request(&mut it, transfer, &read(wanted));
        assert_eq!(request.source, 9);
        let memory = Arc::clone(&it.source);
        it.engine
            .serve(&mut it.links, &request, Ok((memory, layout())));
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
    while it.engine.run_slice(&mut it.links) {}
    let checksums = [2, 0].map(|id| checksum::of(&it.block(id))).to_vec();
    let (id, message, _) = it.sent().remove(0);
    let first = 0;
    assert_eq!((id, message), (2, Message::Checksums { first, checksums }));
    assert!(!it.engine.has_work());
}

#[test]
fn a_peer_that_asks_for_what_is_not_there_is_refused() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let request = request(&mut it, 1, &read(Wanted::Bytes));
    it.engine
        .serve(&mut it.links, &request, Err(config("no such source")));
    let (id, message, _) = it.sent().remove(0);
    let reason = "no such source".to_owned();
    assert_eq!((id, message), (1, Message::Refused(reason)));
}
