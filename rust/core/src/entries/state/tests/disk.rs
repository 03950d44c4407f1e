//! Use of the disk by a store: saves, loads, and the space of both tiers.

use super::super::disk::{LOAD_TIMEOUT, SAVE_PAUSE};
use super::super::{EntryAction, KeptEntry};
use super::*;

const DISK_CAPACITY: u64 = 1 << 20;

impl Store {
    fn with_disk(capacity_bytes: u64) -> Self {
        let mut store = Self::new();
        store.state.add_disk(capacity_bytes, Vec::new(), store.now);
        store
    }

    /// Commits an entry of 30 bytes under its content as key; returns its number.
    fn put_to_be_saved(&mut self, content: &'static str) -> EntryId {
        let holder = self.reserve(content, 30, Duration::ZERO);
        self.actions();
        assert!(self.commit(holder, content));
        match &self.actions()[..] {
            [EntryAction::Save(id, key, saved)] => {
                assert_eq!((&key[..], *saved), (content.as_bytes(), content));
                *id
            }
            other => panic!("{other:?}"),
        }
    }

    /// As [`put_to_be_saved`](Self::put_to_be_saved), and the disk has it.
    fn put_on_disk(&mut self, content: &'static str) -> EntryId {
        let id = self.put_to_be_saved(content);
        self.state.saved(id, true, self.now);
        id
    }
}

#[test]
fn a_value_that_is_evicted_from_memory_is_loaded_from_the_disk_for_all_that_wait() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_on_disk("a");
    for content in ["b", "c", "d"] {
        store.put_on_disk(content);
    }
    assert_eq!(store.exists(["a", "b", "d"]), [true; 3]);
    let info = store.state.info();
    assert_eq!((info.num_values, info.num_disk_values), (4, 4));
    assert_eq!((info.num_bytes, info.num_evicted), (90, 0));

    let selected = store.select(1, "a", Duration::ZERO);
    let taken = store.take(2, "a", SECOND);
    assert_eq!(store.actions(), [EntryAction::Load(a, 1)]);
    store.state.loaded(a, Ok("a"), store.now);
    assert_eq!(store.actions(), [EntryAction::Offered(selected, "a")]);
    store.release(selected);
    assert_eq!(store.actions(), [EntryAction::Offered(taken, "a")]);
    assert_eq!(store.state.info().num_loaded, 1);
}

#[test]
fn an_acknowledged_value_is_erased_and_the_caller_knows_that_it_was_on_disk() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_on_disk("a");
    let taken = store.take(1, "a", Duration::ZERO);
    store.actions();
    assert_eq!(store.state.acknowledge(taken, store.now), Ok(true));
    assert_eq!(store.actions(), [EntryAction::Erase(a)]);
    let b = store.put_to_be_saved("b");
    let deleted = store.state.delete([&b"b"[..]].into_iter(), store.now);
    assert_eq!(deleted, (1, true));
    assert_eq!(store.actions(), [EntryAction::Erase(b)]);
    store.state.saved(b, true, store.now);
    let info = store.state.info();
    assert_eq!((info.num_disk_values, info.num_disk_bytes), (0, 0));
}

#[test]
fn a_value_with_a_time_to_live_stays_in_memory() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let holder = store.reserve("a", 30, Duration::ZERO);
    store.actions();
    let (ttl, now) = (Some(SECOND), store.now);
    assert!(store.state.commit(holder, ("a", 1, 0), ttl, now));
    assert_eq!(store.actions(), []);
}

#[test]
fn a_value_that_is_evicted_while_it_is_saved_is_loaded_when_it_is_on_disk_and_lost_if_it_is_not() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let (a, b) = (store.put_to_be_saved("a"), store.put_to_be_saved("b"));
    for content in ["c", "d", "e"] {
        store.put_to_be_saved(content);
    }
    let waiting = [
        store.select(1, "a", SECOND),
        store.select(1, "b", Duration::ZERO),
    ];
    assert_eq!(store.actions(), []);
    store.state.saved(a, true, store.now);
    assert_eq!(store.actions(), [EntryAction::Load(a, 1)]);
    store.state.saved(b, false, store.now);
    assert_eq!(store.actions(), [EntryAction::Nothing(waiting[1])]);
    assert_eq!(store.exists(["a", "b", "c"]), [true, false, true]);
    let info = store.state.info();
    assert_eq!((info.num_disk_failures, info.num_evicted), (1, 1));
}

#[test]
fn a_full_disk_erases_the_longest_unused_values_and_leaves_those_in_memory_there() {
    // Two entries of 4 KiB and a block each.
    let mut store = Store::with_disk(16 << 10);
    let a = store.put_on_disk("a");
    store.put_on_disk("b");
    let holder = store.reserve("c", 30, Duration::ZERO);
    store.actions();
    assert!(store.commit(holder, "c"));
    let actions = store.actions();
    let [EntryAction::Erase(erased), EntryAction::Save(c, ..)] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(*erased, a);
    store.state.saved(*c, true, store.now);
    assert_eq!(store.exists(["a", "b", "c"]), [true; 3]);
    // Only memory has a, and it is the next to go from there.
    store.put_on_disk_after_erasing("d");
    assert_eq!(store.exists(["a", "c", "d"]), [false, true, true]);
    assert_eq!(store.state.info().num_evicted, 1);
}

impl Store {
    fn put_on_disk_after_erasing(&mut self, content: &'static str) {
        let holder = self.reserve(content, 30, Duration::ZERO);
        self.actions();
        assert!(self.commit(holder, content));
        for action in self.actions() {
            if let EntryAction::Save(id, ..) = action {
                self.state.saved(id, true, self.now);
            }
        }
    }
}

#[test]
fn a_disk_that_hangs_has_no_more_waiting_for_it_than_there_are_values() {
    let mut store = Store::with_disk(u64::MAX);
    let mut state = Entries::of_store(1 << 30, None, RESERVATION);
    state.add_disk(u64::MAX, Vec::new(), store.now);
    std::mem::swap(&mut store.state, &mut state);
    store.state.session_up(1);
    // Each is as large as all that is saved at once, and memory holds 16.
    for number in 0..10_000 {
        let holder = store.reserve(&number.to_string(), 64 << 20, Duration::ZERO);
        let sized = ("", 64 << 20, 0);
        assert!(store.state.commit(holder, sized, None, store.now));
        store.actions();
    }
    let sizes = store.state.sizes();
    let (_, num_unsaved) = sizes
        .iter()
        .find(|(name, _)| *name == "values to be saved")
        .unwrap();
    assert!(*num_unsaved <= 2 * 16 + 64, "{num_unsaved}");
}

#[test]
fn a_load_without_a_waiting_select_claims_no_space() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    for content in ["a", "b", "c", "d"] {
        store.put_on_disk(content);
    }
    let held = ["b", "c", "d"].map(|key| store.select(1, key, Duration::ZERO));
    store.actions();
    let late = store.select(1, "a", Duration::ZERO);
    store.pass(LOAD_TIMEOUT);
    assert_eq!(store.actions(), [EntryAction::Nothing(late)]);
    // Nothing stands before a reservation that gets its space, and a can still be loaded.
    store.release(held[0]);
    let reserved = store.reserve("e", 30, Duration::ZERO);
    assert_eq!(store.actions(), [EntryAction::Reserved(reserved)]);
    store.release(reserved);
    let again = store.select(2, "a", Duration::ZERO);
    let actions = store.actions();
    assert!(
        matches!(actions[..], [EntryAction::Load(..)]),
        "{actions:?}"
    );
    store.state.session_down(2, store.now);
    let _ = again;
}

#[test]
fn a_value_that_changed_on_disk_is_deleted_and_those_that_wait_for_a_commit_go_on_waiting() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_on_disk("a");
    for content in ["b", "c", "d"] {
        store.put_on_disk(content);
    }
    let (now_or_never, later) = (
        store.select(1, "a", Duration::ZERO),
        store.select(2, "a", SECOND),
    );
    store.actions();
    let damaged = Err(Error::Corrupt("changed".to_owned()));
    store.state.loaded(a, damaged, store.now);
    assert_eq!(
        store.actions(),
        [EntryAction::Erase(a), EntryAction::Nothing(now_or_never)]
    );
    assert_eq!(store.state.info().num_corrupt, 1);
    store.put_to_be_saved_for("a", later);
}

impl Store {
    fn put_to_be_saved_for(&mut self, content: &'static str, waiting: Holder) {
        let holder = self.reserve(content, 30, Duration::ZERO);
        self.actions();
        assert!(self.commit(holder, content));
        let offered = EntryAction::Offered(waiting, content);
        assert!(self.actions().contains(&offered));
    }
}

#[test]
fn a_value_that_cannot_be_read_now_stays_on_disk_and_is_loaded_the_next_time() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_on_disk("a");
    for content in ["b", "c", "d"] {
        store.put_on_disk(content);
    }
    let waiting = [(); 2].map(|()| store.take(1, "a", SECOND));
    let missed = store.select(1, "a", Duration::ZERO);
    store.actions();
    let failed = Err(Error::Unavailable("the disk failed".to_owned()));
    store.state.loaded(a, failed, store.now);
    assert_eq!(store.actions(), [EntryAction::Nothing(missed)]);
    let info = store.state.info();
    assert_eq!((info.num_disk_failures, info.num_bytes), (1, 60));
    let again = store.select(2, "a", Duration::ZERO);
    assert_eq!(store.actions(), [EntryAction::Load(a, 1)]);
    store.state.loaded(a, Ok("a"), store.now);
    assert_eq!(store.actions(), [EntryAction::Offered(again, "a")]);
    store.release(again);
    assert_eq!(store.actions(), [EntryAction::Offered(waiting[0], "a")]);
}

#[test]
fn after_a_save_that_failed_there_is_a_pause_and_then_or_at_the_end_all_is_tried_again() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_to_be_saved("a");
    store.state.saved(a, false, store.now);
    let holder = store.reserve("b", 30, Duration::ZERO);
    store.actions();
    assert!(store.commit(holder, "b"));
    store.pass(SAVE_PAUSE / 2);
    assert_eq!(store.actions(), []);
    store.pass(SAVE_PAUSE / 2);
    let saves = store.actions();
    let [EntryAction::Save(first, ..), EntryAction::Save(b, ..)] = saves[..] else {
        panic!("{saves:?}");
    };
    assert_eq!(first, a);
    store.state.saved(a, false, store.now);
    store.state.saved(b, true, store.now);
    assert_eq!(store.actions(), []);
    assert_eq!(store.state.save_all(), 1);
    assert!(matches!(store.actions()[..], [EntryAction::Save(last, ..)] if last == a));
}

#[test]
fn a_save_that_failed_delays_the_answer_until_the_disk_has_erased_it() {
    for is_erased in [false, true] {
        let mut store = Store::with_disk(DISK_CAPACITY);
        let a = store.put_to_be_saved("a");
        store.state.saved(a, false, store.now);
        if is_erased {
            store.state.erased(a);
        }
        let taken = store.take(1, "a", Duration::ZERO);
        store.actions();
        let acknowledged = store.state.acknowledge(taken, store.now);
        assert_eq!(acknowledged, Ok(!is_erased));
    }
}

#[test]
fn an_erasure_that_is_not_durable_delays_the_answer_for_the_same_key_committed_anew() {
    let mut store = Store::with_disk(DISK_CAPACITY);
    let a = store.put_on_disk("a");
    assert_eq!(
        store.state.delete([&b"a"[..]].into_iter(), store.now),
        (1, true)
    );
    let holder = store.reserve("a", 30, Duration::ZERO);
    store.actions();
    let (ttl, now) = (Some(SECOND), store.now);
    assert!(store.state.commit(holder, ("anew", 1, 0), ttl, now));
    let taken = store.take(1, "a", Duration::ZERO);
    store.actions();
    assert_eq!(store.state.acknowledge(taken, now), Ok(true));
    store.state.erased(a);
    let holder = store.reserve("a", 30, Duration::ZERO);
    assert!(store.state.commit(holder, ("anew", 1, 0), ttl, now));
    assert_eq!(store.state.delete([&b"a"[..]].into_iter(), now), (1, false));
}

#[test]
fn a_store_begins_with_what_is_on_its_disk_and_erases_what_it_cannot_use() {
    let mut state: Entries<&str> = Entries::of_store(90, None, RESERVATION);
    let now = Instant::now();
    let kept = |id, key: &str, footprint| KeptEntry {
        id,
        key: key.as_bytes().into(),
        num_bytes: 1,
        num_record: 0,
        footprint,
    };
    let on_disk = vec![
        kept(9, "b", 30),
        kept(3, "a", 30),
        kept(4, "too large", 91),
        kept(12, "a", 30),
        kept(20, "c", 30),
    ];
    // Two entries fit.
    state.add_disk(16 << 10, on_disk, now);
    let erased: Vec<_> = std::iter::from_fn(|| state.next_action()).collect();
    assert_eq!(erased, [4, 3, 9].map(EntryAction::Erase));
    assert!(state.exists(b"a") && state.exists(b"c") && !state.exists(b"b"));
    state.session_up(1);
    state.select(
        (1, 1),
        Query::Exact(&b"a"[..]),
        Access::Open,
        Some(now),
        now,
    );
    assert_eq!(state.next_action(), Some(EntryAction::Load(12, 1)));
    state.reserve((1, 2), &b"new"[..], 30, Some(now), now);
    assert!(state.commit((1, 2), ("new", 1, 0), None, now));
    let saved = std::iter::from_fn(|| state.next_action()).find_map(|action| match action {
        EntryAction::Save(id, ..) => Some(id),
        _ => None,
    });
    assert!(saved > Some(20), "{saved:?}");
}
