mod buffer;
mod disk;
mod model;
mod quota;

use super::holds::HOLDS_CAP;
use super::*;

const RESERVATION: Duration = Duration::from_secs(30);
const LEASE: Option<Duration> = Some(Duration::from_secs(10));
const SECOND: Duration = Duration::from_secs(1);

/// A store for three entries of a third, of which a client with session 1 and another with session 2 are connected.
struct Store {
    state: Entries<&'static str>,
    now: Instant,
    last_operation: u64,
}

impl Store {
    fn new() -> Self {
        Self::with_quota(None)
    }

    fn with_quota(quota_bytes: Option<u64>) -> Self {
        let mut state = Entries::of_store(90, quota_bytes, RESERVATION);
        state.session_up(1);
        state.session_up(2);
        Self {
            state,
            now: Instant::now(),
            last_operation: 0,
        }
    }

    fn holder(&mut self, session: SessionKey) -> Holder {
        self.last_operation += 1;
        (session, self.last_operation)
    }

    fn actions(&mut self) -> Vec<EntryAction<&'static str>> {
        std::iter::from_fn(|| self.state.next_action()).collect()
    }

    fn reserve(&mut self, key: &str, num_bytes: u64, timeout: Duration) -> Holder {
        let (holder, deadline) = (self.holder(1), Some(self.now + timeout));
        self.state
            .reserve(holder, key.as_bytes(), num_bytes, deadline, self.now);
        holder
    }

    fn commit(&mut self, holder: Holder, content: &'static str) -> bool {
        self.state.commit(holder, (content, 1, 0), None, self.now)
    }

    /// Commits an entry of 30 bytes under its content as key.
    fn put(&mut self, content: &'static str) {
        let holder = self.reserve(content, 30, Duration::ZERO);
        assert_eq!(self.actions(), [EntryAction::Reserved(holder)]);
        assert!(self.commit(holder, content));
    }

    fn select(&mut self, session: SessionKey, key: &str, timeout: Duration) -> Holder {
        self.request(session, key, Access::Open, timeout)
    }

    fn take(&mut self, session: SessionKey, key: &str, timeout: Duration) -> Holder {
        self.request(session, key, Access::Lease(LEASE), timeout)
    }

    fn request(
        &mut self,
        session: SessionKey,
        key: &str,
        access: Access,
        timeout: Duration,
    ) -> Holder {
        let (holder, deadline) = (self.holder(session), Some(self.now + timeout));
        self.state.select(
            holder,
            Query::Exact(key.as_bytes()),
            access,
            deadline,
            self.now,
        );
        holder
    }

    fn release(&mut self, holder: Holder) {
        self.state.release(holder, self.now);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.state.expire(self.now);
    }

    fn exists(&self, keys: [&str; 3]) -> [bool; 3] {
        keys.map(|key| self.state.exists(key.as_bytes()))
    }
}

#[test]
fn a_full_store_evicts_the_longest_unused_values() {
    let mut store = Store::new();
    for content in ["a", "b", "c"] {
        store.put(content);
    }
    let opened = store.select(1, "a", Duration::ZERO);
    store.release(opened);
    store.actions();
    store.put("d");
    assert_eq!(store.exists(["a", "b", "c"]), [true, false, true]);
    assert_eq!(store.state.info().num_evicted, 1);
}

#[test]
fn values_that_are_held_are_not_evicted_and_the_refusal_says_what_holds_the_space() {
    let mut store = Store::new();
    store.put("a");
    store.put("b");
    let opened = store.select(1, "a", Duration::ZERO);
    let leased = store.take(2, "b", Duration::ZERO);
    store.reserve("c", 20, Duration::ZERO);
    store.actions();
    let refused = store.reserve("d", 30, SECOND);
    assert_eq!(store.actions(), []);
    store.pass(SECOND);
    let actions = store.actions();
    let [EntryAction::Refused(holder, Error::Exhausted(text))] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(*holder, refused);
    assert!(text.contains("1 reservations hold 20"), "{text}");
    assert!(text.contains("values hold 60"), "{text}");
    assert_eq!(store.state.info().num_evicted, 0);
    store.release(opened);
    store.release(leased);
    store.put("e");
}

#[test]
fn reservations_wait_for_space_in_order() {
    let mut store = Store::new();
    let first = store.reserve("a", 80, SECOND);
    let large = store.reserve("b", 60, SECOND);
    let small = store.reserve("c", 5, SECOND);
    assert_eq!(store.actions(), [EntryAction::Reserved(first)]);
    store.release(first);
    let granted = [EntryAction::Reserved(large), EntryAction::Reserved(small)];
    assert_eq!(store.actions(), granted);
}

#[test]
fn a_key_with_a_value_or_a_reservation_is_occupied_also_for_those_that_wait() {
    let mut store = Store::new();
    let first = store.reserve("a", 80, SECOND);
    let same = store.reserve("a", 1, SECOND);
    assert_eq!(
        store.actions(),
        [EntryAction::Reserved(first), EntryAction::Occupied(same)]
    );
    let one = store.reserve("b", 20, SECOND);
    let other = store.reserve("b", 20, SECOND);
    store.release(first);
    assert_eq!(
        store.actions(),
        [EntryAction::Reserved(one), EntryAction::Occupied(other)]
    );
    assert!(store.commit(one, "b"));
    let late = store.reserve("b", 1, SECOND);
    assert_eq!(store.actions(), [EntryAction::Occupied(late)]);
}

#[test]
fn a_commit_serves_all_waiting_selects_and_then_one_take() {
    let mut store = Store::new();
    let first_take = store.take(1, "a", SECOND);
    let second_take = store.take(2, "a", SECOND);
    let selects = [store.select(1, "a", SECOND), store.select(2, "a", SECOND)];
    store.put("a");
    let offered = selects.map(|holder| EntryAction::Offered(holder, "a"));
    assert_eq!(store.actions(), offered);
    store.release(selects[0]);
    assert_eq!(store.actions(), []);
    store.release(selects[1]);
    assert_eq!(store.actions(), [EntryAction::Offered(first_take, "a")]);
    assert_eq!(store.state.acknowledge(first_take, store.now), Ok(false));
    store.pass(SECOND);
    assert_eq!(store.actions(), [EntryAction::Nothing(second_take)]);
    assert_eq!(store.state.info().num_bytes, 0);
}

#[test]
fn a_lease_that_ends_returns_the_value_and_cannot_be_acknowledged() {
    let mut store = Store::new();
    store.put("a");
    let late = store.take(1, "a", Duration::ZERO);
    store.actions();
    let waiting = store.take(2, "a", LEASE.unwrap() * 2);
    store.pass(LEASE.unwrap());
    let returned = [
        EntryAction::Expired(late),
        EntryAction::Offered(waiting, "a"),
    ];
    assert_eq!(store.actions(), returned);
    for refused in [
        store.state.acknowledge(late, store.now).map(drop),
        store.state.renew(late, SECOND, store.now),
        store.state.corrupt(late),
    ] {
        assert!(matches!(refused, Err(Error::Timeout(_))), "{refused:?}");
    }
    assert_eq!(store.state.acknowledge(waiting, store.now), Ok(false));
}

#[test]
fn a_renewed_lease_goes_on() {
    let mut store = Store::new();
    store.put("a");
    let leased = store.take(1, "a", Duration::ZERO);
    store.pass(SECOND * 9);
    assert_eq!(store.state.renew(leased, SECOND * 5, store.now), Ok(()));
    store.pass(SECOND * 4);
    assert_eq!(store.state.acknowledge(leased, store.now), Ok(false));
}

#[test]
fn a_reservation_ends_by_time_but_not_while_bytes_are_written() {
    let mut store = Store::new();
    let late = store.reserve("a", 30, Duration::ZERO);
    store.state.begin_write(late);
    store.pass(RESERVATION * 2);
    assert!(store.state.is_reserved(late));
    store.state.end_write(late, store.now);
    store.actions();
    store.pass(RESERVATION);
    assert_eq!(store.actions(), [EntryAction::Expired(late)]);
    let later = store.reserve("a", 30, Duration::ZERO);
    assert_eq!(store.actions(), [EntryAction::Reserved(later)]);
    assert!(!store.commit(late, "old"));
    assert!(store.commit(later, "new"));
}

#[test]
fn a_lost_client_holds_nothing_and_others_go_on() {
    let mut store = Store::new();
    for content in ["a", "b"] {
        store.put(content);
    }
    let others = store.select(1, "b", Duration::ZERO);
    store.take(2, "a", Duration::ZERO);
    store.select(2, "b", Duration::ZERO);
    store.select(2, "missing", SECOND);
    let (holder, deadline) = (store.holder(2), None);
    let now = store.now;
    store.state.reserve(holder, &b"mine"[..], 30, deadline, now);
    store.actions();
    store.state.session_down(2, now);
    assert_eq!(store.exists(["a", "b", "mine"]), [true, true, false]);
    let info = store.state.info();
    assert_eq!(
        (info.num_leased, info.num_reserved, info.num_waiting),
        (0, 0, 0)
    );
    assert_eq!((info.num_bytes, info.num_clients), (60, 1));
    // A reservation, an open entry and a lease; a call that waited held nothing.
    assert_eq!((info.num_lost, info.num_expired), (3, 0));
    assert_eq!(store.state.delete([&b"b"[..]].into_iter(), now), (0, false));
    store.release(others);
    assert_eq!(store.state.delete([&b"b"[..]].into_iter(), now), (1, false));
}

#[test]
fn a_value_whose_time_has_passed_is_gone_for_all_but_those_that_hold_it() {
    let mut store = Store::new();
    let reserved = store.reserve("a", 30, Duration::ZERO);
    let (ttl, now) = (Some(SECOND), store.now);
    assert!(store.state.commit(reserved, ("a", 1, 0), ttl, now));
    let opened = store.select(1, "a", Duration::ZERO);
    store.pass(SECOND);
    assert!(!store.state.exists(b"a"));
    assert_eq!(store.state.info().num_bytes, 30);
    store.release(opened);
    assert_eq!(store.state.info().num_bytes, 0);
    assert_eq!(store.state.info().num_expired, 1);
}

#[test]
fn waits_bytes_and_calls_after_the_end_of_a_lease_are_counted() {
    let mut store = Store::new();
    store.select(1, "missing", Duration::ZERO);
    let taken = store.take(1, "a", SECOND);
    assert_eq!(store.state.info().num_waits, 1);
    store.actions();
    store.put("a");
    store.pass(SECOND * 10);
    let now = store.now;
    assert!(store.state.renew(taken, SECOND, now).is_err());
    assert!(store.state.acknowledge(taken, now).is_err());
    for content in ["b", "c"] {
        store.actions();
        store.put(content);
        store.take(1, content, Duration::ZERO);
    }
    store.take(1, "a", Duration::ZERO);
    store.actions();
    store.reserve("d", 30, Duration::ZERO);
    assert_eq!(store.state.info().num_waits, 1);
    store.reserve("d", 30, SECOND);
    let info = store.state.info();
    assert_eq!((info.num_waits, info.num_fenced), (2, 2));
    // Values of one byte.
    assert_eq!((info.committed_bytes, info.hit_bytes), (3, 4));
}

#[test]
fn a_value_that_a_reader_finds_changed_is_gone_and_counted_once() {
    let mut store = Store::new();
    store.put("a");
    let readers = [(); 2].map(|()| store.select(1, "a", Duration::ZERO));
    for reader in readers {
        assert_eq!(store.state.corrupt(reader), Ok(()));
    }
    assert!(!store.state.exists(b"a"));
    for reader in readers {
        store.release(reader);
    }
    let info = store.state.info();
    assert_eq!(
        (info.num_corrupt, info.num_values, info.num_bytes),
        (1, 0, 0)
    );
}

#[test]
fn a_client_cannot_hold_without_limit_or_begin_an_operation_twice() {
    let mut store = Store::new();
    let mut last = (1, 0);
    for _ in 0..HOLDS_CAP {
        last = store.select(1, "missing", SECOND);
    }
    let full = store.state.check_new((1, u64::MAX));
    assert!(matches!(full, Err(Error::Exhausted(_))), "{full:?}");
    assert_eq!(store.state.check_new((2, 1)), Ok(()));
    let twice = store.state.check_new(last);
    assert!(matches!(twice, Err(Error::Protocol(_))), "{twice:?}");
    store.release(last);
    assert_eq!(store.state.check_new((1, u64::MAX)), Ok(()));
}

#[test]
fn a_list_goes_through_all_values_by_pages() {
    let mut state = Entries::of_store(u64::MAX, None, RESERVATION);
    state.session_up(1);
    let now = Instant::now();
    let num_values = PAGE_ENTRIES as u64 * 2 + 5;
    for number in 0..num_values {
        let prefix = if number % 3 == 0 { "x" } else { "y" };
        let key = format!("{prefix}{number}");
        state.reserve((1, number), key.as_bytes(), 1, None, now);
        assert!(state.commit((1, number), ("", 1, 0), None, now));
    }
    let (mut listed, mut after) = (Vec::new(), Some(0));
    while let Some(from) = after {
        let (entries, next) = state.list(b"x", from);
        listed.extend(entries.into_iter().map(|entry| entry.key));
        after = next;
    }
    let unique: std::collections::HashSet<_> = listed.iter().collect();
    assert_eq!(listed.len() as u64, num_values.div_ceil(3));
    assert_eq!(unique.len(), listed.len());
}
