use super::*;
use crate::work::work;

/// How a receive ends that is under way when the pipe ends.
fn ended_with(io: &mut Io) -> String {
    let (work, completer) = work();
    let mut receiver = Receiver::new(Shared::default());
    receiver.wanted.push_back(Wanted {
        out: None,
        deadline: Deadline::default(),
        completer,
    });
    receiver.stop(io);
    let Some(Err(Error::Closed(text))) = work.result() else {
        panic!("the receive did not end as closed")
    };
    text
}

#[test]
fn a_receive_says_that_its_memory_may_still_be_written_to_when_reads_have_not_ended() {
    let text = ended_with(&mut Io::with_unended_reads(2));
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
    assert_eq!(ended_with(&mut Io::alone(None)), "the pipe is closed");
}
