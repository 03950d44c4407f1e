use kvpipe_ucx::Buffer;

use super::super::Deadline;
use super::super::large_receive::{LargeReceive, ReceiveStage};
use super::*;
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::session::Service;
use crate::session::grace::GracePeriod;
use crate::tensor::Meta;
use crate::transfer::TransferError;
use crate::transfer::host::Host;
use crate::transfer::region::Pieces;
use crate::work::work;

const SESSION: SessionKey = 20;
const SECOND: Duration = Duration::from_secs(1);

fn receiver() -> Host<Receiver> {
    Host::new(Receiver::new(SharedInfo::connecting(String::new())))
}

fn advance(links: &mut Links, receiver: &mut Host<Receiver>) {
    receiver.call(links, |_, _| ());
}

fn withdraw(links: &mut Links, receiver: &mut Host<Receiver>, sequence: u64) {
    receiver.call(links, |receiver, cx| {
        receiver.withdraw(cx, SESSION, sequence);
    });
}

/// Error text of a receive that is under way when the pipe ends.
fn ended_with(links: &mut Links) -> String {
    let (work, completer) = work();
    let mut receiver = receiver();
    receiver.service.receives.push_back(PendingReceive {
        out: None,
        deadline: Deadline::default(),
        completer,
    });
    receiver.stop(links);
    let Some(Err(Error::Closed(text))) = work.result() else {
        panic!("the receive did not end as closed")
    };
    text
}

#[test]
fn a_receive_says_that_its_memory_may_still_be_written_to_when_reads_have_not_ended() {
    let text = ended_with(&mut Links::with_pending_reads(2));
    for part in [
        "2 reads have not ended",
        "may still be written to",
        "kvpipe keeps it alive",
        "take other memory",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_receive_says_nothing_of_its_memory_when_all_reads_have_ended() {
    assert_eq!(ended_with(&mut Links::manual(None)), "the pipe is closed");
}

#[test]
fn a_pipe_that_has_ended_has_no_receives_in_flight() {
    let (mut links, mut receiver) = (Links::manual(None), receiver());
    let (_received, completer) = work();
    receiver.service.receives.push_back(PendingReceive {
        out: None,
        deadline: Deadline::default(),
        completer,
    });
    receiver.service.count_waiting();
    assert_eq!(receiver.service.shared.get().in_flight, 1);
    receiver.stop(&mut links);
    assert_eq!(receiver.service.shared.get().in_flight, 0);
}

/// Two large tensors that are being received: of the first nothing is here, the second is complete and waits for it.
fn receiving(links: &mut Links) -> (Host<Receiver>, [Work<Arc<Received>>; 2]) {
    let mut receiver = receiver();
    receiver.service.session = Some(SESSION);
    let works = [1, 2].map(|sequence| {
        let (work, completer) = work();
        let mut large = LargeReceive::waiting(sequence, completer);
        if sequence == 2 {
            large.stage = ReceiveStage::Ended(Ok(links.register(Buffer::zeroed(8)).unwrap()));
        }
        receiver.service.large_receives.push_back(large);
        work
    });
    (receiver, works)
}

fn with_memory() -> Links {
    use crate::transport::{MemoryPath, Transport};
    let transport = Transport::Memory(MemoryPath::Stream);
    Links::manual(Some(transport.open().unwrap()))
}

/// Its sender has reported it as lost.
#[test]
fn a_tensor_that_is_withdrawn_while_it_waits_is_not_delivered_although_it_is_complete() {
    let mut links = with_memory();
    let (mut receiver, [first, second]) = receiving(&mut links);
    withdraw(&mut links, &mut receiver, 2);
    advance(&mut links, &mut receiver);
    assert!(matches!(second.result(), Some(Err(Error::Timeout(_)))));
    assert!(!first.is_completed());
    assert_eq!(
        receiver.service.shared.get().num_tensors,
        0,
        "nothing was acknowledged"
    );
}

#[test]
fn a_complete_tensor_does_not_wait_for_one_whose_caller_knows_that_it_is_late() {
    let mut links = with_memory();
    let (mut receiver, [late, complete]) = receiving(&mut links);
    advance(&mut links, &mut receiver);
    assert!(!complete.is_completed(), "tensors come in order");
    let error = Error::Timeout("late".to_owned());
    let first = &receiver.service.large_receives[0].completer;
    first.complete_unsettled(Err(error.clone()));
    advance(&mut links, &mut receiver);
    assert_eq!(late.result().unwrap().unwrap_err(), error);
    assert!(!late.is_settled());
    assert!(complete.result().unwrap().is_ok());
}

/// The complete tensor does not wait for the next message either.
#[test]
fn a_receive_that_is_overdue_behind_another_fails_at_once_and_the_complete_one_behind_it_is_delivered()
 {
    let mut links = with_memory();
    let (mut receiver, [first, complete]) = receiving(&mut links);
    let known = Error::Timeout("late".to_owned());
    let large = &receiver.service.large_receives[0].completer;
    large.complete_unsettled(Err(known.clone()));
    let (overdue, completer) = work();
    let mut large = LargeReceive::waiting(3, completer);
    large.grace = Some(GracePeriod::of_responsive_peer(links.now()));
    receiver.service.large_receives.insert(1, large);
    receiver.service.large_receives[2].grace =
        Some(GracePeriod::new(links.now(), links.now() + 60 * SECOND));
    links.advance(SECOND);
    receiver.timer(&mut links); // withdraws it
    assert!(!overdue.is_completed() && !complete.is_completed());
    receiver.timer(&mut links);
    assert_eq!(first.result().unwrap().unwrap_err(), known);
    let late = overdue.result().unwrap().unwrap_err();
    assert!(matches!(&late, Error::Timeout(text) if text.contains("may still write")));
    assert!(!overdue.is_settled());
    assert!(complete.result().unwrap().is_ok());
}

#[test]
fn no_tensor_is_delivered_after_one_that_the_end_of_the_session_has_failed() {
    let mut links = with_memory();
    let (mut receiver, [_, second]) = receiving(&mut links);
    let lost = Error::lost("peer", "killed");
    receiver.session_down(&mut links, SESSION, lost.clone());
    // As the engine has it complete, where there is a transfer.
    receiver.service.large_receives[0].stage = ReceiveStage::Ended(Err(lost.clone()));
    advance(&mut links, &mut receiver);
    assert_eq!(second.result().map(Result::err), Some(Some(lost)));
}

#[test]
fn a_tensor_that_a_sender_leaves_behind_at_the_end_of_its_pipe_ends_with_the_pipe() {
    let mut links = with_memory();
    let (mut receiver, [first, _]) = receiving(&mut links);
    receiver.service.has_ended = true;
    let lost = Error::lost("peer", "gone");
    let completion = Completion {
        owner: 1,
        session: SESSION,
        memory: links.register(Buffer::zeroed(8)).unwrap(),
        pieces: Arc::new(Pieces::whole(8, 8)),
        steps: crate::transfer::steps::Steps::begin(),
        checksum: None,
        digests: None,
        outcome: Err(TransferError::Failed(lost)),
    };
    receiver.call(&mut links, |receiver, cx| {
        receiver.record_transferred(cx, completion);
    });
    assert_eq!(
        first.result().map(Result::err),
        Some(Some(Error::EndOfPipe))
    );
}

/// As [`receiving`]; the sender has been asked whether it still offers the second tensor.
fn validating(links: &mut Links) -> (Host<Receiver>, [Work<Arc<Received>>; 2]) {
    let (mut receiver, works) = receiving(links);
    let memory = links.register(Buffer::zeroed(8)).unwrap();
    receiver.service.large_receives[1].stage = ReceiveStage::Validating(memory);
    receiver.service.next_sequence = 3;
    (receiver, works)
}

#[test]
fn a_tensor_whose_offer_its_sender_does_not_confirm_is_not_delivered() {
    let mut links = with_memory();
    let (mut receiver, [first, second]) = validating(&mut links);
    assert_eq!(receiver.service.validated(2, false), Ok(()));
    advance(&mut links, &mut receiver);
    let Some(Err(Error::Timeout(text))) = second.result() else {
        panic!("the tensor was delivered");
    };
    assert!(text.contains("withdrew"), "{text}");
    assert!(!first.is_completed());
    assert_eq!(receiver.service.shared.get().num_tensors, 0);
}

#[test]
fn a_tensor_whose_session_ends_before_its_sender_has_answered_is_not_delivered() {
    let mut links = with_memory();
    let (mut receiver, [_, second]) = validating(&mut links);
    let lost = Error::lost("peer", "killed");
    receiver.session_down(&mut links, SESSION, lost.clone());
    receiver.service.large_receives[0].stage = ReceiveStage::Ended(Err(lost.clone()));
    advance(&mut links, &mut receiver);
    assert_eq!(second.result().map(Result::err), Some(Some(lost)));
}

#[test]
fn an_answer_that_was_not_asked_for_is_a_protocol_error_and_one_that_comes_late_is_dropped() {
    let mut links = with_memory();
    let (mut receiver, _works) = validating(&mut links);
    for sequence in [1, 3] {
        let refused = receiver.service.validated(sequence, true);
        assert!(matches!(refused, Err(Error::Protocol(_))), "{refused:?}");
    }
    assert_eq!(
        receiver.service.validated(0, true),
        Ok(()),
        "it has completed"
    );
    receiver.service.large_receives[1].fail(&Error::lost("peer", "killed"));
    assert_eq!(receiver.service.validated(2, true), Ok(()));
    assert!(matches!(
        receiver.service.large_receives[1].stage,
        ReceiveStage::Ended(Err(_))
    ));
}

/// Receives a tensor whose last message arrives before the receiver sees the end of the session.
fn arrives(integrity: Integrity, has_sender_ended: bool) -> Result<Arc<Received>> {
    use crate::pipe::Pipe;
    use crate::reactor::manual::{Round, without_threads};
    use crate::transport::{MemoryPath, Transport};
    use crate::work::Then;

    const LEN: usize = 128 << 10; // what a socket takes, so that all of it is sent at once
    const TIMEOUT: Duration = Duration::from_secs(600);
    let transport = || Transport::Memory(MemoryPath::Stream);
    let rest = |pipe: &Pipe| while pipe.round() == Round::Busy {};
    let listen = || Pipe::listen("127.0.0.1:0", b"token", transport(), Duration::ZERO);
    let receiver = without_threads(listen).unwrap();
    let address = receiver.address().unwrap().to_string();
    let connect = || {
        Pipe::connect(
            &address,
            b"token",
            transport(),
            integrity,
            Duration::ZERO,
            TIMEOUT,
        )
    };
    let (sender, connected) = without_threads(connect).unwrap();
    while !connected.is_completed() {
        rest(&sender);
        rest(&receiver);
    }
    let (meta, deadline) = (Meta::default(), Deadline::default());
    let _sent = sender.send(meta, Buffer::zeroed(LEN), deadline, Then::GoOn);
    rest(&sender);
    let arriving = receiver.receive(None, deadline, Then::GoOn).unwrap();
    rest(&receiver); // asks for it
    assert!(!arriving.is_completed());
    rest(&sender); // sends it
    if has_sender_ended {
        sender.stop();
        while sender.round() != Round::Over {}
    }
    while !arriving.is_completed() {
        receiver.round();
    }
    arriving.result().unwrap()
}

/// Its sender may have changed it, as after its deadline.
#[test]
fn what_came_without_checksums_as_messages_counts_only_if_its_sender_holds_the_session() {
    let (checksum, none) = (Integrity::Checksum, Integrity::None);
    for (integrity, has_sender_ended) in [(checksum, true), (checksum, false), (none, false)] {
        assert!(arrives(integrity, has_sender_ended).is_ok());
    }
    let lost = arrives(none, true);
    assert!(matches!(lost, Err(Error::PeerLost { .. })), "{lost:?}");
}
