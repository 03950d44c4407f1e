//! Which data path bytes take: reads by the destination, or messages of the source.

use kvpipe_ucx::{Lane, MemoryKind};

/// How bytes get to where they belong. Whoever owns the destination writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataPath {
    /// The destination's side reads the source's memory; names the transport (`cma`, `rc_mlx5`, …).
    RemoteRead(String),
    /// The source sends messages that the destination's own code places: TCP, where UCX checks no remote key.
    Stream(String),
}

impl DataPath {
    /// The transport that carries the bytes.
    pub fn transport(&self) -> &str {
        match self {
            Self::RemoteRead(name) | Self::Stream(name) => name,
        }
    }

    pub(crate) fn choose(lanes: &[Lane]) -> Self {
        if let Some(lane) = lanes.iter().find(|lane| reads_host(lane)) {
            return Self::RemoteRead(lane.transport.clone());
        }
        let message = lanes.iter().find(|lane| lane.is_am).or(lanes.first());
        Self::Stream(message.map_or_else(|| "unknown".to_owned(), |lane| lane.transport.clone()))
    }
}

/// Transports that reach no memory of the host's.
const OF_GPUS: [&str; 3] = ["cuda_ipc", "cuda_copy", "gdr_copy"];

/// Whether reads over a lane are not served in software by the other side.
pub(crate) fn is_direct(lane: &Lane) -> bool {
    lane.is_rma && !["tcp", "self", "posix", "sysv"].contains(&&lane.transport[..])
}

/// Whether a lane can read the other side's memory on the host, or part of it.
pub(crate) fn reads_host(lane: &Lane) -> bool {
    is_direct(lane) && !OF_GPUS.contains(&&lane.transport[..])
}

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

    fn lane(transport: &str, is_rma: bool) -> Lane {
        Lane {
            transport: transport.to_owned(),
            device: "any".to_owned(),
            is_rma,
            is_am: !is_rma,
            domain: Some(1),
            remote_domain: Some(1),
        }
    }

    #[test]
    fn lanes_of_gpus_are_no_road_for_memory_of_the_host() {
        let (tcp, cuda, cma) = (
            lane("tcp", false),
            lane("cuda_ipc", true),
            lane("cma", true),
        );
        let messages = DataPath::Stream("tcp".to_owned());
        assert_eq!(DataPath::choose(&[tcp.clone(), cuda.clone()]), messages);
        assert_eq!(
            DataPath::choose(&[tcp, cuda, cma]),
            DataPath::RemoteRead("cma".to_owned())
        );
    }

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
