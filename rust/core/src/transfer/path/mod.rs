//! How the bytes of a transfer get here: one decision, and the three ways.

pub(crate) mod advice;
pub(crate) mod incoming;
pub(super) mod outgoing;
pub(super) mod process_vm;

use std::rc::Rc;

use kvpipe_ucx::{MemoryKind, ProcessVmReader};

use super::peer::RemoteSource;
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

/// What can connect two memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// The lanes of the session that read memory of the host, if there are any.
    Host,
    /// A lane between two GPUs, if it knows both memories.
    Cuda,
    /// Nothing: UCX would serve the read in software.
    Nothing,
}

const fn reach(is_from_cuda: bool, to: MemoryKind) -> Reach {
    match (is_from_cuda, to) {
        (false, MemoryKind::Host) => Reach::Host,
        (true, MemoryKind::Cuda { .. }) => Reach::Cuda,
        (false, MemoryKind::Cuda { .. }) | (true, MemoryKind::Host) => Reach::Nothing,
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
    let to = destination.buffer().kind();
    match reach(source.is_cuda, to) {
        Reach::Host if !matches!(cx.data_path(session), Some(DataPath::RemoteRead(_))) => {
            Ok(Path::Stream)
        }
        Reach::Host => match process {
            Some(process) => Ok(Path::ProcessVm(Rc::clone(process))),
            None => source.key(cx, session, to).map(Path::RemoteRead),
        },
        // A key that cannot be used here is no fault of the peer's: CUDA opens not all memory everywhere.
        Reach::Cuda => Ok(match source.key(cx, session, to) {
            Ok(key) if cx.reaches(session, destination, (source.base, &key)) => {
                Path::RemoteRead(key)
            }
            _ => Path::Stream,
        }),
        Reach::Nothing => Ok(Path::Stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_a_gpu_and_the_host_nothing_reads() {
        let cuda = MemoryKind::Cuda { device: 1 };
        assert_eq!(reach(false, MemoryKind::Host), Reach::Host);
        assert_eq!(reach(true, cuda), Reach::Cuda);
        assert_eq!(reach(false, cuda), Reach::Nothing);
        assert_eq!(reach(true, MemoryKind::Host), Reach::Nothing);
    }
}
