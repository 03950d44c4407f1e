//! Quotas: what one namespace does, and what it does to others.

use super::*;

const QUOTA: Option<u64> = Some(40);
/// Of two namespaces.
const MINE: [&str; 3] = ["my namespace: a", "my namespace: b", "my namespace: c"];
const OTHER: &str = "another space: a";

impl Store {
    fn put_small(&mut self, content: &'static str) {
        let holder = self.reserve(content, 20, Duration::ZERO);
        assert_eq!(self.actions(), [EntryAction::Reserved(holder)]);
        assert!(self.commit(holder, content));
    }

    fn refusal(&mut self, refused: Holder) -> Error {
        match &self.actions()[..] {
            [EntryAction::Refused(holder, error)] if *holder == refused => error.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// Both entries of a namespace, and its quota, are held.
    fn with_held_quota() -> (Self, [Holder; 2]) {
        let mut store = Self::with_quota(QUOTA);
        store.put_small(MINE[0]);
        store.put_small(MINE[1]);
        let opened = store.select(1, MINE[0], Duration::ZERO);
        let leased = store.take(1, MINE[1], Duration::ZERO);
        store.actions();
        (store, [opened, leased])
    }
}

#[test]
fn a_namespace_over_its_quota_evicts_its_own_longest_unused_value_and_no_other() {
    let mut store = Store::with_quota(QUOTA);
    store.put_small(OTHER);
    for content in MINE {
        store.put_small(content);
    }
    assert_eq!(store.exists(MINE), [false, true, true]);
    assert!(store.state.exists(OTHER.as_bytes()));
    let info = store.state.info();
    assert_eq!((info.num_bytes, info.num_evicted), (60, 1));
}

#[test]
fn a_namespace_may_have_exactly_its_quota_and_a_short_key_is_one_of_its_own() {
    let mut store = Store::with_quota(QUOTA);
    for key in ["a", "b"] {
        let holder = store.reserve(key, 40, Duration::ZERO);
        assert_eq!(store.actions(), [EntryAction::Reserved(holder)]);
    }
}

#[test]
fn a_reservation_without_room_in_its_quota_is_refused_at_once_with_what_holds_it() {
    let (mut store, [opened, leased]) = Store::with_held_quota();
    let refused = store.reserve(MINE[2], 1, SECOND);
    let error = store.refusal(refused);
    let Error::Exhausted(text) = &error else {
        panic!("{error:?}");
    };
    assert!(text.contains("quota of 40 bytes"), "{text}");
    assert!(text.contains("reservations hold 0"), "{text}");
    assert!(text.contains("values hold 40"), "{text}");
    let info = store.state.info();
    assert_eq!(
        (info.num_over_quota, info.num_waits, info.num_waiting),
        (1, 0, 0)
    );
    store.release(opened);
    store.release(leased);
    store.put_small(MINE[2]);
}

#[test]
fn a_reservation_whose_quota_is_used_up_while_it_waits_is_refused_in_its_turn_and_others_go_on() {
    let mut store = Store::with_quota(QUOTA);
    let first = store.reserve("first", 40, SECOND);
    let second = store.reserve("second", 40, SECOND);
    let mine = [MINE[0], MINE[1]].map(|key| store.reserve(key, 30, SECOND));
    let other = store.reserve(OTHER, 20, SECOND);
    let granted = [first, second].map(EntryAction::Reserved);
    assert_eq!(store.actions(), granted);
    store.release(first);
    let actions = store.actions();
    let [
        EntryAction::Reserved(one),
        EntryAction::Refused(two, Error::Exhausted(text)),
        EntryAction::Reserved(three),
    ] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!([*one, *two, *three], [mine[0], mine[1], other]);
    assert!(text.contains("reservations hold 30"), "{text}");
    assert_eq!(store.state.info().num_waiting, 0);
}

#[test]
fn a_value_larger_than_the_quota_is_refused_as_one_that_never_fits() {
    let mut store = Store::with_quota(QUOTA);
    let holder = store.reserve(OTHER, 41, SECOND);
    let error = store.refusal(holder);
    assert!(
        matches!(&error, Error::Config(text) if text.contains("quota of a namespace is 40")),
        "{error:?}"
    );
    assert_eq!(store.state.info().num_over_quota, 0);
}

#[test]
fn a_record_beyond_the_quota_evicts_older_values_of_its_namespace_and_not_its_own() {
    let mut store = Store::with_quota(QUOTA);
    store.put_small(OTHER);
    store.put_small(MINE[0]);
    let holder = store.reserve(MINE[1], 20, Duration::ZERO);
    store.actions();
    let (record, now) = (("", 1, 5), store.now);
    assert!(store.state.commit(holder, record, None, now));
    assert_eq!(store.exists([MINE[0], MINE[1], OTHER]), [false, true, true]);
    store.select(1, MINE[1], Duration::ZERO);
    let holder = store.reserve(MINE[2], 15, Duration::ZERO);
    store.actions();
    assert!(store.state.commit(holder, record, None, now));
    assert_eq!(store.exists([MINE[1], MINE[2], OTHER]), [true; 3]);
}

#[test]
fn a_value_that_its_record_makes_larger_than_the_quota_is_not_saved() {
    let mut store = Store::with_quota(QUOTA);
    store.state.add_disk(1 << 20, Vec::new(), store.now);
    for (key, num_record, is_saved) in [(MINE[0], 5, false), (OTHER, 0, true)] {
        let holder = store.reserve(key, 40, Duration::ZERO);
        store.actions();
        let now = store.now;
        assert!(store.state.commit(holder, ("", 1, num_record), None, now));
        let saves = |action: &EntryAction<_>| matches!(action, EntryAction::Save(..));
        assert_eq!(store.actions().iter().any(saves), is_saved, "{key}");
    }
}

#[test]
fn a_load_without_room_in_its_quota_is_a_miss_and_the_value_stays_on_disk() {
    let (mut store, [opened, leased]) = Store::with_held_quota();
    store.state.release(opened, store.now);
    store.state.release(leased, store.now);
    store.put_small(OTHER);
    let kept = KeptEntry {
        id: 1000,
        key: MINE[2].as_bytes().into(),
        num_bytes: 1,
        num_record: 0,
        footprint: 20,
    };
    store.state.add_disk(1 << 20, vec![kept], store.now);
    let opened = [MINE[0], MINE[1]].map(|key| store.select(1, key, Duration::ZERO));
    store.actions();
    let missed = store.select(1, MINE[2], Duration::ZERO);
    assert_eq!(store.actions(), [EntryAction::Nothing(missed)]);
    assert_eq!(store.state.info().num_over_quota, 1);
    store.release(opened[0]);
    let selected = store.select(1, MINE[2], Duration::ZERO);
    assert_eq!(store.actions(), [EntryAction::Load(1000, 1)]);
    store.state.loaded(1000, Ok(MINE[2]), store.now);
    let offered = EntryAction::Offered(selected, MINE[2]);
    assert_eq!(store.actions(), [offered]);
    assert_eq!(store.exists(MINE), [false, true, true]);
    assert!(store.state.exists(OTHER.as_bytes()));
}

#[test]
fn nothing_is_kept_of_a_namespace_that_has_nothing_in_memory() {
    let mut store = Store::with_quota(QUOTA);
    let empty = store.state.memory.sizes();
    store.put_small(MINE[0]);
    let reserved = store.reserve(OTHER, 20, Duration::ZERO);
    assert_ne!(store.state.memory.sizes(), empty);
    store.release(reserved);
    let deleted = [MINE[0].as_bytes()].into_iter();
    assert_eq!(store.state.delete(deleted, store.now), (1, false));
    assert_eq!(store.state.memory.sizes(), empty);
}
