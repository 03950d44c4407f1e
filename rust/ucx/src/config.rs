//! UCX settings. They go through UCX's configuration call, never through the environment: the
//! user's `UCX_*` variables override all but the pinned settings.

use std::ffi::CString;
use std::path::Path;
use std::ptr::{null, null_mut};

use crate::library::{Library, has_rdma_devices};
use crate::status::{Status, check};
use crate::sys::{UCS_ERR_INVALID_PARAM, ucp_config};

/// Settings for a context: kvpipe's defaults, then what the caller sets.
#[derive(Clone, Debug)]
pub struct Config {
    settings: Vec<Setting>,
}

#[derive(Clone, Debug)]
struct Setting {
    key: String,
    value: String,
    pinned: bool,
}

type Version = (u32, u32);

/// Keys that only some UCX versions know, or need: `(key, since, before)`. Older versions do not
/// refuse an unknown key but print a warning for each worker (seen: 1.13 to 1.19).
const VERSIONS: [(&str, Version, Version); 10] = [
    // Before, CMA is not used: it has no PEER error mode.
    ("CMA_TX_QUOTA", (1, 20), NEVER),
    // Before, kvpipe reads nothing over it.
    ("CUDA_IPC_ENABLE_GET_ZCOPY", (1, 22), NEVER),
    ("IB_PCI_RELAXED_ORDERING", PREFIXES_WORK, NEVER),
    // Later, the cache does not belong to the transport.
    ("IB_REG_METHODS", (1, 13), (1, 16)),
    ("MAX_HCA_PER_GPU", (1, 21), NEVER),
    ("MAX_RMA_RAILS", (1, 15), NEVER),
    // Before, no UCX with CUDA is used.
    ("MM_ERROR_HANDLING", PREFIXES_WORK, NEVER),
    // Reads that UCX would serve in software fail instead.
    ("PROTO_EMULATION_ENABLE", (1, 22), NEVER),
    // Before, the cache belongs to the transport.
    ("RCACHE_ENABLE", (1, 15), NEVER),
    // A leak, fixed in 1.22.
    ("RCACHE_MAX_UNRELEASED", (1, 17), (1, 22)),
];
/// The device file of NVIDIA's driver.
const NVIDIA: &str = "/dev/nvidiactl";
const NEVER: Version = (u32::MAX, 0);
/// The first version seen whose configuration call knows a transport's keys by the names they
/// have in the environment. Before (1.13, 1.15), it expects them without the transport's prefix.
const PREFIXES_WORK: Version = (1, 17);

impl Default for Config {
    fn default() -> Self {
        Self::new()
    }
}

impl Config {
    /// The settings kvpipe needs on every machine.
    pub fn new() -> Self {
        let mut config = Self {
            settings: Vec::new(),
        };
        // Any other threshold allows UCX's rendezvous, which in PEER error mode costs the CMA and TCP
        // zero-copy lanes (measured: 0.94 instead of 5 GB/s). Without its registration cache, UCX also crashes
        // when a rendezvous is ended by force (1.18, openucx/ucx#11467).
        config.pin("RNDV_THRESH", "inf");
        // Otherwise shared memory has no PEER error mode, and endpoints of `cuda_ipc`, which need a lane for UCX's own
        // messages, could be made over TCP alone.
        config.pin("MM_ERROR_HANDLING", "y");
        // Reads of one progress call. With UCX's default of 8, polling its sockets in between takes 0.15 us of each read.
        config.set("CMA_TX_QUOTA", "32");
        // Sessions notice dead peers, and close their endpoints. UCX's own timer would wake an idle process.
        config.set("KEEPALIVE_INTERVAL", "inf");
        config
            .set("MAX_RMA_RAILS", "2")
            .set("MAX_HCA_PER_GPU", "auto");
        config
            .set("RCACHE_MAX_UNRELEASED", "1024")
            .set("WARN_UNUSED_ENV_VARS", "n");
        if Path::new(NVIDIA).exists() {
            // By default UCX has no gets over it without NVLink, and would serve them in software, over TCP.
            config.pin("CUDA_IPC_ENABLE_GET_ZCOPY", "on");
            config.pin("PROTO_EMULATION_ENABLE", "n");
        }
        if has_rdma_devices() {
            config.set("IB_PCI_RELAXED_ORDERING", "try");
            // By default UCX keeps deregistered memory in a cache (seen: 1.13, 1.23): pinned, and open to every peer with its key.
            config.set("IB_REG_METHODS", "direct");
            config.set("RCACHE_ENABLE", "n");
        }
        config
    }

    /// Sets `key` (without `UCX_`), unless the user's environment sets it.
    pub fn set(&mut self, key: &str, value: &str) -> &mut Self {
        self.put(key, value, false)
    }

    /// Sets `key` (without `UCX_`), also against the user's environment.
    pub fn pin(&mut self, key: &str, value: &str) -> &mut Self {
        self.put(key, value, true)
    }

    fn put(&mut self, key: &str, value: &str, pinned: bool) -> &mut Self {
        self.settings.retain(|setting| setting.key != key);
        let (key, value) = (key.to_owned(), value.to_owned());
        self.settings.push(Setting { key, value, pinned });
        self
    }

    /// Settings for UCX `version`, without those that `has_env` finds in the environment, unless they are pinned.
    fn effective(
        &self,
        version: Version,
        has_env: impl Fn(&str) -> bool,
    ) -> impl Iterator<Item = &Setting> {
        self.settings.iter().filter(move |setting| {
            let theirs = || has_env(&format!("UCX_{}", setting.key));
            is_for(&setting.key, version) && (setting.pinned || !theirs())
        })
    }

    /// Reads UCX's configuration (environment and files) and applies these settings on top.
    pub(crate) fn read<'l>(&self, library: &'l Library) -> Result<UcxConfig<'l>, Status> {
        let config = UcxConfig::read(library)?;
        let has_env = |name: &str| std::env::var_os(name).is_some();
        let (major, minor, _) = library.version();
        for setting in self.effective((major, minor), has_env) {
            let key = call_name(&setting.key, (major, minor));
            if let Err(status) = config.modify(key, &setting.value) {
                // UCX's keys depend on its version and transports.
                tracing::debug!(key, value = setting.value, %status, "ucx.config_refused");
            }
        }
        Ok(config)
    }
}

fn is_for(key: &str, version: Version) -> bool {
    let limits = VERSIONS.iter().find(|(name, ..)| *name == key);
    limits.is_none_or(|(_, since, before)| *since <= version && version < *before)
}

/// The key as UCX's configuration call expects it.
fn call_name(key: &str, version: Version) -> &str {
    match key {
        _ if version >= PREFIXES_WORK => key,
        "IB_REG_METHODS" => "REG_METHODS",
        "TCP_CONN_NB" => "CONN_NB",
        _ => key,
    }
}

/// UCX's own configuration object.
pub(crate) struct UcxConfig<'l> {
    library: &'l Library,
    handle: *mut ucp_config,
}

impl<'l> UcxConfig<'l> {
    fn read(library: &'l Library) -> Result<Self, Status> {
        let mut handle = null_mut();
        // SAFETY: both strings may be null by the header; the handle is a valid place to write to.
        let code = unsafe { (library.api().ucp_config_read)(null(), null(), &raw mut handle) };
        check(code, "ucp_config_read")?;
        Ok(Self { library, handle })
    }

    fn modify(&self, key: &str, value: &str) -> Result<(), Status> {
        const CALL: &str = "ucp_config_modify";
        let invalid = |_| Status::new(UCS_ERR_INVALID_PARAM, CALL);
        let key = CString::new(key).map_err(invalid)?;
        let value = CString::new(value).map_err(invalid)?;
        let api = self.library.api();
        // SAFETY: the handle is live until drop; both strings end in NUL and outlive the call.
        check(
            unsafe { (api.ucp_config_modify)(self.handle, key.as_ptr(), value.as_ptr()) },
            CALL,
        )
    }

    pub(crate) fn as_ptr(&self) -> *const ucp_config {
        self.handle
    }
}

impl Drop for UcxConfig<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from ucp_config_read and is released once, here.
        unsafe { (self.library.api().ucp_config_release)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<'c>(config: &'c Config, version: Version, env: &[&str], key: &str) -> Option<&'c str> {
        config
            .effective(version, |name| env.contains(&name))
            .find(|setting| setting.key == key)
            .map(|setting| setting.value.as_str())
    }

    #[test]
    fn environment_wins_over_set_but_not_over_pin() {
        let config = Config::new();
        let env = ["UCX_RNDV_THRESH", "UCX_KEEPALIVE_INTERVAL"];
        assert_eq!(value(&config, (1, 22), &env, "RNDV_THRESH"), Some("inf"));
        assert_eq!(value(&config, (1, 22), &env, "KEEPALIVE_INTERVAL"), None);
        assert_eq!(
            value(&config, (1, 22), &[], "KEEPALIVE_INTERVAL"),
            Some("inf")
        );
    }

    #[test]
    fn later_setting_replaces_the_earlier() {
        let mut config = Config::new();
        config.set("NET_DEVICES", "lo").pin("NET_DEVICES", "eth0");
        assert_eq!(
            value(&config, (1, 22), &["UCX_NET_DEVICES"], "NET_DEVICES"),
            Some("eth0")
        );
    }

    #[test]
    fn settings_apply_only_to_the_versions_that_need_them() {
        let config = Config::new();
        assert_eq!(
            value(&config, (1, 18), &[], "RCACHE_MAX_UNRELEASED"),
            Some("1024")
        );
        assert_eq!(value(&config, (1, 22), &[], "RCACHE_MAX_UNRELEASED"), None);
        assert_eq!(value(&config, (1, 20), &[], "MAX_HCA_PER_GPU"), None);
        assert_eq!(value(&config, (1, 16), &[], "MM_ERROR_HANDLING"), None);
        assert_eq!(value(&config, (1, 17), &[], "MM_ERROR_HANDLING"), Some("y"));
    }

    #[test]
    fn gets_over_cuda_ipc_are_forced_since_ucx_would_serve_them_in_software() {
        let mut config = Config::new();
        config.pin("CUDA_IPC_ENABLE_GET_ZCOPY", "on");
        let env = ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"];
        let gets = |version| value(&config, version, &env, "CUDA_IPC_ENABLE_GET_ZCOPY");
        assert_eq!(gets((1, 22)), Some("on"));
        assert_eq!(gets((1, 21)), None);
    }

    #[test]
    fn the_registration_cache_is_disabled_by_the_name_of_each_version() {
        let mut config = Config::new();
        config.set("IB_REG_METHODS", "direct");
        config.set("RCACHE_ENABLE", "n");
        let of = |version, key| value(&config, version, &[], key);
        assert_eq!(of((1, 13), "IB_REG_METHODS"), Some("direct"));
        assert_eq!(of((1, 13), "RCACHE_ENABLE"), None);
        assert_eq!(of((1, 16), "IB_REG_METHODS"), None);
        assert_eq!(of((1, 16), "RCACHE_ENABLE"), Some("n"));
    }

    #[test]
    fn old_versions_get_keys_of_transports_without_prefix() {
        assert_eq!(call_name("IB_REG_METHODS", (1, 13)), "REG_METHODS");
        assert_eq!(call_name("IB_REG_METHODS", (1, 22)), "IB_REG_METHODS");
        assert_eq!(
            call_name("KEEPALIVE_INTERVAL", (1, 13)),
            "KEEPALIVE_INTERVAL"
        );
    }
}
