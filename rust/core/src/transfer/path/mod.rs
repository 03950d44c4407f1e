//! How the bytes of a transfer get here: one decision, and the three ways.

pub(crate) mod incoming;
pub(super) mod outgoing;
pub(super) mod process_vm;

use std::rc::Rc;

use kvpipe_ucx::{MemoryKind, ProcessVmReader};

use super::remote_source::RemoteSource;
use crate::error::Result;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transport::DataPath;
use crate::transport::{Memory, RemoteKey};

/// Bytes a source may stream before the destination's next credit.
const WINDOW: u64 = 4 << 20;

/// How the bytes of one transfer get here.
#[derive(Debug)]
pub(super) enum Path {
    /// UCX reads them.
    RemoteRead(Rc<RemoteKey>),
    /// Calls of our own read them out of a process of this host.
    ProcessVm(Rc<ProcessVmReader>),
    /// The source streams them.
    Stream,
}

/// Whether the destination reads from a peer's memory, in CUDA or not, into memory of its own; else the source streams.
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

/// Chooses the path from a source of a peer to memory of ours.
///
/// # Errors
/// The peer's key cannot be used, or the session is lost.
pub(super) fn choose(
    cx: &mut ReactorContext,
    session: SessionKey,
    (source, process): (&mut RemoteSource, Option<&Rc<ProcessVmReader>>),
    destination: &Memory,
    is_retry: bool,
) -> Result<Path> {
    if is_retry || source.is_stream_only() {
        return Ok(Path::Stream);
    }
    let (to, data_path) = (destination.buffer().kind(), cx.data_path(session));
    let is_cuda = source.is_cuda;
    // A key that cannot be used here is no fault of the peer's: CUDA opens not all memory everywhere.
    let reaches = || {
        let key = source.key(cx, session, to);
        key.is_ok_and(|key| cx.reaches(session, destination, (source.base, &key)))
    };
    if !is_read(data_path.as_ref(), is_cuda, to, reaches) {
        return Ok(Path::Stream);
    }
    match process {
        Some(process) if !is_cuda => Ok(Path::ProcessVm(Rc::clone(process))),
        _ => source.key(cx, session, to).map(Path::RemoteRead),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
