use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use kvpipe_ucx::Buffer;

use super::*;
use crate::net::identity::SessionKind;
use crate::net::secret::Secrets;
use crate::net::secret::tests::{TOKEN, assert_discloses_nothing};
use crate::transport::MemoryPath;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Is busy with its first command until it may end.
struct Busy {
    begun: std::sync::mpsc::SyncSender<()>,
    may_end: Receiver<()>,
}

impl Service for Busy {
    type Command = ();

    fn command(&mut self, _cx: &mut Links, _command: ()) {
        let _ = self.begun.send(());
        let _ = self.may_end.recv_timeout(TIMEOUT);
    }
    fn session_up(&mut self, _cx: &mut Links, _session: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _cx: &mut Links, _session: SessionKey, _error: Error) {}
}

fn config() -> ReactorConfig {
    ReactorConfig {
        listen: None,
        secrets: Secrets::new(b""),
        encryption: Encryption::Off,
        streams: Streams::default(),
        identity: Identity::new(SessionKind::Agent, "", Vec::new()).expect("identity"),
        transport: Some(Transport::Memory(MemoryPath::RemoteRead)),
        timeouts: SessionTimeouts::default(),
        busy_poll: Duration::ZERO,
    }
}

#[test]
fn memory_is_registered_on_the_callers_thread_while_the_reactor_is_busy() {
    let ((begun, begins), (lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let reactor = spawn(config(), || Busy { begun, may_end }).expect("reactor");
    reactor.send(()).expect("it runs");
    begins.recv_timeout(TIMEOUT).expect("it is busy");
    let memory = reactor.register(Buffer::zeroed(64)).expect("registered");
    assert_eq!(memory.buffer().len(), 64);
    lets_end.send(()).expect("it is busy still");
}

#[test]
fn nothing_is_registered_with_a_reactor_that_has_ended() {
    let ((begun, _begins), (_lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let reactor = spawn(config(), || Busy { begun, may_end }).expect("reactor");
    reactor.stop();
    let refused = reactor
        .register(Buffer::zeroed(64))
        .expect_err("it has ended");
    assert!(matches!(refused, Error::Closed(_)), "{refused}");
}

/// Takes long to end.
struct SlowToEnd {
    ends: std::sync::mpsc::SyncSender<()>,
    may_end: Receiver<()>,
    has_ended: Arc<AtomicBool>,
}

impl Service for SlowToEnd {
    type Command = ();

    fn command(&mut self, _cx: &mut Links, _command: ()) {}
    fn session_up(&mut self, _cx: &mut Links, _session: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _cx: &mut Links, _session: SessionKey, _error: Error) {}
    fn stop(&mut self, _cx: &mut Links) {
        let _ = self.ends.send(());
        let _ = self.may_end.recv_timeout(TIMEOUT);
        self.has_ended.store(true, Ordering::Release);
    }
}

#[test]
fn every_caller_of_stop_returns_when_the_reactor_has_ended() {
    let ((ends, is_ending), (lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let has_ended = Arc::new(AtomicBool::new(false));
    let lasting = SlowToEnd {
        ends,
        may_end,
        has_ended: Arc::clone(&has_ended),
    };
    let reactor = spawn(config(), || lasting).expect("reactor");
    let stop = || {
        reactor.stop();
        has_ended.load(Ordering::Acquire)
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(stop);
        is_ending.recv_timeout(TIMEOUT).expect("it is ending");
        let others = [scope.spawn(stop), scope.spawn(stop)];
        // Time for callers that would not wait.
        std::thread::sleep(Duration::from_millis(50));
        lets_end.send(()).expect("it is ending still");
        for stopping in others.into_iter().chain([first]) {
            assert!(stopping.join().expect("stopped"));
        }
    });
    assert!(stop(), "and it may be stopped once more");
}

/// Counts its commands.
struct CommandCounter(Arc<AtomicUsize>);

impl Service for CommandCounter {
    type Command = ();

    fn command(&mut self, _cx: &mut Links, _command: ()) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn session_up(&mut self, _cx: &mut Links, _session: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _cx: &mut Links, _session: SessionKey, _error: Error) {}
}

#[test]
fn every_accepted_command_is_handled_whenever_the_reactor_is_stopped() {
    for _ in 0..50 {
        let num_handled = Arc::new(AtomicUsize::new(0));
        let counting = CommandCounter(Arc::clone(&num_handled));
        let reactor = spawn(config(), || counting).expect("reactor");
        let ask = || std::iter::from_fn(|| reactor.send(()).ok()).count();
        let num_accepted = std::thread::scope(|scope| {
            let callers = [scope.spawn(ask), scope.spawn(ask)];
            reactor.stop();
            callers.map(|caller| caller.join().expect("refused"))
        });
        let num_accepted: usize = num_accepted.iter().sum();
        assert_eq!(num_handled.load(Ordering::Relaxed), num_accepted);
    }
}

#[test]
fn neither_the_configuration_of_a_reactor_nor_the_reactor_shows_the_token() {
    let config = ReactorConfig {
        secrets: Secrets::new(TOKEN),
        encryption: Encryption::Off,
        streams: Streams::default(),
        ..config()
    };
    let configured = format!("{config:?}{config:#?}");
    let ((begun, _begins), (_lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let reactor = spawn(config, || Busy { begun, may_end }).expect("reactor");
    assert_discloses_nothing(&format!("{configured}{reactor:?}{reactor:#?}"));
}
