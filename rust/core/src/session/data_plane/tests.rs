use std::net::Ipv4Addr;

use kvpipe_ucx::Event;

use super::*;
use crate::transport::{MemoryPath, Transport};

const LINK: SessionKey = 20;
const LEN: usize = 1 << 20;

/// A reactor with a session that has an endpoint, and the worker that it leads to.
fn connected(session: SessionKey) -> (ReactorContext, Worker) {
    let transport = Transport::Memory(MemoryPath::Stream);
    let context = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
    let other = context().worker().unwrap();
    let mut cx = ReactorContext::manual(Some(context()));
    let data = cx.data.as_mut().unwrap();
    data.admit(session, [1; 16]);
    data.open(session, &other.address().unwrap()).unwrap();
    (cx, other)
}

/// A message of nearly `LEN` bytes.
fn send(cx: &mut ReactorContext, session: SessionKey) -> bool {
    let header = cx.header(session, 1);
    cx.message(session, header, Payload::Bytes(vec![0; LEN - 17]))
}

/// Until nothing has left any more.
fn let_leave(cx: &ReactorContext) {
    let data = cx.data.as_ref().unwrap();
    while let Some(event) = data.worker.next_event() {
        let Event::Done { token, .. } = event else {
            continue;
        };
        data.end_message(token);
    }
}

#[test]
fn a_peer_that_does_not_read_what_it_is_sent_is_lost_at_the_cap() {
    let (mut cx, _other) = connected(LINK);
    assert!((0..UNSENT_CAP_KIB * 1024 / LEN).all(|_| send(&mut cx, LINK)));
    assert!(!cx.has_failed(LINK));
    assert!(!send(&mut cx, LINK));
    assert!(cx.has_failed(LINK));
}

#[test]
fn a_message_that_has_left_makes_room_for_another() {
    let (mut cx, _other) = connected(LINK);
    for _ in 0..2 * UNSENT_CAP_KIB * 1024 / LEN {
        assert!(send(&mut cx, LINK));
        let_leave(&cx);
    }
    assert_eq!(cx.unsent(LINK), 0);
}

#[test]
fn what_a_link_has_sent_is_known_after_any_number_of_links_before() {
    for session in [1 << 32, 1 << 33, (1 << 42) - 1] {
        let (mut cx, _other) = connected(session);
        assert!(send(&mut cx, session));
        assert_eq!(cx.unsent(session), LEN / 1024);
        let_leave(&cx);
        assert_eq!(cx.unsent(session), 0);
    }
}
