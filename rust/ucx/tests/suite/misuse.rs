//! Calls that the crate refuses before they can harm UCX.

use kvpipe_ucx::{Buffer, Event, LanesError, MemoryKind, Status};

use crate::common::{self, Node, REGION_BYTES, Visitor, get, visit_thread};

/// UCX's codes, for the errors that callers tell apart.
const INVALID_PARAM: i32 = -5;
const INVALID_ADDR: i32 = -7;
const OUT_OF_RANGE: i32 = -19;
const NOT_CONNECTED: i32 = -24;

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> i32 {
    result.expect_err("an error").code
}

#[test]
fn impossible_operands_are_refused_without_a_done() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    visitor.greet();
    let Visitor {
        node,
        endpoint: ep,
        card,
        ..
    } = &visitor;
    let (worker, region, key) = (&node.worker, &node.region, visitor.key());
    let end = REGION_BYTES;
    assert_eq!(
        code(worker.get(*ep, get(region, (end, 1), card.region, &key, 1))),
        OUT_OF_RANGE
    );
    assert_eq!(
        code(worker.get(*ep, get(region, (usize::MAX, 2), card.region, &key, 1))),
        OUT_OF_RANGE
    );
    let foreign = Node::new(common::context(&library, None)).region;
    assert_eq!(
        code(worker.get(*ep, get(&foreign, (0, 1), card.region, &key, 1))),
        INVALID_PARAM
    );
    // SAFETY: a worker has written this address.
    let other = unsafe { worker.connect(&card.worker) }.expect("second endpoint");
    assert_eq!(
        code(worker.get(other, get(region, (0, 1), card.region, &key, 1))),
        INVALID_PARAM
    );
    assert_eq!(
        code(node.context.register(Buffer::zeroed(0))),
        INVALID_PARAM
    );
    assert_eq!(worker.outstanding(), 0);
    assert!(
        node.wait(std::time::Duration::from_millis(50), |event| match event {
            Event::Done { token: 1, .. } => Some(()),
            _ => None,
        })
        .is_none()
    );
}

#[test]
fn closed_endpoint_and_its_keys_refuse_use() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    visitor.greet();
    let Visitor {
        node,
        endpoint,
        card,
        ..
    } = &visitor;
    let (key, worker) = (visitor.key(), &node.worker);
    worker.close(*endpoint);
    worker.close(*endpoint);
    assert_eq!(code(worker.flush(*endpoint, 1)), NOT_CONNECTED);
    node.close(*endpoint);
    assert_eq!(worker.outstanding(), 0);
    worker.close(*endpoint);
    assert_eq!(worker.outstanding(), 0);
    assert!(matches!(
        worker.lanes(*endpoint),
        Err(LanesError::Unusable(_))
    ));
    let read = get(&node.region, (0, 1), card.region, &key, 1);
    assert_eq!(code(worker.get(*endpoint, read)), NOT_CONNECTED);
    // SAFETY: a worker has written this address.
    let again = unsafe { worker.connect(&card.worker) }.expect("connect again");
    assert_ne!(again, *endpoint);
    assert_eq!(code(worker.get(again, read)), INVALID_PARAM);
}

#[test]
fn short_addresses_and_truncated_keys_are_errors() {
    let Some(library) = common::library() else {
        return;
    };
    let visitor = visit_thread(&library, None);
    visitor.greet();
    let (worker, card) = (&visitor.node.worker, &visitor.card);
    for address in [&[][..], &card.worker[..9], &vec![0; 1 << 20]] {
        // SAFETY: its length is refused before UCX sees it.
        let refused = unsafe { worker.connect(address) };
        assert_eq!(code(refused), INVALID_ADDR);
    }
    for len in 0..9 {
        let unpacked = worker.unpack_rkey(visitor.endpoint, &card.rkey[..len], MemoryKind::Host);
        assert_eq!(code(unpacked), INVALID_PARAM);
    }
    assert_eq!(
        code(worker.unpack_rkey(visitor.endpoint, &[0xff; 64], MemoryKind::Host)),
        INVALID_PARAM
    );
}
