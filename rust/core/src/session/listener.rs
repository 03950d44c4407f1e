//! Accepting connections. They wait in the backlog of the listener while all places of handshakes are taken.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::Service;
use super::sessions::Sessions;
use crate::error::{Error, Result};
use crate::net::address::ListenAddress;
use crate::reactor::{FIRST_TOKEN, Token};

pub(super) const LISTENER: Token = FIRST_TOKEN;
/// Connections that may wait to be accepted, as far as the system allows. A peer that finds no place tries again after a
/// second, then after two more.
const BACKLOG: i32 = 4096;
/// Pause after the system has refused to accept, as it does without file descriptors.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The socket that peers connect to.
pub(super) struct Listener {
    socket: TcpListener,
    /// Reason for which the poller does not report waiting connections.
    paused: Option<Paused>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Paused {
    /// All places of handshakes are taken, and none gives way yet.
    Full,
    /// The system refuses to accept.
    Refused,
}

impl Listener {
    /// A socket whose connections the poller reports.
    pub(super) fn new(socket: TcpListener) -> Self {
        Self {
            socket,
            paused: None,
        }
    }

    /// Accepts a connection, if one waits.
    ///
    /// # Errors
    /// The system refuses; it may do so for a while.
    fn accept(&self) -> std::io::Result<Option<(TcpStream, SocketAddr)>> {
        loop {
            match self.socket.accept() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(None),
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => return Err(error),
                },
            }
        }
    }
}

/// Binds a socket that peers can connect to, at the first port that is free.
///
/// # Errors
/// `Config`: the address cannot be had, or no port of a range is free.
pub(super) fn bind(address: ListenAddress) -> Result<TcpListener> {
    let cannot = |error: std::io::Error| {
        let is_range = address.first_port != address.last_port;
        let text = format!("cannot listen on {address}: {error}");
        Error::Config(if is_range && error.kind() == ErrorKind::AddrInUse {
            format!("{text}, which is so for all ports of the range; allow more")
        } else {
            text
        })
    };
    let mut tried: std::io::Result<_> = Err(ErrorKind::AddrInUse.into());
    for candidate in address.candidates() {
        tried = TcpListener::bind(candidate);
        if !matches!(&tried, Err(error) if error.kind() == ErrorKind::AddrInUse) {
            break;
        }
    }
    let socket = tried.map_err(cannot)?;
    socket.set_nonblocking(true).map_err(cannot)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|error| cannot(error.into()))?;
    Ok(socket)
}

impl<S: Service> Sessions<S> {
    /// Accepts connections that wait, as far as there are places for their handshakes. The poller has reported one.
    pub(super) fn accept(&mut self) {
        if self.links.places.is_full() && !self.make_place() {
            return;
        }
        while !self.links.places.is_full() {
            let Some(listener) = &self.listener else {
                return;
            };
            match listener.accept() {
                Ok(Some((stream, peer))) => {
                    if let Err(error) = self.links.add_accepted(stream, peer.to_string()) {
                        self.service.log(format!("refused {peer}: {error}"));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    // Else the poller would report the listener again and again.
                    self.pause_accepting(Paused::Refused, self.links.now() + REFUSED_PAUSE);
                    let text = format!("cannot accept connections: {error}");
                    return self.service.log(text);
                }
            }
        }
    }

    /// Frees the place of a handshake that is old enough. False if there is none: accepting then pauses until there is.
    fn make_place(&mut self) -> bool {
        let now = self.links.now();
        loop {
            let oldest = match self.links.places.evictable(now) {
                Ok(oldest) => oldest,
                Err(due) => {
                    self.pause_accepting(Paused::Full, due);
                    return false;
                }
            };
            // Received bytes count: this side may be the slow one.
            self.receive(oldest);
            self.report_failure(oldest);
            if self.links.places.evictable(now) == Ok(oldest) {
                let text = "it had not completed its handshake while many others waited";
                self.end_session(oldest, Error::Connect(text.to_owned()));
            }
            if !self.links.places.is_full() {
                return true;
            }
        }
    }

    fn pause_accepting(&mut self, reason: Paused, until: Instant) {
        self.watch_listener(Some(reason));
        self.links.timers.set(LISTENER, until);
    }

    /// The pause is over: the poller reports connections that wait.
    pub(super) fn resume_accepting(&mut self) {
        self.watch_listener(None);
    }

    /// Ends a pause for places once one is free.
    pub(super) fn resume_where_free(&mut self) {
        let listener = self.listener.as_ref();
        if listener.is_some_and(|it| it.paused == Some(Paused::Full))
            && !self.links.places.is_full()
        {
            self.resume_accepting();
        }
    }

    fn watch_listener(&mut self, paused: Option<Paused>) {
        let events = match paused {
            None => EventFlags::IN,
            Some(_) => EventFlags::empty(),
        };
        if let Some(listener) = &mut self.listener {
            listener.paused = paused;
            self.links.poller.modify(&listener.socket, LISTENER, events);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn loopback(first_port: u16, last_port: u16) -> ListenAddress {
        ListenAddress {
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            first_port,
            last_port,
        }
    }

    #[test]
    fn the_first_free_port_of_a_range_is_bound_and_none_is_an_error_that_names_the_range() {
        let port = |socket: &TcpListener| socket.local_addr().unwrap().port();
        // A port with a free one after it.
        let (first, taken) = loop {
            let taken = bind(loopback(0, 0)).unwrap();
            let first = port(&taken);
            if first < u16::MAX && TcpListener::bind((Ipv4Addr::LOCALHOST, first + 1)).is_ok() {
                break (first, taken);
            }
        };
        let second = bind(loopback(first, first + 1)).unwrap();
        assert_eq!(port(&second), first + 1);
        let error = bind(loopback(first, first + 1)).unwrap_err().to_string();
        let range = format!("127.0.0.1:{first}-{}", first + 1);
        assert!(
            error.contains(&range) && error.contains("all ports"),
            "{error}"
        );
        drop(taken);
        assert_eq!(port(&bind(loopback(first, first + 1)).unwrap()), first);
    }

    #[test]
    fn five_hundred_peers_may_come_while_the_reactor_is_busy_and_none_has_to_come_again() {
        let listener = bind(loopback(0, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        // The kernel tries again after a second.
        let at_once = Duration::from_millis(900);
        let connect = || TcpStream::connect_timeout(&address, at_once);
        let streams: Vec<_> = (0..500).map(|_| connect().unwrap()).collect();
        drop(streams);
    }
}
