//! Whether the destination reads a transfer's bytes, or the source sends them.

use kvpipe_ucx::MemoryKind;

pub(crate) use crate::transport::DataPath;

/// Whether the destination reads what goes from a peer's memory, in CUDA or not, to memory of its own; else the source
/// sends messages. `reaches` tells whether a lane connects two CUDA memories.
pub(crate) fn is_read(
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
    fn memory_of_the_host_takes_the_road_of_the_link() {
        let asked = || panic!("whether CUDA memory is reached");
        let (get, messages) = (
            DataPath::RemoteRead(String::new()),
            DataPath::Stream(String::new()),
        );
        assert!(is_read(Some(&get), false, MemoryKind::Host, asked));
        assert!(!is_read(Some(&messages), false, MemoryKind::Host, asked));
        assert!(!is_read(None, false, MemoryKind::Host, asked));
    }

    #[test]
    fn between_two_gpus_bytes_are_read_where_a_lane_reaches_and_messages_where_none_does() {
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
    fn between_a_gpu_and_the_host_bytes_always_go_as_messages() {
        let (cuda, get) = (
            MemoryKind::Cuda { device: 0 },
            DataPath::RemoteRead(String::new()),
        );
        assert!(!is_read(Some(&get), false, cuda, || true));
        assert!(!is_read(Some(&get), true, MemoryKind::Host, || true));
    }
}
