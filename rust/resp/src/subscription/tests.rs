use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use super::*;
use crate::Connection;

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(30);

/// A subscription, and the server's end of its connection.
fn pair(timeout: Duration) -> (Subscription, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut connection = Connection::connect("127.0.0.1", port, timeout, None).unwrap();
    let server = listener.accept().unwrap().0;
    server.set_read_timeout(Some(LONG)).unwrap();
    server.set_nodelay(true).unwrap();
    (connection.subscribe().unwrap(), server)
}

fn expect(server: &mut TcpStream, command: &str) {
    let mut received = vec![0; encoded(command).len()];
    server.read_exact(&mut received).unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), encoded(command));
}

/// A command, or what has the same form, a message.
fn encoded(command: &str) -> String {
    let words: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
    let mut out = Vec::new();
    encode(&mut out, &words);
    String::from_utf8(out).unwrap()
}

fn send(server: &mut TcpStream, message: &str) {
    server.write_all(encoded(message).as_bytes()).unwrap();
}

fn wait(waiter: &Waiter, timeout: Duration) -> Result<Waited> {
    waiter.wait(Some(Instant::now() + timeout))
}

fn subscribed(subscription: &Subscription, server: &mut TcpStream, channel: &str) -> Waiter {
    let waiter = subscription.listen(channel.as_bytes()).unwrap();
    expect(server, &format!("SUBSCRIBE {channel}"));
    assert_eq!(waiter.begin(), Ok(false));
    send(server, &format!("subscribe {channel} 1"));
    assert_eq!(wait(&waiter, LONG), Ok(Waited::Changed));
    assert_eq!(waiter.begin(), Ok(true));
    waiter
}

#[test]
fn a_message_wakes_the_waiters_of_its_channel_alone() {
    let (subscription, mut server) = pair(LONG);
    let one = subscribed(&subscription, &mut server, "one");
    let other = subscribed(&subscription, &mut server, "other");
    let second = subscription.listen(b"one").unwrap();
    assert_eq!(second.begin(), Ok(true));
    send(&mut server, "message one x");
    assert_eq!(wait(&other, SHORT), Ok(Waited::TimedOut));
    assert_eq!(wait(&second, LONG), Ok(Waited::Changed));
    assert_eq!(wait(&one, LONG), Ok(Waited::Changed));
    assert_eq!(one.begin(), Ok(true));
    assert_eq!(wait(&one, SHORT), Ok(Waited::TimedOut));
}

fn wait_until_driven(subscription: &Subscription) {
    let is_driven = || {
        // A waiter tries with this lock held: the question below cannot be in its way.
        let _state = subscription.0.state();
        subscription.0.try_drive().is_none()
    };
    while !is_driven() {
        thread::yield_now();
    }
}

/// Runs with a waiter that drives and another one that sleeps.
fn with_driver_and_sleeper(
    run: impl FnOnce(&mut TcpStream, [thread::ScopedJoinHandle<'_, Result<Waited>>; 2]),
) {
    let (subscription, mut server) = pair(LONG);
    let [driver, sleeper] =
        ["driver", "sleeper"].map(|name| subscribed(&subscription, &mut server, name));
    thread::scope(|scope| {
        let driving = scope.spawn(|| wait(&driver, LONG));
        wait_until_driven(&subscription);
        let sleeping = scope.spawn(|| wait(&sleeper, LONG));
        while subscription.0.state().sleeping.is_empty() {
            thread::yield_now();
        }
        run(&mut server, [driving, sleeping]);
    });
}

#[test]
fn the_driver_wakes_a_waiter_that_sleeps_and_drives_on() {
    with_driver_and_sleeper(|server, [driving, sleeping]| {
        send(server, "message sleeper x");
        assert_eq!(sleeping.join().unwrap(), Ok(Waited::Changed));
        assert!(!driving.is_finished());
        send(server, "message driver x");
        assert_eq!(driving.join().unwrap(), Ok(Waited::Changed));
    });
}

#[test]
fn a_waiter_that_sleeps_drives_when_the_driver_has_left() {
    with_driver_and_sleeper(|server, [driving, sleeping]| {
        send(server, "message driver x");
        assert_eq!(driving.join().unwrap(), Ok(Waited::Changed));
        send(server, "message sleeper x");
        assert_eq!(sleeping.join().unwrap(), Ok(Waited::Changed));
    });
}

#[test]
fn a_channel_without_a_waiter_is_left_when_another_one_is_subscribed_to() {
    let (subscription, mut server) = pair(LONG);
    drop(subscribed(&subscription, &mut server, "one"));
    let again = subscription.listen(b"one").unwrap();
    assert_eq!(again.begin(), Ok(true));
    let other = subscribed(&subscription, &mut server, "other");
    drop((again, other));
    let _third = subscription.listen(b"third").unwrap();
    let mut left = ["UNSUBSCRIBE one", "UNSUBSCRIBE other"].map(encoded);
    let mut received = vec![0; left.concat().len()];
    server.read_exact(&mut received).unwrap();
    if received.starts_with(left[1].as_bytes()) {
        left.reverse();
    }
    assert_eq!(String::from_utf8(received).unwrap(), left.concat());
    expect(&mut server, "SUBSCRIBE third");
}

#[test]
fn a_waiter_that_comes_back_waits_for_the_answer_to_its_own_subscribe() {
    let (subscription, mut server) = pair(LONG);
    drop(subscription.listen(b"one").unwrap());
    let other = subscription.listen(b"other").unwrap();
    let again = subscription.listen(b"one").unwrap();
    for command in ["SUBSCRIBE one", "UNSUBSCRIBE one"] {
        expect(&mut server, command);
    }
    expect(&mut server, "SUBSCRIBE other");
    expect(&mut server, "SUBSCRIBE one");
    send(&mut server, "subscribe one 1");
    assert_eq!(wait(&again, LONG), Ok(Waited::Changed));
    assert_eq!(again.begin(), Ok(false));
    send(&mut server, "unsubscribe one 0");
    send(&mut server, "subscribe other 1");
    assert_eq!(wait(&other, LONG), Ok(Waited::Changed));
    send(&mut server, "subscribe one 2");
    assert_eq!(wait(&again, LONG), Ok(Waited::Changed));
    assert_eq!(again.begin(), Ok(true));
}

#[test]
fn a_silent_server_is_probed_and_is_lost_when_it_does_not_answer() {
    let (subscription, mut server) = pair(Duration::from_secs(1));
    let waiter = subscribed(&subscription, &mut server, "one");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waiter.wait(None));
        expect(&mut server, "PING");
        send(&mut server, "pong x");
        expect(&mut server, "PING");
        assert!(matches!(waiting.join().unwrap(), Err(Error::Timeout(_))));
    });
    let mut rest = Vec::new();
    server.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    assert!(matches!(waiter.begin(), Err(Error::Timeout(_))));
    assert!(subscription.has_received());
    assert!(subscription.listen(b"other").is_err());
}

#[test]
fn all_waiters_learn_that_the_subscription_has_ended() {
    for is_closed_here in [false, true] {
        let (subscription, mut server) = pair(LONG);
        let waiters = ["a", "b", "c"].map(|name| subscribed(&subscription, &mut server, name));
        thread::scope(|scope| {
            let waits = waiters.each_ref();
            let waits = waits.map(|waiter| scope.spawn(|| waiter.wait(None)));
            if is_closed_here {
                subscription.close();
            } else {
                drop(server);
            }
            for wait in waits {
                assert!(matches!(wait.join().unwrap(), Err(Error::Lost(_))));
            }
        });
    }
}

#[test]
fn a_command_of_another_thread_has_its_own_time_for_an_answer() {
    let (subscription, mut server) = pair(LONG);
    let waiter = subscribed(&subscription, &mut server, "one");
    let probe_at = Instant::now() + Duration::from_secs(1);
    subscription.0.state().quiet_since = probe_at.checked_sub(LONG).unwrap();
    thread::scope(|scope| {
        let driving = scope.spawn(|| wait(&waiter, LONG));
        wait_until_driven(&subscription);
        let other = subscription.listen(b"other").unwrap();
        expect(&mut server, "SUBSCRIBE other");
        thread::sleep(probe_at.saturating_duration_since(Instant::now()) + SHORT);
        assert_eq!(other.begin(), Ok(false));
        send(&mut server, "message one x");
        assert_eq!(driving.join().unwrap(), Ok(Waited::Changed));
    });
}

#[test]
fn an_error_reply_ends_the_subscription_and_is_no_answer() {
    let (subscription, mut server) = pair(LONG);
    let waiter = subscription.listen(b"one").unwrap();
    server.write_all(b"-NOPERM no access\r\n").unwrap();
    let refused = Error::Refused("NOPERM no access".to_owned());
    assert_eq!(wait(&waiter, LONG), Err(refused.clone()));
    assert_eq!(waiter.begin(), Err(refused));
    assert!(!subscription.has_received());
    assert!(subscription.has_ended());
}

#[test]
fn a_copy_that_a_forked_child_drops_does_not_end_the_connection() {
    let (subscription, mut server) = pair(LONG);
    let waiter = subscribed(&subscription, &mut server, "one");
    drop(subscription);
    send(&mut server, "message one x");
    assert_eq!(wait(&waiter, LONG), Ok(Waited::Changed));
}
