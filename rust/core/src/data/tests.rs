use std::net::Ipv4Addr;

use kvpipe_ucx::Event;

use super::*;
use crate::transport::{MemoryRoad, Transport};

const LINK: LinkId = 20;
const LEN: usize = 1 << 20;

/// A node with an endpoint, and the worker that it leads to.
fn connected() -> (Io, Worker) {
    let transport = Transport::Memory(MemoryRoad::Messages);
    let context = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
    let other = context().worker().unwrap();
    let mut io = Io::alone(Some(context()));
    let data = io.data.as_mut().unwrap();
    data.admit(LINK, [1; 16]);
    data.open(LINK, &other.address().unwrap()).unwrap();
    (io, other)
}

/// A message of nearly `LEN` bytes.
fn send(io: &mut Io) -> bool {
    let header = io.header(LINK, 1);
    io.message(LINK, header, Payload::Bytes(vec![0; LEN - 17]))
}

#[test]
fn a_peer_that_does_not_read_what_it_is_sent_is_lost_at_the_cap() {
    let (mut io, _other) = connected();
    assert!((0..UNSENT_CAP / LEN).all(|_| send(&mut io)));
    assert!(!io.has_failed(LINK));
    assert!(!send(&mut io));
    assert!(io.has_failed(LINK));
}

#[test]
fn a_message_that_has_left_makes_room_for_another() {
    let (mut io, _other) = connected();
    for _ in 0..2 * UNSENT_CAP / LEN {
        assert!(send(&mut io));
        let data = io.data.as_ref().unwrap();
        while let Some(event) = data.worker.next_event() {
            let Event::Done { token, .. } = event else {
                continue;
            };
            data.end_message(token);
        }
    }
    assert_eq!(io.unsent(LINK), 0);
}
