//! Buffers and clients with manual reactors: tests run them round by round.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::Buffer;

use super::super::{Items, LookupBuffer, LookupQuery, Operation, Selected};
use crate::reactor::manual::{Round, without_threads};
use crate::tensor::{Meta, Received};
use crate::transport::{MemoryPath, Transport};
use crate::work::Then;

const TIMEOUT: Duration = Duration::from_secs(600);
const TRANSPORT: Transport = Transport::Memory(MemoryPath::RemoteRead);
/// More rounds than any test needs.
pub(in crate::entries) const ROUNDS: usize = 100_000;

/// An entry with a key of so many bytes.
pub(in crate::entries) fn entry(key: Meta, num_bytes: usize) -> Items {
    let nothing = || Received {
        meta: Meta::default(),
        buffer: None,
    };
    let mut items = [(); 5].map(|()| Arc::new(nothing()));
    items[2] = Arc::new(Received {
        meta: key,
        buffer: Some(Buffer::zeroed(num_bytes)),
    });
    Items(items)
}

/// A served buffer with these entries.
pub(in crate::entries) fn serve(entries: Vec<Items>) -> LookupBuffer {
    serve_within(u64::MAX, entries)
}

/// As [`serve`], with a capacity.
pub(in crate::entries) fn serve_within(capacity_bytes: u64, entries: Vec<Items>) -> LookupBuffer {
    let local = LookupBuffer::new(capacity_bytes);
    for entry in entries {
        let inserted = local.insert(vec![1], entry, None, Then::GoOn).unwrap();
        assert!(inserted.is_completed());
    }
    let serve = || local.serve("127.0.0.1:0", b"token", TRANSPORT, true);
    without_threads(serve).unwrap();
    local
}

/// A client of all these servers.
pub(in crate::entries) fn connect(locals: &[&LookupBuffer]) -> LookupBuffer {
    let address = |local: &&LookupBuffer| local.address();
    let addresses = locals.iter().map(address).collect();
    let connect = || LookupBuffer::connect(addresses, b"token", TRANSPORT, true, TIMEOUT);
    let (remote, connected) = without_threads(connect).unwrap();
    for _ in 0..ROUNDS {
        if connected.is_completed() {
            assert_eq!(connected.result(), Some(Ok(())));
            return remote;
        }
        remote.manual_round();
        for local in locals {
            local.manual_round();
        }
        std::thread::yield_now();
    }
    panic!("not connected")
}

/// Begins a select, and sends it.
pub(in crate::entries) fn select(remote: &LookupBuffer) -> Operation<Selected> {
    let selected = remote.select(LookupQuery::Any, None, Then::GoOn).unwrap();
    rest(|| remote.manual_round());
    selected
}

/// Runs a reactor until it is idle.
pub(in crate::entries) fn rest(round: impl Fn() -> Round) {
    while round() == Round::Busy {}
}
