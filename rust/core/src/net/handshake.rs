//! The bootstrap conversation as a pure state machine: frames in, frames out.
//!
//! ```text
//! client                               server
//! Hello{magic, version, nonce_c}  ->
//!                                 <-   Challenge{version, nonce_s}
//! Proof{HMAC(client)}             ->                                 the server checks
//!                                 <-   Proof{HMAC(server)}           the client checks
//! Identity{who, HMAC}             ->                                 service and fingerprint are checked
//!                                 <-   Welcome{who, session id, HMAC}
//! Ready                           ->
//! ```
//! Nothing about a process (identity, UCX address) is said before the other side has proved the token. Each HMAC
//! covers a label of its own, both nonces and the protocol version, so none can be reflected or replayed.

use hmac::digest::KeyInit;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::{Error, Result};
pub use crate::ids::SessionId;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::{Identity, random};

/// Version of everything on the wire; other versions are refused.
pub const PROTOCOL_VERSION: u16 = 5;
/// Largest frame before authentication.
pub const HANDSHAKE_FRAME_CAP: usize = 64 << 10;

const MAGIC: [u8; 4] = *b"KVPP";
const TEXT_CAP: usize = 4096;

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;
const IDENTITY: u8 = 4;
const WELCOME: u8 = 5;
const READY: u8 = 6;
const REFUSED: u8 = 7;

type Nonce = [u8; 32];

/// What a frame led to.
#[derive(Debug)]
pub enum Step {
    /// Send these frames and wait for more.
    Continue(Vec<Vec<u8>>),
    /// Send these frames; the peer is known. The accepting side waits for [`Step::Ready`] before it speaks on the
    /// data plane, so that no message overtakes the frame that makes the session known.
    Admitted {
        /// What is still to be sent.
        frames: Vec<Vec<u8>>,
        /// Who the peer is.
        peer: Box<Identity>,
        /// The session's id.
        session_id: SessionId,
        /// Whether this side may speak at once.
        is_ready: bool,
    },
    /// The peer knows the session too.
    Ready,
    /// Send this frame, then close; for the log of this side.
    Refuse(Vec<u8>, Error),
}

#[derive(Debug)]
enum State {
    ServerHello,
    ServerProof,
    ServerIdentity,
    ServerReady,
    ClientChallenge,
    ClientProof,
    ClientWelcome,
    Done,
}

/// One side of the conversation.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    token: Vec<u8>,
    nonce_client: Nonce,
    nonce_server: Nonce,
    peer: String,
}

impl Handshake {
    /// The accepting side.
    pub fn server(token: &[u8], peer: &str) -> Result<Self> {
        Ok(Self {
            state: State::ServerHello,
            token: token.to_vec(),
            nonce_client: [0; 32],
            nonce_server: random()?,
            peer: peer.to_owned(),
        })
    }

    /// The connecting side, and its first frame.
    pub fn client(token: &[u8], peer: &str) -> Result<(Self, Vec<u8>)> {
        let nonce_client = random()?;
        let hello = Writer::new(HELLO)
            .raw(&MAGIC)
            .u16(PROTOCOL_VERSION)
            .raw(&nonce_client)
            .finish();
        let handshake = Self {
            state: State::ClientChallenge,
            token: token.to_vec(),
            nonce_client,
            nonce_server: [0; 32],
            peer: peer.to_owned(),
        };
        Ok((handshake, hello))
    }

    /// Takes a frame of the peer. `ours` is what this side says about itself when its turn comes; `accept` may
    /// refuse a peer that has proved the token, with a reason that the peer is told.
    ///
    /// # Errors
    /// The peer refused us, cannot prove the token, or does not speak this protocol; the session is over.
    pub fn frame(
        &mut self,
        frame: &[u8],
        ours: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<Step> {
        let mut reader = Reader::new(frame);
        let kind = reader.u8()?;
        if kind == REFUSED {
            return Err(self.read_refusal(reader));
        }
        match (std::mem::replace(&mut self.state, State::Done), kind) {
            (State::ServerHello, HELLO) => self.hello(reader),
            (State::ServerProof, PROOF) => self.client_proof(reader),
            (State::ServerIdentity, IDENTITY) => self.identity(reader, ours, accept),
            (State::ServerReady, READY) => reader.end().map(|()| Step::Ready),
            (State::ClientChallenge, CHALLENGE) => self.challenge(reader),
            (State::ClientProof, PROOF) => self.server_proof(reader, ours),
            (State::ClientWelcome, WELCOME) => self.welcome(reader, ours),
            (state, kind) => Err(Error::protocol(format_args!(
                "frame {kind} in handshake state {state:?}"
            ))),
        }
    }

    fn hello(&mut self, mut reader: Reader<'_>) -> Result<Step> {
        if reader.fixed::<4>()? != MAGIC {
            return Err(Error::protocol("not a kvpipe peer"));
        }
        let version = reader.u16()?;
        if version != PROTOCOL_VERSION {
            return Ok(refuse(self.other_version(version)));
        }
        self.nonce_client = reader.fixed()?;
        reader.end()?;
        self.state = State::ServerProof;
        let frame = Writer::new(CHALLENGE)
            .u16(PROTOCOL_VERSION)
            .raw(&self.nonce_server)
            .finish();
        Ok(Step::Continue(vec![frame]))
    }

    fn challenge(&mut self, mut reader: Reader<'_>) -> Result<Step> {
        let version = reader.u16()?;
        if version != PROTOCOL_VERSION {
            return Err(self.other_version(version));
        }
        self.nonce_server = reader.fixed()?;
        reader.end()?;
        self.state = State::ClientProof;
        Ok(Step::Continue(vec![
            Writer::new(PROOF)
                .raw(&self.mac(b"kvpipe client", &[]))
                .finish(),
        ]))
    }

    fn client_proof(&mut self, mut reader: Reader<'_>) -> Result<Step> {
        if !self.proves(&reader.fixed()?, b"kvpipe client", &[]) {
            let text = format!(
                "{} does not hold this side's token: give both sides the same KVPIPE_TOKEN",
                self.peer
            );
            return Ok(refuse(Error::Authentication(text)));
        }
        reader.end()?;
        self.state = State::ServerIdentity;
        Ok(Step::Continue(vec![
            Writer::new(PROOF)
                .raw(&self.mac(b"kvpipe server", &[]))
                .finish(),
        ]))
    }

    fn server_proof(&mut self, mut reader: Reader<'_>, ours: &Identity) -> Result<Step> {
        if !self.proves(&reader.fixed()?, b"kvpipe server", &[]) {
            return Err(Error::Authentication(format!(
                "{} could not prove that it holds the token",
                self.peer
            )));
        }
        reader.end()?;
        let body = ours.write(Writer::default()).finish();
        let mac = self.mac(b"kvpipe client identity", &body);
        self.state = State::ClientWelcome;
        Ok(Step::Continue(vec![
            Writer::new(IDENTITY).raw(&mac).raw(&body).finish(),
        ]))
    }

    fn identity(
        &mut self,
        mut reader: Reader<'_>,
        ours: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<Step> {
        let mac = reader.fixed()?;
        let body = reader.rest();
        if !self.proves(&mac, b"kvpipe client identity", body) {
            return Err(Error::Authentication(format!(
                "the identity of {} is not signed by its token",
                self.peer
            )));
        }
        let mut reader = Reader::new(body);
        let theirs = Identity::read(&mut reader)?;
        reader.end()?;
        if theirs.kind != ours.kind {
            let (ours, theirs) = (format!("{:?}", ours.kind), format!("{:?}", theirs.kind));
            return Ok(refuse(self.incompatible("service", ours, theirs)));
        }
        if let Some((field, ours, theirs)) = ours.difference(&theirs) {
            return Ok(refuse(self.incompatible(&field, ours, theirs)));
        }
        if let Err(reason) = accept(&theirs) {
            return Ok(refuse(Error::Connect(reason)));
        }
        let session_id: SessionId = random()?;
        let body = ours.write(Writer::default().raw(&session_id)).finish();
        let mac = self.mac(b"kvpipe server identity", &body);
        self.state = State::ServerReady;
        let frames = vec![Writer::new(WELCOME).raw(&mac).raw(&body).finish()];
        Ok(Step::Admitted {
            frames,
            peer: Box::new(theirs),
            session_id,
            is_ready: false,
        })
    }

    fn welcome(&mut self, mut reader: Reader<'_>, ours: &Identity) -> Result<Step> {
        let mac = reader.fixed()?;
        let body = reader.rest();
        if !self.proves(&mac, b"kvpipe server identity", body) {
            return Err(Error::Authentication(format!(
                "the identity of {} is not signed by its token",
                self.peer
            )));
        }
        let mut reader = Reader::new(body);
        let session_id = reader.fixed()?;
        let peer = Identity::read(&mut reader)?;
        reader.end()?;
        if let Some((field, ours, theirs)) = ours.difference(&peer) {
            return Err(self.incompatible(&field, ours, theirs));
        }
        let frames = vec![Writer::new(READY).finish()];
        Ok(Step::Admitted {
            frames,
            peer: Box::new(peer),
            session_id,
            is_ready: true,
        })
    }

    fn mac(&self, label: &[u8], body: &[u8]) -> [u8; 32] {
        self.signer(label, body).finalize().into_bytes().into()
    }

    fn signer(&self, label: &[u8], body: &[u8]) -> Hmac<Sha256> {
        // Hashed to the key size first: `new` then takes it without an error path, and any token length works.
        let key = Sha256::digest(&self.token);
        let mut block = hmac::digest::Key::<Hmac<Sha256>>::default();
        block[..key.len()].copy_from_slice(&key);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&block);
        mac.update(label);
        mac.update(&PROTOCOL_VERSION.to_le_bytes());
        mac.update(&self.nonce_client);
        mac.update(&self.nonce_server);
        mac.update(body);
        mac
    }

    fn proves(&self, given: &[u8; 32], label: &[u8], body: &[u8]) -> bool {
        self.mac(label, body).ct_eq(given).into()
    }

    fn incompatible(&self, field: &str, ours: String, theirs: String) -> Error {
        Error::Incompatible {
            peer: self.peer.clone(),
            field: field.to_owned(),
            ours,
            theirs,
        }
    }

    fn other_version(&self, version: u16) -> Error {
        self.incompatible(
            "protocol version",
            PROTOCOL_VERSION.to_string(),
            version.to_string(),
        )
    }

    fn read_refusal(&self, mut reader: Reader<'_>) -> Error {
        let mut parse = || -> Result<Error> {
            Ok(match reader.u8()? {
                1 => Error::Authentication(format!(
                    "{} refused this side's token: give both sides the same KVPIPE_TOKEN",
                    self.peer
                )),
                2 => self.incompatible(
                    &reader.str(TEXT_CAP)?,
                    reader.str(TEXT_CAP)?,
                    reader.str(TEXT_CAP)?,
                ),
                _ => Error::Connect(format!(
                    "{} refused the connection: {}",
                    self.peer,
                    reader.str(TEXT_CAP)?
                )),
            })
        };
        parse().unwrap_or_else(|error| error)
    }
}

/// Tells the peer why it is refused, from its point of view (our value is its peer's).
fn refuse(error: Error) -> Step {
    let frame = match &error {
        Error::Authentication(_) => Writer::new(REFUSED).u8(1),
        Error::Incompatible {
            field,
            ours,
            theirs,
            ..
        } => Writer::new(REFUSED).u8(2).str(field).str(theirs).str(ours),
        other => Writer::new(REFUSED)
            .u8(3)
            .text(&other.to_string(), TEXT_CAP),
    };
    Step::Refuse(frame.finish(), error)
}

#[cfg(test)]
mod tests;
