//! The UCP context: the library's state of one process, shared by workers and registered memory.

use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::config::Config;
use crate::exit_gate::InUse;
use crate::library::Library;
use crate::memory::Memory;
use crate::status::{Status, check};
use crate::sys;

/// One UCP context, with remote memory access and wake-up by file descriptor.
pub struct Context {
    handle: NonNull<sys::ucp_context>,
    library: Arc<Library>,
    has_cuda: bool,
    _in_use: InUse,
}

// SAFETY: `ucp_params_t::mt_workers_shared`, which `init` sets: "This flag indicates if this
// context is shared by multiple workers from different threads. If so, this context needs thread
// safety support". "Note that actual thread mode may be different from mode passed to ucp_init":
// `Context::new` therefore refuses a context that does not report UCS_THREAD_MODE_MULTI, "Multiple
// threads can access concurrently".
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

impl Context {
    /// Creates a context from UCX's configuration with `config` on top.
    ///
    /// # Errors
    /// The status of UCX; `UCS_ERR_UNSUPPORTED` when this UCX was built without thread support.
    pub fn new(library: Arc<Library>, config: &Config) -> Result<Arc<Self>, Status> {
        let in_use = InUse::begin();
        let handle = init(&library, config)?;
        let mut context = Self {
            handle,
            library,
            has_cuda: false,
            _in_use: in_use,
        };
        let (thread_mode, memory_types) = context.query()?;
        if thread_mode != sys::UCS_THREAD_MODE_MULTI {
            return Err(Status::new(
                sys::UCS_ERR_UNSUPPORTED,
                "ucp_init with mt_workers_shared",
            ));
        }
        context.has_cuda = memory_types & (1 << sys::UCS_MEMORY_TYPE_CUDA) != 0;
        Ok(Arc::new(context))
    }

    /// The library the context lives in.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// True if UCX can handle CUDA memory here: built with it, and a driver present.
    pub fn has_cuda(&self) -> bool {
        self.has_cuda
    }

    /// Registers memory for remote access and for local use without a copy. Any thread may call.
    ///
    /// # Errors
    /// The status of UCX; `UCS_ERR_INVALID_PARAM` for an empty buffer, `UCS_ERR_UNSUPPORTED` for CUDA
    /// memory where [`has_cuda`](Self::has_cuda) is false.
    pub fn register(self: &Arc<Self>, buffer: Buffer) -> Result<Arc<Memory>, Status> {
        Memory::new(Arc::clone(self), buffer).map(Arc::new)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ucp_context {
        self.handle.as_ptr()
    }

    /// The thread mode in force and the mask of memory types.
    fn query(&self) -> Result<(i32, u64), Status> {
        let mut attr = sys::ucp_context_attr_t {
            field_mask: sys::UCP_ATTR_FIELD_THREAD_MODE | sys::UCP_ATTR_FIELD_MEMORY_TYPES,
            request_size: 0,
            thread_mode: sys::UCS_THREAD_MODE_SERIALIZED,
            memory_types: 0,
            name: [0; 32],
            device_counter_size: 0,
        };
        let api = self.library.api();
        // SAFETY: the context is live, and `attr` holds every field its mask asks for.
        let code = unsafe { (api.ucp_context_query)(self.as_ptr(), &raw mut attr) };
        check(code, "ucp_context_query")?;
        Ok((attr.thread_mode, attr.memory_types))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory hold an Arc of the context, so none is left; called once.
        unsafe { (self.library.api().ucp_cleanup)(self.as_ptr()) };
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("library", &self.library)
            .field("has_cuda", &self.has_cuda)
            .finish_non_exhaustive()
    }
}

fn init(library: &Library, config: &Config) -> Result<NonNull<sys::ucp_context>, Status> {
    const CALL: &str = "ucp_init_version";
    let config = config.read(library)?;
    // No active message is sent. Without the feature older versions (1.13) choose no lanes of high bandwidth for remote memory.
    let params = sys::ucp_params_t {
        field_mask: sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        features: sys::UCP_FEATURE_AM | sys::UCP_FEATURE_RMA | sys::UCP_FEATURE_WAKEUP,
        request_size: 0,
        request_init: null_mut(),
        request_cleanup: null_mut(),
        tag_sender_mask: 0,
        mt_workers_shared: 1,
        estimated_num_eps: 0,
        estimated_num_ppn: 0,
        name: null(),
        node_local_id: 0,
    };
    let mut handle = null_mut();
    let api = library.api();
    // SAFETY: params and configuration outlive the call; 1.13 is the version all calls come from.
    let code = unsafe {
        (api.ucp_init_version)(1, 13, &raw const params, config.as_ptr(), &raw mut handle)
    };
    check(code, CALL)?;
    NonNull::new(handle).ok_or(Status::new(sys::UCS_ERR_NO_MEMORY, CALL))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::library::Search;

    /// A context on the loopback interface, or None after printing why there is none.
    #[allow(clippy::print_stderr, reason = "a skipped test says why")]
    pub(crate) fn context() -> Option<Arc<Context>> {
        let search = Search {
            explicit: std::env::var_os("KVPIPE_UCX_LIB").map(Into::into),
            wheel_dir: None,
        };
        let library = Library::load(&search)
            .map_err(|error| eprintln!("skipped: {error}"))
            .ok()?;
        let mut config = Config::new();
        config.pin("NET_DEVICES", "lo"); // other interfaces of this machine come and go
        Some(Context::new(library, &config).expect("context"))
    }
}
