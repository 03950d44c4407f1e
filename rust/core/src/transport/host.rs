//! The transport between hosts and processes: without UCX, unless a device needs that.

use kvpipe_ucx::{Search, has_cuda_devices, has_rdma_devices, let_processes_read};

use super::{Context, ucx};
use crate::error::{Error, Result};

/// The setting of users.
const DATA_PATH: &str = "KVPIPE_DATA_PATH";

/// Data paths that users allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    /// The fastest path that both sides have.
    Auto,
    /// Streams over the TCP connection of a session.
    Tcp,
    /// RDMA and CUDA devices, also between processes of one host.
    Devices,
}

impl Allowed {
    fn of(setting: Option<&str>) -> Result<Self> {
        match setting {
            None | Some("" | "auto") => Ok(Self::Auto),
            Some("tcp") => Ok(Self::Tcp),
            Some("rdma") => Ok(Self::Devices),
            Some(other) => Err(Error::Config(format!(
                "{DATA_PATH}={other}: expected auto (the fastest that both sides have), tcp, or rdma"
            ))),
        }
    }
}

/// Makes a context. UCX is loaded if this machine has RDMA or CUDA devices.
///
/// # Errors
/// `Config`: the setting of users is none of its values. `Unavailable`: it wants devices, and there are none, or no UCX.
pub(super) fn context(search: &Search) -> Result<Context> {
    let setting = std::env::var(DATA_PATH).ok();
    let allowed = Allowed::of(setting.as_deref())?;
    let reads_processes = allowed == Allowed::Auto;
    let host = Context::Host { reads_processes };
    if allowed == Allowed::Tcp {
        return Ok(host);
    }
    let_processes_read();
    let devices = match (has_rdma_devices(), has_cuda_devices()) {
        (false, false) if reads_processes => return Ok(host),
        (false, false) => {
            let text = format!("{DATA_PATH}=rdma, and this machine has no RDMA devices");
            return Err(Error::Unavailable(text));
        }
        (true, false) => "RDMA devices",
        (_, true) => "CUDA devices",
    };
    match ucx::context(search, has_cuda_devices()) {
        Ok(Some(context)) => Ok(Context::Ucx {
            context,
            reads_processes,
        }),
        Ok(None) => Ok(host),
        Err(error @ Error::Unavailable(_)) if reads_processes => {
            tracing::warn!(
                "ucx.missing this machine has {devices}, and bytes move without them: {error}"
            );
            Ok(host)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_path_that_is_not_known_is_refused_by_name() {
        for (setting, allowed) in [
            (None, Allowed::Auto),
            (Some(""), Allowed::Auto),
            (Some("auto"), Allowed::Auto),
            (Some("tcp"), Allowed::Tcp),
            (Some("rdma"), Allowed::Devices),
        ] {
            assert_eq!(Allowed::of(setting), Ok(allowed));
        }
        let error = Allowed::of(Some("cma")).unwrap_err().to_string();
        assert!(
            error.contains("KVPIPE_DATA_PATH=cma: expected auto"),
            "{error}"
        );
    }
}
