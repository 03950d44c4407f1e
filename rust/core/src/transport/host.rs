//! The transport between hosts and processes: without UCX, unless a device needs that.

use std::net::IpAddr;

use kvpipe_ucx::{Search, has_cuda_devices, has_rdma_devices, let_processes_read};

use super::{Context, ucx};
use crate::error::{Error, Result};

/// The setting of users.
const DATA_PATH: &str = "KVPIPE_DATA_PATH";

/// What users allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    /// The fastest path that both sides have.
    Auto,
    /// Streams over the TCP connection of a session.
    Tcp,
}

impl Allowed {
    fn of(setting: Option<&str>) -> Result<Self> {
        match setting {
            None | Some("" | "auto") => Ok(Self::Auto),
            Some("tcp") => Ok(Self::Tcp),
            Some(other) => Err(Error::Config(format!(
                "{DATA_PATH}={other}: expected auto (the fastest that both sides have) or tcp"
            ))),
        }
    }
}

/// Makes a context at this local address. UCX is loaded if this machine has RDMA or CUDA devices.
///
/// # Errors
/// `Config`: the setting of users is neither of its values. Those of UCX, but for a library that is not found.
pub(super) fn context(search: &Search, local: IpAddr) -> Result<Context> {
    let setting = std::env::var(DATA_PATH).ok();
    if Allowed::of(setting.as_deref())? == Allowed::Tcp {
        let reads_processes = false;
        return Ok(Context::Host { reads_processes });
    }
    let_processes_read();
    let reads_processes = true;
    let devices = match (has_rdma_devices(), has_cuda_devices()) {
        (false, false) => return Ok(Context::Host { reads_processes }),
        (true, false) => "RDMA devices",
        (_, true) => "CUDA devices",
    };
    match ucx::context(search, local, has_cuda_devices()) {
        Ok(Some(context)) => Ok(Context::Ucx(context)),
        Ok(None) => Ok(Context::Host { reads_processes }),
        Err(error @ Error::Unavailable(_)) => {
            tracing::warn!("ucx.missing this machine has {devices}, whose memory is streamed over TCP: {error}");
            Ok(Context::Host { reads_processes })
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_path_is_auto_or_tcp_and_any_other_is_refused_by_name() {
        for (setting, allowed) in [
            (None, Allowed::Auto),
            (Some(""), Allowed::Auto),
            (Some("auto"), Allowed::Auto),
            (Some("tcp"), Allowed::Tcp),
        ] {
            assert_eq!(Allowed::of(setting), Ok(allowed));
        }
        let error = Allowed::of(Some("rdma")).unwrap_err().to_string();
        assert!(error.contains("KVPIPE_DATA_PATH=rdma: expected auto"), "{error}");
    }
}
