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
//! A side sends nothing about its process (identity, UCX address) before the other side has proved the token. Each HMAC
//! covers a label of its own, both nonces and the protocol version, so that none can be reflected or replayed.

mod frames;

use hmac::digest::KeyInit;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::{Identity, random};
use crate::net::secret::Secret;
use frames::{Greeting, HandshakeFrame, Nonce, Signature, Signed};

/// Version of everything on the wire; other versions are refused.
pub const PROTOCOL_VERSION: u16 = 8;
/// Largest frame before authentication.
pub const HANDSHAKE_FRAME_CAP: usize = 64 << 10;

const CLIENT_PROOF: &[u8] = b"kvpipe client";
const SERVER_PROOF: &[u8] = b"kvpipe server";
const CLIENT_IDENTITY: &[u8] = b"kvpipe client identity";
const SERVER_IDENTITY: &[u8] = b"kvpipe server identity";

/// What a frame leads to.
#[derive(Debug)]
pub enum Step {
    /// Send this frame and wait for more.
    Continue(Vec<u8>),
    /// Send this frame; the peer is known. The accepting side waits for [`Step::Ready`] before it sends on the data
    /// plane, so that no message overtakes the frame that makes the session known.
    Admitted {
        /// What is still to be sent.
        frame: Vec<u8>,
        /// The session's id.
        session_id: SessionId,
        /// Who the peer is, where this side may send at once.
        peer: Option<Box<Identity>>,
    },
    /// This peer knows the session too.
    Ready(Box<Identity>),
    /// Send this frame, then close; the error is for the log of this side.
    Refuse(Vec<u8>, Error),
}

/// How far a peer that has connected is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Its HELLO has not come.
    Silent,
    /// Its HELLO has come.
    Greeted,
    /// It has proved the token, or the handshake is over.
    Proved,
}

#[derive(Debug)]
enum HandshakeState {
    ServerHello,
    ServerProof,
    ServerIdentity,
    ServerReady(Box<Identity>),
    ClientChallenge,
    ClientProof,
    ClientWelcome,
    Done,
}

/// One side of the conversation.
#[derive(Debug)]
pub struct Handshake {
    state: HandshakeState,
    secret: Secret,
    nonce_client: Nonce,
    nonce_server: Nonce,
    peer: String,
}

impl Handshake {
    /// The accepting side.
    pub fn server(secret: &Secret, peer: &str) -> Result<Self> {
        Ok(Self {
            state: HandshakeState::ServerHello,
            secret: secret.clone(),
            nonce_client: Nonce::default(),
            nonce_server: random()?,
            peer: peer.to_owned(),
        })
    }

    /// The connecting side, and its first frame.
    pub fn client(secret: &Secret, peer: &str) -> Result<(Self, Vec<u8>)> {
        let handshake = Self {
            state: HandshakeState::ClientChallenge,
            secret: secret.clone(),
            nonce_client: random()?,
            nonce_server: Nonce::default(),
            peer: peer.to_owned(),
        };
        let hello = HandshakeFrame::Hello(Greeting::new(handshake.nonce_client));
        Ok((handshake, hello.encode()))
    }

    /// How far a peer that has connected is.
    pub(crate) fn progress(&self) -> Progress {
        match self.state {
            HandshakeState::ServerHello => Progress::Silent,
            HandshakeState::ServerProof => Progress::Greeted,
            _ => Progress::Proved,
        }
    }

    /// Handles a frame of the peer. `ours` is what this side says about itself when its turn comes; `accept` may refuse a
    /// peer that has proved the token, with a reason that the peer receives.
    ///
    /// # Errors
    /// The peer refused us, cannot prove the token, or breaks the protocol; the session is over.
    pub fn frame(
        &mut self,
        frame: &[u8],
        ours: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<Step> {
        use {HandshakeFrame as Frame, HandshakeState as State};
        let kind = frame.first().copied().unwrap_or_default();
        let decoded = Frame::decode(frame, &self.peer)?;
        match (std::mem::replace(&mut self.state, State::Done), decoded) {
            (_, Frame::Refused(error)) => Err(error),
            (State::ServerHello, Frame::Hello(greeting)) => {
                Ok(self.hello(&greeting).unwrap_or_else(refuse))
            }
            (State::ServerProof, Frame::Proof(signature)) => {
                Ok(self.client_proof(&signature).unwrap_or_else(refuse))
            }
            (State::ServerIdentity, Frame::Identity(signed)) => {
                let peer = self.read_identity(&signed)?;
                let checked = self.check_identity(ours, &peer, accept);
                checked.map_or_else(|error| Ok(refuse(error)), |()| self.welcome(ours, peer))
            }
            (State::ServerReady(peer), Frame::Ready) => Ok(Step::Ready(peer)),
            (State::ClientChallenge, Frame::Challenge(greeting)) => self.challenge(&greeting),
            (State::ClientProof, Frame::Proof(signature)) => self.server_proof(&signature, ours),
            (State::ClientWelcome, Frame::Welcome(signed)) => self.welcomed(&signed, ours),
            _ => Err(Error::protocol(format_args!(
                "frame {kind} of a handshake, out of turn"
            ))),
        }
    }

    fn hello(&mut self, greeting: &Greeting) -> Result<Step> {
        self.check_version(greeting)?;
        self.nonce_client = greeting.nonce;
        self.state = HandshakeState::ServerProof;
        let challenge = Greeting::new(self.nonce_server);
        Ok(reply(&HandshakeFrame::Challenge(challenge)))
    }

    fn challenge(&mut self, greeting: &Greeting) -> Result<Step> {
        self.check_version(greeting)?;
        self.nonce_server = greeting.nonce;
        self.state = HandshakeState::ClientProof;
        let proof = self.sign(CLIENT_PROOF, &[]);
        Ok(reply(&HandshakeFrame::Proof(proof)))
    }

    fn client_proof(&mut self, signature: &Signature) -> Result<Step> {
        if !self.is_signed(signature, CLIENT_PROOF, &[]) {
            return Err(Error::Authentication(format!(
                "{} does not hold this side's token: give both sides the same KVPIPE_TOKEN",
                self.peer
            )));
        }
        self.state = HandshakeState::ServerIdentity;
        let proof = self.sign(SERVER_PROOF, &[]);
        Ok(reply(&HandshakeFrame::Proof(proof)))
    }

    fn server_proof(&mut self, signature: &Signature, ours: &Identity) -> Result<Step> {
        if !self.is_signed(signature, SERVER_PROOF, &[]) {
            return Err(Error::Authentication(format!(
                "{} could not prove that it holds the token",
                self.peer
            )));
        }
        self.state = HandshakeState::ClientWelcome;
        let body = ours.write(Writer::default()).finish();
        let signed = self.seal(CLIENT_IDENTITY, &body);
        Ok(reply(&HandshakeFrame::Identity(signed)))
    }

    fn read_identity(&self, signed: &Signed<'_>) -> Result<Identity> {
        let mut reader = self.open(CLIENT_IDENTITY, signed)?;
        let peer = Identity::read(&mut reader)?;
        reader.end()?;
        Ok(peer)
    }

    fn check_identity(
        &self,
        ours: &Identity,
        peer: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<()> {
        if peer.kind != ours.kind {
            let (ours, theirs) = (format!("{:?}", ours.kind), format!("{:?}", peer.kind));
            return Err(self.incompatible("service", ours, theirs));
        }
        self.check_fingerprint(ours, peer)?;
        accept(peer).map_err(Error::Connect)
    }

    fn welcome(&mut self, ours: &Identity, peer: Identity) -> Result<Step> {
        let session_id: SessionId = random()?;
        self.state = HandshakeState::ServerReady(Box::new(peer));
        let body = ours.write(Writer::default().raw(&session_id)).finish();
        let welcome = HandshakeFrame::Welcome(self.seal(SERVER_IDENTITY, &body));
        Ok(Step::Admitted {
            frame: welcome.encode(),
            session_id,
            peer: None,
        })
    }

    fn welcomed(&self, signed: &Signed<'_>, ours: &Identity) -> Result<Step> {
        let mut reader = self.open(SERVER_IDENTITY, signed)?;
        let (session_id, peer) = (reader.fixed()?, Identity::read(&mut reader)?);
        reader.end()?;
        self.check_fingerprint(ours, &peer)?;
        Ok(Step::Admitted {
            frame: HandshakeFrame::Ready.encode(),
            session_id,
            peer: Some(Box::new(peer)),
        })
    }

    fn seal<'a>(&self, label: &[u8], body: &'a [u8]) -> Signed<'a> {
        let signature = self.sign(label, body);
        Signed { signature, body }
    }

    /// A body whose signature is right.
    fn open<'a>(&self, label: &[u8], signed: &Signed<'a>) -> Result<Reader<'a>> {
        if self.is_signed(&signed.signature, label, signed.body) {
            return Ok(Reader::new(signed.body));
        }
        Err(Error::Authentication(format!(
            "the identity of {} is not signed by its token",
            self.peer
        )))
    }

    fn check_version(&self, greeting: &Greeting) -> Result<()> {
        if greeting.version == PROTOCOL_VERSION {
            return Ok(());
        }
        let (ours, theirs) = (PROTOCOL_VERSION.to_string(), greeting.version.to_string());
        Err(self.incompatible("protocol version", ours, theirs))
    }

    fn check_fingerprint(&self, ours: &Identity, peer: &Identity) -> Result<()> {
        match ours.difference(peer) {
            None => Ok(()),
            Some((field, ours, theirs)) => Err(self.incompatible(&field, ours, theirs)),
        }
    }

    fn sign(&self, label: &[u8], body: &[u8]) -> Signature {
        let (key, mut block) = (
            self.secret.key(),
            hmac::digest::Key::<Hmac<Sha256>>::default(),
        );
        block[..key.len()].copy_from_slice(key);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&block);
        block.as_mut_slice().zeroize();
        mac.update(label);
        mac.update(&PROTOCOL_VERSION.to_le_bytes());
        mac.update(&self.nonce_client);
        mac.update(&self.nonce_server);
        mac.update(body);
        mac.finalize().into_bytes().into()
    }

    fn is_signed(&self, signature: &Signature, label: &[u8], body: &[u8]) -> bool {
        self.sign(label, body).ct_eq(signature).into()
    }

    fn incompatible(&self, field: &str, ours: String, theirs: String) -> Error {
        Error::Incompatible {
            peer: self.peer.clone(),
            field: field.to_owned(),
            ours,
            theirs,
        }
    }
}

fn reply(frame: &HandshakeFrame<'_>) -> Step {
    Step::Continue(frame.encode())
}

fn refuse(error: Error) -> Step {
    let frame = HandshakeFrame::Refused(error.clone());
    Step::Refuse(frame.encode(), error)
}

#[cfg(test)]
mod tests;
