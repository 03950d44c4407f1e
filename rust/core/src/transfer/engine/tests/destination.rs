//! Transfers to this side: their start and their completion.

use super::*;
use crate::transfer::transfer::Corruption;

#[test]
fn a_stream_is_complete_when_all_of_it_has_come() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let id = it.begin(it.request(7));
    assert_eq!(it.requests(), [(id, Wanted::ChecksummedBytes)]);
    assert!(it.engine.next_completion().is_none());
    it.data(id).unwrap();
    it.assert_moved(7);
    // Sent before the source could know: dropped.
    assert!(matches!(it.data(id), Ok(None)));
    assert!(matches!(it.data(id + 1), Err(Error::Protocol(_))));
}

#[test]
fn what_another_session_sends_of_a_transfer_is_dropped() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let id = it.begin(it.request(7));
    let data = vec![9; 3 * BLOCK];
    let (offset, checksum) = (0, checksum::of(&data));
    let message = Message::Data { offset, checksum };
    it.receive_from(SESSION + 1, id, &message, &data).unwrap();
    assert!(it.engine.next_completion().is_none());
    it.data(id).unwrap();
    it.assert_moved(7);
}

#[test]
fn a_transfer_without_bytes_is_complete_when_its_turn_may_come() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let pieces = coalesce((&layout(), &[]), (&layout(), &[])).unwrap();
    let id = it.engine.add(TransferRequest {
        pieces: Arc::new(pieces),
        ..it.request(7)
    });
    assert!(it.engine.next_completion().is_none(), "it is held");
    it.engine.enqueue(&mut it.links, id);
    let completion = it.engine.next_completion().expect("a completion");
    assert_eq!((completion.owner, completion.outcome), (7, Ok(())));
    assert_eq!(it.requests(), []);
}

#[test]
fn a_read_is_complete_when_its_bytes_and_their_checksums_are_here() {
    for checksums_are_first in [false, true] {
        let mut it = Fixture::new(MemoryPath::RemoteRead);
        let id = it.begin(it.request(7));
        assert_eq!(it.requests(), [(id, Wanted::Checksums)]);
        let checksums = it.block_checksums();
        let halves = [true, false].map(|is_checksums| is_checksums == checksums_are_first);
        for is_checksums in halves {
            assert!(it.engine.next_completion().is_none());
            if is_checksums {
                it.checksums(id, checksums.clone()).unwrap();
            } else {
                it.end_reads();
            }
        }
        it.assert_moved(7);
    }
}

#[test]
fn a_read_names_the_first_block_that_differs() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let id = it.begin(it.request(7));
    let mut checksums = it.block_checksums();
    checksums[1] ^= 1;
    it.checksums(id, checksums).unwrap();
    it.end_reads();
    let completion = it.engine.next_completion().expect("a completion");
    let corruption = Corruption {
        at: BLOCK as u64,
        is_exact: true,
    };
    assert_eq!(completion.outcome, Err(TransferError::Corrupt(corruption)));
}

#[test]
fn checksums_that_come_unasked_verify_a_read_whenever_they_come() {
    for comes_first in [true, false] {
        let mut it = Fixture::new(MemoryPath::RemoteRead);
        it.add_source(Verification::Pushed);
        let checksums = it.block_checksums();
        if comes_first {
            it.source_checksums(checksums.clone()).unwrap();
        }
        it.begin(it.request(7));
        assert_eq!(it.requests(), []);
        it.end_reads();
        if !comes_first {
            assert!(it.engine.next_completion().is_none());
            it.source_checksums(checksums).unwrap();
        }
        it.assert_moved(7);
    }
}

#[test]
fn a_retry_streams_whatever_the_path_of_the_session() {
    let mut it = Fixture::new(MemoryPath::RemoteRead);
    let request = TransferRequest {
        is_retry: true,
        ..it.request(7)
    };
    let id = it.begin(request);
    assert_eq!(it.requests(), [(id, Wanted::ChecksummedBytes)]);
}

#[test]
fn checksums_of_a_stream_only_are_asked_for_by_a_stream_only() {
    for (path, wanted) in [
        (MemoryPath::RemoteRead, None),
        (MemoryPath::Stream, Some(Wanted::ChecksummedBytes)),
    ] {
        let mut it = Fixture::new(path);
        let id = it.begin(TransferRequest {
            checksums: Checksums::OfStream,
            is_verified_by_owner: true,
            ..it.request(7)
        });
        let expected: Vec<_> = wanted.map(|wanted| (id, wanted)).into_iter().collect();
        assert_eq!(it.requests(), expected);
        if wanted.is_some() {
            it.data(id).unwrap();
            it.assert_moved(7);
        }
    }
}

#[test]
fn transfers_from_a_peer_begin_in_order_and_a_few_at_a_time() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let ids = [0, 1, 2, 3].map(|owner| it.begin(it.request(owner)));
    let bytes = Wanted::ChecksummedBytes;
    assert_eq!(it.requests(), [(ids[0], bytes), (ids[1], bytes)]);
    it.data(ids[1]).unwrap();
    assert_eq!(it.requests(), [(ids[2], bytes)]);
    it.assert_moved(1);
    let refused = Message::Refused("no such block".to_owned());
    it.receive(ids[0], &refused, &[]).unwrap();
    assert_eq!(it.requests(), [(ids[3], bytes)]);
    let error = failed(it.engine.next_completion());
    assert_eq!(error, config("the peer refused: no such block"));
}

#[test]
fn a_transfer_that_is_held_does_not_keep_others_from_beginning() {
    let mut it = Fixture::new(MemoryPath::Stream);
    let held = it.engine.add(it.request(0));
    let ids = [1, 2].map(|owner| it.begin(it.request(owner)));
    assert_eq!(it.requests().len(), ids.len());
    it.engine
        .withdraw(&mut it.links, held, &config("withdrawn"));
    assert_eq!(failed(it.engine.next_completion()), config("withdrawn"));
}
