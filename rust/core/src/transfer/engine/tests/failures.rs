//! Transfers that fail: late, cancelled, or with their session.

use super::*;

#[test]
fn a_failed_read_completes_when_nothing_is_in_flight_any_more() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(it.request(7));
    it.engine.fail(&mut it.links, id, &config("first"));
    it.engine.fail(&mut it.links, id, &config("second"));
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
        .remove_source(&mut it.links, SESSION, SOURCE, &config("closed"));
    assert_eq!(failed(it.engine.next_completion()), config("closed"));
    assert!(it.engine.next_completion().is_none());
    for (id, owner) in ids.into_iter().zip([0, 1]) {
        it.data(id).unwrap();
        it.assert_moved(owner);
    }
}

fn late(it: &Fixture, owner: u64) -> TransferRequest {
    TransferRequest {
        deadline: Some(it.links.now()),
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
    it.engine.expire(&mut it.links);
    assert_eq!(it.engine.next_deadline(), None);
    assert!(is_timeout(it.engine.next_completion()));
    assert!(!it.links.has_failed(SESSION));
    it.data(healthy).unwrap();
    it.assert_moved(1);
}

#[test]
fn a_late_stream_is_cancelled_and_fails_alone() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let cancelled = it.begin(late(&it, 0));
    let healthy = it.begin(it.request(1));
    it.sent();
    it.engine.expire(&mut it.links);
    assert_eq!(it.sent(), [(cancelled, Message::Cancel, Vec::new())]);
    assert!(is_timeout(it.engine.next_completion()));
    assert!(!it.links.has_failed(SESSION));
    // Bytes that were under way are dropped, and CANCEL may cross the last of them.
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
    it.engine.fail(&mut it.links, ids[0], &config("failed"));
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
    it.engine.fail(&mut it.links, id, &config("failed"));
    assert_eq!(it.sent(), []);
    assert!(it.engine.peers[&SESSION].cancelling.is_empty());
}

#[test]
fn a_late_read_fails_at_once_and_is_over_when_nothing_can_write_any_more() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(late(&it, 7));
    it.sent();
    it.engine.expire(&mut it.links);
    let (owner, error) = it.engine.next_late().expect("it is late");
    assert_eq!(owner, 7);
    assert!(matches!(error, Error::Timeout(_)));
    assert!(it.engine.next_completion().is_none(), "reads may write");
    assert_eq!(it.sent(), [(id, Message::Cancel, Vec::new())]);
    assert!(!it.links.has_failed(SESSION));
    it.end_reads();
    assert!(is_timeout(it.engine.next_completion()));
    assert!(it.engine.next_late().is_none());
}

#[test]
fn the_end_of_a_session_is_that_of_its_transfers_after_their_reads() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    it.begin(it.request(0));
    it.engine.add(it.request(1));
    let lost = Error::lost("peer", "gone");
    it.engine.session_down(&mut it.links, SESSION, &lost);
    let held = it
        .engine
        .next_completion()
        .expect("nothing was read for it");
    assert_eq!(held.owner, 1);
    assert!(it.engine.next_completion().is_none());
    it.end_reads();
    assert_eq!(failed(it.engine.next_completion()), lost);
}

/// As when the link of its device goes down.
#[test]
fn transfers_whose_device_is_lost_begin_again_as_streams_and_the_session_goes_on() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let ids = [0, 1].map(|owner| it.begin(it.request(owner)));
    it.sent();
    it.links.lose_devices(SESSION, "the link is down");
    it.end_reads();
    assert!(it.engine.next_completion().is_none());
    assert_eq!(it.requests(), ids.map(|id| (id, Wanted::ChecksummedBytes)));
    for (id, owner) in ids.into_iter().zip([0, 1]) {
        it.data(id).unwrap();
        it.assert_moved(owner);
    }
    assert!(!it.links.has_failed(SESSION));
    let later = it.begin(it.request(2));
    assert_eq!(it.requests(), [(later, Wanted::ChecksummedBytes)]);
}

/// Parts on it may be lost, and neither side knows which.
#[test]
fn streams_begin_again_when_a_connection_of_their_session_is_lost_and_late_parts_are_dropped() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let [done, id] = [0, 1].map(|owner| it.begin(it.request(owner)));
    it.data(done).unwrap();
    it.assert_moved(0);
    it.sent();
    let part = Message::Data {
        offset: 0,
        checksum: checksum::of(b"wrong"),
    };
    it.receive(id, &part, b"wrong").unwrap();
    let mut before = id;
    for attempt in 1..4 {
        it.engine.streams_lost(&mut it.links, SESSION);
        let again = id | attempt << 56;
        let sent = it.sent();
        assert_eq!(sent[0], (before, Message::Cancel, Vec::new()));
        assert!(matches!(sent[1..], [(named, Message::Read { .. }, _)] if named == again));
        it.data(before).unwrap();
        assert!(it.engine.next_completion().is_none());
        it.receive(before, &Message::Cancelled, &[]).unwrap();
        before = again;
    }
    it.data(before).unwrap();
    it.assert_moved(1);
    assert!(it.engine.peers[&SESSION].cancelling.is_empty());
    it.engine.streams_lost(&mut it.links, SESSION);
    assert_eq!(it.sent(), []);
}
