use std::net::{IpAddr, Ipv4Addr};
use std::thread::{self, ThreadId};

use super::*;
use crate::error::Result;
use crate::identity::{Identity, Service as Kind};
use crate::link::Timing;
use crate::node::{Io, LinkId, Node, NodeConfig};
use crate::work::{Completer, Then, Work};

const SOON: Duration = Duration::from_secs(10);

enum Ask {
    /// Who runs the node?
    WhoRuns(Completer<ThreadId>),
    /// Never answered.
    Keep(Completer<ThreadId>),
    /// Stops the node, which is its own; then who runs it?
    Stop(Arc<Node<Self>>, Completer<ThreadId>),
    Panic,
}

#[derive(Default)]
struct Teller(Vec<Completer<ThreadId>>);

impl Service for Teller {
    type Command = Ask;

    fn command(&mut self, _io: &mut Io, ask: Ask) {
        match ask {
            Ask::WhoRuns(completer) => completer.complete(Ok(thread::current().id())),
            Ask::Keep(completer) => self.0.push(completer),
            Ask::Stop(node, completer) => {
                node.stop();
                completer.complete(Ok(thread::current().id()));
            }
            Ask::Panic => panic!("asked to"),
        }
    }
    fn link_up(&mut self, _io: &mut Io, _link: LinkId, _peer: &Identity) {}
    fn link_down(&mut self, _io: &mut Io, _link: LinkId, _error: Error) {}
    fn frame(&mut self, _io: &mut Io, _link: LinkId, _frame: &[u8]) -> Result<()> {
        Ok(())
    }
}

fn node() -> Node<Ask> {
    let config = NodeConfig {
        listen: None,
        token: Vec::new(),
        identity: Identity::new(Kind::Pipe, "", Vec::new()).unwrap(),
        transport: None,
        local: IpAddr::from(Ipv4Addr::LOCALHOST),
        timing: Timing::default(),
        busy_poll: Duration::ZERO,
    };
    Node::spawn(config, Teller::default).unwrap()
}

fn who_runs(node: &Node<Ask>) -> ThreadId {
    let (work, completer) = node.work();
    node.hand(Ask::WhoRuns(completer), Then::Wait).unwrap();
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

/// A caller that runs the node for good, and what its wait ends with.
fn caller(node: &Arc<Node<Ask>>) -> thread::JoinHandle<Result<ThreadId>> {
    let (work, completer) = node.work();
    node.hand(Ask::Keep(completer), Then::Wait).unwrap();
    let node = Arc::clone(node);
    thread::spawn(move || {
        let _node = node;
        work.wait_for(SOON)
    })
}

#[test]
fn a_caller_that_waits_runs_the_node_itself() {
    let node = node();
    // Its thread may be at it when a caller comes.
    let is_me = |_| who_runs(&node) == thread::current().id();
    assert!((0..100).any(is_me));
}

#[test]
fn the_thread_takes_over_when_callers_are_gone() {
    let node = node();
    for _ in 0..100 {
        who_runs(&node);
        let (work, completer) = node.work();
        node.send(Ask::WhoRuns(completer)).unwrap();
        assert_ne!(look(&work), thread::current().id());
    }
}

#[test]
fn what_others_ask_for_is_done_by_the_caller_that_runs_the_node() {
    let node = Arc::new(node());
    let caller = caller(&node);
    let is_caller = |_| {
        thread::sleep(Duration::from_millis(1));
        who_runs(&node) == caller.thread().id()
    };
    assert!((0..1000).any(is_caller));
    node.stop();
    assert!(matches!(caller.join().unwrap(), Err(Error::Closed(_))));
}

#[test]
fn a_stopped_node_ends_the_wait_of_the_caller_that_runs_it() {
    for _ in 0..100 {
        let node = Arc::new(node());
        let caller = caller(&node);
        node.stop();
        assert!(matches!(caller.join().unwrap(), Err(Error::Closed(_))));
    }
}

#[test]
fn a_node_may_be_stopped_by_what_it_does_itself_whoever_runs_it() {
    for then in [Then::GoOn, Then::Wait] {
        let node = Arc::new(node());
        let (stopped, completer) = node.work();
        let stop = Ask::Stop(Arc::clone(&node), completer);
        node.hand(stop, then).unwrap();
        match then {
            Then::GoOn => assert_ne!(look(&stopped), thread::current().id()),
            Then::Wait => drop(stopped.wait_for(SOON).unwrap()),
        }
        node.stop();
        assert!(node.send(Ask::Panic).is_err());
    }
}

#[test]
fn a_panic_ends_what_is_under_way_as_closed() {
    let node = node();
    let (kept, completer) = node.work();
    node.hand(Ask::Keep(completer), Then::Wait).unwrap();
    node.hand(Ask::Panic, Then::Wait).unwrap();
    assert!(matches!(kept.wait_for(SOON), Err(Error::Closed(_))));
    node.stop();
    assert!(node.send(Ask::Panic).is_err());
}

#[test]
fn many_callers_at_once_are_all_answered() {
    let node = Arc::new(node());
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let node = Arc::clone(&node);
            thread::spawn(move || {
                for _ in 0..500 {
                    who_runs(&node);
                }
            })
        })
        .collect();
    for caller in callers {
        caller.join().unwrap();
    }
}
