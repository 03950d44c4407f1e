//! Scheduling of the copies of inserts of the server's own process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::{ChangedBy, Server, SharedState};
use super::*;
use crate::entries::items::key_of;
use crate::entries::lookup::tests::manual::serve_within;
use crate::entries::state::{Access, EntryAction, Key, Query};
use crate::error::Error;
use crate::reactor::manual::Round;
use crate::work::{Then, Waited};

/// Slices of a waiting insert.
const NUM_SLICES: usize = 2;
/// They fit into the space of the one entry.
const INSERTS: usize = 3;

/// A full buffer whose inserts all get their space in the next round.
fn about_to_grant() -> (LookupBuffer, LookupBuffer, Vec<Operation<()>>) {
    let local = serve_within((SLICES * SLICE + (8 << 10)) as u64, entries(1));
    let remote = connect(&[&local]);
    let insert = |_| {
        let items = entry(Meta::default(), NUM_SLICES * SLICE);
        local.insert(vec![2], items, None, Then::GoOn).unwrap()
    };
    let inserts: Vec<_> = (0..INSERTS).map(insert).collect();
    let selected = select(&remote);
    ends(
        &local,
        std::slice::from_ref(&remote),
        std::slice::from_ref(&selected),
    );
    let delivery = selected.result().unwrap().unwrap().unwrap();
    delivery.consume();
    while remote.manual_round() == Round::Busy {}
    (local, remote, inserts)
}

fn num_completed(inserts: &[Operation<()>]) -> usize {
    let completed = |insert: &&Operation<()>| insert.is_completed();
    inserts.iter().filter(completed).count()
}

/// Rounds until the next insert ends.
fn rounds_to_next(local: &LookupBuffer, inserts: &[Operation<()>]) -> usize {
    let before = num_completed(inserts);
    for round in 1..ROUNDS {
        local.manual_round();
        if num_completed(inserts) > before {
            return round;
        }
    }
    panic!("none ends")
}

/// Runs rounds until all inserts are granted, and none is copied.
fn granted(local: &LookupBuffer, inserts: &[Operation<()>]) {
    for _ in 0..ROUNDS {
        if local.info().num_waiting == 0 {
            assert_eq!(num_completed(inserts), 0);
            return;
        }
        local.manual_round();
    }
    panic!("none gets its place")
}

#[test]
fn one_slice_of_all_granted_inserts_is_copied_in_a_round() {
    let (local, _remote, inserts) = about_to_grant();
    for num_ended in 1..=INSERTS {
        assert!(rounds_to_next(&local, &inserts) >= NUM_SLICES);
        assert_eq!(num_completed(&inserts), num_ended);
    }
    assert!(inserts.iter().all(|insert| insert.result() == Some(Ok(()))));
    assert_eq!(local.info().num_entries, Some(INSERTS));
}

#[test]
fn a_granted_insert_can_be_withdrawn_before_its_copy_begins() {
    let (local, _remote, inserts) = about_to_grant();
    granted(&local, &inserts);
    inserts[INSERTS - 1].withdraw();
    while num_completed(&inserts) < INSERTS {
        rounds_to_next(&local, &inserts);
    }
    let last = inserts[INSERTS - 1].result();
    assert!(matches!(last, Some(Err(Error::Closed(_)))), "{last:?}");
    assert_eq!(local.info().num_entries, Some(INSERTS - 1));
    let num_bytes = (NUM_SLICES * SLICE + (2 << 10) + 8) * (INSERTS - 1);
    assert_eq!(local.info().num_bytes, Some(num_bytes as u64));
}

#[test]
fn closing_the_buffer_ends_inserts_that_are_being_copied() {
    let (local, _remote, inserts) = about_to_grant();
    granted(&local, &inserts);
    local.close();
    while local.manual_round() != Round::Over {}
    for insert in &inserts {
        assert!(matches!(insert.result(), Some(Err(Error::Closed(_)))));
    }
}

#[test]
fn waiting_for_an_insert_that_is_copied_past_its_deadline_sleeps() {
    let (local, _remote, mut inserts) = about_to_grant();
    granted(&local, &inserts);
    let first = inserts.remove(0).expires(Some(Instant::now()));
    let deadline = Instant::now() + Duration::from_millis(100);
    assert_eq!(first.wait(Some(deadline)), Ok(Waited::TimedOut));
    assert!(!first.is_completed());
    rounds_to_next(&local, std::slice::from_ref(&first));
    assert_eq!(first.wait(None), Ok(Waited::Done));
    assert_eq!(first.result(), Some(Ok(())));
}

#[test]
fn granted_inserts_end_with_the_server_and_free_their_space() {
    let local = LookupBuffer::new(20 << 10);
    let shared = local.shared();
    let insert = |num_bytes| {
        let items = entry(Meta::default(), num_bytes);
        local.insert(vec![1], items, None, Then::GoOn).unwrap()
    };
    let server = Server::of_buffer(Arc::clone(shared), true);
    let other = (20, 1);
    let reserve = |state: &mut SharedState| {
        let (key, now) = (key_of(&[1]), Instant::now());
        state.entries.reserve(other, key, 16 << 10, None, now);
    };
    shared.change(ChangedBy::Server, reserve).unwrap();
    let inserted = insert(4 << 10);
    assert!(inserted.result().is_none());
    // As the server does when it loses the client.
    let forget = |state: &mut SharedState| state.entries.release(other, Instant::now());
    shared.change(ChangedBy::Server, forget).unwrap();
    assert!(inserted.result().is_none());
    drop(server); // as the driver does when the reactor panics
    assert!(matches!(inserted.result(), Some(Err(Error::Closed(_)))));
    assert_eq!(insert(16 << 10).result(), Some(Ok(())));
}

#[test]
fn an_entry_returned_as_the_server_ends_is_not_leased_to_another_client() {
    for _ in 0..16 {
        let local = LookupBuffer::new(20 << 10);
        let shared = local.shared();
        let mut server = Server::of_buffer(Arc::clone(shared), true);
        let items = entry(Meta::default(), 1);
        let _inserted = local.insert(vec![1], items, None, Then::GoOn).unwrap();
        for session in [16, 17] {
            server.clients.insert(session);
            let select = |state: &mut SharedState| {
                let (query, access) = (Query::<Key>::Oldest, Access::Lease(None));
                let now = Instant::now();
                (state.entries).select((session, 1), query, access, None, now);
            };
            shared.change(ChangedBy::Server, select).unwrap();
        }
        let action = shared.drain_client_actions().pop_front();
        assert!(matches!(action, Some(EntryAction::Offered((16, 1), _))));
        drop(server);
        let info = shared.info().unwrap();
        assert_eq!((info.num_values, info.num_leased), (1, 0));
    }
}
