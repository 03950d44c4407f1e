//! Damaged addresses and keys. Each kind is tried in a process of its own, as UCX's parsers
//! promise nothing. Random bytes in place of an address do crash UCX (1.22: a segmentation fault about
//! once in a few thousand), so there only truncation is tried, and not on 1.13, which asserts.

use kvpipe_ucx::MemoryKind;

use crate::common::{self, Visitor, pattern, visit_thread};

const DAMAGED: &str = "KVPIPE_TEST_DAMAGED";

#[test]
fn damaged_process() {
    let Ok(what) = std::env::var(DAMAGED) else {
        return;
    };
    let library = common::library().expect("the parent found UCX");
    let visitor = visit_thread(&library, None);
    visitor.greet();
    if what == "key" {
        unpack_damaged_keys(&visitor);
    } else {
        connect_to_truncated(&visitor);
    }
    visitor.greet();
}

fn unpack_damaged_keys(visitor: &Visitor) {
    let valid = &visitor.card.rkey;
    for seed in 0..1000 {
        let at = seed as usize % valid.len();
        let noise = pattern(4 * valid.len(), seed);
        let mut flipped = valid.clone();
        flipped[at] ^= 1 << (seed % 7);
        let mut tail_replaced = valid[..at].to_vec();
        tail_replaced.extend_from_slice(&noise);
        for bytes in [&flipped, &tail_replaced, &noise, &valid[..at].to_vec()] {
            let _ = visitor
                .node
                .worker
                .unpack_rkey(visitor.endpoint, bytes, MemoryKind::Host);
        }
    }
}

fn connect_to_truncated(visitor: &Visitor) {
    let (worker, valid) = (&visitor.node.worker, &visitor.card.worker);
    for len in 0..valid.len() {
        // SAFETY: the beginning of a worker's address.
        if let Ok(endpoint) = unsafe { worker.connect(&valid[..len]) } {
            let _ = worker.flush(endpoint, 0);
            worker.progress();
            worker.close(endpoint);
        }
    }
}

fn survives(what: &str) {
    if common::library().is_none() {
        return;
    }
    let mut child = common::child("damaged_process", &[(DAMAGED, what)]);
    let status = child.0.wait().expect("child ends");
    assert!(status.success(), "{status}");
}

#[test]
fn damaged_keys_do_not_crash() {
    survives("key");
}

#[test]
fn truncated_addresses_do_not_crash() {
    if common::library().is_some_and(|library| library.version() >= (1, 15, 0)) {
        survives("address");
    }
}
