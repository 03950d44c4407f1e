//! Ways of bytes from one side of a session to the other.

use kvpipe_ucx::{Lane, has_rdma_devices};

/// Data path of a session. The side of the destination writes the destination in both cases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataPath {
    /// The destination reads the source's memory over this transport (`cma`, `rc_mlx5`, …).
    RemoteRead(String),
    /// The source sends them over the TCP connection of the session.
    Stream(String),
}

impl DataPath {
    /// The transport that carries the bytes.
    pub fn transport(&self) -> &str {
        match self {
            Self::RemoteRead(name) | Self::Stream(name) => name,
        }
    }

    /// Reason for a slow data path, and the remedy; none when it is as fast as this machine allows.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        let is_stream = matches!(self, Self::Stream(_));
        (is_stream && has_rdma_devices()).then_some(
            "this machine has RDMA devices, but bytes move over tcp: the libucx wheel has no RDMA (install the system's UCX, or name one with KVPIPE_UCX_LIB), or UCX_NET_DEVICES, UCX_TLS or KVPIPE_DATA_PATH leaves it out",
        )
    }
}

/// Transports that reach no host memory.
const GPU_TRANSPORTS: [&str; 3] = ["cuda_ipc", "cuda_copy", "gdr_copy"];

/// True if reads over a lane are done by hardware or the kernel, not by software of the other side.
pub(crate) fn is_direct(lane: &Lane) -> bool {
    lane.is_rma && !["tcp", "self", "posix", "sysv"].contains(&&lane.transport[..])
}

/// True if a lane can read host memory of the other side.
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
}
