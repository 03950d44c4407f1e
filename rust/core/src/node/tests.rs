use std::sync::mpsc::{Receiver, sync_channel};

use super::*;
use crate::identity::Service as Kind;
use crate::transport::MemoryRoad;

const PATIENCE: Duration = Duration::from_secs(20);

/// Is busy with its first command until it is let go.
struct Busy {
    begun: std::sync::mpsc::SyncSender<()>,
    may_end: Receiver<()>,
}

impl Service for Busy {
    type Command = ();

    fn command(&mut self, _io: &mut Io, _command: ()) {
        let _ = self.begun.send(());
        let _ = self.may_end.recv_timeout(PATIENCE);
    }
    fn link_up(&mut self, _io: &mut Io, _link: LinkId, _peer: &Identity) {}
    fn link_down(&mut self, _io: &mut Io, _link: LinkId, _error: Error) {}
    fn frame(&mut self, _io: &mut Io, _link: LinkId, _frame: &[u8]) -> Result<()> {
        Ok(())
    }
}

fn config() -> NodeConfig {
    NodeConfig {
        listen: None,
        token: Vec::new(),
        identity: Identity::new(Kind::Blocks, "", Vec::new()).expect("identity"),
        transport: Some(Transport::Memory(MemoryRoad::Get)),
        local: std::net::Ipv4Addr::LOCALHOST.into(),
        timing: Timing::default(),
        busy_poll: Duration::ZERO,
    }
}

#[test]
fn memory_is_registered_on_the_callers_thread_whatever_the_node_is_busy_with() {
    let ((begun, begins), (lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let node = Node::spawn(config(), || Busy { begun, may_end }).expect("node");
    node.send(()).expect("it runs");
    begins.recv_timeout(PATIENCE).expect("it is busy");
    let memory = node.register(Buffer::zeroed(64)).expect("registered");
    assert_eq!(memory.buffer().len(), 64);
    lets_end.send(()).expect("it is busy still");
}

#[test]
fn nothing_is_registered_with_a_node_that_has_ended() {
    let ((begun, _begins), (_lets_end, may_end)) = (sync_channel(1), sync_channel(1));
    let node = Node::spawn(config(), || Busy { begun, may_end }).expect("node");
    node.stop();
    let refused = node.register(Buffer::zeroed(64)).expect_err("it has ended");
    assert!(matches!(refused, Error::Closed(_)), "{refused}");
}

#[test]
fn five_hundred_peers_may_come_while_the_node_is_busy_and_none_has_to_come_again() {
    let listener = bind("127.0.0.1:0".parse().expect("address")).expect("listen");
    let address = listener.local_addr().expect("address");
    // Asked again by the kernel after a second.
    let at_once = Duration::from_millis(900);
    let connect = || std::net::TcpStream::connect_timeout(&address, at_once);
    let streams: Vec<_> = (0..500).map(|_| connect().expect("room")).collect();
    drop(streams);
}
