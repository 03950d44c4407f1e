use std::net::Ipv4Addr;

use kvpipe_ucx::Event;

use super::*;
use crate::transport::{MemoryRoad, Transport};

const LINK: LinkId = 20;
const LEN: usize = 1 << 20;

/// A node with a link that has an endpoint, and the worker that it leads to.
fn connected(link: LinkId) -> (Io, Worker) {
    let transport = Transport::Memory(MemoryRoad::Messages);
    let context = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
    let other = context().worker().unwrap();
    let mut io = Io::alone(Some(context()));
    let data = io.data.as_mut().unwrap();
    data.admit(link, [1; 16]);
    data.open(link, &other.address().unwrap()).unwrap();
    (io, other)
}

/// A message of nearly `LEN` bytes.
fn send(io: &mut Io, link: LinkId) -> bool {
    let header = io.header(link, 1);
    io.message(link, header, Payload::Bytes(vec![0; LEN - 17]))
}

/// Until nothing has left any more.
fn let_leave(io: &Io) {
    let data = io.data.as_ref().unwrap();
    while let Some(event) = data.worker.next_event() {
        let Event::Done { token, .. } = event else {
            continue;
        };
        data.end_message(token);
    }
}

#[test]
fn a_peer_that_does_not_read_what_it_is_sent_is_lost_at_the_cap() {
    let (mut io, _other) = connected(LINK);
    assert!((0..UNSENT_CAP_KIB * 1024 / LEN).all(|_| send(&mut io, LINK)));
    assert!(!io.has_failed(LINK));
    assert!(!send(&mut io, LINK));
    assert!(io.has_failed(LINK));
}

#[test]
fn a_message_that_has_left_makes_room_for_another() {
    let (mut io, _other) = connected(LINK);
    for _ in 0..2 * UNSENT_CAP_KIB * 1024 / LEN {
        assert!(send(&mut io, LINK));
        let_leave(&io);
    }
    assert_eq!(io.unsent(LINK), 0);
}

#[test]
fn what_a_link_has_sent_is_known_after_any_number_of_links_before() {
    for link in [1 << 32, 1 << 33, (1 << 42) - 1] {
        let (mut io, _other) = connected(link);
        assert!(send(&mut io, link));
        assert_eq!(io.unsent(link), LEN / 1024);
        let_leave(&io);
        assert_eq!(io.unsent(link), 0);
    }
}
