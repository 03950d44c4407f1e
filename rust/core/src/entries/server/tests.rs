//! Scheduling of the server's long work. All reactors are manual: each round of the server does one slice.

mod copies;

use std::sync::Arc;

use crate::entries::lookup::tests::manual::{ROUNDS, connect, entry, rest, select, serve};
use crate::entries::lookup::{Items, LookupBuffer, Operation, Selected};
use crate::tensor::Meta;
use crate::work::Then;

/// Slices of an entry.
const SLICES: usize = 8;
const SLICE: usize = 4 << 20;

fn entries(count: usize) -> Vec<Items> {
    let entry = || entry(Meta::default(), SLICES * SLICE);
    std::iter::repeat_with(entry).take(count).collect()
}

/// The round of the server in which each select ends.
fn ends(
    local: &LookupBuffer,
    remotes: &[LookupBuffer],
    selects: &[Operation<Selected>],
) -> Vec<usize> {
    let mut ends = vec![None; selects.len()];
    for round in 0..ROUNDS {
        local.manual_round();
        for remote in remotes {
            rest(|| remote.manual_round());
        }
        for (end, select) in ends.iter_mut().zip(selects) {
            if select.is_completed() {
                assert!(matches!(select.result(), Some(Ok(Some(_)))));
                end.get_or_insert(round);
            }
        }
        if let Some(ends) = ends.iter().copied().collect() {
            return ends;
        }
    }
    panic!("not all end")
}

#[test]
fn clients_get_their_checksums_in_turns() {
    const CLIENTS: usize = 3;
    let local = serve(entries(CLIENTS));
    let remotes: Vec<_> = (0..CLIENTS).map(|_| connect(&[&local])).collect();
    let selects: Vec<_> = remotes.iter().map(select).collect();
    let mut ends = ends(&local, &remotes, &selects);
    ends.sort_unstable();
    assert!(ends[CLIENTS - 1] - ends[0] < SLICES, "{ends:?}");
}

#[test]
fn a_client_gets_the_checksums_first_of_what_it_fetches_first() {
    const SELECTS: usize = 5;
    let local = serve(entries(SELECTS));
    let remote = [connect(&[&local])];
    let selects: Vec<_> = (0..SELECTS).map(|_| select(&remote[0])).collect();
    let ends = ends(&local, &remote, &selects);
    let is_next = |pair: &[usize]| pair[1] >= pair[0] + SLICES / 2;
    assert!(ends.windows(2).all(is_next), "{ends:?}");
}

/// An entry of two tensors of one slice each.
fn pair() -> Items {
    let mut pair = entry(Meta::default(), SLICE);
    pair.0[3] = Arc::clone(&pair.0[2]);
    pair
}

#[test]
fn an_entry_is_complete_before_the_tensors_of_the_next_one_are_read() {
    const SELECTS: usize = 8;
    let local = serve((0..SELECTS).map(|_| pair()).collect());
    let remote = [connect(&[&local])];
    let selects: Vec<_> = (0..SELECTS).map(|_| select(&remote[0])).collect();
    let ends = ends(&local, &remote, &selects);
    assert!(ends[0] < ends[SELECTS - 1] / 2, "{ends:?}");
    assert!(ends.is_sorted(), "{ends:?}");
}

#[test]
fn inserts_of_a_client_are_visible_in_the_order_of_their_calls() {
    const INSERTS: usize = 8;
    let local = serve(Vec::new());
    let remote = connect(&[&local]);
    let mut entries: Vec<_> = (1..INSERTS).map(|_| pair()).collect();
    entries.push(entry(Meta::default(), 1)); // inside its message
    let insert = |items| remote.insert(vec![1], items, None, Then::GoOn).unwrap();
    let inserts: Vec<_> = entries.into_iter().map(insert).collect();
    let mut num_done = Vec::new();
    for _ in 0..ROUNDS {
        local.manual_round();
        rest(|| remote.manual_round());
        let done = inserts.iter().take_while(|insert| insert.is_completed());
        num_done.push(done.count());
        let num_completed = inserts.iter().filter(|insert| insert.is_completed());
        assert_eq!(num_completed.count(), num_done[num_done.len() - 1]);
        if num_done.last() == Some(&INSERTS) {
            let first = num_done.iter().position(|num| *num > 0);
            assert!(first.unwrap() < num_done.len() / 2, "{num_done:?}");
            return;
        }
    }
    panic!("not all end: {num_done:?}")
}
