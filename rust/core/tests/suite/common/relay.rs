//! Somebody on the way between two peers, who passes everything on and remembers it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

type Said = Arc<Mutex<Vec<u8>>>;

/// Between a server and the first client that connects.
pub struct Relay {
    /// Where the client connects instead.
    pub address: SocketAddr,
    client: Said,
    server: Said,
}

impl Relay {
    pub fn to(server: SocketAddr) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").expect("listen"), server)
    }

    /// The client may have connected already: until now nobody has heard it.
    pub fn at(listener: TcpListener, server: SocketAddr) -> Self {
        let relay = Self {
            address: listener.local_addr().expect("address"),
            client: Said::default(),
            server: Said::default(),
        };
        let (there, back) = (Arc::clone(&relay.client), Arc::clone(&relay.server));
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("accept");
            let server = TcpStream::connect(server).expect("connect");
            let ends = (server.try_clone(), client.try_clone());
            let (from, to) = (ends.0.expect("clone"), ends.1.expect("clone"));
            std::thread::spawn(move || pass(from, to, &back));
            pass(client, server, &there);
        });
        relay
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

fn pass(mut from: TcpStream, mut to: TcpStream, said: &Said) {
    let mut piece = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        lock(said).extend_from_slice(&piece[..len]);
        if to.write_all(&piece[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
