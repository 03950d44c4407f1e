//! Blocks and loads that wait for events of a device.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::Event;
use crate::FailureCause;
use crate::Integrity;
use crate::blocks::handoff::event_waiter::tests::{Outcome, late};
use crate::blocks::handoff::loads::tests::{BLOCK, ID, Side, settle};
use crate::blocks::handoff::{
    DeviceEvent, LoadFailure, LoadPart, LoadRequest, ReadyBlocks, ReadyRange,
};
use crate::reactor::manual::Round;
use crate::transport::MemoryPath;

fn pair() -> (Side, Side) {
    let side = |content| {
        let integrity = Integrity::Validate;
        Side::on(MemoryPath::RemoteRead, integrity, content, |_| {})
    };
    (side(1), side(0))
}

fn mark_ready_after(producer: &Side, event: Arc<dyn DeviceEvent>) {
    let ready = ReadyBlocks::new(vec![ReadyRange {
        handoff: ID,
        first: 0,
        block_ids: vec![0],
    }]);
    let ready = ready.expect("ready");
    let marked = producer
        .agent
        .mark_ready_after(event, &ready, producer.regions());
    marked.expect("it runs");
}

fn load_after(consumer: &Side, producer: &Side, event: Arc<dyn DeviceEvent>) {
    let request = LoadRequest {
        handoff: ID,
        producer: producer.agent.address().expect("address").to_string(),
        incarnation: producer.agent.incarnation(),
        parts: vec![LoadPart::of_all_regions(0, vec![0])],
        is_committed: true,
        ..LoadRequest::default()
    };
    consumer.agent.load_after(event, request).expect("it runs");
}

/// Runs both until the consumer's load has ended.
fn ended(producer: &Side, consumer: &Side) -> Event {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        settle(&[&producer.agent, &consumer.agent]);
        if let Some(event) = consumer.ended() {
            return event;
        }
        assert!(Instant::now() < deadline, "the load has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs both for a while, in which the consumer's load must not end.
fn nothing_arrives(producer: &Side, consumer: &Side) {
    for _ in 0..20 {
        settle(&[&producer.agent, &consumer.agent]);
        assert_eq!(
            (consumer.ended(), consumer.content()),
            (None, vec![0; BLOCK])
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing arrives before the producer's or the consumer's event is completed, and the blocks then.
fn arrives_once_completed(producer: &Side, consumer: &Side, complete: &Sender<Outcome>) {
    nothing_arrives(producer, consumer);
    complete.send(Ok(())).expect("it waits");
    let event = ended(producer, consumer);
    assert!(matches!(event, Event::LoadCompleted(_)), "{event:?}");
    assert_eq!(consumer.content(), [1; BLOCK]);
}

fn failure(event: Event) -> LoadFailure {
    let Event::LoadFailed(_, failure) = event else {
        panic!("{event:?}");
    };
    failure
}

#[test]
fn blocks_are_announced_when_the_event_behind_them_is_completed_and_not_before() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    consumer.load(ID, &producer);
    mark_ready_after(&producer, event);
    arrives_once_completed(&producer, &consumer, &complete);
}

#[test]
fn blocks_of_a_handoff_that_ends_before_their_event_are_never_announced() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    consumer.load(ID, &producer);
    mark_ready_after(&producer, event);
    producer.agent.end(ID, "preempted").expect("it runs");
    let failure = failure(ended(&producer, &consumer));
    assert_eq!((failure.missing, &*failure.reason), (vec![0], "preempted"));
    complete.send(Ok(())).expect("it waits");
    let (later, after) = late();
    mark_ready_after(&producer, after);
    later.send(Ok(())).expect("it waits");
    nothing_arrives(&producer, &consumer);
    assert_eq!(producer.agent.num_leased(), 0);
}

#[test]
fn an_event_that_fails_ends_the_handoff_with_the_reason() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    consumer.load(ID, &producer);
    mark_ready_after(&producer, event);
    complete
        .send(Err("illegal address".to_owned()))
        .expect("it waits");
    let failure = failure(ended(&producer, &consumer));
    assert_eq!(failure.cause, FailureCause::Ended);
    assert!(failure.reason.contains("illegal address"), "{failure:?}");
    assert_eq!(consumer.content(), [0; BLOCK]);
}

#[test]
fn nothing_is_written_into_the_blocks_of_a_load_before_its_event_is_completed() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    producer.mark_ready([ID].into_iter());
    load_after(&consumer, &producer, event);
    arrives_once_completed(&producer, &consumer, &complete);
}

#[test]
fn a_load_that_waits_for_its_event_can_be_cancelled_and_begun_again() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    producer.mark_ready([ID].into_iter());
    load_after(&consumer, &producer, event);
    consumer
        .agent
        .cancel(ID, "aborted", false)
        .expect("it runs");
    let failure = failure(ended(&producer, &consumer));
    assert_eq!((failure.missing, &*failure.reason), (vec![0], "aborted"));
    // The event of the first load does not open the gate of the second one.
    let (complete_second, event) = late();
    load_after(&consumer, &producer, event);
    complete.send(Ok(())).expect("it waits");
    arrives_once_completed(&producer, &consumer, &complete_second);
}

#[test]
fn a_load_whose_event_fails_has_the_reason() {
    let (producer, consumer) = pair();
    let (complete, event) = late();
    producer.mark_ready([ID].into_iter());
    load_after(&consumer, &producer, event);
    complete
        .send(Err("illegal address".to_owned()))
        .expect("it waits");
    let failure = failure(ended(&producer, &consumer));
    assert_eq!(failure.missing, [0]);
    assert!(failure.reason.contains("illegal address"), "{failure:?}");
    assert_eq!(consumer.content(), [0; BLOCK]);
}

#[test]
fn a_close_does_not_wait_for_a_device_that_hangs_and_ends_the_load() {
    let (producer, consumer) = pair();
    let (_complete, event) = late();
    load_after(&consumer, &producer, event);
    settle(&[&producer.agent, &consumer.agent]);
    let began = Instant::now();
    consumer.agent.close();
    while consumer.agent.round() != Round::Over {}
    assert!(began.elapsed() < Duration::from_secs(10));
    let failure = failure(consumer.ended().expect("it has ended"));
    assert_eq!(failure.missing, [0]);
}
