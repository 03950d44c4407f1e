//! The identity of a process: incarnation, kind of session, fingerprint, and the address of its UCX worker if it has one.
//! Peers exchange it when both have proved the token.

use crate::error::{Error, Result};
use crate::ids::Incarnation;
use crate::net::codec::{Reader, Writer};

/// Longest text in an identity.
const TEXT_CAP: usize = 4096;
/// Largest UCX worker address; real ones have 100 to 500 bytes, machines with many devices a few KiB.
const ADDRESS_CAP: usize = 32 << 10;
/// Most fields of a fingerprint.
const FIELDS_CAP: usize = 256;

/// Purpose of a session; a peer with another one is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SessionKind {
    /// A pipe: one sender, one receiver.
    Pipe = 1,
    /// Block transfers between agents, and between connector workers.
    Agent = 2,
    /// Handoffs between schedulers, and the proxy's questions.
    Control = 3,
    /// Entries that are found by their tokens.
    Lookup = 4,
    /// Values that are found by their keys.
    Store = 5,
}

impl SessionKind {
    fn parse(value: u8) -> Result<Self> {
        let kinds = [
            Self::Pipe,
            Self::Agent,
            Self::Control,
            Self::Lookup,
            Self::Store,
        ];
        kinds
            .into_iter()
            .find(|kind| *kind as u8 == value)
            .ok_or_else(|| Error::protocol(format_args!("unknown kind {value}")))
    }
}

/// Largest packed key of a canary; real ones have 10 to 200 bytes.
const RKEY_CAP: usize = 4096;

/// Memory of this process with random content, by which a peer proves that it can read our memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Canary {
    /// This process, for peers on the same host.
    pub pid: u32,
    /// Its address in this process.
    pub address: u64,
    /// Packed by UCX.
    pub rkey: Vec<u8>,
    /// Of its content, [`LEN`](Self::LEN) bytes.
    pub checksum: u64,
}

impl Canary {
    /// A block's usual size, because UCX may read a few bytes by another protocol than a block.
    pub const LEN: usize = 64 << 10;

    fn write(&self, writer: Writer) -> Writer {
        writer
            .u32(self.pid)
            .u64(self.address)
            .bytes(&self.rkey)
            .u64(self.checksum)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            pid: reader.u32()?,
            address: reader.u64()?,
            rkey: reader.bytes(RKEY_CAP)?.to_vec(),
            checksum: reader.u64()?,
        })
    }
}

/// Description of this side for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Purpose of the session.
    pub kind: SessionKind,
    /// This life of the engine.
    pub incarnation: Incarnation,
    /// The engine's id, for people.
    pub engine_id: String,
    /// Properties that must agree, in order: `(field, value)`. Empty: nothing to compare.
    pub fingerprint: Vec<(String, String)>,
    /// The UCX worker's address; empty where there is no data plane.
    pub ucx_address: Vec<u8>,
    /// Memory that peers read first; none without a data plane.
    pub canary: Option<Canary>,
    /// The boot id of the machine: both sides know whether they share a host.
    pub host: String,
}

impl Identity {
    /// An identity of a new incarnation.
    pub fn new(
        kind: SessionKind,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
    ) -> Result<Self> {
        let too_long = |text: &String| text.len() > TEXT_CAP;
        let texts = fingerprint.iter().flat_map(|(field, value)| [field, value]);
        if texts.chain([&engine_id.to_owned()]).any(too_long) || fingerprint.len() > FIELDS_CAP {
            return Err(Error::Config(format!(
                "a fingerprint has at most {FIELDS_CAP} fields, and they and the engine id at most {TEXT_CAP} bytes each"
            )));
        }
        Ok(Self {
            kind,
            incarnation: random()?,
            engine_id: engine_id.to_owned(),
            fingerprint,
            ucx_address: Vec::new(),
            canary: None,
            host: host_id(),
        })
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        let writer = writer
            .u8(self.kind as u8)
            .raw(&self.incarnation)
            .str(&self.engine_id)
            .list(&self.fingerprint, |w, (field, value)| {
                w.str(field).str(value)
            })
            .bytes(&self.ucx_address)
            .str(&self.host);
        match &self.canary {
            Some(canary) => canary.write(writer.u8(1)),
            None => writer.u8(0),
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            kind: SessionKind::parse(reader.u8()?)?,
            incarnation: reader.fixed()?,
            engine_id: reader.str(TEXT_CAP)?,
            fingerprint: reader.list(FIELDS_CAP, |r| Ok((r.str(TEXT_CAP)?, r.str(TEXT_CAP)?)))?,
            ucx_address: reader.bytes(ADDRESS_CAP)?.to_vec(),
            host: reader.str(TEXT_CAP)?,
            canary: reader.flag()?.then(|| Canary::read(reader)).transpose()?,
        })
    }

    /// The first field in which two fingerprints differ: `(field, ours, theirs)`.
    ///
    /// An empty fingerprint agrees with any other (the proxy has none).
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        if self.fingerprint.is_empty() || other.fingerprint.is_empty() {
            return None;
        }
        let value = |fields: &[(String, String)], name: &str| {
            let field = fields.iter().find(|(field, _)| field == name);
            field.map_or("(absent)".to_owned(), |(_, value)| value.clone())
        };
        for (name, _) in self.fingerprint.iter().chain(&other.fingerprint) {
            let ours = value(&self.fingerprint, name);
            let theirs = value(&other.fingerprint, name);
            if ours != theirs {
                return Some((name.clone(), ours, theirs));
            }
        }
        None
    }
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::Exhausted(format!("the system gives no random bytes: {error}")))?;
    Ok(bytes)
}

/// The boot id of this machine; empty if it has none.
pub fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identity(fields: &[(&str, &str)]) -> Identity {
        let fields = fields
            .iter()
            .map(|(f, v)| ((*f).to_owned(), (*v).to_owned()))
            .collect();
        Identity::new(SessionKind::Control, "engine", fields).unwrap()
    }

    #[test]
    fn an_identity_is_read_as_written() {
        let mut sent = identity(&[("dtype", "float32")]);
        for canary in [
            None,
            Some(Canary {
                pid: 7,
                address: 1 << 40,
                rkey: vec![4, 5],
                checksum: 6,
            }),
        ] {
            sent.ucx_address = vec![1, 2, 3];
            sent.canary = canary;
            let message = sent.write(Writer::new(0)).finish();
            let received = Identity::read(&mut Reader::new(&message[1..]));
            assert_eq!(received.as_ref(), Ok(&sent));
        }
    }

    #[test]
    fn the_field_that_differs_is_named_with_both_values() {
        let ours = identity(&[("model", "a"), ("dtype", "float32")]);
        let theirs = identity(&[("model", "a"), ("dtype", "bfloat16")]);
        let expected = (
            "dtype".to_owned(),
            "float32".to_owned(),
            "bfloat16".to_owned(),
        );
        assert_eq!(ours.difference(&theirs), Some(expected));
    }

    #[test]
    fn a_field_that_one_side_lacks_differs() {
        let difference =
            identity(&[("model", "a")]).difference(&identity(&[("model", "a"), ("isa", "vec")]));
        assert_eq!(difference.unwrap().1, "(absent)");
    }

    #[test]
    fn an_empty_fingerprint_agrees_with_any() {
        assert_eq!(identity(&[]).difference(&identity(&[("model", "a")])), None);
    }

    #[test]
    fn a_fingerprint_that_no_peer_would_accept_is_refused_here() {
        let field = vec![("dtype".to_owned(), "x".repeat(TEXT_CAP + 1))];
        assert!(matches!(
            Identity::new(SessionKind::Control, "", field),
            Err(Error::Config(_))
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_identity_or_an_error(message: Vec<u8>) {
            let _ = Identity::read(&mut Reader::new(&message));
        }
    }
}
