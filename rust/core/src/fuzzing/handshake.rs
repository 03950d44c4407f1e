//! The bootstrap conversation as a state machine, against a peer that says what it should, something near to it, or
//! anything else.

use super::hostile::TOKEN;
use crate::error::Result;
use crate::net::codec::Reader;
use crate::net::handshake::{Handshake, Step};
use crate::net::identity::{Identity, SessionKind};

/// In what one side says, this shows that it has told who it is.
const WHO: &str = "engine of the side under test";

const HONEST: u8 = 0;
const OTHER: u8 = 2;
const MOVES: u8 = 3;

/// The peer, and what it has not said yet.
struct Peer {
    handshake: Handshake,
    identity: Identity,
    to_say: Vec<Vec<u8>>,
}

impl Peer {
    fn hear(&mut self, frame: &[u8]) {
        let step = self
            .handshake
            .frame(frame, &self.identity.clone(), |_| Ok(()));
        match step {
            Ok(Step::Continue(frames) | Step::Admitted { frames, .. }) => self.to_say = frames,
            Ok(Step::Refuse(frame, _)) => self.to_say = vec![frame],
            Ok(Step::Ready) | Err(_) => {}
        }
    }
}

/// The next frame as the bytes have it, and whether it is what an honest peer says now.
fn next_frame(reader: &mut Reader<'_>, peer: &mut Peer) -> Result<Option<(Vec<u8>, bool)>> {
    let kind = reader.u8()? % MOVES;
    if kind == OTHER {
        let len = reader.u16()?;
        return Ok(Some((reader.raw(len.into())?.to_vec(), false)));
    }
    let Some(mut frame) = peer.to_say.pop() else {
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

fn contains(frame: &[u8], text: &str) -> bool {
    frame
        .windows(text.len())
        .any(|part| part == text.as_bytes())
}

/// Nobody is admitted, or told anything, but a peer that holds the token and has kept to every byte.
///
/// # Panics
/// Somebody was.
pub fn handshake(bytes: &[u8]) {
    let Some((flags, rest)) = bytes.split_first() else {
        return;
    };
    let (is_server, has_token) = (flags & 1 != 0, flags & 2 == 0);
    let token = if has_token { TOKEN } else { b"another" };
    let ours = identity(WHO);
    let client = |token| Handshake::client(token, "peer").expect("client");
    let server = |token| Handshake::server(token, "peer").expect("server");
    let (mut under_test, mut peer) = {
        let (client, hello) = client(if is_server { token } else { TOKEN });
        let server = server(if is_server { TOKEN } else { token });
        let (under_test, handshake) = if is_server {
            (server, client)
        } else {
            (client, server)
        };
        let identity = identity("the peer");
        let mut peer = Peer {
            handshake,
            identity,
            to_say: Vec::new(),
        };
        if is_server {
            peer.to_say.push(hello);
        } else {
            peer.hear(&hello);
        }
        (under_test, peer)
    };
    let mut is_honest = has_token;
    let mut reader = Reader::new(rest);
    while let Ok(Some((frame, is_right))) = next_frame(&mut reader, &mut peer) {
        is_honest &= is_right;
        let frames = match under_test.frame(&frame, &ours, |_| Ok(())) {
            Ok(Step::Continue(frames)) => frames,
            Ok(Step::Admitted { frames, .. }) => {
                assert!(is_honest, "a stranger was admitted");
                frames
            }
            Ok(Step::Ready) | Err(_) => return,
            Ok(Step::Refuse(frame, _)) => vec![frame],
        };
        for frame in frames {
            let is_told = contains(&frame, WHO);
            assert!(is_honest || !is_told, "a stranger was told who this is");
            peer.hear(&frame);
        }
    }
}
