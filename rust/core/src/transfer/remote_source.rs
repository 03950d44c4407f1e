//! Memory that a peer exposes to us: its address, its keys, the checksums that its owner sends, and how this side reads it.

use std::rc::Rc;
use std::sync::Arc;

use kvpipe_ucx::{MemoryKind, ProcessVmReader};

use super::verifier::add_next;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::Links;
use crate::transport::{DataPath, Memory, RemoteKey};

/// Most units of a source whose checksums come unasked: a TiB of a buffer.
const UNITS_CAP: u64 = 1 << 20;
/// Verification of bytes that are read from a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Verification {
    /// A region: by checksums that the destination asks for, if it wants any. A buffer: by none, its sender has switched
    /// them off.
    OnRequest = 0,
    /// A buffer: by checksums of its units, which come unasked, or by those that the pieces of a stream carry.
    Pushed = 1,
    /// A buffer: by the checksums of a stream only, because its sender does not see that it could be read.
    StreamOnly = 2,
    /// A buffer: its owner is asked, after the last read, whether it still exposes it. The pieces of a stream have
    /// checksums, if it is in host memory.
    Validated = 3,
}

/// Path of a destination that reads a source itself.
#[derive(Debug)]
pub(super) enum ReadPath {
    /// UCX reads.
    RemoteRead(Rc<RemoteKey>),
    /// A kernel copies between memories of GPUs, or UCX reads where it cannot.
    DeviceCopy(Rc<RemoteKey>),
    /// Calls of our own read out of a process of this host.
    ProcessVm(Arc<ProcessVmReader>),
}

/// Memory that a peer exposes to us.
#[derive(Debug)]
pub(crate) struct RemoteSource {
    /// Address of its first byte in the peer's process.
    pub(super) base: u64,
    /// The packed key for UCX.
    pub(super) rkey: Vec<u8>,
    pub(super) is_cuda: bool,
    pub(super) verification: Verification,
    /// Number of checksums that come unasked, and those that have come.
    pub(super) num_units: u64,
    pub(super) known: Vec<u64>,
    /// By the kind of memory that they read into.
    pub(super) keys: Vec<(MemoryKind, Rc<RemoteKey>)>,
}

impl RemoteSource {
    /// Memory of which no checksums come unasked.
    pub(crate) fn new(base: u64, rkey: Vec<u8>, is_cuda: bool) -> Self {
        Self {
            base,
            rkey,
            is_cuda,
            verification: Verification::OnRequest,
            num_units: 0,
            known: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// Chooses how memory of ours reads from it; none if the source streams instead.
    ///
    /// # Errors
    /// The peer's key cannot be used, or the session is lost.
    pub(super) fn read_path(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        destination: &Memory,
    ) -> Result<Option<ReadPath>> {
        let (to, data_path) = (destination.buffer().kind(), links.data_path(session));
        let (is_cuda, is_exposed) = (self.is_cuda, self.verification != Verification::StreamOnly);
        let mut lane = None;
        // A key that cannot be used here is no fault of the peer's: CUDA opens not all memory everywhere.
        let reaches = || {
            let key = self.key(links, session, to);
            lane = key
                .ok()
                .and_then(|key| links.reaches(session, destination, (self.base, &key)));
            lane.is_some()
        };
        let is_read = is_exposed && is_read(data_path.as_ref(), is_cuda, to, reaches);
        if is_cuda || to != MemoryKind::Host {
            links.note_gpu_transport(session, lane);
        }
        if !is_read {
            return Ok(None);
        }
        if let Some(process) = links.process(session)
            && !is_cuda
        {
            return Ok(Some(ReadPath::ProcessVm(process)));
        }
        let key = self.key(links, session, to)?;
        Ok(Some(if is_cuda {
            ReadPath::DeviceCopy(key)
        } else {
            ReadPath::RemoteRead(key)
        }))
    }

    /// Its key for reads into memory of kind `to`.
    ///
    /// # Errors
    /// It cannot be used.
    fn key(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        to: MemoryKind,
    ) -> Result<Rc<RemoteKey>> {
        if let Some((_, key)) = self.keys.iter().find(|(kind, _)| *kind == to) {
            return Ok(Rc::clone(key));
        }
        let key = Rc::new(links.unpack_rkey(session, &self.rkey, to)?);
        self.keys.push((to, Rc::clone(&key)));
        Ok(key)
    }

    /// Its owner's checksums of the next units.
    ///
    /// # Errors
    /// It has no such units, or no checksums that come unasked.
    pub(crate) fn receive(&mut self, first: u64, checksums: &[u64]) -> Result<()> {
        let num_units = UNITS_CAP.min(self.num_units);
        if self.verification == Verification::Pushed
            && add_next(&mut self.known, num_units, first, checksums)
        {
            return Ok(());
        }
        let num = checksums.len();
        Err(Error::protocol(format_args!(
            "{num} checksums of a source from unit {first} on, which were not to come"
        )))
    }
}

/// True if the destination reads from a peer's memory, in CUDA or not, into memory of its own; else the source streams.
/// `reaches` tells whether a lane connects two CUDA memories.
fn is_read(
    data_path: Option<&DataPath>,
    is_from_cuda: bool,
    to: MemoryKind,
    reaches: impl FnOnce() -> bool,
) -> bool {
    match (is_from_cuda, to) {
        (false, MemoryKind::Host) => matches!(data_path, Some(DataPath::RemoteRead(_))),
        (true, MemoryKind::Cuda { .. }) => reaches(),
        // No lane connects the two: UCX would serve the read in software.
        (false, MemoryKind::Cuda { .. }) | (true, MemoryKind::Host) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_that_come_unasked_come_in_order_and_not_beyond_the_last_unit() {
        let mut source = RemoteSource {
            verification: Verification::Pushed,
            num_units: 2,
            ..RemoteSource::new(0, Vec::new(), false)
        };
        assert!(source.receive(1, &[7]).is_err());
        assert_eq!(source.receive(0, &[7]), Ok(()));
        assert!(source.receive(0, &[7]).is_err());
        assert!(source.receive(1, &[7, 7]).is_err());
        assert_eq!(source.receive(1, &[8]), Ok(()));
        let mut source = RemoteSource::new(0, Vec::new(), false);
        assert!(source.receive(0, &[7]).is_err());
        assert!(source.receive(0, &[]).is_err());
    }

    #[test]
    fn memory_of_the_host_takes_the_path_of_the_session() {
        let asked = || panic!("whether CUDA memory is reached");
        let (read, stream) = (
            DataPath::RemoteRead(String::new()),
            DataPath::Stream(String::new()),
        );
        assert!(is_read(Some(&read), false, MemoryKind::Host, asked));
        assert!(!is_read(Some(&stream), false, MemoryKind::Host, asked));
        assert!(!is_read(None, false, MemoryKind::Host, asked));
    }

    #[test]
    fn between_two_gpus_bytes_are_read_where_a_lane_reaches_and_streamed_where_none_does() {
        let cuda = MemoryKind::Cuda { device: 1 };
        for data_path in [
            DataPath::RemoteRead(String::new()),
            DataPath::Stream(String::new()),
        ] {
            assert!(is_read(Some(&data_path), true, cuda, || true));
            assert!(!is_read(Some(&data_path), true, cuda, || false));
        }
    }

    #[test]
    fn between_a_gpu_and_the_host_bytes_are_always_streamed() {
        let (cuda, read) = (
            MemoryKind::Cuda { device: 0 },
            DataPath::RemoteRead(String::new()),
        );
        assert!(!is_read(Some(&read), false, cuda, || true));
        assert!(!is_read(Some(&read), true, MemoryKind::Host, || true));
    }
}
