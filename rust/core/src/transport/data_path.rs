//! How bytes get from one session's side to the other, as its UCX lanes allow.

use kvpipe_ucx::{Lane, has_rdma_devices};

/// How bytes move on a session. The side of the destination writes the destination in both cases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataPath {
    /// The destination reads the source's memory over this transport (`cma`, `rc_mlx5`, …).
    RemoteRead(String),
    /// The source sends messages, and the destination's own code places them: TCP, where UCX checks no remote key.
    Stream(String),
}

impl DataPath {
    /// The transport that carries the bytes.
    pub fn transport(&self) -> &str {
        match self {
            Self::RemoteRead(name) | Self::Stream(name) => name,
        }
    }

    /// The transport of streams over these lanes.
    pub(crate) fn stream_transport(lanes: &[Lane]) -> String {
        let message = lanes.iter().find(|lane| lane.is_am).or(lanes.first());
        message.map_or_else(|| "unknown".to_owned(), |lane| lane.transport.clone())
    }

    /// Why it is slow, and what to do; none when it is as fast as this machine allows.
    pub(crate) fn advice(&self, is_same_host: bool) -> Option<&'static str> {
        let Self::Stream(transport) = self else {
            return None;
        };
        if transport == "tcp" && is_same_host {
            return Some(
                "the peer is on this host, but bytes move over tcp: UCX 1.20 or newer reads its memory (CMA) if both run as the same user in the same namespaces, and UCX_TLS allows it",
            );
        }
        (transport == "tcp" && has_rdma_devices()).then_some(
            "this machine has RDMA devices, but bytes move over tcp: the libucx wheel has no RDMA (install the system's UCX, or name one with KVPIPE_UCX_LIB), or UCX_NET_DEVICES or UCX_TLS leaves it out",
        )
    }
}

/// Transports that reach no host memory.
const GPU_TRANSPORTS: [&str; 3] = ["cuda_ipc", "cuda_copy", "gdr_copy"];

/// Whether reads over a lane are done by hardware or the kernel, not by software of the other side.
pub(crate) fn is_direct(lane: &Lane) -> bool {
    lane.is_rma && !["tcp", "self", "posix", "sysv"].contains(&&lane.transport[..])
}

/// Whether a lane can read host memory of the other side.
pub(crate) fn reads_host(lane: &Lane) -> bool {
    is_direct(lane) && !GPU_TRANSPORTS.contains(&&lane.transport[..])
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
    fn lanes_of_gpus_are_no_data_path_for_host_memory() {
        assert!(reads_host(&lane("cma", true)));
        assert!(!reads_host(&lane("cuda_ipc", true)));
        assert!(is_direct(&lane("cuda_ipc", true)));
        assert!(!is_direct(&lane("tcp", true)), "software serves it");
    }

    #[test]
    fn tcp_on_one_host_is_worth_a_word_and_cma_is_not() {
        let advice = |path: DataPath| path.advice(true);
        let tcp = advice(DataPath::Stream("tcp".to_owned()));
        assert!(tcp.is_some_and(|text| text.contains("CMA")));
        assert_eq!(advice(DataPath::RemoteRead("cma".to_owned())), None);
        assert_eq!(advice(DataPath::Stream("memory".to_owned())), None);
    }
}
