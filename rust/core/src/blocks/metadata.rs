//! Description of an agent for callers with their own exchange. It contains no key and no UCX address: peers get those
//! after they have verified the token.

use crate::error::{Error, Result};
use crate::ids::Incarnation;
use crate::net::codec::{Reader, Writer};

const MAGIC: [u8; 4] = *b"KVPA";
const VERSION: u16 = 1;
/// Longest address.
const ADDRESS_CAP: usize = 1024;
/// Most bytes that are looked at.
const METADATA_CAP: usize = 4096;

/// Address and incarnation of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// Its address.
    pub address: String,
    /// Its incarnation.
    pub incarnation: Incarnation,
}

impl Metadata {
    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        Writer::default()
            .raw(&MAGIC)
            .u16(VERSION)
            .str(&self.address)
            .raw(&self.incarnation)
            .finish()
    }

    /// From bytes.
    ///
    /// # Errors
    /// They are something else, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let damaged = |what: &str| {
            Error::Config(format!(
                "these {} bytes are no metadata of an agent: {what}",
                bytes.len()
            ))
        };
        if bytes.len() > METADATA_CAP {
            return Err(damaged(&format!("at most {METADATA_CAP} are possible")));
        }
        let mut reader = Reader::new(bytes);
        if reader.raw(MAGIC.len()).ok() != Some(&MAGIC[..]) {
            return Err(damaged("they begin otherwise"));
        }
        let version = reader.u16().map_err(|_| damaged("they end early"))?;
        if version != VERSION {
            return Err(Error::Config(format!(
                "metadata of version {version}, this is version {VERSION}; use the same kvpipe on both sides"
            )));
        }
        Self::read(reader).map_err(|error| damaged(&error.to_string()))
    }

    fn read(mut reader: Reader<'_>) -> Result<Self> {
        let address = reader.str(ADDRESS_CAP)?;
        let incarnation = reader.fixed()?;
        reader.end()?;
        Ok(Self {
            address,
            incarnation,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Metadata {
        Metadata {
            address: "127.0.0.1:4000".to_owned(),
            incarnation: [7; 16],
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        assert_eq!(Metadata::from_bytes(&sample().to_bytes()), Ok(sample()));
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = sample().to_bytes();
        bytes[4] = 9;
        let error = Metadata::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains("version 9"), "{error}");
    }

    proptest! {
        #[test]
        fn other_bytes_are_a_config_error(bytes: Vec<u8>, cut in 0usize..30) {
            let whole = sample().to_bytes();
            for bad in [&bytes[..], &whole[..cut]] {
                prop_assert!(matches!(Metadata::from_bytes(bad), Err(Error::Config(_))));
            }
        }
    }
}
