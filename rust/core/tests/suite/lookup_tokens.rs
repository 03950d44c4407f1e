//! Size of entries and waiting operations of a lookup buffer: tokens and descriptions count as well as tensors.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::checksum;
use kvpipe_core::entries::lookup::{Items, LookupBuffer, LookupQuery, Operation, Selected};
use kvpipe_core::net::codec::Writer;
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::tensor::{Meta, Received};
use kvpipe_core::work::Then;
use kvpipe_ucx::{Buffer, Search};

use crate::common::{self, Raw, TIMEOUT, TOKEN, eventually};

const PUT: u8 = 68;
/// Most tokens of an entry or a query.
const TOKENS_CAP: usize = 1 << 22;
/// Counted bytes of an entry besides tokens, tensors and their descriptions.
const BOOKKEEPING: u64 = 2048;

fn serve(search: &Search, capacity_bytes: u64) -> LookupBuffer {
    let local = LookupBuffer::new(capacity_bytes);
    local
        .serve("127.0.0.1:0", TOKEN, search.clone().into(), true)
        .expect("serve");
    local
}

fn connect(search: &Search, local: &LookupBuffer) -> LookupBuffer {
    let address = local.address();
    let transport = search.clone().into();
    let (remote, connected) =
        LookupBuffer::connect(vec![address], TOKEN, transport, true, TIMEOUT).expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    remote
}

/// An entry whose only tensor is a key of this dtype.
fn items(dtype: String, key: Vec<u8>) -> Items {
    let nothing = Arc::new(Received {
        meta: Meta::default(),
        buffer: None,
    });
    let mut items = [(); 5].map(|()| Arc::clone(&nothing));
    items[2] = Arc::new(Received {
        meta: Meta {
            family: 2,
            dtype,
            shape: vec![key.len() as u64],
        },
        buffer: Some(Buffer::from_vec(key)),
    });
    Items(items)
}

fn nothing() -> Items {
    items(String::new(), Vec::new())
}

fn waits(local: &LookupBuffer, num_waiting: usize) {
    eventually("it waits", || {
        (local.info().num_waiting == num_waiting).then_some(())
    });
}

fn ends<T: Clone>(operation: &Operation<T>) -> Result<T, Error> {
    eventually("it ends", || operation.result())
}

#[test]
fn an_entry_counts_all_its_memory_inserted_here_or_by_a_client() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 1 << 20);
    let remote = connect(&search, &local);
    let entry = || items("d".repeat(3000), vec![7; 50_000]);
    let num_bytes = BOOKKEEPING + 8 * 1000 + 3000 + 8 + 50_000;
    let here = local
        .insert(vec![1; 1000], entry(), None, Then::GoOn)
        .expect("inserted");
    assert_eq!(ends(&here), Ok(()));
    assert_eq!(local.info().num_bytes, Some(num_bytes));
    let there = remote
        .insert(vec![1; 1000], entry(), None, Then::GoOn)
        .expect("inserted");
    assert_eq!(ends(&there), Ok(()));
    assert_eq!(local.info().num_bytes, Some(2 * num_bytes));
}

#[test]
fn tokens_count_against_the_capacity_as_tensors_do() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 1 << 20);
    let remote = connect(&search, &local);
    let insert = |num_tokens, timeout| {
        let inserted = remote.insert(vec![1; num_tokens], nothing(), timeout, Then::GoOn);
        ends(&inserted.expect("begun"))
    };
    assert!(matches!(insert(1 << 17, None), Err(Error::Config(_))));
    assert_eq!(insert(1 << 16, None), Ok(()));
    let refused = insert(1 << 16, Some(Duration::ZERO));
    assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
    let entry = local.insert(vec![1; 1 << 17], nothing(), None, Then::GoOn);
    assert!(matches!(entry, Err(Error::Config(_))), "{entry:?}");
}

fn select(remote: &LookupBuffer, num_tokens: usize) -> Operation<Selected> {
    let query = LookupQuery::Tokens(vec![1; num_tokens]);
    remote.select(query, None, Then::GoOn).expect("begun")
}

#[test]
fn a_select_with_too_many_tokens_beside_waiting_selects_is_refused_and_they_go_on() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 1 << 20);
    let remote = connect(&search, &local);
    let mut waiting: Vec<_> = (0..4).map(|_| select(&remote, TOKENS_CAP)).collect();
    waits(&local, 4);
    let refused = ends(&select(&remote, 5)).expect_err("too many");
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let text = refused.to_string();
    for number in ["16777216 tokens wait", "5 more cannot"] {
        assert!(text.contains(number), "{text}");
    }
    let other = connect(&search, &local);
    let others = select(&other, 5);
    waits(&local, 5);
    waiting.pop();
    waits(&local, 4);
    let next = select(&remote, 5);
    waits(&local, 5);
    drop((waiting, others));
    waits(&local, 1);
    local
        .insert(vec![1], nothing(), None, Then::GoOn)
        .expect("inserted");
    assert!(ends(&next).expect("no error").is_some());
}

#[test]
fn inserts_with_too_many_tokens_for_the_server_wait_in_the_client() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 64 << 20);
    let remote = connect(&search, &local);
    let full = items(String::new(), vec![0; 60 << 20]);
    local
        .insert(vec![1], full, None, Then::GoOn)
        .expect("inserted");
    let insert = |num_tokens, timeout| {
        let inserted = remote.insert(vec![1; num_tokens], nothing(), timeout, Then::GoOn);
        inserted.expect("begun")
    };
    let inserts = [TOKENS_CAP / 2 + 1, TOKENS_CAP / 2, 1].map(|num| insert(num, None));
    waits(&local, 1);
    eventually("the others wait in the client", || {
        (remote.info().num_waiting == 3).then_some(())
    });
    let refused = ends(&insert(1, Some(Duration::ZERO))).expect_err("no place");
    assert!(
        matches!(&refused, Error::Exhausted(text) if text.starts_with("1 earlier insert")),
        "{refused}"
    );
    assert_eq!(local.info().num_waiting, 1);
    let taken = local
        .select(LookupQuery::Any, None, Then::GoOn)
        .expect("select");
    ends(&taken).expect("no error").expect("an entry").consume();
    for insert in &inserts {
        assert_eq!(ends(insert), Ok(()));
    }
}

#[test]
fn an_insert_is_sent_once_an_earlier_one_with_too_many_tokens_has_timed_out() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 64 << 20);
    let full = items(String::new(), vec![0; 60 << 20]);
    local
        .insert(vec![1], full, None, Then::GoOn)
        .expect("inserted");
    for is_late in [true, false] {
        let remote = connect(&search, &local);
        let timeout = is_late.then_some(Duration::from_millis(100));
        let insert = |num_tokens, timeout| {
            let inserted = remote.insert(vec![1; num_tokens], nothing(), timeout, Then::GoOn);
            inserted.expect("begun")
        };
        let _first = insert(TOKENS_CAP - 1, None);
        let (large, _small) = (insert(2, timeout), insert(1, None));
        if !is_late {
            waits(&local, 1);
            large.withdraw();
        }
        waits(&local, 2);
        assert!(ends(&large).is_err());
        remote.close();
        waits(&local, 0);
    }
}

#[test]
fn a_client_that_exceeds_the_tokens_of_inserts_is_cut_off() {
    let Some(search) = common::ucx() else { return };
    let local = serve(&search, 64 << 20);
    let full = items(String::new(), vec![0; 60 << 20]);
    local
        .insert(vec![1], full, None, Then::GoOn)
        .expect("inserted");
    let mut raw = Raw::connect(
        local.address().parse().expect("address"),
        SessionKind::Lookup,
    );
    let insert = |raw: &Raw, operation: u64, num_tokens: usize| {
        let key = 1u64.to_le_bytes().repeat(num_tokens);
        let (never, not_hashed, no_tensors) = (u64::MAX, 0, [0; 5]);
        let payload = Writer::default().bytes(&key).u64(never).u64(never);
        let payload = payload.u8(not_hashed).bytes(&no_tensors).u32(0).finish();
        let sum = checksum::of(&payload);
        let header = Writer::new(PUT).u64(operation).u64(sum).finish();
        raw.send(&header, &payload);
    };
    insert(&raw, 1, TOKENS_CAP);
    waits(&local, 1);
    insert(&raw, 2, 1);
    assert!(raw.is_closed());
    waits(&local, 0);
}
