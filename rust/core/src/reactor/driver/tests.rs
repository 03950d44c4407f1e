use std::net::{IpAddr, Ipv4Addr};
use std::thread::{self, ThreadId};

use super::*;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::{Reactor, ReactorConfig, ReactorContext};
use crate::session::connection::SessionTimeouts;
use crate::work::{Completer, Then, Work};

const SOON: Duration = Duration::from_secs(10);

enum Ask {
    /// Who runs the reactor?
    WhoRuns(Completer<ThreadId>),
    /// Never answered.
    Keep(Completer<ThreadId>),
    /// Stops the reactor, which is its own; then who runs it?
    Stop(Arc<Reactor<Self>>, Completer<ThreadId>),
    Panic,
}

#[derive(Default)]
struct Teller(Vec<Completer<ThreadId>>);

impl Service for Teller {
    type Command = Ask;

    fn command(&mut self, _io: &mut ReactorContext, ask: Ask) {
        match ask {
            Ask::WhoRuns(completer) => completer.complete(Ok(thread::current().id())),
            Ask::Keep(completer) => self.0.push(completer),
            Ask::Stop(reactor, completer) => {
                reactor.stop();
                completer.complete(Ok(thread::current().id()));
            }
            Ask::Panic => panic!("asked to"),
        }
    }
    fn session_up(&mut self, _io: &mut ReactorContext, _link: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _io: &mut ReactorContext, _link: SessionKey, _error: Error) {}
    fn frame(&mut self, _io: &mut ReactorContext, _link: SessionKey, _frame: &[u8]) -> Result<()> {
        Ok(())
    }
}

fn reactor() -> Reactor<Ask> {
    let config = ReactorConfig {
        listen: None,
        token: Vec::new(),
        identity: Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap(),
        transport: None,
        local: IpAddr::from(Ipv4Addr::LOCALHOST),
        timeouts: SessionTimeouts::default(),
        busy_poll: Duration::ZERO,
    };
    Reactor::spawn(config, Teller::default).unwrap()
}

fn who_runs(reactor: &Reactor<Ask>) -> ThreadId {
    let (work, completer) = reactor.work();
    reactor.hand(Ask::WhoRuns(completer), Then::Wait).unwrap();
    work.wait_for(SOON).unwrap()
}

/// As asyncio waits: on the descriptor.
fn look(work: &Work<ThreadId>) -> ThreadId {
    work.event_fd().unwrap();
    while !work.is_completed() {
        thread::yield_now();
    }
    work.result().unwrap().unwrap()
}

/// A caller that runs the reactor for good, and what its wait ends with.
fn caller(reactor: &Arc<Reactor<Ask>>) -> thread::JoinHandle<Result<ThreadId>> {
    let (work, completer) = reactor.work();
    reactor.hand(Ask::Keep(completer), Then::Wait).unwrap();
    let reactor = Arc::clone(reactor);
    thread::spawn(move || {
        let _node = reactor;
        work.wait_for(SOON)
    })
}

#[test]
fn a_caller_that_waits_runs_the_node_itself() {
    let reactor = reactor();
    // Its thread may be at it when a caller comes.
    let is_me = |_| who_runs(&reactor) == thread::current().id();
    assert!((0..100).any(is_me));
}

#[test]
fn the_thread_takes_over_when_callers_are_gone() {
    let reactor = reactor();
    for _ in 0..100 {
        who_runs(&reactor);
        let (work, completer) = reactor.work();
        reactor.send(Ask::WhoRuns(completer)).unwrap();
        assert_ne!(look(&work), thread::current().id());
    }
}

#[test]
fn what_others_ask_for_is_done_by_the_caller_that_runs_the_node() {
    let reactor = Arc::new(reactor());
    let caller = caller(&reactor);
    let is_caller = |_| {
        thread::sleep(Duration::from_millis(1));
        who_runs(&reactor) == caller.thread().id()
    };
    assert!((0..1000).any(is_caller));
    reactor.stop();
    assert!(matches!(caller.join().unwrap(), Err(Error::Closed(_))));
}

#[test]
fn a_stopped_node_ends_the_wait_of_the_caller_that_runs_it() {
    for _ in 0..100 {
        let reactor = Arc::new(reactor());
        let caller = caller(&reactor);
        reactor.stop();
        assert!(matches!(caller.join().unwrap(), Err(Error::Closed(_))));
    }
}

#[test]
fn a_node_may_be_stopped_by_what_it_does_itself_whoever_runs_it() {
    for then in [Then::GoOn, Then::Wait] {
        let reactor = Arc::new(reactor());
        let (stopped, completer) = reactor.work();
        let stop = Ask::Stop(Arc::clone(&reactor), completer);
        reactor.hand(stop, then).unwrap();
        match then {
            Then::GoOn => assert_ne!(look(&stopped), thread::current().id()),
            Then::Wait => drop(stopped.wait_for(SOON).unwrap()),
        }
        reactor.stop();
        assert!(reactor.send(Ask::Panic).is_err());
    }
}

#[test]
fn a_panic_ends_what_is_under_way_as_closed() {
    let reactor = reactor();
    let (kept, completer) = reactor.work();
    reactor.hand(Ask::Keep(completer), Then::Wait).unwrap();
    reactor.hand(Ask::Panic, Then::Wait).unwrap();
    assert!(matches!(kept.wait_for(SOON), Err(Error::Closed(_))));
    reactor.stop();
    assert!(reactor.send(Ask::Panic).is_err());
}

#[test]
fn many_callers_at_once_are_all_answered() {
    let reactor = Arc::new(reactor());
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let reactor = Arc::clone(&reactor);
            thread::spawn(move || {
                for _ in 0..500 {
                    who_runs(&reactor);
                }
            })
        })
        .collect();
    for caller in callers {
        caller.join().unwrap();
    }
}
