use std::time::Instant;

use super::*;

const SOON: Duration = Duration::from_secs(10);

pub(in crate::blocks::handoff) type Outcome = std::result::Result<(), String>;

/// Completed when the sender sends how it ended.
struct Late(Mutex<Receiver<Outcome>>);

impl DeviceEvent for Late {
    fn wait(&self) -> Outcome {
        lock(&self.0).recv().unwrap_or(Ok(()))
    }
}

pub(in crate::blocks::handoff) fn late() -> (Sender<Outcome>, Arc<dyn DeviceEvent>) {
    let (complete, completed) = channel();
    (complete, Arc::new(Late(Mutex::new(completed))))
}

#[test]
fn events_are_completed_in_the_order_of_the_calls_and_a_failure_is_passed_on() {
    let waiter = EventWaiter::new();
    let (seen, ended) = channel();
    let (first, one) = late();
    let (second, two) = late();
    for (number, event) in [one, two].into_iter().enumerate() {
        let seen = seen.clone();
        let then = move |completed| seen.send((number, completed)).expect("it is received");
        waiter.after(event, Box::new(then));
    }
    second.send(Err("broken".to_owned())).expect("it waits");
    let pause = Duration::from_millis(20);
    assert_eq!(ended.recv_timeout(pause), Err(RecvTimeoutError::Timeout));
    first.send(Ok(())).expect("it waits");
    assert_eq!(ended.recv_timeout(SOON), Ok((0, Ok(()))));
    let failed = Err("broken".to_owned());
    assert_eq!(ended.recv_timeout(SOON), Ok((1, failed)));
}

#[test]
fn without_events_there_is_no_thread() {
    let waiter = EventWaiter::new();
    assert!(lock(&waiter.running).is_none());
    waiter.close();
}

#[test]
fn nothing_is_called_after_a_close() {
    let waiter = EventWaiter::new();
    let (seen, ended) = channel::<()>();
    let (complete, event) = late();
    let then = move |_| seen.send(()).expect("it is received");
    waiter.after(event, Box::new(then));
    let is_closing = Arc::clone(&waiter.is_closing);
    let completes = std::thread::spawn(move || {
        while !is_closing.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // It may be closed before it has waited.
        drop(complete.send(Ok(())));
    });
    waiter.close();
    completes.join().expect("it sent");
    assert_eq!(
        ended.recv_timeout(SOON),
        Err(RecvTimeoutError::Disconnected)
    );
    waiter.after(late().1, Box::new(|_| panic!("it was closed")));
    assert!(matches!(waiter.check(), Err(Error::Closed(_))));
}

#[test]
fn a_device_that_hangs_does_not_hang_the_close() {
    let waiter = EventWaiter::new();
    let (_complete, event) = late();
    waiter.after(event, Box::new(|_| ()));
    let began = Instant::now();
    waiter.close();
    assert!(began.elapsed() < SOON);
}

#[test]
fn a_fork_waits_for_nothing_and_joins_no_thread() {
    let mut waiter = EventWaiter::new();
    let (_complete, event) = late();
    waiter.after(event, Box::new(|_| ()));
    waiter.process = Process::another();
    let began = Instant::now();
    waiter.close();
    assert!(began.elapsed() < CLOSE_WITHIN);
    assert!(matches!(waiter.check(), Err(Error::Closed(_))));
}

/// An event whose wait panics, and with it the thread.
struct Broken;

impl DeviceEvent for Broken {
    fn wait(&self) -> Outcome {
        panic!("the test's event is broken");
    }
}

#[test]
fn what_comes_after_the_thread_has_ended_fails_at_once() {
    let waiter = EventWaiter::new();
    let (seen, ended) = channel();
    waiter.after(Arc::new(Broken), Box::new(|_| ()));
    let failed = loop {
        let seen = seen.clone();
        let then = move |completed| drop(seen.send(completed));
        // It is forgotten if it comes before the thread has ended.
        waiter.after(late().1, Box::new(then));
        if let Ok(completed) = ended.try_recv() {
            break completed;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(failed.is_err_and(|reason| reason.contains("has ended")));
}
