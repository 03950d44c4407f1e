use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use kvpipe_ucx::{Event, socket};

use super::*;
use crate::net::framing::{FRAME_CAP, FrameReader, SessionFrame};
use crate::session::connection::Connection;
use crate::session::link::Link;
use crate::session::session::{Session, SessionState};
use crate::session::{Payload, inbox};
use crate::transport::{DataPath, reads_host};

/// The other end of a session's connection.
pub(crate) struct FarEnd {
    stream: TcpStream,
    received: FrameReader,
}

impl FarEnd {
    /// Sends bytes as they are.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }
}

impl Links {
    /// Adds a session that is up, and whose endpoint leads to a worker; the other end of its connection.
    pub(crate) fn add_manual(&mut self, key: SessionKey, worker: Option<&[u8]>) -> FarEnd {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        let silence = self.timeouts().silence;
        let mut session = Session::new("peer".to_owned(), false, self.now(), self.timeouts());
        let connection = Connection::new(near, "peer", &self.poller, key, silence);
        session.link = Some(Link::new(connection.unwrap()));
        session.state = SessionState::Up;
        session.endpoint = self.data.is_some().then(SessionEndpoint::default);
        self.sessions.insert(key, session);
        if let Some(address) = worker {
            assert!(self.open_endpoint(key, address));
            let (data, endpoint) = self.data_of(key).unwrap();
            let worker = data.worker.as_ref().unwrap();
            let lanes = worker.lanes(endpoint.id.unwrap()).unwrap();
            let data_path = if lanes.iter().any(reads_host) {
                DataPath::RemoteRead("memory".to_owned())
            } else {
                DataPath::Stream("tcp".to_owned())
            };
            self.set_data_path(key, data_path);
        }
        FarEnd {
            stream,
            received: FrameReader::default(),
        }
    }

    /// The messages and parts of streams that a session has sent since the last call: header and payload.
    pub(crate) fn sent(&mut self, key: SessionKey, to: &mut FarEnd) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut sent = Vec::new();
        while let Some(session) = self.sessions.get_mut(&key) {
            session.flush();
            let received = socket::receive(to.stream.as_fd(), None, to.received.buffer(), 1 << 20);
            if received.is_err() {
                break;
            }
            while let Some(frame) = to.received.next(FRAME_CAP).unwrap() {
                match SessionFrame::decode(frame).unwrap() {
                    SessionFrame::Message { header, payload }
                    | SessionFrame::Stream {
                        header, payload, ..
                    } => sent.push((header.to_vec(), payload.to_vec())),
                    _ => {}
                }
            }
        }
        sent
    }

    /// A part of a stream has come.
    pub(crate) fn place(&self, key: SessionKey, header: &[u8], payload: &[u8]) -> Result<Payload> {
        inbox::place(&self.sinks, key, header, payload)?;
        Ok(Payload::Placed {
            num_bytes: payload.len(),
            is_aborted: false,
        })
    }

    /// Lets the worker work, and returns a read that has ended.
    pub(crate) fn next_ended_read(&self) -> Option<(u64, std::result::Result<(), Status>)> {
        let worker = self.worker()?;
        worker.progress();
        std::iter::from_fn(|| worker.next_event()).find_map(|event| match event {
            Event::Done { token, result } if connected_by(token).is_none() => Some((token, result)),
            _ => None,
        })
    }
}
