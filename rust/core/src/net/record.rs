//! Records: frames that are sealed with the keys of a session. The type of a frame stays readable, its fields do not.
//!
//! ```text
//! u32 length ‖ u8 type ‖ AES-128-GCM(fields) ‖ tag[16]        length and type are the associated data
//! ```
//! Each direction has a secret, which gives its key and, after 64 GiB, the next secret. The nonce counts the records of a
//! direction and is not sent. So a record that was changed, left out, repeated, moved or sent back does not open.

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::error::{Error, Result};
use crate::net::secret::{KEY_LEN, Key, expand};

/// Bytes by which a record is longer than its frame.
pub const TAG_LEN: usize = 16;
/// Bytes of a direction after which its key changes: the lengths of its records count.
const REKEY_BYTES: u64 = 64 << 30;

const KEY_LABEL: &[u8] = b"kvpipe record key";
const NEXT_LABEL: &[u8] = b"kvpipe next secret";

/// The keys of a session: one for each direction.
pub struct Records {
    /// Of what this side sends.
    pub sealer: Sealer,
    /// Of what it receives.
    pub opener: Opener,
}

impl Records {
    /// Those of a side that sends with one secret and receives with the other.
    pub(super) fn new(send: Key, receive: Key) -> Self {
        Self {
            sealer: Sealer(Direction::new(send)),
            opener: Opener(Direction::new(receive)),
        }
    }
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Records")
    }
}

/// Seals the frames of one direction, in their order.
pub struct Sealer(Direction);

impl Sealer {
    /// Appends the record of a frame to `unsent`, without its length.
    ///
    /// # Errors
    /// All nonces of the session are used.
    ///
    /// # Panics
    /// The frame has no type.
    pub fn seal(&mut self, frame: &[u8], unsent: &mut Vec<u8>) -> Result<()> {
        let start = unsent.len();
        unsent.reserve(frame.len() + TAG_LEN);
        unsent.extend_from_slice(frame);
        self.seal_from(start, unsent)
    }

    /// Seals the frame that begins at `start` and ends with `unsent`.
    ///
    /// # Errors
    /// As of [`seal`](Self::seal).
    ///
    /// # Panics
    /// As of [`seal`](Self::seal).
    pub(super) fn seal_from(&mut self, start: usize, unsent: &mut Vec<u8>) -> Result<()> {
        let len = unsent.len() - start + TAG_LEN;
        let (kind, fields) = unsent[start..]
            .split_first_mut()
            .expect("every frame has a type");
        let (header, nonce) = (header(len, *kind), self.0.nonce()?);
        let sealed = self.0.key.seal_in_place_separate_tag(nonce, header, fields);
        let tag = sealed.map_err(|_| Error::Exhausted("a frame is too long to seal".to_owned()))?;
        unsent.extend_from_slice(tag.as_ref());
        self.0.count(len);
        Ok(())
    }
}

/// Opens the records of one direction, in their order.
pub struct Opener(Direction);

impl Opener {
    /// The frame in a record, which is opened in place.
    ///
    /// # Errors
    /// `Protocol`: its tag is wrong; no record after it opens (`Exhausted`). The text does not name the peer.
    pub fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<&'a [u8]> {
        let wrong = || Error::protocol("a record that does not open: it was changed on the way");
        let len = record.len();
        let (kind, sealed) = record.split_first_mut().ok_or_else(wrong)?;
        let (header, nonce) = (header(len, *kind), self.0.nonce()?);
        if self.0.key.open_in_place(nonce, header, sealed).is_err() {
            self.0.num_records = u64::MAX;
            return Err(wrong());
        }
        self.0.count(len);
        Ok(&record[..len - TAG_LEN])
    }
}

fn header(len: usize, kind: u8) -> Aad<[u8; 5]> {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    Aad::from([a, b, c, d, kind])
}

struct Direction {
    secret: Key,
    key: LessSafeKey,
    /// Records so far, with any key.
    num_records: u64,
    /// Bytes of records with this key.
    num_bytes: u64,
    rekey_bytes: u64,
}

impl Direction {
    fn new(secret: Key) -> Self {
        Self {
            key: record_key(&secret),
            secret,
            num_records: 0,
            num_bytes: 0,
            rekey_bytes: REKEY_BYTES,
        }
    }

    /// The nonce of the next record. None is ever used twice.
    fn nonce(&mut self) -> Result<Nonce> {
        let used_up = || Error::Exhausted("all nonces of the session are used".to_owned());
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.num_records.to_be_bytes());
        self.num_records = self.num_records.checked_add(1).ok_or_else(used_up)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// A record of so many bytes is done: the next one may have the next key.
    fn count(&mut self, len: usize) {
        self.num_bytes += len as u64;
        if self.num_bytes >= self.rekey_bytes {
            self.secret = expand(&self.secret, &[NEXT_LABEL]);
            self.key = record_key(&self.secret);
            self.num_bytes = 0;
        }
    }
}

fn record_key(secret: &Key) -> LessSafeKey {
    let expanded: Zeroizing<[u8; KEY_LEN]> = expand(secret, &[KEY_LABEL]);
    let key = UnboundKey::new(&AES_128_GCM, &expanded[..AES_128_GCM.key_len()]);
    LessSafeKey::new(key.expect("a key of the right length"))
}

#[cfg(test)]
mod tests;
