use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;

use super::*;
use crate::identity::Identity;

/// Notes at each command whether the link had failed.
#[derive(Default)]
struct Noting(Vec<bool>);

impl Service for Noting {
    type Command = LinkId;

    fn command(&mut self, io: &mut Io, link: LinkId) {
        self.0.push(io.has_failed(link));
    }
    fn link_up(&mut self, _io: &mut Io, _link: LinkId, _peer: &Identity) {}
    fn link_down(&mut self, _io: &mut Io, _link: LinkId, _error: Error) {}
    fn frame(&mut self, _io: &mut Io, _link: LinkId, _frame: &[u8]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn what_is_asked_for_while_the_end_of_a_link_is_seen_knows_of_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut io = Io::alone(None);
    let (link, now) = (io.new_link(), io.now);
    io.add(link, stream, "peer".to_owned(), false, now).unwrap();
    let (commands, receiver) = channel();
    let mut node = Loop::new(io, Noting::default(), receiver);
    drop(listener.accept().unwrap());
    while node.service.0.last() != Some(&true) {
        // The end is on its way, and a command is there whenever it is seen.
        commands.send(Control::Command(link)).unwrap();
        node.serve(link, epoll::EventFlags::empty());
        let has_failed = node.io.has_failed(link);
        assert_eq!(node.service.0.last(), Some(&has_failed));
    }
}
