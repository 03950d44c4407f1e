use std::net::Ipv4Addr;

use kvpipe_ucx::Event;

use super::*;
use crate::session::session::Session;
use crate::transport::{DataPath, MemoryPath, Transport, reads_host};

const SESSION: SessionKey = 20;
const LEN: usize = 1 << 20;

impl ReactorContext {
    /// Adds a session of this id, whose endpoint leads to a worker.
    pub(crate) fn add_manual(
        &mut self,
        key: SessionKey,
        session_id: SessionId,
        worker: Option<&[u8]>,
    ) {
        let session = Session::new("peer".to_owned(), false, self.now(), self.timeouts());
        self.sessions.insert(key, session);
        self.admit(key, session_id);
        if let Some(address) = worker {
            self.open_endpoint(key, address).unwrap();
            let (data, endpoint) = self.data_of(key).unwrap();
            let lanes = data.worker.lanes(endpoint.id.unwrap()).unwrap();
            let transport = DataPath::stream_transport(&lanes);
            let data_path = if lanes.iter().any(reads_host) {
                DataPath::RemoteRead(transport)
            } else {
                DataPath::Stream(transport)
            };
            self.set_data_path(key, data_path);
        }
    }

    /// Lets the worker work, and returns a read that has ended.
    pub(crate) fn next_ended_read(&self) -> Option<(u64, std::result::Result<(), Status>)> {
        let worker = &self.data.as_ref()?.worker;
        worker.progress();
        std::iter::from_fn(|| worker.next_event()).find_map(|event| match event {
            Event::Done { token, result } if message_of(token).is_none() => Some((token, result)),
            _ => None,
        })
    }
}

/// A reactor with a session that has an endpoint, and the worker that it leads to.
fn connected(session: SessionKey) -> (ReactorContext, Worker) {
    let transport = Transport::Memory(MemoryPath::Stream);
    let context = || transport.open(Ipv4Addr::LOCALHOST.into()).unwrap();
    let other = context().worker().unwrap();
    let mut cx = ReactorContext::manual(Some(context()));
    cx.add_manual(session, [1; 16], Some(&other.address().unwrap()));
    (cx, other)
}

/// A message of nearly `LEN` bytes.
fn send(cx: &mut ReactorContext, session: SessionKey) -> bool {
    let header = cx.header(session, 1);
    cx.message(session, header, Payload::Bytes(vec![0; LEN - 17]))
}

/// Handles the ends of all messages that have left.
fn let_leave(cx: &mut ReactorContext) {
    while let Some(event) = cx.data.as_ref().unwrap().worker.next_event() {
        if let Event::Done { token, .. } = event
            && let Some((session, size_kib)) = message_of(token)
        {
            cx.endpoint_mut(session).unwrap().unsent_kib -= size_kib;
        }
    }
}

fn unsent_kib(cx: &ReactorContext, session: SessionKey) -> usize {
    cx.endpoint(session).unwrap().unsent_kib
}

#[test]
fn a_peer_that_does_not_read_what_it_is_sent_is_lost_at_the_cap() {
    let (mut cx, _other) = connected(SESSION);
    assert!((0..UNSENT_CAP_KIB * 1024 / LEN).all(|_| send(&mut cx, SESSION)));
    assert!(!cx.has_failed(SESSION));
    assert!(!send(&mut cx, SESSION));
    assert!(cx.has_failed(SESSION));
}

#[test]
fn a_message_that_has_left_makes_room_for_another() {
    let (mut cx, _other) = connected(SESSION);
    for _ in 0..2 * UNSENT_CAP_KIB * 1024 / LEN {
        assert!(send(&mut cx, SESSION));
        let_leave(&mut cx);
    }
    assert_eq!(unsent_kib(&cx, SESSION), 0);
}

#[test]
fn what_a_session_has_sent_is_known_after_any_number_of_sessions_before() {
    for session in [1 << 32, 1 << 33, (1 << 42) - 1] {
        let (mut cx, _other) = connected(session);
        assert!(send(&mut cx, session));
        assert_eq!(unsent_kib(&cx, session), LEN / 1024);
        let_leave(&mut cx);
        assert_eq!(unsent_kib(&cx, session), 0);
    }
}
