use std::net::Ipv4Addr;

use kvpipe_ucx::Buffer;

use super::super::Deadline;
use super::super::large_receive::LargeReceive;
use super::*;
use crate::ids::SessionKey;
use crate::tensor::Meta;
use crate::work::work;

const SESSION: SessionKey = 20;

/// How a receive ends that is under way when the pipe ends.
fn ended_with(cx: &mut ReactorContext) -> String {
    let (work, completer) = work();
    let mut receiver = Receiver::new(SharedInfo::connecting(String::new()));
    receiver.receives.push_back(PendingReceive {
        out: None,
        deadline: Deadline::default(),
        completer,
    });
    receiver.stop(cx);
    let Some(Err(Error::Closed(text))) = work.result() else {
        panic!("the receive did not end as closed")
    };
    text
}

#[test]
fn a_receive_says_that_its_memory_may_still_be_written_to_when_reads_have_not_ended() {
    let text = ended_with(&mut ReactorContext::with_pending_reads(2));
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
    assert_eq!(
        ended_with(&mut ReactorContext::manual(None)),
        "the pipe is closed"
    );
}

/// Two large tensors that are being received: of the first nothing is here, the second is complete and waits for it.
fn receiving(cx: &mut ReactorContext) -> (Receiver, [Work<Arc<Received>>; 2]) {
    let mut receiver = Receiver::new(SharedInfo::connecting(String::new()));
    receiver.session = Some(SESSION);
    let works = [1, 2].map(|sequence| {
        let (work, completer) = work();
        let mut large = LargeReceive::waiting(sequence, completer);
        if sequence == 2 {
            large.outcome = Some(Ok(cx.register(Buffer::zeroed(8)).unwrap()));
        }
        receiver.large_receives.push_back(large);
        work
    });
    (receiver, works)
}

fn with_memory() -> ReactorContext {
    use crate::transport::{MemoryPath, Transport};
    let transport = Transport::Memory(MemoryPath::Stream);
    ReactorContext::manual(Some(transport.open(Ipv4Addr::LOCALHOST.into()).unwrap()))
}

/// Its sender has reported it as lost.
#[test]
fn a_tensor_that_is_withdrawn_while_it_waits_is_not_delivered_although_it_is_complete() {
    let mut cx = with_memory();
    let (mut receiver, [first, second]) = receiving(&mut cx);
    receiver.withdraw(&mut cx, SESSION, 2);
    receiver.advance(&mut cx);
    assert!(matches!(second.result(), Some(Err(Error::Timeout(_)))));
    assert!(!first.is_completed());
    assert_eq!(
        receiver.shared.get().num_tensors,
        0,
        "nothing was acknowledged"
    );
}

#[test]
fn no_tensor_is_delivered_after_one_that_the_end_of_the_session_has_failed() {
    let mut cx = with_memory();
    let (mut receiver, [_, second]) = receiving(&mut cx);
    let lost = Error::lost("peer", "killed");
    receiver.session_down(&mut cx, SESSION, lost.clone());
    // As the engine has it complete, where there is a transfer.
    receiver.large_receives[0].outcome = Some(Err(lost.clone()));
    receiver.advance(&mut cx);
    assert_eq!(second.result().map(Result::err), Some(Some(lost)));
}

/// How a tensor arrives whose last message is here before the end of the session is seen.
fn arrives(is_checksummed: bool, has_sender_ended: bool) -> Result<Arc<Received>> {
    use crate::pipe::Pipe;
    use crate::reactor::manual::{Round, without_threads};
    use crate::transport::{MemoryPath, Transport};
    use crate::work::Then;

    const LEN: usize = 1 << 20; // less than is credited, so that all of it is sent at once
    const PATIENCE: Duration = Duration::from_secs(600);
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
            is_checksummed,
            Duration::ZERO,
            PATIENCE,
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
    for (is_checksummed, has_sender_ended) in [(true, true), (true, false), (false, false)] {
        assert!(arrives(is_checksummed, has_sender_ended).is_ok());
    }
    let lost = arrives(false, true);
    assert!(matches!(lost, Err(Error::PeerLost { .. })), "{lost:?}");
}
