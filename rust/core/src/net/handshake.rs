//! The bootstrap conversation as a pure state machine: frames in, frames out.
//!
//! ```text
//! client                               server
//! Hello{magic, version, message 1} ->                                the server checks the token
//!                                 <-   Reply{version, message 2}     the client checks the token
//! Identity{who}                   ->                                 service and fingerprint are checked
//!                                 <-   Welcome{who}
//! Ready                           ->
//! ```
//! The messages are those of Noise, pattern `NNpsk0`: the token is the key that both sides know before. All frames after them
//! are sealed with keys of this conversation alone. A first message can be recorded and played again; so the server acts on
//! nothing before the client's first record has opened.
//!
//! A further connection of a session proves the session's own secret instead, and both sides know each other already:
//!
//! ```text
//! Join{magic, version, session, number, message 1} ->                the server checks the secret
//!                                 <-   Reply{version, message 2}     the client checks it
//! Ready                           ->
//! ```

mod frames;
mod noise;

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::encryption::{Encryption, EncryptionOffer};
use crate::net::identity::Identity;
use crate::net::record::Records;
use crate::net::secret::{JoinSecret, Secrets, SessionId};
use crate::net::version::PROTOCOL_VERSION;
use frames::{Greeting, HandshakeFrame};
use noise::Noise;

/// Largest frame before authentication.
pub const HANDSHAKE_FRAME_CAP: usize = 64 << 10;

/// The next step of a handshake after a frame.
#[derive(Debug)]
pub enum Step {
    /// Send this frame and wait for more.
    Continue(Vec<u8>),
    /// Send this frame; the peer is known. The accepting side waits for [`Step::Ready`] before it uses the session.
    Admitted {
        /// The frame to send.
        frame: Vec<u8>,
        /// The peer's identity, if this side may send at once.
        peer: Option<Box<Identity>>,
    },
    /// This peer knows the session too.
    Ready(Box<Identity>),
    /// A further connection of a session: [`Handshake::join`] goes on, or the connection is closed.
    AskedToJoin(JoinRequest),
    /// Send this frame, if there is one; the connection has joined its session.
    Joined(Option<Vec<u8>>),
    /// Send this frame, then close; the error is for the log of this side.
    Refuse(Vec<u8>, Error),
}

/// The first frame of a connection that is to join a session.
#[derive(Debug)]
pub struct JoinRequest {
    pub(crate) session: SessionId,
    pub(crate) number: u32,
    message: Vec<u8>,
}

/// Progress of a peer that has connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeProgress {
    /// Its HELLO has not come.
    Silent,
    /// Its HELLO has come: with the token, or played again.
    Greeted,
    /// It has proved the token, or the handshake is over.
    Proved,
}

#[derive(Debug)]
enum HandshakeState {
    ServerHello(Secrets),
    ServerIdentity,
    ServerReady(Box<Identity>),
    ServerJoin,
    ServerJoinReady,
    ClientJoinReply(Box<Noise>),
    ClientReply(Box<Noise>),
    ClientWelcome,
    Done,
}

/// One side of the conversation.
#[derive(Debug)]
pub struct Handshake {
    state: HandshakeState,
    /// The keys, once both messages of Noise have been written and read.
    records: Option<Records>,
    join_secret: Option<JoinSecret>,
    ours: EncryptionOffer,
    /// The setting of the peer, once it has proved the token.
    theirs: Option<Encryption>,
    /// True if frames stay sealed after the handshake; `None` where the two sides do not agree.
    is_sealed: Option<bool>,
    peer: String,
}

impl Handshake {
    fn new(state: HandshakeState, ours: EncryptionOffer, peer: &str) -> Self {
        Self {
            state,
            records: None,
            join_secret: None,
            ours,
            theirs: None,
            is_sealed: None,
            peer: peer.to_owned(),
        }
    }

    /// The accepting side.
    pub fn server(secrets: &Secrets, ours: EncryptionOffer, peer: &str) -> Self {
        Self::new(HandshakeState::ServerHello(secrets.clone()), ours, peer)
    }

    /// The connecting side, and its first frame.
    ///
    /// # Errors
    /// `Exhausted`: the system gives no random bytes.
    pub fn client(secrets: &Secrets, ours: EncryptionOffer, peer: &str) -> Result<(Self, Vec<u8>)> {
        Self::greet(Noise::initiator(secrets.current())?, ours, peer)
    }

    fn greet(mut noise: Noise, ours: EncryptionOffer, peer: &str) -> Result<(Self, Vec<u8>)> {
        let message = noise.write(&ours.write(Writer::default()).finish())?;
        let hello = HandshakeFrame::Hello(Greeting::new(&message)).encode();
        let state = HandshakeState::ClientReply(Box::new(noise));
        Ok((Self::new(state, ours, peer), hello))
    }

    /// Progress of a peer that has connected.
    pub(crate) fn progress(&self) -> HandshakeProgress {
        match self.state {
            HandshakeState::ServerHello(_) => HandshakeProgress::Silent,
            HandshakeState::ServerIdentity
            | HandshakeState::ServerJoin
            | HandshakeState::ServerJoinReady => HandshakeProgress::Greeted,
            _ => HandshakeProgress::Proved,
        }
    }

    /// The connecting side of a further connection of a session, and its first frame. Its frames are sealed as those of the
    /// session are.
    ///
    /// # Errors
    /// As of [`client`](Self::client).
    pub(crate) fn joining(
        secret: &JoinSecret,
        number: u32,
        is_sealed: bool,
        peer: &str,
    ) -> Result<(Self, Vec<u8>)> {
        let mut noise = Noise::initiator(&secret.of_connection(number))?;
        let message = noise.write(&[])?;
        let (session, greeting) = (secret.session_id(), Greeting::new(&message));
        let join = HandshakeFrame::Join(session, number, greeting).encode();
        let state = HandshakeState::ClientJoinReply(Box::new(noise));
        let mut handshake = Self::new(state, EncryptionOffer::default(), peer);
        handshake.is_sealed = Some(is_sealed);
        Ok((handshake, join))
    }

    /// Answers a peer that has [asked](Step::AskedToJoin) to join a session with this secret, whose frames are sealed or not;
    /// refuses it if there is none.
    ///
    /// # Errors
    /// This handshake is not that far; the system gives no random bytes.
    pub(crate) fn join(
        &mut self,
        session: Option<(&JoinSecret, bool)>,
        request: &JoinRequest,
    ) -> Result<Step> {
        if !matches!(self.state, HandshakeState::ServerJoin) {
            return Err(Error::protocol("nothing has asked to join a session"));
        }
        let refused = || {
            let text = "there is no such session, or its secret is another one";
            refuse(Error::Connect(text.to_owned()))
        };
        let Some((secret, is_sealed)) = session else {
            return Ok(refused());
        };
        let mut noise = Noise::responder(&secret.of_connection(request.number))?;
        if noise.read(&request.message).is_none() {
            return Ok(refused());
        }
        let message = noise.write(&[])?;
        self.set_keys(noise);
        self.is_sealed = Some(is_sealed);
        self.state = HandshakeState::ServerJoinReady;
        let reply = HandshakeFrame::Reply(Greeting::new(&message));
        Ok(Step::Continue(reply.encode()))
    }

    fn set_keys(&mut self, noise: Noise) {
        let (records, join_secret) = noise.into_keys();
        (self.records, self.join_secret) = (Some(records), Some(join_secret));
    }

    /// The secret of further connections, once there are keys.
    pub(crate) fn join_secret(&self) -> Option<JoinSecret> {
        self.join_secret.clone()
    }

    /// The keys of the session that the handshake has made, if its frames are sealed.
    pub fn into_records(self) -> Option<Records> {
        self.records.filter(|_| self.is_sealed == Some(true))
    }

    /// Handles a frame of the peer, which is opened in place. `ours` is what this side says about itself when its turn comes;
    /// `accept` may refuse a peer that has proved the token, with a reason that the peer receives.
    ///
    /// # Errors
    /// The peer refused us, cannot prove the token, or breaks the protocol; the session is over.
    pub fn frame(
        &mut self,
        frame: &mut [u8],
        ours: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<Step> {
        use {HandshakeFrame as Frame, HandshakeState as State};
        let kind = frame.first().copied().unwrap_or_default();
        let state = std::mem::replace(&mut self.state, State::Done);
        let frame = self.open(frame)?;
        match (state, Frame::decode(frame, &self.peer)?) {
            (State::ClientReply(_) | State::ClientJoinReply(_), Frame::Refused(error)) => {
                Err(unproved(error))
            }
            (State::ServerIdentity | State::ClientWelcome, Frame::Refused(error)) => Err(error),
            (State::ServerHello(secrets), Frame::Hello(greeting)) => {
                Ok(self.hello(&secrets, &greeting).unwrap_or_else(refuse))
            }
            (State::ServerIdentity, Frame::Identity(body)) => {
                let peer = read_identity(Reader::new(body))?;
                match self.check_identity(ours, &peer, accept) {
                    Ok(()) => self.welcome(ours, peer),
                    Err(error) => self.refuse_sealed(error),
                }
            }
            (State::ServerReady(peer), Frame::Ready) => Ok(Step::Ready(peer)),
            (State::ServerHello(_), Frame::Join(session, number, greeting)) => {
                if let Err(error) = self.check_version(&greeting) {
                    return Ok(refuse(error));
                }
                self.state = State::ServerJoin;
                Ok(Step::AskedToJoin(JoinRequest {
                    session,
                    number,
                    message: greeting.message.to_vec(),
                }))
            }
            (State::ServerJoinReady, Frame::Ready) => Ok(Step::Joined(None)),
            (State::ClientJoinReply(noise), Frame::Reply(greeting)) => {
                self.read_reply(*noise, &greeting)?;
                Ok(Step::Joined(Some(self.seal(&HandshakeFrame::Ready)?)))
            }
            (State::ClientReply(noise), Frame::Reply(greeting)) => {
                self.reply(*noise, &greeting, ours)
            }
            (State::ClientWelcome, Frame::Welcome(body)) => self.welcomed(body, ours),
            _ => Err(Error::protocol(format_args!(
                "frame {kind} of a handshake, out of turn"
            ))),
        }
    }

    /// A frame as its sender has made it.
    fn open<'a>(&mut self, frame: &'a mut [u8]) -> Result<&'a [u8]> {
        let Some(records) = &mut self.records else {
            return Ok(frame);
        };
        records.opener.open(frame).map_err(|_| {
            Error::Authentication(format!(
                "{} does not have the keys of this handshake: what it sent was played again, or changed on the way",
                self.peer
            ))
        })
    }

    fn seal(&mut self, frame: &HandshakeFrame<'_>) -> Result<Vec<u8>> {
        let (frame, mut sealed) = (frame.encode(), Vec::new());
        let records = self.records.as_mut();
        let records = records.ok_or_else(|| Error::protocol("no keys yet"))?;
        records.sealer.seal(&frame, &mut sealed)?;
        Ok(sealed)
    }

    fn refuse_sealed(&mut self, error: Error) -> Result<Step> {
        let frame = self.seal(&HandshakeFrame::Refused(error.clone()))?;
        Ok(Step::Refuse(frame, error))
    }

    fn hello(&mut self, secrets: &Secrets, greeting: &Greeting<'_>) -> Result<Step> {
        self.check_version(greeting)?;
        for secret in secrets.accepted() {
            let mut noise = Noise::responder(secret)?;
            if let Some(offer) = noise.read(greeting.message) {
                return self.greeted(noise, &offer);
            }
        }
        Err(Error::Authentication(format!(
            "{} does not hold this side's token: give both sides the same KVPIPE_TOKEN",
            self.peer
        )))
    }

    fn greeted(&mut self, mut noise: Noise, offer: &[u8]) -> Result<Step> {
        self.read_offer(offer)?;
        let message = noise.write(&self.ours.write(Writer::default()).finish())?;
        self.set_keys(noise);
        self.state = HandshakeState::ServerIdentity;
        let reply = HandshakeFrame::Reply(Greeting::new(&message));
        Ok(Step::Continue(reply.encode()))
    }

    /// Payload of the server's message, which gives the keys.
    fn read_reply(&mut self, mut noise: Noise, greeting: &Greeting<'_>) -> Result<Vec<u8>> {
        self.check_version(greeting)?;
        let payload = noise.read(greeting.message).ok_or_else(|| {
            Error::Authentication(format!(
                "{} could not prove that it holds the token",
                self.peer
            ))
        })?;
        self.set_keys(noise);
        Ok(payload)
    }

    fn reply(&mut self, noise: Noise, greeting: &Greeting<'_>, ours: &Identity) -> Result<Step> {
        let offer = self.read_reply(noise, greeting)?;
        self.read_offer(&offer)?;
        if let Err(error) = self.check_encryption() {
            return self.refuse_sealed(error);
        }
        self.state = HandshakeState::ClientWelcome;
        let body = ours.write(Writer::default()).finish();
        Ok(Step::Continue(self.seal(&HandshakeFrame::Identity(&body))?))
    }

    fn read_offer(&mut self, offer: &[u8]) -> Result<()> {
        let mut reader = Reader::new(offer);
        let theirs = EncryptionOffer::read(&mut reader)?;
        reader.end()?;
        self.is_sealed = self.ours.agree(&theirs);
        self.theirs = Some(theirs.encryption);
        Ok(())
    }

    fn check_encryption(&self) -> Result<()> {
        match (self.is_sealed, self.theirs) {
            (None, Some(theirs)) => {
                let (ours, theirs) = (self.ours.encryption.to_string(), theirs.to_string());
                Err(self.incompatible("encryption", ours, theirs))
            }
            _ => Ok(()),
        }
    }

    fn check_identity(
        &self,
        ours: &Identity,
        peer: &Identity,
        accept: impl FnOnce(&Identity) -> std::result::Result<(), String>,
    ) -> Result<()> {
        self.check_encryption()?;
        if peer.kind != ours.kind {
            let (ours, theirs) = (format!("{:?}", ours.kind), format!("{:?}", peer.kind));
            return Err(self.incompatible("service", ours, theirs));
        }
        self.check_fingerprint(ours, peer)?;
        accept(peer).map_err(Error::Connect)
    }

    fn welcome(&mut self, ours: &Identity, peer: Identity) -> Result<Step> {
        self.state = HandshakeState::ServerReady(Box::new(peer));
        let body = ours.write(Writer::default()).finish();
        Ok(Step::Admitted {
            frame: self.seal(&HandshakeFrame::Welcome(&body))?,
            peer: None,
        })
    }

    fn welcomed(&mut self, body: &[u8], ours: &Identity) -> Result<Step> {
        let peer = read_identity(Reader::new(body))?;
        self.check_fingerprint(ours, &peer)?;
        Ok(Step::Admitted {
            frame: self.seal(&HandshakeFrame::Ready)?,
            peer: Some(Box::new(peer)),
        })
    }

    fn check_version(&self, greeting: &Greeting<'_>) -> Result<()> {
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

    fn incompatible(&self, field: &str, ours: String, theirs: String) -> Error {
        Error::Incompatible {
            peer: self.peer.clone(),
            field: field.to_owned(),
            ours,
            theirs,
        }
    }
}

fn read_identity(mut reader: Reader<'_>) -> Result<Identity> {
    let identity = Identity::read(&mut reader)?;
    reader.end()?;
    Ok(identity)
}

/// The error of a refusal that is not sealed: another machine than the peer may have sent it.
fn unproved(error: Error) -> Error {
    const HINT: &str = "this answer is not authenticated, so another machine may have sent it";
    match error {
        Error::Authentication(text) => Error::Authentication(format!("{text} ({HINT})")),
        Error::Incompatible {
            peer,
            field,
            ours,
            theirs,
        } => Error::Incompatible {
            peer: format!("{peer} ({HINT})"),
            field,
            ours,
            theirs,
        },
        Error::Connect(text) => Error::Connect(format!("{text} ({HINT})")),
        other => other,
    }
}

/// A refusal before there are keys.
fn refuse(error: Error) -> Step {
    let frame = HandshakeFrame::Refused(error.clone());
    Step::Refuse(frame.encode(), error)
}

#[cfg(test)]
pub(super) mod tests;
