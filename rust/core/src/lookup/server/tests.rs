//! Whose checksums are computed when. All nodes run by hand, so that each round of the server is one slice of that work.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::super::{Items, Local, Operation, Query, Remote, Selected};
use crate::node::by_hand::{Round, without_threads};
use crate::pipe::{Meta, Received};
use crate::transport::{MemoryRoad, Transport};
use crate::work::Then;

const TIMEOUT: Duration = Duration::from_secs(600);
const TRANSPORT: Transport = Transport::Memory(MemoryRoad::Get);
/// Of an entry.
const SLICES: usize = 8;
const ENTRY_BYTES: usize = SLICES * (4 << 20);
/// More than anything takes.
const ROUNDS: usize = 100_000;

fn entry() -> Items {
    let item = |buffer| {
        let meta = Meta::default();
        Arc::new(Received { meta, buffer })
    };
    let key = Buffer::zeroed(ENTRY_BYTES);
    Items([None, None, Some(key), None, None].map(item))
}

/// A buffer with so many entries.
fn serve(num_entries: usize) -> Local {
    let local = Local::new(u64::MAX);
    for _ in 0..num_entries {
        let inserted = local.insert(vec![1], entry(), None).unwrap();
        assert!(inserted.is_completed());
    }
    let serve = || local.serve("127.0.0.1:0", b"token", TRANSPORT, true);
    without_threads(serve).unwrap();
    local
}

fn connect(local: &Local) -> Remote {
    let addresses = vec![local.address().unwrap().to_string()];
    let connect = || Remote::connect(addresses, b"token", TRANSPORT, true, TIMEOUT);
    let (remote, connected) = without_threads(connect).unwrap();
    for _ in 0..ROUNDS {
        if connected.is_completed() {
            assert_eq!(connected.result(), Some(Ok(())));
            return remote;
        }
        remote.round_by_hand();
        local.round_by_hand();
        std::thread::yield_now();
    }
    panic!("not connected")
}

fn select(remote: &Remote) -> Operation<Selected> {
    let selected = remote.select(Query::Any, None, Then::GoOn).unwrap();
    while remote.round_by_hand() == Round::Busy {}
    selected
}

/// In which round of the server each select ends.
fn ends(local: &Local, remotes: &[Remote], selects: &[Operation<Selected>]) -> Vec<usize> {
    let mut ends = vec![None; selects.len()];
    for round in 0..ROUNDS {
        local.round_by_hand();
        for remote in remotes {
            while remote.round_by_hand() == Round::Busy {}
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
    let local = serve(CLIENTS);
    let remotes: Vec<_> = (0..CLIENTS).map(|_| connect(&local)).collect();
    let selects: Vec<_> = remotes.iter().map(select).collect();
    let mut ends = ends(&local, &remotes, &selects);
    ends.sort_unstable();
    assert!(ends[CLIENTS - 1] - ends[0] < SLICES, "{ends:?}");
}

#[test]
fn a_client_gets_the_checksums_first_of_what_it_fetches_first() {
    const SELECTS: usize = 5;
    let local = serve(SELECTS);
    let remote = [connect(&local)];
    let selects: Vec<_> = (0..SELECTS).map(|_| select(&remote[0])).collect();
    let ends = ends(&local, &remote, &selects);
    let is_next = |pair: &[usize]| pair[1] >= pair[0] + SLICES / 2;
    assert!(ends.windows(2).all(is_next), "{ends:?}");
}
