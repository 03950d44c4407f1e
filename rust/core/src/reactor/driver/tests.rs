use std::thread::{self, ThreadId};

use kvpipe_ucx::Event;

use super::*;
use crate::error::{Error, Result};
use crate::reactor::{CommandReceiver, Reactor, Token};
use crate::transport::Worker;
use crate::work::{Completer, Then, Work};

const SOON: Duration = Duration::from_secs(10);

enum Ask {
    /// Reports the thread that runs the reactor.
    WhoRuns(Completer<ThreadId>),
    /// Never answered.
    Keep(Completer<ThreadId>),
    /// Stops the reactor, which is its own, then reports the thread that runs it.
    Stop(Arc<Reactor<Self>>, Completer<ThreadId>),
    Panic,
}

/// Handles commands, and has neither sockets nor deadlines.
struct Answering {
    commands: CommandReceiver<Ask>,
    kept: Vec<Completer<ThreadId>>,
}

impl EventHandler for Answering {
    fn worker(&self) -> Option<&Worker> {
        None
    }
    fn set_now(&mut self, _now: Instant) {}
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        Vec::new()
    }
    fn drain_commands(&mut self) {
        while let Some(ask) = self.commands.next() {
            match ask {
                Ask::WhoRuns(completer) => completer.complete(Ok(thread::current().id())),
                Ask::Keep(completer) => self.kept.push(completer),
                Ask::Stop(reactor, completer) => {
                    reactor.stop();
                    completer.complete(Ok(thread::current().id()));
                }
                Ask::Panic => panic!("asked to"),
            }
        }
    }
    fn is_stopping(&self) -> bool {
        self.commands.is_stopping()
    }
    fn handle_readiness(&mut self, _token: Token) {}
    fn handle_ucx_event(&mut self, _event: Event) {}
    fn poll(&mut self) -> bool {
        false
    }
    fn has_work(&self) -> bool {
        false
    }
    fn expire(&mut self) -> Option<Instant> {
        None
    }
    fn has_failures(&self) -> bool {
        false
    }
    fn report_failures(&mut self) {}
    fn end(self) {
        drop(self.commands.close());
    }
    fn num_sessions(&self) -> usize {
        0
    }
}

fn reactor() -> Reactor<Ask> {
    let registrar = std::sync::Weak::new();
    let reactor = Reactor::start(Duration::ZERO, None, registrar, |_, commands, _| {
        let kept = Vec::new();
        Ok(Answering { commands, kept })
    });
    reactor.unwrap()
}

fn who_runs(reactor: &Reactor<Ask>) -> ThreadId {
    let (work, completer) = reactor.work();
    reactor
        .send_and(Ask::WhoRuns(completer), Then::Wait)
        .unwrap();
    work.wait_for(SOON).unwrap()
}

/// As asyncio waits: without running the reactor.
fn poll(work: &Work<ThreadId>) -> ThreadId {
    while !work.is_completed() {
        thread::yield_now();
    }
    work.result().unwrap().unwrap()
}

/// A caller that runs the reactor for good, and what its wait ends with.
fn caller(reactor: &Arc<Reactor<Ask>>) -> thread::JoinHandle<Result<ThreadId>> {
    let (work, completer) = reactor.work();
    reactor.send_and(Ask::Keep(completer), Then::Wait).unwrap();
    let reactor = Arc::clone(reactor);
    thread::spawn(move || {
        let _reactor = reactor;
        work.wait_for(SOON)
    })
}

#[test]
fn a_caller_that_waits_runs_the_reactor_itself() {
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
        assert_ne!(poll(&work), thread::current().id());
    }
}

#[test]
fn what_others_ask_for_is_done_by_the_caller_that_runs_the_reactor() {
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
fn a_stopped_reactor_ends_the_wait_of_the_caller_that_runs_it() {
    for _ in 0..100 {
        let reactor = Arc::new(reactor());
        let caller = caller(&reactor);
        reactor.stop();
        assert!(matches!(caller.join().unwrap(), Err(Error::Closed(_))));
    }
}

#[test]
fn a_reactor_may_be_stopped_by_its_own_work_on_either_thread() {
    for then in [Then::GoOn, Then::Wait] {
        let reactor = Arc::new(reactor());
        let (stopped, completer) = reactor.work();
        let stop = Ask::Stop(Arc::clone(&reactor), completer);
        reactor.send_and(stop, then).unwrap();
        match then {
            Then::GoOn => assert_ne!(poll(&stopped), thread::current().id()),
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
    reactor.send_and(Ask::Keep(completer), Then::Wait).unwrap();
    reactor.send_and(Ask::Panic, Then::Wait).unwrap();
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
