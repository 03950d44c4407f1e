//! A socket, with TLS or without it: [`Stream`].

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::{Error, Result};

/// Ciphertext that one call of the system reads. rustls by itself reads 4 KiB at a time.
const CIPHERTEXT_BYTES: usize = 256 << 10;
/// Bound for records without bytes that have arrived on a connection that nothing is expected from.
const QUIET_WITHIN: Duration = Duration::from_millis(100);

/// The authorities that are trusted, and the certificate of this client.
#[derive(Debug, Clone)]
pub struct Tls(Arc<ClientConfig>);

impl Tls {
    /// Reads certificates from PEM files.
    ///
    /// Without `ca_file` the authorities of the system are trusted. `key_file` is by default `cert_file`.
    pub fn new(
        ca_file: Option<&Path>,
        cert_file: Option<&Path>,
        key_file: Option<&Path>,
    ) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        let authorities = match ca_file {
            Some(path) => certificates(path)?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        let (num_trusted, _) = roots.add_parsable_certificates(authorities);
        if num_trusted == 0 {
            let place = ca_file.map_or("the system".to_owned(), |path| path.display().to_string());
            let text = format!("{place} has no certificate of an authority: set ca_file to one");
            return Err(Error::Config(text));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let invalid = |error: rustls::Error| Error::Config(format!("TLS: {error}"));
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(invalid)?
            .with_root_certificates(roots);
        let config = match cert_file {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let key_file = key_file.unwrap_or(path);
                let key = PrivateKeyDer::from_pem_file(key_file)
                    .map_err(|error| unreadable(key_file, &error))?;
                builder
                    .with_client_auth_cert(certificates(path)?, key)
                    .map_err(invalid)?
            }
        };
        Ok(Self(Arc::new(config)))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &rustls::pki_types::pem::Error) -> Error {
    Error::Config(format!("cannot read {}: {error}", path.display()))
}

/// A socket, or a TLS session over it. One thread may read while another one writes.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    session: Option<Mutex<Session>>,
}

#[derive(Debug)]
struct Session {
    connection: ClientConnection,
    /// Received, and not handed to `connection` where it lies within `start..end`.
    ciphertext: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Stream {
    pub(crate) fn new(socket: TcpStream) -> Self {
        let session = None;
        Self { socket, session }
    }

    /// Makes a TLS session with the server of that name.
    pub(crate) fn with_tls(
        socket: TcpStream,
        tls: &Tls,
        host: &str,
        deadline: Instant,
    ) -> io::Result<Self> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connection =
            ClientConnection::new(Arc::clone(&tls.0), name).map_err(io::Error::other)?;
        let session = Session {
            connection,
            ciphertext: vec![0; CIPHERTEXT_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        };
        let session = Some(Mutex::new(session));
        let stream = Self { socket, session };
        stream.shake_hands(deadline)?;
        Ok(stream)
    }

    fn shake_hands(&self, deadline: Instant) -> io::Result<()> {
        while let Some(mut session) = self.session() {
            session.flush(&self.socket, deadline)?;
            if !session.connection.is_handshaking() {
                break;
            }
            left(deadline)?;
            let advanced = session.advance(&self.socket);
            drop(session);
            self.ready(advanced, deadline)?;
        }
        Ok(())
    }

    /// Reads some bytes; none at the end.
    pub(crate) fn read(&self, out: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let result = if let Some(mut session) = self.session() {
                session.read(&self.socket, out, deadline)
            } else {
                self.socket.set_read_timeout(Some(left(deadline)?))?;
                match (&self.socket).read(out) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    result => return result,
                }
            };
            if let Some(num_bytes) = self.ready(result, deadline)? {
                return Ok(num_bytes);
            }
        }
    }

    /// Writes some bytes.
    pub(crate) fn write(&self, slices: &[IoSlice<'_>], deadline: Instant) -> io::Result<usize> {
        let Some(mut session) = self.session() else {
            self.socket.set_write_timeout(Some(left(deadline)?))?;
            return (&self.socket).write_vectored(slices);
        };
        let num_bytes = session.connection.writer().write_vectored(slices)?;
        session.flush(&self.socket, deadline)?;
        Ok(num_bytes)
    }

    /// True if the peer has neither ended the connection nor sent bytes that were not read.
    pub(crate) fn is_quiet(&self) -> bool {
        if let Some(mut session) = self.session() {
            let deadline = Instant::now() + QUIET_WITHIN;
            let result = session.read(&self.socket, &mut [0; 1], deadline);
            return result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&self.socket, &mut [0; 1], flags);
        matches!(peeked, Err(Errno::AGAIN))
    }

    /// Waits until there is something to read, also an error or the end; false when `deadline` has passed.
    pub(crate) fn wait(&self, deadline: Instant) -> rustix::io::Result<bool> {
        loop {
            if self
                .session()
                .is_some_and(|mut session| session.is_readable(&self.socket, deadline))
            {
                return Ok(true);
            }
            if self.session.is_some() && left(deadline).is_err() {
                return Ok(false);
            }
            if !readable(&self.socket, Some(deadline))? {
                return Ok(false);
            }
            if self.session.is_none() {
                return Ok(true);
            }
        }
    }

    pub(crate) fn shutdown(&self) {
        // An error says that it is shut down already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn session(&self) -> Option<MutexGuard<'_, Session>> {
        let session = self.session.as_ref()?;
        Some(session.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for the socket where a result says that there is nothing yet.
    fn ready<T>(&self, result: io::Result<T>, deadline: Instant) -> io::Result<Option<T>> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result.map(Some),
        }
        match readable(&self.socket, Some(deadline)) {
            Ok(true) | Err(Errno::INTR) => Ok(None),
            Ok(false) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Session {
    /// Reads some bytes that have arrived; `WouldBlock` if there are none.
    ///
    /// A peer may send records that have no bytes for as long as it likes: `TimedOut` after `deadline`.
    fn read(&mut self, socket: &TcpStream, out: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    left(deadline)?;
                    self.advance(socket)?;
                }
                result => return result,
            }
        }
    }

    fn is_readable(&mut self, socket: &TcpStream, deadline: Instant) -> bool {
        loop {
            match self.connection.process_new_packets() {
                Ok(state) if state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed() => {}
                _ => return true,
            }
            if left(deadline).is_err() {
                return false;
            }
            if let Err(error) = self.advance(socket) {
                return error.kind() != io::ErrorKind::WouldBlock;
            }
        }
    }

    /// Decrypts what has arrived; `WouldBlock` if nothing has.
    fn advance(&mut self, socket: &TcpStream) -> io::Result<()> {
        if self.start == self.end {
            let (num_bytes, _) =
                rustix::net::recv(socket, &mut self.ciphertext[..], RecvFlags::DONTWAIT)?;
            if num_bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            (self.start, self.end) = (0, num_bytes);
        }
        let mut received = &self.ciphertext[self.start..self.end];
        let num_bytes = self.connection.read_tls(&mut received)?;
        if num_bytes == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.start += num_bytes;
        if let Err(error) = self.connection.process_new_packets() {
            // The alert tells the peer why. A socket that takes nothing now will not matter any more.
            let mut unblocked = Unblocked(socket);
            while self.connection.wants_write() && self.connection.write_tls(&mut unblocked).is_ok()
            {
            }
            let text = explained(&error);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(())
    }

    fn flush(&mut self, mut socket: &TcpStream, deadline: Instant) -> io::Result<()> {
        while self.connection.wants_write() {
            socket.set_write_timeout(Some(left(deadline)?))?;
            match self.connection.write_tls(&mut socket) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => drop(result?),
            }
        }
        Ok(())
    }
}

/// A socket whose writes do not wait.
struct Unblocked<'a>(&'a TcpStream);

impl Write for Unblocked<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::net::send(self.0, data, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The text of an error, with a remedy where the user has one.
fn explained(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(_) => format!(
            "{error}: the server's certificate has to name the host in subjectAltName, and to be signed by an authority \
             of ca_file, which is another certificate"
        ),
        _ => error.to_string(),
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// Waits until a descriptor is readable; false when `deadline` has passed.
pub(crate) fn readable(fd: impl AsFd, deadline: Option<Instant>) -> rustix::io::Result<bool> {
    let timeout = deadline.map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    rustix::event::poll(&mut polled, timeout.as_ref()).map(|num_ready| num_ready > 0)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use rustls::{ServerConfig, ServerConnection};

    use super::*;

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/test_certificates");

    fn file(name: &str) -> std::path::PathBuf {
        Path::new(FOLDER).join(name)
    }

    /// A server's end of a connection that has begun its handshake, and the port at which it listens.
    fn serve() -> (u16, thread::JoinHandle<(ServerConnection, TcpStream)>) {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                certificates(&file("server.pem")).unwrap(),
                PrivateKeyDer::from_pem_file(file("server.key")).unwrap(),
            )
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = thread::spawn(move || {
            let connection = ServerConnection::new(Arc::new(config)).unwrap();
            (connection, listener.accept().unwrap().0)
        });
        (port, serving)
    }

    fn connect(port: u16, ca_file: &str) -> io::Result<Stream> {
        let tls = Tls::new(Some(&file(ca_file)), None, None).unwrap();
        let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        Stream::with_tls(
            socket,
            &tls,
            "127.0.0.1",
            Instant::now() + Duration::from_secs(20),
        )
    }

    #[test]
    fn a_read_whose_deadline_has_passed_handles_no_more_records() {
        let (port, serving) = serve();
        // The tickets that follow its handshake are records without bytes for the reader.
        let sending = thread::spawn(move || {
            let (mut connection, mut socket) = serving.join().unwrap();
            while connection.is_handshaking() || connection.wants_write() {
                connection.complete_io(&mut socket).unwrap();
            }
            socket
        });
        let stream = connect(port, "ca.pem").unwrap();
        let _socket = sending.join().unwrap();
        let soon = Some(Instant::now() + Duration::from_secs(20));
        assert!(readable(&stream.socket, soon).unwrap());
        let error = stream.read(&mut [0; 1], Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(readable(&stream.socket, Some(Instant::now())).unwrap());
        assert!(stream.is_quiet());
        assert!(!readable(&stream.socket, Some(Instant::now())).unwrap());
    }

    #[test]
    fn a_server_whose_certificate_is_refused_is_told_why() {
        let (port, serving) = serve();
        let sending = thread::spawn(move || {
            let (mut connection, mut socket) = serving.join().unwrap();
            loop {
                if let Err(error) = connection.complete_io(&mut socket) {
                    return error;
                }
            }
        });
        let error = connect(port, "server.pem").unwrap_err();
        assert!(error.to_string().contains("ca_file"), "{error}");
        let told = sending.join().unwrap().to_string();
        assert!(told.contains("received fatal alert"), "{told}");
    }
}
