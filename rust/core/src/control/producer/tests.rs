use super::*;
use crate::session::SessionTimeouts;

const ID: HandoffId = [1; 16];
const OTHER: HandoffId = [2; 16];
const TIMEOUT: Duration = Duration::from_secs(60);

pub(in crate::control) fn producer() -> ProducerRole {
    ProducerRole::new(&ControlTimeouts {
        session: SessionTimeouts::default(),
        lease: TIMEOUT,
        open: TIMEOUT,
        handoff: TIMEOUT,
    })
}

pub(in crate::control) fn opening() -> Opening {
    Opening {
        prompt_hash: [0; 32],
        num_tokens: 1,
        adapter: String::new(),
        ranks: Vec::new(),
        stages: Vec::new(),
    }
}

#[test]
fn a_repeated_watch_takes_one_place_for_each_session_and_handoff() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    for _ in 0..=PENDING_WATCHES_CAP {
        producer.watch(&mut out, now, 20, ID);
    }
    producer.watch(&mut out, now, 21, ID);
    producer.watch(&mut out, now, 20, OTHER);
    let pending = producer.pending.iter().map(|it| (it.session, it.handoff));
    let expected = [(20, ID), (21, ID), (20, OTHER)];
    assert_eq!(pending.collect::<Vec<_>>(), expected);
}

#[test]
fn watches_of_unknown_handoffs_do_not_shut_out_another_consumer() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    let handoffs = (2u128..).map(u128::to_le_bytes);
    for handoff in handoffs.take(PENDING_WATCHES_CAP + 1) {
        producer.watch(&mut out, now, 20, handoff);
    }
    producer.watch(&mut out, now, 21, ID);
    assert_eq!(producer.pending.iter().len(), PENDING_WATCHES_CAP);
    producer.open(&mut out, ID, opening());
    assert_eq!(producer.open[&ID].watchers, HashSet::from([21]));
}

#[test]
fn a_consumer_that_gives_up_before_the_opening_takes_the_handoff_from_no_other() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    for session in [20, 21] {
        producer.watch(&mut out, now, session, ID);
    }
    producer.unwatch(&mut out, 20, ID, false);
    producer.open(&mut out, ID, opening());
    assert_eq!(producer.open[&ID].watchers, HashSet::from([21]));
}

#[test]
fn a_handoff_given_up_during_prefill_is_released_when_prefill_finishes() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    producer.open(&mut out, ID, opening());
    producer.watch(&mut out, now, 20, ID);
    producer.unwatch(&mut out, 20, ID, false);
    assert_eq!(out.events.drain(), []);
    producer.finish(&mut out, now, ID, SequenceState::default());
    let handoff = ID;
    let reason = CONSUMER_LOST.to_owned();
    let released = ControlEvent::Released { handoff, reason };
    assert_eq!(out.events.drain(), [released]);
}

#[test]
fn a_lease_has_a_deadline_only_without_a_watcher() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    producer.open(&mut out, ID, opening());
    assert_eq!(producer.expire(&mut out, now), None);
    producer.finish(&mut out, now, ID, SequenceState::default());
    assert_eq!(producer.expire(&mut out, now), Some(now + TIMEOUT));
    producer.watch(&mut out, now, 20, ID);
    assert_eq!(producer.expire(&mut out, now + TIMEOUT), None);
    assert_eq!(out.events.drain(), []);
}

#[test]
fn a_lease_that_was_ended_renewed_or_watched_has_no_deadline_of_its_own_any_more() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    let later = now + TIMEOUT / 2;
    for handoff in [ID, OTHER] {
        producer.open(&mut out, handoff, opening());
        producer.finish(&mut out, now, handoff, SequenceState::default());
    }
    producer.open(&mut out, ID, opening());
    producer.end_handoff(&mut out, OTHER, "preempted");
    assert_eq!(producer.expire(&mut out, now + TIMEOUT), None);
    producer.finish(&mut out, later, ID, SequenceState::default());
    let next = producer.expire(&mut out, now + TIMEOUT);
    assert_eq!((next, out.events.drain()), (Some(later + TIMEOUT), vec![]));
    assert_eq!(producer.expire(&mut out, later + TIMEOUT), None);
    assert_eq!(out.events.drain().len(), 1);
}

#[test]
fn a_lost_session_ends_its_watches_and_no_others() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    producer.watch(&mut out, now, 20, ID);
    for handoff in [ID, OTHER] {
        producer.open(&mut out, handoff, opening());
        producer.finish(&mut out, now, handoff, SequenceState::default());
    }
    producer.watch(&mut out, now, 21, OTHER);
    producer.watch(&mut out, now, 20, OTHER);
    producer.session_down(&mut out, 20);
    let (handoff, reason) = (ID, CONSUMER_LOST.to_owned());
    let released = ControlEvent::Released { handoff, reason };
    assert_eq!(
        out.events.drain(),
        [released],
        "the other one is still watched"
    );
    assert_eq!(producer.open[&OTHER].watchers, HashSet::from([21]));
    producer.unwatch(&mut out, 21, OTHER, true);
    assert_eq!((producer.open.len(), producer.watched.len()), (0, 0));
}

#[test]
fn a_watch_of_a_handoff_that_is_expected_later_has_no_deadline_any_more() {
    let (mut producer, mut out, now) = (producer(), ControlOutbox::default(), Instant::now());
    producer.watch(&mut out, now, 20, ID);
    assert_eq!(producer.expire(&mut out, now), Some(now + TIMEOUT));
    producer.expect(ID);
    producer.watch(&mut out, now, 21, ID);
    assert_eq!(producer.expire(&mut out, now + TIMEOUT), None);
    assert_eq!(out.messages, []);
}
