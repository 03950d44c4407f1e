//! Memory that a peer exposes to us: its address, its keys, and the checksums that its owner sends.

use std::rc::Rc;

use kvpipe_ucx::MemoryKind;

use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transport::RemoteKey;

/// Most units of a source whose checksums come unasked: a TiB of a buffer.
const UNITS_CAP: u64 = 1 << 20;

/// Where the checksums of a source come from.
#[derive(Debug)]
pub(crate) enum SourceChecksums {
    /// There are none.
    None,
    /// The destination asks for those of its blocks.
    Asked,
    /// Its owner sends those of all units unasked: how many there are, and what has come.
    Pushed { num_units: u64, known: Vec<u64> },
    /// Only the pieces of a stream have any, so that it always streams.
    Streamed,
}

/// Memory that a peer exposes to us.
#[derive(Debug)]
pub(crate) struct RemoteSource {
    /// Address of its first byte in the peer's process.
    pub(crate) base: u64,
    /// The packed key for UCX.
    pub(crate) rkey: Vec<u8>,
    pub(crate) is_cuda: bool,
    pub(crate) checksums: SourceChecksums,
    /// By the kind of memory that they read into.
    keys: Vec<(MemoryKind, Rc<RemoteKey>)>,
}

impl RemoteSource {
    pub(crate) fn new(base: u64, rkey: Vec<u8>, is_cuda: bool, checksums: SourceChecksums) -> Self {
        Self {
            base,
            rkey,
            is_cuda,
            checksums,
            keys: Vec::new(),
        }
    }

    pub(super) fn is_stream_only(&self) -> bool {
        matches!(self.checksums, SourceChecksums::Streamed)
    }

    /// Its key for reads into memory of kind `to`.
    ///
    /// # Errors
    /// It cannot be used.
    pub(super) fn key(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        to: MemoryKind,
    ) -> Result<Rc<RemoteKey>> {
        if let Some((_, key)) = self.keys.iter().find(|(kind, _)| *kind == to) {
            return Ok(Rc::clone(key));
        }
        let key = Rc::new(cx.unpack_rkey(session, &self.rkey, to)?);
        self.keys.push((to, Rc::clone(&key)));
        Ok(key)
    }

    /// Its owner's checksums of the next units.
    ///
    /// # Errors
    /// It has no such units, or no checksums that come unasked.
    pub(crate) fn receive(&mut self, first: u64, checksums: &[u64]) -> Result<()> {
        let num = checksums.len() as u64;
        if let SourceChecksums::Pushed { num_units, known } = &mut self.checksums
            && first == known.len() as u64
            && first + num <= UNITS_CAP.min(*num_units)
        {
            known.extend(checksums);
            return Ok(());
        }
        Err(Error::protocol(format_args!(
            "{num} checksums of a source from unit {first} on, which were not to come"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_that_come_unasked_come_in_order_and_not_beyond_the_last_unit() {
        let known = Vec::new();
        let checksums = SourceChecksums::Pushed {
            num_units: 2,
            known,
        };
        let mut source = RemoteSource::new(0, Vec::new(), false, checksums);
        assert!(source.receive(1, &[7]).is_err());
        assert_eq!(source.receive(0, &[7]), Ok(()));
        assert!(source.receive(0, &[7]).is_err());
        assert!(source.receive(1, &[7, 7]).is_err());
        assert_eq!(source.receive(1, &[8]), Ok(()));
        let asked = SourceChecksums::Asked;
        let mut source = RemoteSource::new(0, Vec::new(), false, asked);
        assert!(source.receive(0, &[7]).is_err());
    }
}
