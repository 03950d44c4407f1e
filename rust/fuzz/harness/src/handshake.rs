//! The handshake as a state machine, against a peer that sends what it should, something near to it, or anything else.

use kvpipe_core::Result;
use kvpipe_core::net::codec::Reader;
use kvpipe_core::net::encryption::{Encryption, EncryptionOffer};
use kvpipe_core::net::handshake::{Handshake, Step};
use kvpipe_core::net::identity::{Identity, SessionKind};
use kvpipe_core::net::secret::Secrets;

use crate::hostile::TOKEN;

/// The engine id of the victim: a frame that contains it has disclosed its identity.
const ENGINE_ID: &str = "engine of the side under test";

const HONEST: u8 = 0;
const OTHER: u8 = 2;
const MOVES: u8 = 3;

/// The peer, and the frames that it has not sent yet.
struct Peer {
    handshake: Handshake,
    identity: Identity,
    outbox: Vec<Vec<u8>>,
}

impl Peer {
    fn receive(&mut self, frame: &mut [u8]) {
        let step = self
            .handshake
            .frame(frame, &self.identity.clone(), |_| Ok(()));
        match step {
            Ok(Step::Continue(frame) | Step::Admitted { frame, .. } | Step::Refuse(frame, _)) => {
                self.outbox = vec![frame];
            }
            Ok(Step::Ready(_) | Step::AskedToJoin(_) | Step::Joined(_)) | Err(_) => {}
        }
    }
}

/// The next frame as the bytes have it, and whether an honest peer would send it now.
fn next_frame(reader: &mut Reader<'_>, peer: &mut Peer) -> Result<Option<(Vec<u8>, bool)>> {
    let kind = reader.u8()? % MOVES;
    if kind == OTHER {
        let len = reader.u16()?;
        let frame = reader.raw(len.into())?.to_vec();
        return Ok(Some((frame, false)));
    }
    let Some(mut frame) = peer.outbox.pop() else {
        return Ok(None);
    };
    if kind == HONEST {
        return Ok(Some((frame, true)));
    }
    let (at, flip) = (reader.u16()?, reader.u8()?);
    let at = usize::from(at) % frame.len();
    frame[at] ^= flip;
    Ok(Some((frame, flip == 0)))
}

fn identity(engine_id: &str) -> Identity {
    Identity::new(SessionKind::Pipe, engine_id, Vec::new()).expect("identity")
}

/// The offer of a side, by two bits.
fn offer(bits: u8) -> EncryptionOffer {
    EncryptionOffer {
        encryption: match bits % 4 {
            0 | 1 => Encryption::Auto,
            2 => Encryption::On,
            _ => Encryption::Off,
        },
        is_loopback: bits % 4 != 1,
        host: "boot id".to_owned(),
    }
}

fn contains(frame: &[u8], text: &str) -> bool {
    frame
        .windows(text.len())
        .any(|part| part == text.as_bytes())
}

/// Only a peer that holds the token and has kept to every byte is admitted, and learns the victim's identity.
///
/// # Panics
/// Another peer is admitted or learns it.
pub(crate) fn handshake(bytes: &[u8]) {
    let Some((flags, rest)) = bytes.split_first() else {
        return;
    };
    let (is_server, has_token) = (flags & 1 != 0, flags & 2 == 0);
    let token = if has_token { TOKEN } else { b"another" };
    let ours = identity(ENGINE_ID);
    let client =
        |token| Handshake::client(&Secrets::new(token), offer(flags >> 2), "peer").expect("client");
    let server = |token| Handshake::server(&Secrets::new(token), offer(flags >> 4), "peer");
    let (mut victim, mut peer) = {
        let (client, mut hello) = client(if is_server { token } else { TOKEN });
        let server = server(if is_server { TOKEN } else { token });
        let (victim, handshake) = if is_server {
            (server, client)
        } else {
            (client, server)
        };
        let identity = identity("the peer");
        let mut peer = Peer {
            handshake,
            identity,
            outbox: Vec::new(),
        };
        if is_server {
            peer.outbox.push(hello);
        } else {
            peer.receive(&mut hello);
        }
        (victim, peer)
    };
    let mut is_honest = has_token;
    let mut reader = Reader::new(rest);
    while let Ok(Some((mut frame, is_right))) = next_frame(&mut reader, &mut peer) {
        is_honest &= is_right;
        let mut frame = match victim.frame(&mut frame, &ours, |_| Ok(())) {
            Ok(Step::Continue(frame) | Step::Refuse(frame, _)) => frame,
            Ok(Step::Admitted { frame, .. }) => {
                assert!(is_honest, "a stranger was admitted");
                frame
            }
            Ok(Step::Joined(_)) => panic!("a connection has joined no session"),
            Ok(Step::Ready(_) | Step::AskedToJoin(_)) | Err(_) => return,
        };
        let is_disclosed = contains(&frame, ENGINE_ID);
        assert!(is_honest || !is_disclosed, "a stranger learns who this is");
        peer.receive(&mut frame);
    }
}
