//! One connection to a server: [`Connection`].

use std::io::{self, IoSlice, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::reply::{Reply, ReplyReader, lost};
use crate::stream::{Stream, Tls};
use crate::{Error, Result, Subscription};

/// A stream whose operations end at a deadline.
#[derive(Debug)]
pub(crate) struct Timed {
    stream: Arc<Stream>,
    deadline: Instant,
}

impl Timed {
    pub(crate) fn new(stream: Arc<Stream>, timeout: Duration) -> Self {
        let deadline = Instant::now() + timeout;
        Self { stream, deadline }
    }

    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    pub(crate) fn restart(&mut self, timeout: Duration) {
        self.deadline = Instant::now() + timeout;
    }

    pub(crate) fn write_all(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.stream.write(slices, self.deadline) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(num_bytes) => IoSlice::advance_slices(&mut slices, num_bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Read for Timed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.stream.read(out, self.deadline)
    }
}

/// Ends a connection from another thread.
#[derive(Debug, Clone)]
pub struct Closer(Arc<Stream>);

impl Closer {
    /// Shuts the connection down: what waits for it ends with [`Error::Lost`].
    pub fn close(&self) {
        self.0.shutdown();
    }
}

/// A connection to a server, without authentication: that is a command like others.
#[derive(Debug)]
pub struct Connection {
    pub(crate) reader: ReplyReader<Timed>,
    timeout: Duration,
    is_broken: bool,
}

/// The address as text, an IPv6 address in brackets.
pub fn address_of(host: &str, port: u16) -> String {
    if host.contains(':') {
        return format!("[{host}]:{port}");
    }
    format!("{host}:{port}")
}

impl Connection {
    /// Connects.
    ///
    /// `timeout` bounds the connect to each address of the host, every exchange of commands and replies, and every part
    /// of a value. With `tls` the server has to have a certificate for `host`.
    pub fn connect(host: &str, port: u16, timeout: Duration, tls: Option<&Tls>) -> Result<Self> {
        let at = address_of(host, port);
        let refused = |error: io::Error| Error::Connect(format!("cannot connect to {at}: {error}"));
        let mut last = io::ErrorKind::NotFound.into();
        for address in (host, port).to_socket_addrs().map_err(refused)? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(socket) => {
                    socket.set_nodelay(true).map_err(refused)?;
                    let stream = match tls {
                        None => Stream::new(socket),
                        Some(tls) => Stream::with_tls(socket, tls, host, Instant::now() + timeout)
                            .map_err(refused)?,
                    };
                    return Ok(Self::new(stream, timeout));
                }
                Err(error) => last = error,
            }
        }
        Err(refused(last))
    }

    fn new(stream: Stream, timeout: Duration) -> Self {
        Self {
            reader: ReplyReader::new(Timed::new(Arc::new(stream), timeout)),
            timeout,
            is_broken: false,
        }
    }

    /// Handle that ends this connection from another thread.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(self.reader.stream().stream()))
    }

    /// True if an error has ended it.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// True if a command may be sent: the server has neither closed the connection nor sent anything unasked.
    pub fn is_idle(&self) -> bool {
        !self.is_broken && !self.reader.has_bytes() && self.reader.stream().stream().is_quiet()
    }

    /// Makes a subscription of the connection, which is broken for everything else then.
    pub fn subscribe(&mut self) -> Result<Subscription> {
        self.checked(|_| Ok(()))?;
        self.is_broken = true;
        let stream = Arc::clone(self.reader.stream().stream());
        Ok(Subscription::new(stream, self.timeout))
    }

    /// Sends commands. Their replies have to be received before anything else is sent.
    pub fn send(&mut self, commands: &[Vec<&[u8]>]) -> Result<()> {
        let mut encoded = Vec::new();
        for command in commands {
            encode(&mut encoded, command);
        }
        self.checked(|connection| connection.write(&mut [IoSlice::new(&encoded)]))
    }

    /// Receives the replies to commands that were sent.
    pub fn receive(&mut self, num_replies: usize) -> Result<Vec<Reply>> {
        self.checked(|connection| {
            connection.restart_clock();
            (0..num_replies)
                .map(|_| connection.reader.read_reply())
                .collect()
        })
    }

    pub(crate) fn write(&mut self, slices: &mut [IoSlice<'_>]) -> Result<()> {
        self.restart_clock();
        self.reader
            .stream()
            .write_all(slices)
            .map_err(|error| lost(&error))
    }

    pub(crate) fn restart_clock(&mut self) {
        self.reader.stream_mut().restart(self.timeout);
    }

    /// Runs an operation, after whose error the connection is broken.
    pub(crate) fn checked<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.is_broken {
            return Err(Error::Lost("the connection has ended".to_owned()));
        }
        run(self).inspect_err(|_| self.is_broken = true)
    }
}

/// Appends a command.
pub(crate) fn encode(out: &mut Vec<u8>, command: &[&[u8]]) {
    out.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
    for argument in command {
        out.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
        out.extend_from_slice(argument);
        out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A connection, and the server's end of it.
    pub(crate) fn pair(timeout: Duration) -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connection = Connection::connect("127.0.0.1", port, timeout, None).unwrap();
        (connection, listener.accept().unwrap().0)
    }

    #[test]
    fn commands_are_encoded_as_arrays() {
        let mut encoded = Vec::new();
        encode(&mut encoded, &[b"GET", b""]);
        assert_eq!(encoded, b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n");
    }

    #[test]
    fn a_server_that_does_not_answer_is_a_timeout_and_breaks_the_connection() {
        let (mut connection, _server) = pair(Duration::from_millis(50));
        let began = Instant::now();
        connection.send(&[vec![b"PING"]]).unwrap();
        assert!(matches!(connection.receive(1), Err(Error::Timeout(_))));
        assert!(began.elapsed() < Duration::from_secs(5));
        assert!(connection.is_broken());
        let result = connection.send(&[vec![b"PING"]]);
        assert!(matches!(result, Err(Error::Lost(_))));
    }

    #[test]
    fn a_server_that_does_not_read_is_a_timeout() {
        let (mut connection, _server) = pair(Duration::from_millis(50));
        let large = vec![0; 64 << 20];
        let result = connection.send(&[vec![&large]]);
        assert!(matches!(result, Err(Error::Timeout(_))));
    }

    #[test]
    fn a_server_that_answers_a_byte_at_a_time_is_a_timeout() {
        let (mut connection, mut server) = pair(Duration::from_millis(200));
        let dripping = thread::spawn(move || {
            while server.write_all(b"1").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let result = connection.receive(1);
        assert!(matches!(result, Err(Error::Timeout(_))));
        drop(connection);
        dripping.join().unwrap();
    }

    #[test]
    fn a_connection_that_was_closed_or_has_bytes_unasked_is_not_idle() {
        let (connection, mut server) = pair(Duration::from_secs(5));
        assert!(connection.is_idle());
        server.write_all(b"+").unwrap();
        assert!(!connection.is_idle());
        let (connection, server) = pair(Duration::from_secs(5));
        drop(server);
        assert!(!connection.is_idle());
    }

    #[test]
    fn a_closer_ends_a_wait() {
        let (mut connection, _server) = pair(Duration::from_secs(30));
        let closer = connection.closer();
        let waiting = thread::spawn(move || connection.receive(1));
        thread::sleep(Duration::from_millis(20));
        closer.close();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Lost(_))));
    }

    #[test]
    fn a_port_without_a_listener_is_a_connect_error() {
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let result = Connection::connect("127.0.0.1", port, Duration::from_secs(5), None);
        assert!(matches!(result, Err(Error::Connect(_))));
    }
}
