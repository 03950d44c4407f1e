//! The token that all sides share, as this process keeps it.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

/// Bytes of the key.
const KEY_LEN: usize = 32;

/// The shared token. Only the key is kept that proofs are made with, in one place, which is overwritten when the last clone is
/// dropped. Nothing formats it.
#[derive(Clone)]
pub struct Secret {
    key: Arc<Zeroizing<[u8; KEY_LEN]>>,
}

impl Secret {
    /// The secret of a token of any length.
    pub fn new(token: &[u8]) -> Self {
        let mut hashed = Sha256::digest(token);
        let mut key = Zeroizing::new([0; KEY_LEN]);
        key.copy_from_slice(&hashed);
        hashed.as_mut_slice().zeroize();
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
        let secret = Secret::new(TOKEN);
        assert_discloses_nothing(&format!("{secret:?}{secret:#?}"));
        assert_eq!(format!("{:?}", Some(secret)), "Some(Secret)");
    }
}
