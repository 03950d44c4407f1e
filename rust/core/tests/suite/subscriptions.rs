//! Queries to a control port whose reply follows later: about the end of a prefill, or about a consumer.

use std::time::Duration;

use kvpipe_core::control::{ControlQuery, ControlReply, ControlTimeouts, Moment};
use kvpipe_core::work::Work;

use crate::common::TIMEOUT;
use crate::engines::{Engine, ID, OTHER, engine, engine_with, patience};

const LEAD: Duration = Duration::from_secs(1);

impl Engine {
    fn subscribe(&self, other: &Self, query: ControlQuery) -> Work<ControlReply> {
        let asked = self.control.query(&other.address(), query, TIMEOUT);
        asked.expect("ask")
    }

    fn subscribe_to_the_end(&self, other: &Self, lead: Duration) -> Work<ControlReply> {
        let handoff = ID;
        self.subscribe(other, ControlQuery::Subscribe { handoff, lead })
    }

    /// Waits until the other engine has received all earlier queries.
    fn is_received_by(&self, other: &Self) {
        self.query(other, ControlQuery::Describe).expect("answer");
    }
}

fn reply_of(work: &Work<ControlReply>) -> Moment {
    match work.wait_for(TIMEOUT).expect("an answer") {
        ControlReply::Moment(moment) => moment,
        other => panic!("{other:?}"),
    }
}

/// The reason for which a handoff has ended.
fn ended(work: &Work<ControlReply>) -> String {
    match reply_of(work) {
        Moment::Ended(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reply_follows_between_two_predictions_when_the_end_is_the_lead_away() {
    let (producer, proxy) = (engine(), engine());
    let subscribed = proxy.subscribe_to_the_end(&producer, LEAD);
    producer.open();
    let progress = |remaining| producer.control.progress(ID, remaining).expect("progress");
    progress(TIMEOUT);
    proxy.is_received_by(&producer);
    assert!(!subscribed.is_completed(), "{:?}", subscribed.result());
    progress(LEAD + Duration::from_millis(300));
    // The producer predicts nothing more: its timer alone causes the reply.
    assert!(matches!(reply_of(&subscribed), Moment::Due(_)));
}

#[test]
fn a_lead_longer_than_the_remaining_time_is_replied_at_once() {
    let (producer, proxy) = (engine(), engine());
    producer.open();
    producer.control.progress(ID, LEAD).expect("progress");
    let reply = reply_of(&proxy.subscribe_to_the_end(&producer, TIMEOUT));
    assert!(matches!(reply, Moment::Due(_)), "{reply:?}");
}

#[test]
fn a_progress_report_of_a_worker_corrects_the_prediction() {
    let (producer, worker, proxy) = (engine(), engine(), engine());
    let foresees = |handoff, remaining| {
        let query = ControlQuery::Progress { handoff, remaining };
        let asked = worker.subscribe(&producer, query);
        asked.wait_for(TIMEOUT).expect("an answer")
    };
    assert_eq!(foresees(ID, LEAD), ControlReply::Known(false));
    producer.open();
    producer.control.progress(ID, TIMEOUT).expect("progress");
    let subscribed = proxy.subscribe_to_the_end(&producer, LEAD);
    proxy.is_received_by(&producer);
    assert!(!subscribed.is_completed());
    assert_eq!(foresees(OTHER, Duration::ZERO), ControlReply::Known(false));
    assert_eq!(foresees(ID, LEAD / 2), ControlReply::Known(true));
    assert!(matches!(reply_of(&subscribed), Moment::Due(_)));
    producer.finish();
    assert_eq!(foresees(ID, LEAD), ControlReply::Known(false));
}

#[test]
fn the_reply_after_the_end_says_how_far_off_the_prediction_was() {
    let (producer, proxy) = (engine(), engine());
    producer.open();
    producer.control.progress(ID, TIMEOUT).expect("progress");
    producer.finish();
    let reply = reply_of(&proxy.subscribe_to_the_end(&producer, LEAD));
    assert!(matches!(reply, Moment::Finished(Some(_))), "{reply:?}");
}

#[test]
fn without_a_prediction_the_reply_follows_the_end_of_prefill() {
    let (producer, proxy) = (engine(), engine());
    let subscribed = proxy.subscribe_to_the_end(&producer, TIMEOUT);
    producer.open();
    proxy.is_received_by(&producer);
    assert!(!subscribed.is_completed());
    producer.finish();
    assert_eq!(reply_of(&subscribed), Moment::Finished(None));
    let late = proxy.subscribe_to_the_end(&producer, LEAD);
    assert_eq!(reply_of(&late), Moment::Finished(None));
}

#[test]
fn the_reply_about_an_ended_handoff_says_why() {
    let (producer, proxy) = (engine(), engine());
    producer.open();
    let subscribed = proxy.subscribe_to_the_end(&producer, LEAD);
    let awaiting = proxy.subscribe(&producer, ControlQuery::Watched(ID));
    proxy.is_received_by(&producer);
    producer
        .control
        .withdraw(ID, "\"preempted\"")
        .expect("withdraw");
    let late = proxy.subscribe_to_the_end(&producer, LEAD);
    for work in [subscribed, awaiting, late] {
        assert_eq!(ended(&work), "\"preempted\"");
    }
}

#[test]
fn a_query_about_a_handoff_that_never_opens_ends_unless_it_is_expected() {
    let open = Duration::from_millis(100);
    let producer = engine_with(ControlTimeouts { open, ..patience() }, &[]);
    let proxy = engine();
    producer.control.expect(OTHER).expect("expect");
    let expected = proxy.subscribe(&producer, ControlQuery::Watched(OTHER));
    let unknown = proxy.subscribe_to_the_end(&producer, LEAD);
    assert!(ended(&unknown).contains("not known"));
    assert!(!expected.is_completed());
    producer
        .control
        .withdraw(OTHER, "aborted")
        .expect("withdraw");
    assert!(ended(&expected).contains("aborted"));
}

#[test]
fn a_query_for_a_consumer_is_replied_when_one_watches() {
    let (producer, consumer, proxy) = (engine(), engine(), engine());
    let awaiting = proxy.subscribe(&producer, ControlQuery::Watched(ID));
    producer.open();
    proxy.is_received_by(&producer);
    assert!(!awaiting.is_completed());
    consumer.watch(&producer);
    assert_eq!(reply_of(&awaiting), Moment::Watched);
}

#[test]
fn a_watch_before_the_opening_counts_once_the_handoff_is_open() {
    let (producer, consumer, proxy) = (engine(), engine(), engine());
    consumer.watch(&producer);
    consumer.is_received_by(&producer);
    let awaiting = proxy.subscribe(&producer, ControlQuery::Watched(ID));
    producer.open();
    assert_eq!(reply_of(&awaiting), Moment::Watched);
}

#[test]
fn a_deferred_query_keeps_no_lease_and_ends_with_it() {
    let lease = Duration::from_millis(100);
    let producer = engine_with(
        ControlTimeouts {
            lease,
            ..patience()
        },
        &[],
    );
    let proxy = engine();
    producer.open();
    let awaiting = proxy.subscribe(&producer, ControlQuery::Watched(ID));
    producer.finish();
    assert!(ended(&awaiting).contains("lease"));
}
