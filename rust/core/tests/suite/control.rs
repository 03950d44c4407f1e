//! The control plane between schedulers; no UCX.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_core::control::{ControlEvent, ControlQuery, ControlReply, ControlTimeouts};

use crate::common::relay::Relay;
use crate::common::{self, PROMPT, Process, TIMEOUT, eventually, say, undescribed};
use crate::engines::{ID, OTHER, engine, engine_with, finished, opened, patience};

#[test]
fn peer_process() {
    let Some((role, argument, mut parent)) = common::role() else {
        return;
    };
    let engine = engine();
    match role.as_str() {
        "producer" => {
            engine.open();
            say(&mut parent, &engine.address());
        }
        "consumer" => {
            engine.control.watch(ID, &argument).expect("watch");
            engine.sees(&[opened(), finished()]);
            say(&mut parent, "watching");
        }
        other => panic!("unknown role {other}"),
    }
    common::wait_for_the_end(parent);
}

#[test]
fn a_watch_before_the_opening_receives_opening_and_end() {
    let (producer, consumer) = (engine(), engine());
    consumer.watch(&producer);
    consumer.sees_nothing_more(&[]);
    producer.open();
    consumer.sees(&[opened()]);
    producer.finish();
    consumer.sees(&[opened(), finished()]);
    producer.sees_nothing_more(&[]);
}

#[test]
fn a_watch_after_the_opening_receives_everything() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    producer.finish();
    consumer.watch(&producer);
    consumer.sees(&[opened(), finished()]);
}

#[test]
fn a_handoff_opened_again_keeps_its_watchers() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    consumer.watch(&producer);
    consumer.sees(&[opened()]);
    producer.open();
    producer.finish();
    // The opening is sent again, and counts once.
    consumer.sees(&[opened(), finished()]);
}

#[test]
fn an_acknowledged_handoff_is_released_once() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    consumer.watch(&producer);
    producer.finish();
    consumer.sees(&[opened(), finished()]);
    consumer.control.unwatch(ID, true).expect("unwatch");
    assert!(producer.released().contains("acknowledged"));
    assert_eq!(
        consumer.query(&producer, ControlQuery::Release(ID)),
        Ok(ControlReply::Known(false))
    );
    producer.sees_nothing_more(&producer.events());
    consumer.sees_nothing_more(&[opened(), finished()]);
}

#[test]
fn a_handoff_that_its_consumer_gives_up_is_released_when_it_has_finished() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    consumer.watch(&producer);
    consumer.sees(&[opened()]);
    consumer.control.unwatch(ID, false).expect("unwatch");
    // Prefill goes on: another consumer may come.
    producer.sees_nothing_more(&[]);
    producer.finish();
    assert!(producer.released().contains("consumer"));
}

#[test]
fn a_consumer_that_comes_after_one_that_gave_up_gets_the_handoff() {
    let (producer, first, second) = (engine(), engine(), engine());
    producer.open();
    first.watch(&producer);
    first.sees(&[opened()]);
    first.control.unwatch(ID, false).expect("unwatch");
    // Queries of one session are replied in order: the producer has received the unwatch.
    first
        .query(&producer, ControlQuery::Describe)
        .expect("answer");
    second.watch(&producer);
    second.sees(&[opened()]);
    producer.finish();
    second.sees(&[opened(), finished()]);
    producer.sees_nothing_more(&[]);
}

#[test]
fn an_unwatch_before_the_session_is_up_disturbs_nothing() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    let front = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = front.local_addr().expect("address").to_string();
    let watch = || consumer.control.watch(ID, &address).expect("watch");
    watch();
    consumer.control.unwatch(ID, false).expect("unwatch");
    Relay::at(front, producer.control.address().expect("address"));
    let described = consumer
        .control
        .query(&address, ControlQuery::Describe, TIMEOUT);
    let described = described.expect("query").wait_for(TIMEOUT);
    assert_eq!(described, Ok(undescribed()));
    assert_eq!(consumer.events(), []);
    watch();
    consumer.sees(&[opened()]);
}

#[test]
fn a_release_ends_a_leased_handoff_and_its_watches() {
    let (producer, consumer, proxy) = (engine(), engine(), engine());
    producer.open();
    consumer.watch(&producer);
    consumer.sees(&[opened()]);
    assert_eq!(
        proxy.query(&producer, ControlQuery::Release(ID)),
        Ok(ControlReply::Known(true))
    );
    assert!(producer.released().contains("released"));
    assert!(consumer.ended().contains("released"));
    assert_eq!(
        proxy.query(&producer, ControlQuery::Release(ID)),
        Ok(ControlReply::Known(false))
    );
}

#[test]
fn a_release_before_the_opening_ends_pending_watches_and_the_opening() {
    let (producer, consumer, proxy) = (engine(), engine(), engine());
    consumer.watch(&producer);
    consumer
        .query(&producer, ControlQuery::Describe)
        .expect("answer");
    assert_eq!(
        proxy.query(&producer, ControlQuery::Release(ID)),
        Ok(ControlReply::Known(false))
    );
    assert!(consumer.ended().contains("released"));
    producer.open();
    assert!(producer.released().contains("released"));
}

#[test]
fn a_withdrawn_handoff_has_ended_for_good() {
    let (producer, consumer, late) = (engine(), engine(), engine());
    producer.open();
    consumer.watch(&producer);
    consumer.sees(&[opened()]);
    let long = "preempted ".repeat(1000);
    producer.control.withdraw(ID, &long).expect("withdraw");
    assert!(consumer.ended().starts_with("preempted"));
    late.watch(&producer);
    assert!(late.ended().starts_with("preempted"));
    assert_eq!(producer.events(), []);
}

#[test]
fn a_lease_ends_without_a_consumer() {
    let lease = Duration::from_millis(100);
    let producer = engine_with(
        ControlTimeouts {
            lease,
            ..patience()
        },
        &[],
    );
    producer.open();
    producer.finish();
    assert!(producer.released().contains("lease"));
}

#[test]
fn a_lease_does_not_end_while_a_consumer_watches() {
    let lease = Duration::from_millis(100);
    let producer = engine_with(
        ControlTimeouts {
            lease,
            ..patience()
        },
        &[],
    );
    let consumer = engine();
    producer.open();
    consumer.watch(&producer);
    consumer.sees(&[opened()]);
    producer.finish();
    std::thread::sleep(Duration::from_millis(250));
    producer.sees_nothing_more(&[]);
}

#[test]
fn a_watch_of_a_handoff_that_never_opens_ends() {
    let open = Duration::from_millis(100);
    let producer = engine_with(ControlTimeouts { open, ..patience() }, &[]);
    let consumer = engine();
    consumer.watch(&producer);
    assert!(consumer.ended().contains("not known"));
}

#[test]
fn a_consumer_waits_no_longer_than_its_timeout() {
    let handoff = Duration::from_secs(2);
    let consumer = engine_with(
        ControlTimeouts {
            handoff,
            ..patience()
        },
        &[],
    );
    let producer = engine();
    producer.open();
    consumer.watch(&producer);
    assert!(consumer.ended().contains("handoff_timeout_s"));
    producer.finish();
    assert!(producer.released().contains("consumer"));
}

#[test]
fn a_finish_without_opening_is_released_at_once() {
    let producer = engine();
    producer.finish();
    assert!(producer.released().contains("never opened"));
}

#[test]
fn a_consumer_whose_connection_is_lost_releases_its_handoff() {
    let (producer, consumer) = (engine(), engine());
    producer.open();
    consumer.watch(&producer);
    producer.finish();
    consumer.sees(&[opened(), finished()]);
    consumer.control.close();
    assert!(producer.released().contains("consumer is gone"));
}

#[test]
fn a_killed_consumer_releases_its_handoff_promptly() {
    let producer = engine();
    producer.open();
    producer.finish();
    let mut consumer = Process::start("consumer", &producer.address());
    consumer.line();
    let killed = Instant::now();
    consumer.kill();
    assert!(producer.released().contains("consumer is gone"));
    assert!(killed.elapsed() < PROMPT);
}

#[test]
fn a_killed_producer_ends_its_handoffs_promptly() {
    let consumer = engine();
    let mut producer = Process::start("producer", "");
    let address = producer.line();
    consumer.control.watch(ID, &address).expect("watch");
    consumer.sees(&[opened()]);
    let killed = Instant::now();
    producer.kill();
    assert!(consumer.ended().contains("lost peer"));
    assert!(killed.elapsed() < PROMPT);
    // Queries to it end too.
    let asked = consumer
        .control
        .query(&address, ControlQuery::Describe, TIMEOUT);
    let error = asked
        .expect("ask")
        .wait_for(PROMPT)
        .expect_err("no listener");
    assert!(matches!(error, Error::Connect(_)), "{error}");
}

#[test]
fn fingerprints_that_differ_are_refused_with_field_and_values_on_both_sides() {
    let here = engine_with(patience(), &[("model", "m"), ("dtype", "float32")]);
    let there = engine_with(patience(), &[("model", "m"), ("dtype", "bfloat16")]);
    let error = here
        .query(&there, ControlQuery::Describe)
        .expect_err("they differ");
    let Error::Incompatible {
        field,
        ours,
        theirs,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (&field[..], &ours[..], &theirs[..]),
        ("dtype", "float32", "bfloat16")
    );
    let logged = eventually("the log line", || {
        let refused = |event| match event {
            ControlEvent::Log(text) if text.contains("refused") => Some(text),
            _ => None,
        };
        there.control.drain().into_iter().find_map(refused)
    });
    assert!(
        logged.contains("dtype") && logged.contains("float32") && logged.contains("bfloat16"),
        "{logged}"
    );
    here.control.watch(ID, &there.address()).expect("watch");
    assert!(here.ended().contains("bfloat16"));
}

#[test]
fn descriptions_and_results_are_replied() {
    let (here, there) = (engine(), engine());
    assert_eq!(
        here.query(&there, ControlQuery::Describe),
        Ok(undescribed())
    );
    there
        .control
        .describe_as(r#"{"role": "producer"}"#.to_owned())
        .expect("describe");
    assert_eq!(
        here.query(&there, ControlQuery::Describe),
        Ok(ControlReply::Description(
            r#"{"role": "producer"}"#.to_owned()
        ))
    );
    let result = r#"{"tokens": 3}"#.to_owned();
    there
        .control
        .set_result(ID, result.clone())
        .expect("set result");
    assert_eq!(
        here.query(&there, ControlQuery::Result(ID)),
        Ok(ControlReply::Result(Some(result)))
    );
    assert_eq!(
        here.query(&there, ControlQuery::Result(OTHER)),
        Ok(ControlReply::Result(None))
    );
}

#[test]
fn a_reply_includes_earlier_changes() {
    let (here, there) = (engine(), engine());
    for round in 0..2000 {
        let json = round.to_string();
        there.control.describe_as(json.clone()).expect("describe");
        assert_eq!(
            here.query(&there, ControlQuery::Describe),
            Ok(ControlReply::Description(json))
        );
    }
}

#[test]
fn a_query_without_a_reply_ends_at_its_deadline() {
    let here = engine();
    // Accepts connections in its backlog, and never replies.
    let silent = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = silent.local_addr().expect("address").to_string();
    let soon = Duration::from_millis(100);
    let asked = here
        .control
        .query(&address, ControlQuery::Describe, soon)
        .expect("ask");
    let error = asked.wait_for(TIMEOUT).expect_err("no answer");
    assert!(matches!(error, Error::Timeout(_)), "{error}");
}
