use std::time::Duration;

use super::*;

const CAPACITY: u64 = 100;

fn store() -> Store<char> {
    Store::new(CAPACITY)
}

fn actions(store: &mut Store<char>) -> Vec<StoreAction<char>> {
    std::iter::from_fn(|| store.next_action()).collect()
}

fn reserve(store: &mut Store<char>, num_bytes: u64) -> Ticket {
    store.reserve(num_bytes, None, Instant::now()).unwrap()
}

fn insert(store: &mut Store<char>, tokens: &[i64], content: char) -> Ticket {
    let ticket = reserve(store, 10);
    store.commit(ticket, tokens.into(), content);
    ticket
}

fn select(store: &mut Store<char>, tokens: &[i64]) -> Ticket {
    store.select(LookupQuery::Tokens(tokens.into()), None, Instant::now())
}

fn deliver(select: Ticket, entry: Ticket, content: char) -> StoreAction<char> {
    StoreAction::Deliver {
        select,
        entry,
        content,
    }
}

#[test]
fn an_entry_is_invisible_until_it_is_committed() {
    let mut store = store();
    let entry = reserve(&mut store, 10);
    assert_eq!(actions(&mut store), [StoreAction::Grant(entry)]);
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
        StoreAction::Grant(a),
        deliver(first, a, 'a'),
        StoreAction::Grant(b),
        deliver(second, b, 'b'),
    ];
    assert_eq!(actions(&mut store), expected);
    assert!(store.cancel(other) && !store.cancel(first));
}

#[test]
fn any_takes_the_oldest() {
    let mut store = store();
    let a = insert(&mut store, &[5], 'a');
    insert(&mut store, &[1], 'b');
    actions(&mut store);
    let any = store.select(LookupQuery::Any, None, Instant::now());
    assert_eq!(actions(&mut store), [deliver(any, a, 'a')]);
}

#[test]
fn an_entry_that_is_put_back_keeps_its_age() {
    let mut store = store();
    let a = insert(&mut store, &[1], 'a');
    insert(&mut store, &[1], 'b');
    select(&mut store, &[1]);
    store.put_back(a);
    actions(&mut store);
    let again = select(&mut store, &[1]);
    assert_eq!(actions(&mut store), [deliver(again, a, 'a')]);
}

#[test]
fn an_entry_that_is_put_back_goes_to_who_waits() {
    let mut store = store();
    let a = insert(&mut store, &[1], 'a');
    select(&mut store, &[1]);
    let waiting = select(&mut store, &[1]);
    actions(&mut store);
    store.put_back(a);
    assert_eq!(actions(&mut store), [deliver(waiting, a, 'a')]);
}

#[test]
fn a_leased_entry_takes_its_bytes_until_it_is_dropped() {
    let mut store = store();
    let large = reserve(&mut store, CAPACITY);
    store.commit(large, [1].into(), 'a');
    select(&mut store, &[1]);
    actions(&mut store);
    let waiting = reserve(&mut store, 1);
    assert_eq!(actions(&mut store), []);
    store.drop_entry(large);
    assert_eq!(actions(&mut store), [StoreAction::Grant(waiting)]);
}

#[test]
fn inserts_are_granted_in_the_order_of_their_calls() {
    let mut store = store();
    let first = reserve(&mut store, CAPACITY);
    let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 1));
    actions(&mut store);
    assert!(store.abandon(first));
    let expected = [StoreAction::Grant(large), StoreAction::Grant(small)];
    assert_eq!(actions(&mut store), expected);
}

#[test]
fn an_insert_that_is_given_up_lets_the_next_one_in() {
    let mut store = store();
    reserve(&mut store, 50);
    let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 50));
    actions(&mut store);
    assert!(store.abandon(large));
    assert_eq!(actions(&mut store), [StoreAction::Grant(small)]);
}

#[test]
fn an_entry_that_can_never_fit_is_refused_with_both_numbers() {
    let refused = store().reserve(CAPACITY + 1, None, Instant::now());
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("101 bytes") && text.contains("100 bytes"),
        "{text}"
    );
}

#[test]
fn what_waits_ends_at_its_deadline_and_leaves_nothing() {
    let mut store = store();
    let (now, at) = (Instant::now(), Instant::now() + Duration::from_secs(1));
    reserve(&mut store, CAPACITY);
    let late = store.reserve(10, Some(at), now).unwrap();
    let select = store.select(LookupQuery::Any, Some(at), now);
    actions(&mut store);
    store.expire(now);
    assert_eq!(actions(&mut store), []);
    assert_eq!(store.next_deadline(), Some(at));
    store.expire(at);
    let expected = [StoreAction::Full(late), StoreAction::Nothing(select)];
    assert_eq!(actions(&mut store), expected);
    let counts = store.counts();
    assert_eq!(
        (counts.num_waiting_inserts, counts.num_waiting_selects),
        (0, 0)
    );
    assert_eq!(store.next_deadline(), None);
}

#[test]
fn a_deadline_that_has_come_asks_once() {
    let mut store = store();
    let now = Instant::now();
    let nothing = store.select(LookupQuery::Any, Some(now), now);
    assert_eq!(actions(&mut store), [StoreAction::Nothing(nothing)]);
    insert(&mut store, &[1], 'a');
    let full = store.reserve(CAPACITY, Some(now), now).unwrap();
    assert_eq!(actions(&mut store).last(), Some(&StoreAction::Full(full)));
}
