//! The rules of a lookup buffer.

mod model;

use super::*;

const CAPACITY: u64 = 100;
const CLIENT: SessionKey = 1;

/// A buffer whose operations are of one client. The content of an entry is its own operation.
struct Buffer {
    state: Entries<u64>,
    now: Instant,
    last_operation: u64,
}

type Action = EntryAction<u64>;

pub(super) fn key(tokens: &[i64]) -> Key {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    bytes.collect()
}

impl Buffer {
    fn new() -> Self {
        let mut state = Entries::of_buffer(CAPACITY);
        state.session_up(CLIENT);
        Self {
            state,
            now: Instant::now(),
            last_operation: 0,
        }
    }

    fn operation(&mut self) -> u64 {
        self.last_operation += 1;
        self.last_operation
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.state.next_action()).collect()
    }

    fn reserve_until(&mut self, tokens: &[i64], num_bytes: u64, deadline: Option<Instant>) -> u64 {
        let operation = self.operation();
        let holder = (CLIENT, operation);
        (self.state).reserve(holder, key(tokens), num_bytes, deadline, self.now);
        operation
    }

    fn reserve(&mut self, num_bytes: u64) -> u64 {
        self.reserve_until(&[1], num_bytes, None)
    }

    fn commit(&mut self, insert: u64) {
        let content = (insert, 0, 0);
        assert!((self.state).commit((CLIENT, insert), content, None, self.now));
    }

    fn insert(&mut self, tokens: &[i64]) -> u64 {
        let insert = self.reserve_until(tokens, 10, None);
        self.commit(insert);
        insert
    }

    fn select_until(&mut self, query: &Query<Key>, deadline: Option<Instant>) -> u64 {
        let operation = self.operation();
        let (holder, access) = ((CLIENT, operation), Access::Lease(None));
        self.state
            .select(holder, query.clone(), access, deadline, self.now);
        operation
    }

    fn select(&mut self, tokens: &[i64]) -> u64 {
        self.select_until(&Query::LongestPrefix(key(tokens)), None)
    }

    fn release(&mut self, operation: u64) {
        self.state.release((CLIENT, operation), self.now);
    }

    fn is_waiting(&self, operation: u64) -> bool {
        self.state.is_waiting((CLIENT, operation))
    }
}

fn reserved(insert: u64) -> Action {
    EntryAction::Reserved((CLIENT, insert))
}

fn offered(select: u64, insert: u64) -> Action {
    EntryAction::Offered((CLIENT, select), insert)
}

fn nothing(select: u64) -> Action {
    EntryAction::Nothing((CLIENT, select))
}

fn full(insert: u64, num_bytes: u64, num_taken: u64) -> Action {
    let text = format!(
        "no place for {num_bytes} bytes in time: {num_taken} of {CAPACITY} are taken; nothing was inserted, the buffer is usable"
    );
    EntryAction::Refused((CLIENT, insert), Error::Exhausted(text))
}

#[test]
fn an_entry_is_invisible_until_it_is_committed() {
    let mut buffer = Buffer::new();
    let entry = buffer.reserve_until(&[1, 2], 10, None);
    assert_eq!(buffer.actions(), [reserved(entry)]);
    let waiting = buffer.select(&[1]);
    assert_eq!(buffer.actions(), []);
    buffer.commit(entry);
    assert_eq!(buffer.actions(), [offered(waiting, entry)]);
}

#[test]
fn a_commit_wakes_the_select_that_has_waited_longest() {
    let mut buffer = Buffer::new();
    let other = buffer.select(&[9]);
    let (first, second) = (buffer.select(&[1]), buffer.select(&[1]));
    let (a, b) = (buffer.insert(&[1]), buffer.insert(&[1]));
    let expected = [
        reserved(a),
        offered(first, a),
        reserved(b),
        offered(second, b),
    ];
    assert_eq!(buffer.actions(), expected);
    assert!(buffer.is_waiting(other) && !buffer.is_waiting(first));
}

#[test]
fn a_query_without_tokens_gets_the_oldest_entry() {
    let mut buffer = Buffer::new();
    let a = buffer.insert(&[5]);
    buffer.insert(&[1]);
    buffer.actions();
    let select = buffer.select_until(&Query::Oldest, None);
    assert_eq!(buffer.actions(), [offered(select, a)]);
}

#[test]
fn the_age_of_an_entry_is_that_of_its_insert_and_not_of_its_commit() {
    let mut buffer = Buffer::new();
    let (first, second) = (buffer.reserve(10), buffer.reserve(10));
    buffer.commit(second);
    buffer.commit(first);
    buffer.actions();
    let selects = [
        buffer.select(&[1]),
        buffer.select_until(&Query::Oldest, None),
    ];
    let expected = [offered(selects[0], first), offered(selects[1], second)];
    assert_eq!(buffer.actions(), expected);
}

#[test]
fn an_entry_that_goes_back_keeps_its_age() {
    let mut buffer = Buffer::new();
    let a = buffer.insert(&[1]);
    buffer.insert(&[1]);
    let select = buffer.select(&[1]);
    buffer.release(select);
    buffer.actions();
    let again = buffer.select(&[1]);
    assert_eq!(buffer.actions(), [offered(again, a)]);
}

#[test]
fn an_entry_that_goes_back_is_offered_to_a_waiting_select() {
    let mut buffer = Buffer::new();
    let a = buffer.insert(&[1]);
    let select = buffer.select(&[1]);
    let waiting = buffer.select(&[1]);
    buffer.actions();
    buffer.release(select);
    assert_eq!(buffer.actions(), [offered(waiting, a)]);
}

#[test]
fn a_leased_entry_keeps_its_bytes_until_it_is_acknowledged() {
    let mut buffer = Buffer::new();
    let large = buffer.reserve(CAPACITY);
    buffer.commit(large);
    let select = buffer.select(&[1]);
    buffer.actions();
    let waiting = buffer.reserve(1);
    assert_eq!(buffer.actions(), []);
    let acknowledged = buffer.state.acknowledge((CLIENT, select), buffer.now);
    assert_eq!(acknowledged, Ok(false));
    assert_eq!(buffer.actions(), [reserved(waiting)]);
}

#[test]
fn a_lost_client_keeps_what_it_has_consumed_and_gives_the_rest_back() {
    let mut buffer = Buffer::new();
    let (kept, returned) = (buffer.insert(&[1]), buffer.insert(&[2]));
    let (select, other) = (buffer.select(&[1]), buffer.select(&[2]));
    buffer.actions();
    buffer.state.consume((CLIENT, select)).unwrap();
    assert_eq!(buffer.state.num_consumed(), 1);
    assert_eq!(buffer.state.is_consumed((CLIENT, other)), Some(false));
    buffer.state.session_down(CLIENT, buffer.now);
    buffer.state.session_up(CLIENT);
    let again = [buffer.select(&[2]), buffer.select(&[1])];
    assert_eq!(buffer.actions(), [offered(again[0], returned)]);
    assert!(buffer.is_waiting(again[1]), "{kept} has come back");
    assert_eq!(buffer.state.num_consumed(), 1);
}

#[test]
fn an_entry_that_a_client_gives_back_after_it_has_consumed_it_does_not_count_as_consumed() {
    let mut buffer = Buffer::new();
    let entry = buffer.insert(&[1]);
    let select = buffer.select(&[1]);
    buffer.state.consume((CLIENT, select)).unwrap();
    buffer.release(select);
    assert_eq!(buffer.state.num_consumed(), 0);
    let again = buffer.select(&[1]);
    assert_eq!(buffer.actions().last(), Some(&offered(again, entry)));
}

#[test]
fn inserts_are_granted_in_the_order_of_their_calls() {
    let mut buffer = Buffer::new();
    let first = buffer.reserve(CAPACITY);
    let (large, small) = (buffer.reserve(60), buffer.reserve(1));
    buffer.actions();
    buffer.release(first);
    assert_eq!(buffer.actions(), [reserved(large), reserved(small)]);
}

#[test]
fn a_cancelled_insert_lets_the_next_one_in() {
    let mut buffer = Buffer::new();
    buffer.reserve(50);
    let (large, small) = (buffer.reserve(60), buffer.reserve(50));
    buffer.actions();
    buffer.release(large);
    assert_eq!(buffer.actions(), [reserved(small)]);
}

#[test]
fn an_entry_that_can_never_fit_is_refused_with_both_numbers() {
    let refused = Buffer::new().state.check_size(CAPACITY + 1);
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("101 bytes") && text.contains("100 bytes"),
        "{text}"
    );
}

#[test]
fn no_entry_is_evicted() {
    let mut buffer = Buffer::new();
    for token in 0..10 {
        buffer.insert(&[token]);
    }
    buffer.actions();
    buffer.reserve(10);
    assert_eq!(buffer.actions(), []);
    assert_eq!(buffer.state.info().num_evicted, 0);
}

#[test]
fn waiting_operations_end_at_their_deadline_and_leave_nothing() {
    let mut buffer = Buffer::new();
    let at = buffer.now + SECOND;
    buffer.reserve(CAPACITY);
    let late = buffer.reserve_until(&[1], 10, Some(at));
    let select = buffer.select_until(&Query::Oldest, Some(at));
    buffer.actions();
    buffer.state.expire(buffer.now);
    assert_eq!(buffer.actions(), []);
    assert_eq!(buffer.state.next_deadline(), Some(at));
    buffer.state.expire(at);
    let expected = [full(late, 10, CAPACITY), nothing(select)];
    assert_eq!(buffer.actions(), expected);
    assert_eq!(buffer.state.info().num_waiting, 0);
    assert_eq!(buffer.state.next_deadline(), None);
}

#[test]
fn an_operation_without_time_ends_at_once() {
    let mut buffer = Buffer::new();
    let now = Some(buffer.now);
    let select = buffer.select_until(&Query::Oldest, now);
    assert_eq!(buffer.actions(), [nothing(select)]);
    buffer.insert(&[1]);
    let late = buffer.reserve_until(&[1], CAPACITY, now);
    assert_eq!(buffer.actions().last(), Some(&full(late, CAPACITY, 10)));
}
