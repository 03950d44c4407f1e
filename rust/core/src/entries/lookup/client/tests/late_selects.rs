//! Selects whose entry is on its way when their deadline passes. Their reactors run in a time of their own.

use std::time::Duration;

use super::*;
use crate::clock::{advance, now};

const TIMEOUT: Duration = Duration::from_millis(300);
const TICK: Duration = Duration::from_millis(40);
/// Longer than a server that is silent has.
const RESPONSIVE: Duration = Duration::from_millis(500);
const LATEST: Duration = Duration::from_secs(5);
/// So much that it takes longer.
const LEN: usize = 256 << 20;

#[test]
fn a_late_select_at_a_responsive_server_ends_without_its_entry_which_goes_back_and_the_buffer_goes_on()
 {
    let server = serve(vec![entry(Meta::default(), LEN)]);
    let remote = connect(&[&server]);
    let begun = now();
    let late = remote.select(LookupQuery::Any, Some(TIMEOUT), Then::GoOn);
    let late = late.unwrap();
    while !late.is_completed() {
        remote.manual_round();
        server.manual_round();
        advance(TICK);
    }
    assert!(matches!(late.result(), Some(Ok(None))));
    let waited = now().saturating_duration_since(begun + TIMEOUT);
    assert!(waited >= RESPONSIVE && waited <= LATEST, "{waited:?}");
    let servers = [server];
    run_until(&remote, &servers, || {
        held(&servers[0]) == (Some(1), Some(0))
    });
    assert_eq!(remote.info().state, "open");
    let next = select(&remote);
    let delivery = end(&remote, &servers, &next).unwrap().expect("the entry");
    delivery.consume();
}
