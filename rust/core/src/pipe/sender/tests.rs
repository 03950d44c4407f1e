use std::cell::RefCell;
use std::rc::Rc;

use kvpipe_ucx::Buffer;

use super::*;
use crate::net::codec::Writer;
use crate::session::Service;
use crate::session::wire;
use crate::transfer::host::Host;
use crate::transport::{MemoryPath, Transport};
use crate::work::{Work, work};

const SESSION: SessionKey = 20;
const SEQUENCE: u64 = 3;
// Kinds of messages.
const ACK: u8 = 6;
const WITHDRAWN: u8 = 8;
const VALIDATE: u8 = 12;
const VALID: u8 = 13;
const INVALID: u8 = 14;
const READ: u8 = 32;

/// A sender that has one tensor posted, with its deadline passing now.
fn posted() -> (Links, Host<Sender>, Work<()>) {
    let transport = Transport::Memory(MemoryPath::RemoteRead);
    let opened = transport.open();
    let links = Links::manual(Some(opened.unwrap()));
    let mut sender = Sender::new(SharedInfo::connecting(String::new()), Integrity::Checksum);
    let buffer = Buffer::zeroed(8);
    let (exposed, _) = ExposedBuffer::new(&links, SESSION, buffer, sender.integrity).unwrap();
    let (sent, completer) = work();
    let large = Some(LargeSend {
        exposed,
        completer,
        grace: Some(GracePeriod::new(links.now(), links.now())),
        is_withdrawn: false,
    });
    let sequence = SEQUENCE;
    sender.posted.push_back(PostedSend { sequence, large });
    sender.session = Some(SESSION);
    let mut host = Host::new(sender);
    host.transfers.session_up(SESSION);
    (links, host, sent)
}

/// As [`posted`]: its caller knows that it is late, and its receiver has not answered WITHDRAW.
fn unsettled() -> (Links, Host<Sender>, Work<()>) {
    let (links, mut host, sent) = posted();
    let large = host.service.posted[0].large.as_mut().unwrap();
    (large.grace, large.is_withdrawn) = (None, true);
    let late = Err(Error::Timeout("late".to_owned()));
    large.completer.complete_unsettled(late);
    (links, host, sent)
}

fn receive(links: &mut Links, sender: &mut Host<Sender>, kind: u8) -> Result<()> {
    let header = Writer::default().u8(kind).u64(SEQUENCE).finish();
    let others = Writer::default().list::<u64>(&[], |w, _| w).finish();
    let payload = if kind == ACK { others } else { Vec::new() };
    sender.message(links, SESSION, &header, Payload::Bytes(payload))
}

#[test]
fn a_late_send_is_settled_by_any_answer_and_keeps_its_error() {
    for (answer, num_sent) in [(ACK, 1), (WITHDRAWN, 0)] {
        let (mut links, mut sender, sent) = unsettled();
        assert!(!sent.is_settled());
        assert_eq!(receive(&mut links, &mut sender, answer), Ok(()));
        assert!(sent.is_settled());
        let late = sent.result().unwrap();
        assert!(matches!(late, Err(Error::Timeout(_))), "{late:?}");
        let info = sender.service.shared.get().clone();
        assert_eq!((info.num_tensors, info.in_flight), (num_sent, 0));
    }
}

#[test]
fn a_tensor_is_acknowledged_once_although_its_send_is_late() {
    let (mut links, mut sender, _sent) = unsettled();
    assert_eq!(receive(&mut links, &mut sender, ACK), Ok(()));
    let again = receive(&mut links, &mut sender, ACK);
    assert!(matches!(again, Err(Error::Protocol(_))), "{again:?}");
}

#[test]
fn only_a_tensor_that_is_posted_is_confirmed() {
    let (mut links, mut sender, _sent) = posted();
    let transport = Transport::Memory(MemoryPath::RemoteRead);
    let receiver = transport.open().unwrap();
    let receiver = receiver.worker().unwrap().unwrap();
    let _far = links.add_manual(SESSION, Some(&receiver.address().unwrap()));
    let answers = Rc::new(RefCell::new(Vec::new()));
    let answered = Rc::clone(&answers);
    wire::tap(move |header, _| answered.borrow_mut().push(header[0]));
    for sequence in [SEQUENCE, SEQUENCE - 1, SEQUENCE + 1] {
        let question = Writer::default().u8(VALIDATE).u64(sequence).finish();
        let nothing = Payload::Bytes(Vec::new());
        assert_eq!(
            sender.message(&mut links, SESSION, &question, nothing),
            Ok(())
        );
    }
    assert_eq!(*answers.borrow(), [VALID, INVALID, INVALID]);
}

fn num_streams(sender: &Host<Sender>) -> usize {
    let sizes = sender.transfers.sizes();
    let streams = sizes.iter().find(|(name, _)| *name == "outgoing streams");
    streams.unwrap().1
}

#[test]
fn nothing_more_is_sent_of_a_tensor_that_is_withdrawn() {
    let (mut links, mut sender, sent) = posted();
    let read = |links: &mut _, sender: &mut Host<Sender>, transfer| {
        let as_bytes = 0;
        let header = Writer::default().u8(READ).u64(transfer).u64(SEQUENCE);
        let header = header.u8(as_bytes).finish();
        let ids = Writer::default().list(&[0], |w, id| w.u32(*id)).finish();
        sender.message(links, SESSION, &header, Payload::Bytes(ids))
    };
    assert_eq!(read(&mut links, &mut sender, 1), Ok(()));
    assert_eq!(num_streams(&sender), 1);
    sender.timer(&mut links); // it is late
    assert_eq!(num_streams(&sender), 0);
    assert_eq!(read(&mut links, &mut sender, 2), Ok(()));
    assert_eq!(num_streams(&sender), 0);
    assert!(!sent.is_completed(), "its receiver has time to answer");
}
