mod model;

use std::time::Duration;

use super::*;

const CAPACITY: u64 = 100;

/// Its operations wait as their own tickets.
type TestStore = Store<char, Ticket, Ticket>;
type TestAction = StoreAction<char, Ticket, Ticket>;

fn store() -> TestStore {
    Store::new(CAPACITY)
}

fn actions(store: &mut TestStore) -> Vec<TestAction> {
    std::iter::from_fn(|| store.next_action()).collect()
}

fn reserve_until(
    store: &mut TestStore,
    num_bytes: u64,
    deadline: Option<Instant>,
    now: Instant,
) -> Result<Ticket> {
    let insert = store.next_ticket + 1;
    store.reserve(num_bytes, deadline, now, insert)
}

fn reserve(store: &mut TestStore, num_bytes: u64) -> Ticket {
    reserve_until(store, num_bytes, None, Instant::now()).unwrap()
}

fn insert(store: &mut TestStore, tokens: &[i64], content: char) -> Ticket {
    let ticket = reserve(store, 10);
    store.commit(ticket, tokens.into(), content);
    ticket
}

fn select_until(
    store: &mut TestStore,
    query: LookupQuery,
    deadline: Option<Instant>,
    now: Instant,
) -> Ticket {
    let select = store.next_ticket + 1;
    store.select(query, deadline, now, select)
}

fn select(store: &mut TestStore, tokens: &[i64]) -> Ticket {
    let query = LookupQuery::Tokens(tokens.into());
    select_until(store, query, None, Instant::now())
}

fn grant(insert: Ticket) -> TestAction {
    StoreAction::Insert(insert, Ok(insert))
}

fn full(insert: Ticket, num_bytes: u64, num_taken: u64) -> TestAction {
    let text = format!(
        "no place for {num_bytes} bytes in time: {num_taken} of {CAPACITY} are taken; nothing was inserted, the buffer is usable"
    );
    StoreAction::Insert(insert, Err(Error::Exhausted(text)))
}

fn miss(select: Ticket) -> TestAction {
    StoreAction::Select(select, None)
}

fn deliver(select: Ticket, entry: Ticket, content: char) -> TestAction {
    StoreAction::Select(select, Some((entry, content)))
}

#[test]
fn an_entry_is_invisible_until_it_is_committed() {
    let mut store = store();
    let entry = reserve(&mut store, 10);
    assert_eq!(actions(&mut store), [grant(entry)]);
    let waiting = select(&mut store, &[1]);
    assert_eq!(actions(&mut store), []);
    store.commit(entry, [1, 2].into(), 'a');
    assert_eq!(actions(&mut store), [deliver(waiting, entry, 'a')]);
}

#[test]
fn a_commit_wakes_the_select_that_has_waited_longest() {
    let mut store = store();
    let other = select(&mut store, &[9]);
    let (first, second) = (select(&mut store, &[1]), select(&mut store, &[1]));
    let a = insert(&mut store, &[1], 'a');
    let b = insert(&mut store, &[1], 'b');
    let expected = [
        grant(a),
        deliver(first, a, 'a'),
        grant(b),
        deliver(second, b, 'b'),
    ];
    assert_eq!(actions(&mut store), expected);
    assert!(store.cancel(other) && !store.cancel(first));
}

#[test]
fn any_selects_the_oldest_entry() {
    let mut store = store();
    let a = insert(&mut store, &[5], 'a');
    insert(&mut store, &[1], 'b');
    actions(&mut store);
    let any = select_until(&mut store, LookupQuery::Any, None, Instant::now());
    assert_eq!(actions(&mut store), [deliver(any, a, 'a')]);
}

#[test]
fn an_entry_that_is_put_back_keeps_its_age() {
    let mut store = store();
    let a = insert(&mut store, &[1], 'a');
    insert(&mut store, &[1], 'b');
    select(&mut store, &[1]);
    store.release(a);
    actions(&mut store);
    let again = select(&mut store, &[1]);
    assert_eq!(actions(&mut store), [deliver(again, a, 'a')]);
}

#[test]
fn an_entry_that_is_put_back_goes_to_a_waiting_select() {
    let mut store = store();
    let a = insert(&mut store, &[1], 'a');
    select(&mut store, &[1]);
    let waiting = select(&mut store, &[1]);
    actions(&mut store);
    store.release(a);
    assert_eq!(actions(&mut store), [deliver(waiting, a, 'a')]);
}

#[test]
fn a_leased_entry_keeps_its_bytes_until_it_is_consumed() {
    let mut store = store();
    let large = reserve(&mut store, CAPACITY);
    store.commit(large, [1].into(), 'a');
    select(&mut store, &[1]);
    actions(&mut store);
    let waiting = reserve(&mut store, 1);
    assert_eq!(actions(&mut store), []);
    store.settle(large, true);
    assert_eq!(actions(&mut store), [grant(waiting)]);
}

#[test]
fn inserts_are_granted_in_the_order_of_their_calls() {
    let mut store = store();
    let first = reserve(&mut store, CAPACITY);
    let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 1));
    actions(&mut store);
    store.release(first);
    let expected = [grant(large), grant(small)];
    assert_eq!(actions(&mut store), expected);
}

#[test]
fn a_cancelled_insert_lets_the_next_one_in() {
    let mut store = store();
    reserve(&mut store, 50);
    let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 50));
    actions(&mut store);
    assert!(store.cancel(large));
    assert_eq!(actions(&mut store), [grant(small)]);
}

#[test]
fn an_entry_that_can_never_fit_is_refused_with_both_numbers() {
    let refused = reserve_until(&mut store(), CAPACITY + 1, None, Instant::now());
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("101 bytes") && text.contains("100 bytes"),
        "{text}"
    );
}

#[test]
fn waiting_operations_end_at_their_deadline_and_leave_nothing() {
    let mut store = store();
    let (now, at) = (Instant::now(), Instant::now() + Duration::from_secs(1));
    reserve(&mut store, CAPACITY);
    let late = reserve_until(&mut store, 10, Some(at), now).unwrap();
    let select = select_until(&mut store, LookupQuery::Any, Some(at), now);
    actions(&mut store);
    store.expire(now);
    assert_eq!(actions(&mut store), []);
    assert_eq!(store.next_deadline(), Some(at));
    store.expire(at);
    let expected = [full(late, 10, CAPACITY), miss(select)];
    assert_eq!(actions(&mut store), expected);
    assert!(store.inserts.is_empty() && store.selects.is_empty());
    assert_eq!(store.next_deadline(), None);
}

#[test]
fn an_operation_without_time_ends_at_once() {
    let mut store = store();
    let now = Instant::now();
    let nothing = select_until(&mut store, LookupQuery::Any, Some(now), now);
    assert_eq!(actions(&mut store), [miss(nothing)]);
    insert(&mut store, &[1], 'a');
    let late = reserve_until(&mut store, CAPACITY, Some(now), now).unwrap();
    assert_eq!(actions(&mut store).last(), Some(&full(late, CAPACITY, 10)));
}
