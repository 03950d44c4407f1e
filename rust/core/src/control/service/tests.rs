use std::time::Duration;

use super::super::deferred_queries::DeferredReply;
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
    let (mut cx, mut service) = (
        ReactorContext::manual(None),
        ControlService::new(Events::default(), timeouts),
    );
    let session = service.session_to(&mut cx, "127.0.0.1:9");
    assert_eq!(service.session_to(&mut cx, "127.0.0.1:9"), session);
    let lost = Error::lost("127.0.0.1:9", "connection closed");
    cx.fail(session, lost.clone());
    let again = service.session_to(&mut cx, "127.0.0.1:9");
    assert_ne!(again, session);
    service.session_down(&mut cx, session, lost);
    assert_eq!(service.session_to(&mut cx, "127.0.0.1:9"), again);
}

const ID: HandoffId = [1; 16];
const LEAD: Duration = Duration::from_secs(2);

fn service() -> ControlService {
    let timeouts = ControlTimeouts {
        timeouts: SessionTimeouts::default(),
        lease: Duration::from_secs(60),
        open: Duration::from_secs(60),
        handoff: Duration::from_secs(60),
    };
    ControlService::new(Events::default(), timeouts)
}

fn opened(cx: &mut ReactorContext) -> ControlService {
    let mut service = service();
    service.open(cx, ID, opening());
    service
}

fn opening() -> Opening {
    Opening {
        prompt_hash: [0; 32],
        num_tokens: 1,
        epoch: 0,
        ranks: Vec::new(),
    }
}

fn deferred(cx: &ReactorContext, condition: Condition) -> DeferredQuery {
    DeferredQuery {
        handoff: ID,
        session: 0,
        id: 0,
        condition,
        until: cx.now + Duration::from_secs(60),
    }
}

#[test]
fn a_subscription_is_due_when_the_predicted_end_is_its_lead_away_and_not_before() {
    let mut cx = ReactorContext::manual(None);
    let mut service = opened(&mut cx);
    let it = deferred(&cx, Condition::End { lead: LEAD });
    let begun = cx.now;
    assert_eq!(service.look_again_at(&it), None, "no prediction");
    service.progress(&ID, begun + Duration::from_secs(5));
    let due = begun + Duration::from_secs(3);
    assert_eq!(service.look_again_at(&it), Some(due));
    let before = due.checked_sub(Duration::from_micros(1)).unwrap();
    assert_eq!(service.moment(&it, before), None);
    assert_eq!(service.moment(&it, due), Some(DeferredReply::Due(LEAD)));
    let late = begun + Duration::from_secs(9);
    assert_eq!(
        service.moment(&it, late),
        Some(DeferredReply::Due(Duration::ZERO))
    );
}

#[test]
fn a_later_prediction_moves_the_moment() {
    let mut cx = ReactorContext::manual(None);
    let mut service = opened(&mut cx);
    let it = deferred(&cx, Condition::End { lead: LEAD });
    let begun = cx.now;
    for seconds in [5, 8, 4] {
        let ends_at = begun + Duration::from_secs(seconds);
        service.progress(&ID, ends_at);
        assert_eq!(service.look_again_at(&it), ends_at.checked_sub(LEAD));
    }
}

#[test]
fn a_handoff_opened_again_has_no_prediction_until_one_is_made() {
    let mut cx = ReactorContext::manual(None);
    let mut service = opened(&mut cx);
    service.progress(&ID, cx.now);
    let opening = service.leased[&ID].opening.clone();
    service.open(&mut cx, ID, opening);
    let it = deferred(&cx, Condition::End { lead: LEAD });
    assert_eq!(service.moment(&it, cx.now), None);
}

#[test]
fn a_subscription_to_an_expected_handoff_has_no_deadline() {
    let cx = ReactorContext::manual(None);
    let mut service = service();
    let it = deferred(&cx, Condition::Consumer);
    let late = it.until + Duration::from_secs(1);
    assert_eq!(service.look_again_at(&it), Some(it.until));
    assert!(matches!(
        service.moment(&it, late),
        Some(DeferredReply::Ended(_))
    ));
    service.expected.insert(ID);
    assert_eq!(service.look_again_at(&it), None);
    assert_eq!(service.moment(&it, late), None);
}

#[test]
fn no_more_subscriptions_wait_than_the_cap() {
    let mut cx = ReactorContext::manual(None);
    let mut service = service();
    for _ in 0..=PENDING_CAP {
        let it = deferred(&cx, Condition::Consumer);
        service.subscribe_here(&mut cx, it);
    }
    assert_eq!(service.deferred_queries.iter().len(), PENDING_CAP);
}

#[test]
fn the_subscriptions_of_a_link_end_with_it() {
    let mut cx = ReactorContext::manual(None);
    let mut service = service();
    let it = deferred(&cx, Condition::Consumer);
    service.subscribe_here(&mut cx, it);
    service.session_down(&mut cx, 0, Error::Closed(String::new()));
    assert_eq!(service.deferred_queries.iter().len(), 0);
}

#[test]
fn a_watch_that_is_said_again_is_parked_once_for_each_link_and_handoff() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    for _ in 0..=PENDING_CAP {
        service.watch_here(&mut cx, 20, ID);
    }
    service.watch_here(&mut cx, 21, ID);
    service.watch_here(&mut cx, 20, [2; 16]);
    let pending = service.pending.iter().map(|it| (it.session, it.handoff));
    let expected = [(20, ID), (21, ID), (20, [2; 16])];
    assert_eq!(pending.collect::<Vec<_>>(), expected);
}

fn handoffs() -> impl Iterator<Item = HandoffId> {
    (2u128..).map(u128::to_le_bytes)
}

#[test]
fn a_consumer_that_watches_what_nobody_opens_shuts_out_no_other() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    for handoff in handoffs().take(PENDING_CAP + 1) {
        service.watch_here(&mut cx, 20, handoff);
    }
    service.watch_here(&mut cx, 21, ID);
    assert_eq!(service.pending.iter().len(), PENDING_CAP);
    service.open(&mut cx, ID, opening());
    assert_eq!(service.leased[&ID].watchers, HashSet::from([21]));
}

#[test]
fn one_that_subscribes_to_all_the_room_shuts_out_no_other() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    for _ in 0..=PENDING_CAP {
        let it = deferred(&cx, Condition::Consumer);
        service.subscribe_here(&mut cx, it);
    }
    let other = DeferredQuery {
        session: 21,
        ..deferred(&cx, Condition::Consumer)
    };
    service.subscribe_here(&mut cx, other);
    let of_other = service
        .deferred_queries
        .iter()
        .filter(|it| it.session == 21);
    assert_eq!(of_other.count(), 1);
    assert_eq!(service.deferred_queries.iter().len(), PENDING_CAP);
}

#[test]
fn one_that_gives_up_before_the_opening_takes_the_handoff_from_nobody_else() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    for session in [20, 21] {
        service.watch_here(&mut cx, session, ID);
    }
    service.unwatch_here(&mut cx, 20, ID, false);
    service.open(&mut cx, ID, opening());
    let leased = service.leased.get(&ID).expect("it is leased");
    assert_eq!(leased.watchers, HashSet::from([21]));
}

#[test]
fn a_question_to_an_address_that_is_still_connected_to_ends_with_its_name() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    let (answer, completer) = work();
    let deadline = cx.now;
    service.ask(
        &mut cx,
        "127.0.0.1:9",
        ControlQuery::Describe,
        deadline,
        completer,
    );
    service.expire_queries(&cx);
    let error = answer.result().expect("an end").expect_err("no answer");
    assert_eq!(error.to_string(), "127.0.0.1:9 did not answer in time");
}

#[test]
fn what_a_producer_says_again_of_a_watch_is_told_once() {
    let (mut cx, mut service) = (ReactorContext::manual(None), service());
    let others = [2; 16];
    for handoff in [ID, others] {
        service.watch(&mut cx, handoff, "127.0.0.1:9");
    }
    let session = service.watched[&ID].session;
    let (opening, state) = (opening(), SequenceState::default());
    let said = |handoff| {
        let (opening, state) = (opening.clone(), state.clone());
        [
            ControlMessage::Opened { handoff, opening },
            ControlMessage::Finished { handoff, state },
        ]
    };
    for _ in 0..3 {
        for message in said(ID).into_iter().chain(said(others)) {
            let said = message.encode();
            service.frame(&mut cx, session, &said).expect("no error");
            // Nor does it count of whom the handoff is not watched at.
            service.frame(&mut cx, 99, &said).expect("no error");
        }
    }
    let told = |handoff| {
        let (opening, state) = (opening.clone(), state.clone());
        [
            ControlEvent::Opened { handoff, opening },
            ControlEvent::Finished { handoff, state },
        ]
    };
    assert_eq!(service.events.drain(), [told(ID), told(others)].concat());
    service.watch(&mut cx, ID, "127.0.0.1:9");
    for message in said(ID) {
        let said = message.encode();
        service.frame(&mut cx, session, &said).expect("no error");
    }
    assert_eq!(service.events.drain(), told(ID), "watched anew");
}
