//! What to say of a session whose bytes take a slower data path than they could.

use kvpipe_ucx::has_rdma_devices;

use crate::transport::DataPath;

/// Why the data path is slow, and what to do; none when it is as fast as this machine allows.
pub(crate) fn advice(data_path: &DataPath, is_same_host: bool) -> Option<&'static str> {
    let DataPath::Stream(transport) = data_path else {
        return None;
    };
    if transport == "tcp" && is_same_host {
        return Some(
            "the peer is on this host, but bytes move over tcp: UCX 1.20 or newer reads its memory (CMA) if both run as the same user in the same namespaces",
        );
    }
    (transport == "tcp" && has_rdma_devices()).then_some(
        "this machine has RDMA devices, but bytes move over tcp: the libucx wheel has no RDMA (install the system's UCX, or name one with KVPIPE_UCX_LIB), or UCX_NET_DEVICES or UCX_TLS leaves it out",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_on_one_host_is_worth_a_word_and_cma_is_not() {
        let data_path = |name: &str| DataPath::Stream(name.to_owned());
        assert!(advice(&data_path("tcp"), true).is_some_and(|text| text.contains("CMA")));
        assert_eq!(advice(&DataPath::RemoteRead("cma".to_owned()), true), None);
        assert_eq!(advice(&data_path("memory"), true), None);
    }
}
