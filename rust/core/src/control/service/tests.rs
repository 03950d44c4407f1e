use std::time::Duration;

use super::super::subscriptions::Moment;
use super::*;
use crate::session::connection::SessionTimeouts;
use crate::work::work;

#[test]
fn an_address_whose_link_has_failed_is_connected_to_again() {
    let timeouts = ControlTimeouts {
        timeouts: SessionTimeouts::default(),
        lease: Duration::ZERO,
        open: Duration::ZERO,
        handoff: Duration::ZERO,
    };
    let (mut cx, mut schedulers) = (
        ReactorContext::manual(None),
        Schedulers::new(Events::default(), timeouts),
    );
    let session = schedulers.session_to(&mut cx, "127.0.0.1:9");
    assert_eq!(schedulers.session_to(&mut cx, "127.0.0.1:9"), session);
    let lost = Error::lost("127.0.0.1:9", "connection closed");
    cx.fail(session, lost.clone());
    let again = schedulers.session_to(&mut cx, "127.0.0.1:9");
    assert_ne!(again, session);
    schedulers.session_down(&mut cx, session, lost);
    assert_eq!(schedulers.session_to(&mut cx, "127.0.0.1:9"), again);
}

const ID: HandoffId = [1; 16];
const LEAD: Duration = Duration::from_secs(2);

fn schedulers() -> Schedulers {
    let timeouts = ControlTimeouts {
        timeouts: SessionTimeouts::default(),
        lease: Duration::from_secs(60),
        open: Duration::from_secs(60),
        handoff: Duration::from_secs(60),
    };
    Schedulers::new(Events::default(), timeouts)
}

fn opened(cx: &mut ReactorContext) -> Schedulers {
    let mut schedulers = schedulers();
    schedulers.open(cx, ID, opening());
    schedulers
}

fn opening() -> Opening {
    Opening {
        prompt_hash: [0; 32],
        num_tokens: 1,
        epoch: 0,
        ranks: Vec::new(),
    }
}

fn subscription(cx: &ReactorContext, awaited: Awaited) -> Subscription {
    Subscription {
        handoff: ID,
        session: 0,
        id: 0,
        awaited,
        until: cx.now + Duration::from_secs(60),
    }
}

#[test]
fn a_subscription_is_due_when_the_predicted_end_is_its_lead_away_and_not_before() {
    let mut cx = ReactorContext::manual(None);
    let mut schedulers = opened(&mut cx);
    let it = subscription(&cx, Awaited::End { lead: LEAD });
    let begun = cx.now;
    assert_eq!(schedulers.look_again_at(&it), None, "no prediction");
    schedulers.progress(&ID, begun + Duration::from_secs(5));
    let due = begun + Duration::from_secs(3);
    assert_eq!(schedulers.look_again_at(&it), Some(due));
    let before = due.checked_sub(Duration::from_micros(1)).unwrap();
    assert_eq!(schedulers.moment(&it, before), None);
    assert_eq!(schedulers.moment(&it, due), Some(Moment::Due(LEAD)));
    let late = begun + Duration::from_secs(9);
    assert_eq!(
        schedulers.moment(&it, late),
        Some(Moment::Due(Duration::ZERO))
    );
}

#[test]
fn a_later_prediction_moves_the_moment() {
    let mut cx = ReactorContext::manual(None);
    let mut schedulers = opened(&mut cx);
    let it = subscription(&cx, Awaited::End { lead: LEAD });
    let begun = cx.now;
    for seconds in [5, 8, 4] {
        let ends_at = begun + Duration::from_secs(seconds);
        schedulers.progress(&ID, ends_at);
        assert_eq!(schedulers.look_again_at(&it), ends_at.checked_sub(LEAD));
    }
}

#[test]
fn a_handoff_opened_again_has_no_prediction_until_one_is_made() {
    let mut cx = ReactorContext::manual(None);
    let mut schedulers = opened(&mut cx);
    schedulers.progress(&ID, cx.now);
    let opening = schedulers.leased[&ID].opening.clone();
    schedulers.open(&mut cx, ID, opening);
    let it = subscription(&cx, Awaited::End { lead: LEAD });
    assert_eq!(schedulers.moment(&it, cx.now), None);
}

#[test]
fn a_subscription_to_an_expected_handoff_has_no_deadline() {
    let cx = ReactorContext::manual(None);
    let mut schedulers = schedulers();
    let it = subscription(&cx, Awaited::Consumer);
    let late = it.until + Duration::from_secs(1);
    assert_eq!(schedulers.look_again_at(&it), Some(it.until));
    assert!(matches!(
        schedulers.moment(&it, late),
        Some(Moment::Ended(_))
    ));
    schedulers.expected.insert(ID);
    assert_eq!(schedulers.look_again_at(&it), None);
    assert_eq!(schedulers.moment(&it, late), None);
}

#[test]
fn no_more_subscriptions_wait_than_the_cap() {
    let mut cx = ReactorContext::manual(None);
    let mut schedulers = schedulers();
    for _ in 0..=PARKED_CAP {
        let it = subscription(&cx, Awaited::Consumer);
        schedulers.subscribe_here(&mut cx, it);
    }
    assert_eq!(schedulers.subscriptions.iter().len(), PARKED_CAP);
}

#[test]
fn the_subscriptions_of_a_link_end_with_it() {
    let mut cx = ReactorContext::manual(None);
    let mut schedulers = schedulers();
    let it = subscription(&cx, Awaited::Consumer);
    schedulers.subscribe_here(&mut cx, it);
    schedulers.session_down(&mut cx, 0, Error::Closed(String::new()));
    assert_eq!(schedulers.subscriptions.iter().len(), 0);
}

#[test]
fn a_watch_that_is_said_again_is_parked_once_for_each_link_and_handoff() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    for _ in 0..=PARKED_CAP {
        schedulers.watch_here(&mut cx, 20, ID);
    }
    schedulers.watch_here(&mut cx, 21, ID);
    schedulers.watch_here(&mut cx, 20, [2; 16]);
    let parked = schedulers.parked.iter().map(|it| (it.session, it.handoff));
    let expected = [(20, ID), (21, ID), (20, [2; 16])];
    assert_eq!(parked.collect::<Vec<_>>(), expected);
}

fn handoffs() -> impl Iterator<Item = HandoffId> {
    (2u128..).map(u128::to_le_bytes)
}

#[test]
fn a_consumer_that_watches_what_nobody_opens_shuts_out_no_other() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    for handoff in handoffs().take(PARKED_CAP + 1) {
        schedulers.watch_here(&mut cx, 20, handoff);
    }
    schedulers.watch_here(&mut cx, 21, ID);
    assert_eq!(schedulers.parked.iter().len(), PARKED_CAP);
    schedulers.open(&mut cx, ID, opening());
    assert_eq!(schedulers.leased[&ID].watchers, HashSet::from([21]));
}

#[test]
fn one_that_subscribes_to_all_the_room_shuts_out_no_other() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    for _ in 0..=PARKED_CAP {
        let it = subscription(&cx, Awaited::Consumer);
        schedulers.subscribe_here(&mut cx, it);
    }
    let other = Subscription {
        session: 21,
        ..subscription(&cx, Awaited::Consumer)
    };
    schedulers.subscribe_here(&mut cx, other);
    let of_other = schedulers
        .subscriptions
        .iter()
        .filter(|it| it.session == 21);
    assert_eq!(of_other.count(), 1);
    assert_eq!(schedulers.subscriptions.iter().len(), PARKED_CAP);
}

#[test]
fn one_that_gives_up_before_the_opening_takes_the_handoff_from_nobody_else() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    for session in [20, 21] {
        schedulers.watch_here(&mut cx, session, ID);
    }
    schedulers.unwatch_here(&mut cx, 20, ID, false);
    schedulers.open(&mut cx, ID, opening());
    let leased = schedulers.leased.get(&ID).expect("it is leased");
    assert_eq!(leased.watchers, HashSet::from([21]));
}

#[test]
fn a_question_to_an_address_that_is_still_connected_to_ends_with_its_name() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    let (answer, completer) = work();
    let deadline = cx.now;
    schedulers.ask(
        &mut cx,
        "127.0.0.1:9",
        Question::Describe,
        deadline,
        completer,
    );
    schedulers.expire_questions(&cx);
    let error = answer.result().expect("an end").expect_err("no answer");
    assert_eq!(error.to_string(), "127.0.0.1:9 did not answer in time");
}

#[test]
fn what_a_producer_says_again_of_a_watch_is_told_once() {
    let (mut cx, mut schedulers) = (ReactorContext::manual(None), schedulers());
    let others = [2; 16];
    for handoff in [ID, others] {
        schedulers.watch(&mut cx, handoff, "127.0.0.1:9");
    }
    let session = schedulers.watched[&ID].session;
    let (opening, state) = (opening(), SequenceState::default());
    let said = |handoff| {
        let (opening, state) = (opening.clone(), state.clone());
        [
            Message::Opened { handoff, opening },
            Message::Finished { handoff, state },
        ]
    };
    for _ in 0..3 {
        for message in said(ID).into_iter().chain(said(others)) {
            let said = message.encode();
            schedulers.frame(&mut cx, session, &said).expect("no error");
            // Nor does it count of whom the handoff is not watched at.
            schedulers.frame(&mut cx, 99, &said).expect("no error");
        }
    }
    let told = |handoff| {
        let (opening, state) = (opening.clone(), state.clone());
        [
            Event::Opened { handoff, opening },
            Event::Finished { handoff, state },
        ]
    };
    assert_eq!(schedulers.events.drain(), [told(ID), told(others)].concat());
    schedulers.watch(&mut cx, ID, "127.0.0.1:9");
    for message in said(ID) {
        let said = message.encode();
        schedulers.frame(&mut cx, session, &said).expect("no error");
    }
    assert_eq!(schedulers.events.drain(), told(ID), "watched anew");
}
