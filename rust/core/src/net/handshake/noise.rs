//! The two messages of Noise, and the keys that follow from them.
//!
//! With `psk0` the first message is authenticated by the token before anything is computed with the sender's public key. It
//! can be played again; the keys cannot be had by that.

use snow::{Builder, HandshakeState};
use zeroize::Zeroize;

use super::frames::MAGIC;
use crate::error::{Error, Result};
use crate::net::record::Records;
use crate::net::secret::{JoinSecret, Key, Secret};
use crate::net::version::PROTOCOL_VERSION;

/// `ChaChaPoly` takes the same time for all bytes without instructions of the CPU for it.
pub(super) const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
/// A public key and a tag.
const OVERHEAD: usize = 32 + 16;

/// Both messages are bound to these bytes.
pub(super) fn prologue() -> [u8; 6] {
    let ([k, v, p, q], [low, high]) = (MAGIC, PROTOCOL_VERSION.to_le_bytes());
    [k, v, p, q, low, high]
}

/// A side that has a message to write or to read.
#[derive(Debug)]
pub(super) struct Noise(HandshakeState);

impl Noise {
    /// The connecting side.
    pub(super) fn initiator(secret: &Secret) -> Result<Self> {
        Ok(Self(builder(secret, &prologue())?.build_initiator()?))
    }

    /// The accepting side.
    pub(super) fn responder(secret: &Secret) -> Result<Self> {
        Ok(Self(builder(secret, &prologue())?.build_responder()?))
    }

    /// A side with this ephemeral private key.
    #[cfg(test)]
    pub(super) fn fixed(secret: &Secret, is_initiator: bool, ephemeral: [u8; 32]) -> Self {
        let prologue = prologue();
        let builder = builder(secret, &prologue).expect("builder");
        let builder = builder.fixed_ephemeral_key_for_testing_only(&ephemeral);
        let side = if is_initiator {
            builder.build_initiator()
        } else {
            builder.build_responder()
        };
        Self(side.expect("a side"))
    }

    /// The next message.
    pub(super) fn write(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let mut message = vec![0; payload.len() + OVERHEAD];
        let len = self.0.write_message(payload, &mut message)?;
        message.truncate(len);
        Ok(message)
    }

    /// The payload of the peer's message; `None` if that proves another token or was changed.
    pub(super) fn read(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let mut payload = vec![0; message.len()];
        let len = self.0.read_message(message, &mut payload).ok()?;
        payload.truncate(len);
        Some(payload)
    }

    /// The keys of a connection whose messages are both written and read, and the secret of those that join it.
    pub(super) fn into_keys(mut self) -> (Records, JoinSecret) {
        let is_initiator = self.0.is_initiator();
        let (mut of_initiator, mut of_responder) = self.0.dangerously_get_raw_split();
        let (first, second) = (Key::new(of_initiator), Key::new(of_responder));
        of_initiator.zeroize();
        of_responder.zeroize();
        let join_secret = JoinSecret::new(&first, &second);
        let records = if is_initiator {
            Records::new(first, second)
        } else {
            Records::new(second, first)
        };
        (records, join_secret)
    }
}

fn builder<'a>(secret: &'a Secret, prologue: &'a [u8]) -> Result<Builder<'a>> {
    let builder = Builder::new(PATTERN.parse()?).prologue(prologue)?;
    Ok(builder.psk(0, secret.key())?)
}

impl From<snow::Error> for Error {
    /// The system gives no random bytes: nothing else fails on the side that writes.
    fn from(error: snow::Error) -> Self {
        Self::Exhausted(format!("no handshake can be made: {error}"))
    }
}
