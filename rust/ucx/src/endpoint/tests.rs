use std::time::{Duration, Instant};

use super::*;
use crate::Token;
use crate::context::tests::context;
use crate::event::Event;
use crate::request::{self, Keep};

const SOON: Duration = Duration::from_secs(10);
const FLUSH: Token = 1;
const COPY: Token = 2;

/// A worker with an endpoint to itself that has connected, or None where there is no UCX.
fn connected() -> Option<(Worker, EndpointId)> {
    let context = context()?;
    let worker = Worker::new(&context).expect("worker");
    let address = worker.address().expect("address");
    // SAFETY: the address is a worker's.
    let endpoint = unsafe { worker.connect(&address) }.expect("endpoint");
    worker.flush(endpoint, FLUSH).expect("flush");
    until(&worker, |event| {
        matches!(event, Event::Done { token: FLUSH, .. })
    });
    Some((worker, endpoint))
}

fn until(worker: &Worker, is_it: impl Fn(&Event) -> bool) {
    let deadline = Instant::now() + SOON;
    loop {
        worker.progress();
        while let Some(event) = worker.next_event() {
            if is_it(&event) {
                return;
            }
        }
        assert!(Instant::now() < deadline, "it has not happened");
    }
}

#[test]
fn an_endpoint_is_not_closed_before_a_copy_of_what_it_maps_has_ended() {
    let Some((worker, id)) = connected() else {
        return;
    };
    let inner = &worker.inner;
    let endpoint = inner.endpoint(id, "test").expect("open");
    assert!(endpoint.can_leave());
    let copy = request::begin_copy(inner, &endpoint, (COPY, "test"), Keep::Nothing);
    assert!(!endpoint.can_leave(), "the GPU still reads what it maps");
    worker.close(id);
    assert!(endpoint.phase.get() == Phase::Leaving);
    request::finish_copy(Box::new(copy), sys::UCS_OK);
    until(&worker, |event| {
        matches!(event, Event::Done { token: COPY, .. })
    });
    until(&worker, |event| matches!(event, Event::Closed { .. }));
}

#[test]
fn the_progress_of_an_endpoint_counts_what_is_in_flight_and_what_has_ended() {
    let Some((worker, id)) = connected() else {
        return;
    };
    let progress = |in_flight, ended| Some(EndpointProgress { in_flight, ended });
    assert_eq!(
        worker.progress_of(id),
        progress(0, 1),
        "its flush has ended"
    );
    let endpoint = worker.inner.endpoint(id, "test").expect("open");
    worker.inner.state.op_begins(&endpoint);
    assert_eq!(worker.progress_of(id), progress(1, 1));
    let copy = request::begin_copy(&worker.inner, &endpoint, (COPY, "test"), Keep::Nothing);
    assert_eq!(
        worker.progress_of(id),
        progress(1, 1),
        "a copy ends by itself"
    );
    request::finish_copy(Box::new(copy), sys::UCS_OK);
    worker.inner.state.op_ends(&endpoint);
    assert_eq!(worker.progress_of(id), progress(0, 3));
    worker.close(id);
    until(&worker, |event| matches!(event, Event::Closed { .. }));
}
