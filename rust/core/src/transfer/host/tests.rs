//! The order in which a host hands over what happens, with a service that notes its calls.

use kvpipe_ucx::Buffer;

use super::*;
use crate::session::FarEnd;
use crate::transfer::message::Wanted;
use crate::transfer::region::Pieces;
use crate::transfer::{Checksums, TransferRequest};
use crate::transport::{MemoryPath, Transport};

const SESSION: SessionKey = 20;
const ELSEWHERE: SessionKey = 21;

#[derive(Default)]
struct Notes {
    calls: Vec<String>,
    /// Begun by what follows from an event.
    next: Option<TransferRequest>,
    /// The error of a source; else it is not exposed.
    refusal: Option<Error>,
}

impl TransferService for Notes {
    type Command = ();
    const TRANSFERS_IN_FLIGHT: usize = 4;

    fn command(&mut self, _cx: &mut Cx<'_>, (): ()) {
        self.calls.push("command".to_owned());
    }

    fn session_up(&mut self, _cx: &mut Cx<'_>, _session: SessionKey, _peer: &Identity) {}

    fn session_down(&mut self, _cx: &mut Cx<'_>, _session: SessionKey, _error: Error) {
        self.calls.push("session_down".to_owned());
    }

    fn message(
        &mut self,
        _cx: &mut Cx<'_>,
        _session: SessionKey,
        (kind, _): (u8, Reader<'_>),
        _data: Payload,
    ) -> Result<()> {
        self.calls.push(format!("message {kind}"));
        Ok(())
    }

    fn source(&mut self, _request: &SourceRequest) -> Result<(Arc<Memory>, Layout)> {
        let refusal = self.refusal.take();
        Err(refusal.unwrap_or_else(|| Error::Config("not exposed".to_owned())))
    }

    fn transferred(&mut self, _cx: &mut Cx<'_>, completion: Completion) {
        self.calls.push(format!("transferred {}", completion.owner));
    }

    fn advance(&mut self, cx: &mut Cx<'_>) {
        self.calls.push("advance".to_owned());
        if let Some(next) = self.next.take() {
            let id = cx.transfers.add(next);
            cx.transfers.enqueue(cx.links, id);
        }
    }

    fn expire(&mut self, _cx: &mut Cx<'_>) {
        self.calls.push("expire".to_owned());
    }

    fn stop(&mut self, _cx: &mut Cx<'_>) {}

    fn sizes(&self) -> crate::reactor::manual::Sizes {
        Vec::new()
    }
}

/// A host with one session, which streams.
fn hosted() -> (Links, Host<Notes>, FarEnd) {
    let open = || Transport::Memory(MemoryPath::Stream).open().unwrap();
    let peer = open().worker().unwrap().unwrap();
    let mut links = Links::manual(Some(open()));
    let far = links.add_manual(SESSION, Some(&peer.address().unwrap()));
    let mut host = Host::new(Notes::default());
    host.transfers.session_up(SESSION);
    (links, host, far)
}

fn request(
    links: &Links,
    session: SessionKey,
    owner: u64,
    deadline: Option<Instant>,
) -> TransferRequest {
    TransferRequest {
        owner,
        session,
        source: 1,
        grant: 0,
        memory: links.register(Buffer::zeroed(8)).unwrap(),
        pieces: Arc::new(Pieces::whole(8, 8)),
        checksums: Checksums::None,
        is_verified_by_owner: false,
        is_retry: false,
        deadline,
    }
}

#[test]
fn transfers_that_have_ended_are_handed_over_until_no_more_have_also_those_that_end_at_once() {
    let (mut links, mut host, _far) = hosted();
    host.service.next = Some(request(&links, ELSEWHERE, 2, None));
    let first = request(&links, ELSEWHERE, 1, None);
    host.call(&mut links, |_, cx| {
        let id = cx.transfers.add(first);
        cx.transfers.enqueue(cx.links, id); // its session is none: it fails
    });
    let calls = ["transferred 1", "advance", "transferred 2", "advance"];
    assert_eq!(host.service.calls, calls);
}

#[test]
fn a_late_transfer_is_handed_over_before_the_service_looks_at_its_deadlines() {
    let (mut links, mut host, _far) = hosted();
    let now = links.now();
    let late = request(&links, SESSION, 7, Some(now));
    host.transfers.add(late);
    assert_eq!(host.timer(&mut links), None);
    let calls = ["transferred 7", "advance", "expire", "advance"];
    assert_eq!(host.service.calls, calls);
}

#[test]
fn the_service_knows_of_the_end_of_a_session_before_its_transfers_are_handed_over() {
    let (mut links, mut host, _far) = hosted();
    let held = request(&links, SESSION, 7, None);
    host.transfers.add(held);
    host.session_down(&mut links, SESSION, Error::lost("peer", "killed"));
    let calls = ["session_down", "transferred 7", "advance"];
    assert_eq!(host.service.calls, calls);
}

#[test]
fn a_peer_that_asks_for_what_is_not_exposed_is_refused_or_loses_its_session_as_the_service_says() {
    let (mut links, mut host, mut far) = hosted();
    let read = |transfer| {
        let message = Message::Read {
            source: 1,
            wanted: Wanted::Bytes,
            ids: vec![0].into(),
        };
        let (header, payload) = message.to_bytes(transfer);
        (header, Payload::Bytes(payload))
    };
    let (header, payload) = read(1);
    assert_eq!(host.message(&mut links, SESSION, &header, payload), Ok(()));
    let sent = links.sent(SESSION, &mut far);
    let [(refused, reason)] = &sent[..] else {
        panic!("{sent:?}")
    };
    let decoded = Message::decode(refused[0], Reader::new(&refused[1..]), reason);
    assert!(matches!(decoded, Ok((1, Message::Refused(_)))));
    host.service.refusal = Some(Error::protocol("no reads here"));
    let (header, payload) = read(2);
    let broken = host.message(&mut links, SESSION, &header, payload);
    assert!(matches!(broken, Err(Error::Protocol(_))), "{broken:?}");
}

#[test]
fn other_messages_are_the_services_own() {
    let (mut links, mut host, _far) = hosted();
    let message = host.message(&mut links, SESSION, &[1], Payload::Bytes(Vec::new()));
    assert_eq!(message, Ok(()));
    assert_eq!(host.service.calls, ["message 1", "advance"]);
}
