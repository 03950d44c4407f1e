//! A relay between two peers, which passes all bytes on and records them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Said = Arc<Mutex<Vec<u8>>>;

/// Between a server and the first client that connects.
pub struct Relay {
    /// Address to which the client connects in place of the server's.
    pub address: SocketAddr,
    client: Said,
    server: Said,
    /// The next bytes of the server are changed.
    changes: Arc<AtomicBool>,
}

impl Relay {
    pub fn to(server: SocketAddr) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").expect("listen"), server)
    }

    /// The client may have connected already: its bytes wait in the socket until now.
    pub fn at(listener: TcpListener, server: SocketAddr) -> Self {
        let relay = Self {
            address: listener.local_addr().expect("address"),
            client: Said::default(),
            server: Said::default(),
            changes: Arc::default(),
        };
        let (changes, unchanged) = (Arc::clone(&relay.changes), Arc::default());
        let (there, back) = (Arc::clone(&relay.client), Arc::clone(&relay.server));
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("accept");
            let server = TcpStream::connect(server).expect("connect");
            let ends = (server.try_clone(), client.try_clone());
            let (from, to) = (ends.0.expect("clone"), ends.1.expect("clone"));
            std::thread::spawn(move || pass(from, to, &back, &changes));
            pass(client, server, &there, &unchanged);
        });
        relay
    }

    /// Changes the last byte of what the server says next.
    pub fn change_next(&self) {
        self.changes.store(true, Ordering::Release);
    }

    pub fn client_said(&self) -> Vec<u8> {
        lock(&self.client).clone()
    }

    pub fn server_said(&self) -> Vec<u8> {
        lock(&self.server).clone()
    }
}

fn lock(said: &Said) -> std::sync::MutexGuard<'_, Vec<u8>> {
    said.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pass(mut from: TcpStream, mut to: TcpStream, said: &Said, changes: &AtomicBool) {
    let mut piece = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        if changes.swap(false, Ordering::AcqRel) {
            piece[len - 1] ^= 1;
        }
        lock(said).extend_from_slice(&piece[..len]);
        if to.write_all(&piece[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
