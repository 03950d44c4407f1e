//! The tokens that all sides share, as this process keeps them.

use std::sync::Arc;

use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use zeroize::Zeroizing;

use crate::net::version::PROTOCOL_VERSION;

/// Bytes of a key.
pub(crate) const KEY_LEN: usize = 32;
/// Shortest token of a side that others than this host reach: a shorter one could be guessed from a recorded handshake.
pub const MIN_TOKEN_BYTES: usize = 16;

/// The name of a session, by which a further connection joins it.
pub(crate) type SessionId = [u8; 16];
/// A key, which is overwritten when it is dropped.
pub(crate) type Key = Zeroizing<[u8; KEY_LEN]>;

/// The tokens that a side was given: the one that it proves, and another one that peers may prove to it.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Of the side's own connections; empty for none.
    pub current: &'a [u8],
    /// Accepted by a listener too, while a deployment changes its token.
    pub next: Option<&'a [u8]>,
}

impl<'a> From<&'a [u8]> for Tokens<'a> {
    fn from(current: &'a [u8]) -> Self {
        Self {
            current,
            next: None,
        }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Tokens<'a> {
    fn from(current: &'a [u8; N]) -> Self {
        Self::from(&current[..])
    }
}

impl Tokens<'_> {
    /// The shortest one has so many bytes.
    pub(super) fn min_bytes(self) -> usize {
        let next = self.next.map_or(usize::MAX, <[u8]>::len);
        self.current.len().min(next)
    }
}

impl std::fmt::Debug for Tokens<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens")
    }
}

/// The secrets of a side's tokens.
#[derive(Debug, Clone)]
pub struct Secrets {
    current: Secret,
    next: Option<Secret>,
    is_guessable: bool,
}

impl Secrets {
    /// Those of tokens of any length.
    pub fn new<'a>(tokens: impl Into<Tokens<'a>>) -> Self {
        let tokens = tokens.into();
        Self {
            current: Secret::new(tokens.current),
            next: tokens.next.map(Secret::new),
            is_guessable: tokens.current.len() < MIN_TOKEN_BYTES,
        }
    }

    /// The secret that this side proves.
    pub(super) fn current(&self) -> &Secret {
        &self.current
    }

    /// The secrets that a peer may prove.
    pub(super) fn accepted(&self) -> impl Iterator<Item = &Secret> {
        std::iter::once(&self.current).chain(&self.next)
    }

    /// True if the token that this side proves is missing, or so short that a recorded handshake could disclose it.
    pub(crate) fn is_guessable(&self) -> bool {
        self.is_guessable
    }
}

/// The secret of a token. Only the key that proves it is kept, in one place, which is overwritten when the last clone is
/// dropped. Nothing formats it.
#[derive(Clone)]
pub(super) struct Secret {
    key: Arc<Key>,
}

impl Secret {
    fn new(token: &[u8]) -> Self {
        let key = Salt::new(HKDF_SHA256, b"kvpipe").extract(token);
        let version = PROTOCOL_VERSION.to_le_bytes();
        let key = expand_prk(&key, &[b"kvpipe psk", &version]);
        Self { key: Arc::new(key) }
    }

    pub(super) fn key(&self) -> &[u8; KEY_LEN] {
        &self.key
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The secret with which further connections join a session. It follows from the keys of the session's own.
#[derive(Clone)]
pub struct JoinSecret(Key);

impl JoinSecret {
    pub(super) fn new(of_initiator: &Key, of_responder: &Key) -> Self {
        Self(expand(
            of_initiator,
            &[b"kvpipe join secret", &**of_responder],
        ))
    }

    /// The name of the session, which says nothing of its keys.
    pub(crate) fn session_id(&self) -> SessionId {
        let key = expand(&self.0, &[b"kvpipe session id"]);
        std::array::from_fn(|at| key[at])
    }

    /// The secret of the connection of this number, known before its handshake.
    pub(super) fn of_connection(&self, number: u32) -> Secret {
        let key = expand(&self.0, &[b"kvpipe join psk", &number.to_le_bytes()]);
        Secret { key: Arc::new(key) }
    }
}

impl std::fmt::Debug for JoinSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JoinSecret")
    }
}

/// Another key, which follows from a key and a label.
pub(super) fn expand(key: &Key, label: &[&[u8]]) -> Key {
    expand_prk(&Prk::new_less_safe(HKDF_SHA256, &**key), label)
}

struct KeyLen;

impl KeyType for KeyLen {
    fn len(&self) -> usize {
        KEY_LEN
    }
}

fn expand_prk(key: &Prk, label: &[&[u8]]) -> Key {
    let mut expanded = Key::default();
    let okm = key.expand(label, KeyLen);
    let filled = okm.and_then(|okm| okm.fill(&mut *expanded));
    filled.expect("HKDF gives as much as a key has");
    expanded
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TOKEN: &[u8] = b"kept from every log";

    /// Fails if `formatted` shows the token or its key, as text or as numbers.
    pub(crate) fn assert_discloses_nothing(formatted: &str) {
        let key = *Secret::new(TOKEN).key();
        for secret in [TOKEN, &key] {
            let numbers: Vec<String> = secret.iter().map(u8::to_string).collect();
            let hex: Vec<String> = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            let text = String::from_utf8_lossy(secret).into_owned();
            let numbers_by_line = numbers.join(",\n");
            for shown in [numbers.join(", "), numbers_by_line, hex.concat(), text] {
                let formatted = formatted.replace(' ', "");
                let shown = shown.replace(' ', "");
                assert!(!formatted.contains(&shown), "{formatted}");
            }
        }
    }

    #[test]
    fn a_secret_shows_nothing_of_the_token() {
        let tokens = Tokens {
            current: b"another",
            next: Some(TOKEN),
        };
        let secrets = Secrets::new(tokens);
        assert_discloses_nothing(&format!("{tokens:?}{secrets:?}{secrets:#?}"));
        assert_eq!(format!("{:?}", Some(Secret::new(TOKEN))), "Some(Secret)");
    }

    #[test]
    fn a_token_below_sixteen_bytes_is_guessable() {
        assert!(Secrets::new(b"fifteen bytes..").is_guessable());
        assert!(!Secrets::new(b"sixteen bytes...").is_guessable());
    }
}
