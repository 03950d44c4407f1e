//! Grant checks of loads without checksums.

mod another_producer;
mod any_moment;
mod lost_session;
mod messages;

use std::net::SocketAddr;
use std::time::Instant;

use super::*;
use crate::Integrity;
use crate::blocks::handoff::loads::tests::{BLOCK, ID, KIND_AT, Side, load_in_part, settle};
use crate::blocks::handoff::{Event, LoadCounts};
use crate::clock;
use crate::reactor::manual::Round;
use crate::transport::MemoryPath;

const PATHS: [MemoryPath; 2] = [MemoryPath::RemoteRead, MemoryPath::Stream];

fn side(path: MemoryPath, content: u8) -> Side {
    Side::on(path, Integrity::Validate, content, |_| {})
}

/// Ends the handoff, and so many others that its end is forgotten.
fn end_and_forget(producer: &Side) {
    let end = |handoff| producer.agent.end(handoff, "preempted").expect("it runs");
    end(ID);
    for number in 0..1_u128 << 13 {
        end((1 << 64 | number).to_le_bytes());
    }
    settle(&[&producer.agent]);
}

#[test]
fn a_load_is_validated_and_compares_nothing() {
    for path in PATHS {
        let (producer, consumer) = (side(path, 1), side(path, 0));
        producer.mark_ready([ID].into_iter());
        consumer.load(ID, &producer);
        settle(&[&producer.agent, &consumer.agent]);
        let counts = completed(consumer.ended());
        assert_eq!((counts.num_validated, counts.num_compared), (1, 0));
        assert_eq!(consumer.content(), [1; BLOCK]);
    }
}

/// Runs the consumer until its block is here, which the producer has no part in.
fn read(producer: &Side, consumer: &Side, address: SocketAddr) {
    producer.mark_ready([ID].into_iter());
    consumer.load_from(ID, producer, address);
    while consumer.content() != [1; BLOCK] {
        producer.agent.round();
        settle(&[&consumer.agent]);
    }
    assert_eq!(consumer.ended(), None, "nothing counts before the answer");
}

/// A producer, and a consumer that has read its block and asks whether the grant still holds.
fn awaiting_answer() -> [Side; 2] {
    let [producer, consumer] = [1, 0].map(|content| side(MemoryPath::RemoteRead, content));
    let address = producer.agent.address().expect("address");
    read(&producer, &consumer, address);
    [producer, consumer]
}

/// The counters of a load that is complete.
fn completed(ended: Option<Event>) -> LoadCounts {
    let Some(Event::LoadCompleted(report)) = ended else {
        panic!("{ended:?}");
    };
    report.counts
}

/// Fails unless the load has failed and lacks its only block. Returns why it failed.
fn assert_nothing_counts(ended: Option<Event>) -> String {
    let Some(Event::LoadFailed(_, failure)) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!(failure.missing, [0]);
    failure.reason
}

#[test]
fn a_load_that_was_cancelled_counts_after_the_answer_only() {
    let [producer, consumer] = awaiting_answer();
    consumer.agent.cancel(ID, "late", false).expect("it runs");
    settle(&[&consumer.agent]);
    assert_eq!(consumer.ended(), None);
    settle(&[&producer.agent, &consumer.agent]);
    let ended = consumer.ended();
    let Some(Event::LoadFailed(report, failure)) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!(
        (&failure.missing[..], &failure.reason[..]),
        (&[][..], "late")
    );
    assert_eq!(report.counts.num_validated, 1);
}

#[test]
fn a_cancelled_load_whose_producer_does_not_answer_counts_nothing_and_ends_in_time() {
    // One has asked before it is cancelled, the other one asks then.
    let [_producer, complete] = awaiting_answer();
    let (_another, in_part) = load_in_part(MemoryPath::RemoteRead, Integrity::Validate);
    for (consumer, missing) in [(complete, &[0][..]), (in_part, &[0, 1])] {
        consumer.agent.cancel(ID, "late", false).expect("it runs");
        settle(&[&consumer.agent]);
        assert_eq!(consumer.ended(), None);
        clock::advance(ANSWER_WITHIN);
        settle(&[&consumer.agent]);
        let ended = consumer.ended();
        let Some(Event::LoadFailed(_, failure)) = ended else {
            panic!("{ended:?}");
        };
        assert_eq!(failure.missing, missing);
    }
}

#[test]
fn an_agent_that_is_closed_before_the_answer_counts_nothing() {
    let [_producer, consumer] = awaiting_answer();
    consumer.agent.close();
    while consumer.agent.round() != Round::Over {}
    assert_nothing_counts(consumer.ended());
}

#[test]
fn an_answer_to_an_earlier_load_is_none_to_the_next() {
    let [producer, consumer] = awaiting_answer();
    // The first load is withdrawn here, with its question on its way.
    consumer.agent.cancel(ID, "late", true).expect("it runs");
    settle(&[&consumer.agent]);
    assert!(consumer.ended().is_some());
    producer.agent.round();
    // The second one reads what has changed since, and its own question is not answered yet.
    consumer.load(ID, &producer);
    producer.agent.handoffs.mark_ended(ID);
    producer.fill(9);
    settle(&[&producer.agent, &consumer.agent]);
    assert_nothing_counts(consumer.ended());
}

#[test]
fn a_grant_that_another_consumer_has_acknowledged_holds_no_more() {
    for path in PATHS {
        let producer = side(path, 1);
        let [slow, fast] = [0, 0].map(|content| side(path, content));
        for consumer in [&slow, &fast] {
            consumer.load(ID, &producer);
            settle(&[&producer.agent, &consumer.agent]);
        }
        producer.mark_ready([ID].into_iter());
        settle(&[&producer.agent, &fast.agent]);
        assert!(matches!(fast.ended(), Some(Event::LoadCompleted(_))));
        assert_eq!(producer.ended(), Some(Event::Acknowledged { handoff: ID }));
        // The owner may use its block for something else now, which the slow consumer does not know.
        producer.fill(9);
        settle(&[&producer.agent, &slow.agent]);
        assert_nothing_counts(slow.ended());
        assert!(path == MemoryPath::RemoteRead || slow.content() == [0; BLOCK]);
    }
}

#[test]
fn a_load_that_has_ended_counts_nothing_when_its_session_is_lost_before_the_answer() {
    let [producer, consumer] = awaiting_answer();
    consumer.agent.cancel(ID, "late", false).expect("it runs");
    settle(&[&consumer.agent]);
    assert_eq!(consumer.ended(), None);
    let peer = consumer.agent.peers().remove(0);
    assert!(peer.lost().is_none());
    // Its end arrives without an answer: the question is still to be looked at.
    drop(producer);
    let began = Instant::now();
    let ended = loop {
        settle(&[&consumer.agent]);
        if let Some(ended) = consumer.ended() {
            break ended;
        }
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_nothing_counts(Some(ended));
    assert!(began.elapsed() < ANSWER_WITHIN, "it does not wait for more");
}

#[test]
fn a_side_that_wants_checksums_refuses_a_producer_that_validates_by_name() {
    for path in PATHS {
        let consumer = Side::on(path, Integrity::Checksum, 0, |_| {});
        let producer = side(path, 1);
        producer.mark_ready([ID].into_iter());
        consumer.load(ID, &producer);
        settle(&[&producer.agent, &consumer.agent]);
        let reason = assert_nothing_counts(consumer.ended());
        for part in ["integrity=validate", "integrity=checksum", "set auto"] {
            assert!(reason.contains(part), "{reason}");
        }
        assert_eq!(consumer.content(), [0; BLOCK], "nothing is read");
    }
}

#[test]
fn a_side_that_validates_verifies_the_checksums_of_a_producer_that_has_some() {
    for path in PATHS {
        let consumer = side(path, 0);
        let producer = Side::on(path, Integrity::Checksum, 1, |_| {});
        producer.mark_ready([ID].into_iter());
        consumer.load(ID, &producer);
        settle(&[&producer.agent, &consumer.agent]);
        let counts = completed(consumer.ended());
        assert_eq!((counts.num_validated, counts.num_compared), (0, 1));
    }
}

#[test]
fn two_ends_of_a_handoff_are_marked_until_both_are_processed() {
    let shared = HandoffShared::default();
    shared.mark_ended(ID);
    shared.mark_ended(ID);
    shared.end_processed(ID);
    assert!(shared.has_ended(&ID));
    shared.end_processed(ID);
    assert!(!shared.has_ended(&ID));
    shared.end_processed(ID);
    assert!(!shared.has_ended(&ID));
}

#[test]
fn an_end_is_marked_when_the_call_returns_and_before_the_reactor_runs() {
    let producer = side(MemoryPath::RemoteRead, 1);
    producer.agent.end(ID, "preempted").expect("it runs");
    assert!(producer.agent.handoffs.has_ended(&ID));
    settle(&[&producer.agent]);
    assert!(
        !producer.agent.handoffs.has_ended(&ID),
        "the producer knows"
    );
}
