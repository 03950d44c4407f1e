//! The part of UCP's C interface that kvpipe calls: types, constants and signatures from the UCX
//! 1.22 headers, limited to what UCX 1.13 already had. No logic. UCX guards every structure with a
//! field mask and grows it at the tail, so the 1.22 layouts serve all versions from the floor on.

#![allow(non_camel_case_types, reason = "names are those of the C headers")]

use std::ffi::{c_char, c_int, c_uint, c_void};

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque!(ucp_address ucp_config ucp_context ucp_ep ucp_mem ucp_rkey ucp_worker);

/// `ucs_status_t` is a packed enum: one signed byte.
pub(crate) type ucs_status_t = i8;
pub(crate) type ucs_status_ptr_t = *mut c_void;

pub(crate) const UCS_OK: ucs_status_t = 0;
pub(crate) const UCS_ERR_IO_ERROR: ucs_status_t = -3;
pub(crate) const UCS_ERR_NO_MEMORY: ucs_status_t = -4;
pub(crate) const UCS_ERR_INVALID_PARAM: ucs_status_t = -5;
pub(crate) const UCS_ERR_UNREACHABLE: ucs_status_t = -6;
pub(crate) const UCS_ERR_INVALID_ADDR: ucs_status_t = -7;
pub(crate) const UCS_ERR_BUSY: ucs_status_t = -15;
pub(crate) const UCS_ERR_CANCELED: ucs_status_t = -16;
pub(crate) const UCS_ERR_OUT_OF_RANGE: ucs_status_t = -19;
pub(crate) const UCS_ERR_TIMED_OUT: ucs_status_t = -20;
pub(crate) const UCS_ERR_UNSUPPORTED: ucs_status_t = -22;
pub(crate) const UCS_ERR_NOT_CONNECTED: ucs_status_t = -24;
pub(crate) const UCS_ERR_CONNECTION_RESET: ucs_status_t = -25;
pub(crate) const UCS_ERR_ENDPOINT_TIMEOUT: ucs_status_t = -80;
pub(crate) const UCS_ERR_LAST: isize = -100;

pub(crate) const UCS_THREAD_MODE_SERIALIZED: c_int = 1;
pub(crate) const UCS_THREAD_MODE_MULTI: c_int = 2;

pub(crate) const UCS_MEMORY_TYPE_HOST: c_int = 0;
pub(crate) const UCS_MEMORY_TYPE_CUDA: c_int = 1;
pub(crate) const UCS_MEMORY_TYPE_CUDA_MANAGED: c_int = 2;

pub(crate) const UCP_PARAM_FIELD_FEATURES: u64 = 1 << 0;
pub(crate) const UCP_PARAM_FIELD_MT_WORKERS_SHARED: u64 = 1 << 5;
pub(crate) const UCP_FEATURE_RMA: u64 = 1 << 1;
pub(crate) const UCP_FEATURE_WAKEUP: u64 = 1 << 4;
pub(crate) const UCP_FEATURE_AM: u64 = 1 << 6;
pub(crate) const UCP_ATTR_FIELD_THREAD_MODE: u64 = 1 << 1;
pub(crate) const UCP_ATTR_FIELD_MEMORY_TYPES: u64 = 1 << 2;
pub(crate) const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
pub(crate) const UCP_WORKER_ATTR_FIELD_ADDRESS: u64 = 1 << 1;
pub(crate) const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
pub(crate) const UCP_EP_ATTR_FIELD_TRANSPORTS: u64 = 1 << 3;
pub(crate) const UCP_ERR_HANDLING_MODE_PEER: c_int = 1;
pub(crate) const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1 << 0;
pub(crate) const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1 << 0;
pub(crate) const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;
pub(crate) const UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE: u64 = 1 << 4;
pub(crate) const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
pub(crate) const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
pub(crate) const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub(crate) const UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
pub(crate) const UCP_OP_ATTR_FIELD_MEMH: u32 = 1 << 8;

pub(crate) type ucp_send_nbx_callback_t =
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void);
pub(crate) type ucp_err_handler_cb_t =
    unsafe extern "C" fn(arg: *mut c_void, ep: *mut ucp_ep, status: ucs_status_t);
#[repr(C)]
pub(crate) struct ucp_params_t {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *mut c_void,
    pub(crate) request_cleanup: *mut c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
    pub(crate) node_local_id: usize,
}

#[repr(C)]
pub(crate) struct ucp_context_attr_t {
    pub(crate) field_mask: u64,
    pub(crate) request_size: usize,
    pub(crate) thread_mode: c_int,
    pub(crate) memory_types: u64,
    pub(crate) name: [c_char; 32],
    pub(crate) device_counter_size: usize,
}

#[repr(C)]
pub(crate) struct ucp_worker_params_t {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) cpu_mask: [u64; 16],
    pub(crate) events: c_uint,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
    pub(crate) name: *const c_char,
    pub(crate) am_alignment: usize,
    pub(crate) client_id: u64,
}

#[repr(C)]
pub(crate) struct ucp_worker_attr_t {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) address_flags: u32,
    pub(crate) address: *mut ucp_address,
    pub(crate) address_length: usize,
    pub(crate) max_am_header: usize,
    pub(crate) name: [c_char; 32],
    pub(crate) max_debug_string: usize,
}

#[repr(C)]
pub(crate) struct ucp_err_handler_t {
    pub(crate) cb: Option<ucp_err_handler_cb_t>,
    pub(crate) arg: *mut c_void,
}

#[repr(C)]
pub(crate) struct ucs_sock_addr_t {
    pub(crate) addr: *const c_void,
    pub(crate) addrlen: u32,
}

#[repr(C)]
pub(crate) struct ucp_ep_params_t {
    pub(crate) field_mask: u64,
    pub(crate) address: *const ucp_address,
    pub(crate) err_mode: c_int,
    pub(crate) err_handler: ucp_err_handler_t,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: c_uint,
    pub(crate) sockaddr: ucs_sock_addr_t,
    pub(crate) conn_request: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) local_sockaddr: ucs_sock_addr_t,
}

#[repr(C)]
pub(crate) struct ucp_transport_entry_t {
    pub(crate) transport_name: *const c_char,
    pub(crate) device_name: *const c_char,
}

#[repr(C)]
pub(crate) struct ucp_transports_t {
    pub(crate) entries: *mut ucp_transport_entry_t,
    pub(crate) num_entries: c_uint,
    pub(crate) entry_size: usize,
}

#[repr(C)]
pub(crate) struct ucp_ep_attr_t {
    pub(crate) field_mask: u64,
    pub(crate) name: [c_char; 32],
    pub(crate) local_sockaddr: libc::sockaddr_storage,
    pub(crate) remote_sockaddr: libc::sockaddr_storage,
    pub(crate) transports: ucp_transports_t,
    pub(crate) user_data: *mut c_void,
}

#[repr(C)]
pub(crate) struct ucp_mem_map_params_t {
    pub(crate) field_mask: u64,
    pub(crate) address: *mut c_void,
    pub(crate) length: usize,
    pub(crate) flags: c_uint,
    pub(crate) prot: c_uint,
    pub(crate) memory_type: c_int,
    pub(crate) exported_memh_buffer: *const c_void,
}

/// The callback is a union in C; kvpipe only uses its `send` member.
#[repr(C)]
pub(crate) struct ucp_request_param_t {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    pub(crate) cb: Option<ucp_send_nbx_callback_t>,
    pub(crate) datatype: u64,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: c_int,
    pub(crate) recv_info: *mut c_void,
    pub(crate) memh: *mut ucp_mem,
    pub(crate) remote_datatype: u64,
    pub(crate) remote: *const c_void,
    pub(crate) remote_count: usize,
}

/// A table of a C library's functions, resolved once when the library is loaded.
macro_rules! entry_points {
    ($(#[$about:meta])* $table:ident {
        $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)*
    }) => {
        $(#[$about])*
        #[allow(clippy::struct_field_names, reason = "names are those of the C headers")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg: $ty),*) $(-> $ret)?,)*
        }

        impl $table {
            /// Resolves every function, or names the first one that is missing.
            ///
            /// # Safety
            /// `library` must be the one that the table is of, and must stay loaded for as long as the result is used.
            pub(crate) unsafe fn resolve(
                library: &libloading::Library,
            ) -> Result<Self, &'static str> {
                Ok(Self {$(
                    // SAFETY: the type is the prototype of this symbol in the library's headers.
                    $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,
                )*})
            }
        }
    };
}

pub(crate) use entry_points;

entry_points! {
    /// UCP's functions.
    EntryPoints {
        fn ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
        fn ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut *mut ucp_config)
            -> ucs_status_t;
        fn ucp_config_modify(config: *mut ucp_config, name: *const c_char, value: *const c_char)
            -> ucs_status_t;
        fn ucp_config_release(config: *mut ucp_config);
        fn ucp_init_version(
            major: c_uint,
            minor: c_uint,
            params: *const ucp_params_t,
            config: *const ucp_config,
            context: *mut *mut ucp_context,
        ) -> ucs_status_t;
        fn ucp_cleanup(context: *mut ucp_context);
        fn ucp_context_query(context: *mut ucp_context, attr: *mut ucp_context_attr_t) -> ucs_status_t;
        fn ucp_mem_map(
            context: *mut ucp_context,
            params: *const ucp_mem_map_params_t,
            memh: *mut *mut ucp_mem,
        ) -> ucs_status_t;
        fn ucp_mem_unmap(context: *mut ucp_context, memh: *mut ucp_mem) -> ucs_status_t;
        fn ucp_rkey_pack(
            context: *mut ucp_context,
            memh: *mut ucp_mem,
            buffer: *mut *mut c_void,
            size: *mut usize,
        ) -> ucs_status_t;
        fn ucp_rkey_buffer_release(buffer: *mut c_void);
        fn ucp_worker_create(
            context: *mut ucp_context,
            params: *const ucp_worker_params_t,
            worker: *mut *mut ucp_worker,
        ) -> ucs_status_t;
        fn ucp_worker_destroy(worker: *mut ucp_worker);
        fn ucp_worker_query(worker: *mut ucp_worker, attr: *mut ucp_worker_attr_t) -> ucs_status_t;
        fn ucp_worker_release_address(worker: *mut ucp_worker, address: *mut ucp_address);
        fn ucp_worker_get_efd(worker: *mut ucp_worker, fd: *mut c_int) -> ucs_status_t;
        fn ucp_worker_arm(worker: *mut ucp_worker) -> ucs_status_t;
        fn ucp_worker_signal(worker: *mut ucp_worker) -> ucs_status_t;
        fn ucp_worker_progress(worker: *mut ucp_worker) -> c_uint;
        fn ucp_ep_create(
            worker: *mut ucp_worker,
            params: *const ucp_ep_params_t,
            ep: *mut *mut ucp_ep,
        ) -> ucs_status_t;
        fn ucp_ep_close_nbx(ep: *mut ucp_ep, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
        fn ucp_ep_print_info(ep: *mut ucp_ep, stream: *mut libc::FILE);
        fn ucp_ep_query(ep: *mut ucp_ep, attr: *mut ucp_ep_attr_t) -> ucs_status_t;
        fn ucp_ep_flush_nbx(ep: *mut ucp_ep, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
        fn ucp_ep_rkey_unpack(
            ep: *mut ucp_ep,
            buffer: *const c_void,
            rkey: *mut *mut ucp_rkey,
        ) -> ucs_status_t;
        fn ucp_rkey_ptr(rkey: *mut ucp_rkey, raddr: u64, addr: *mut *mut c_void) -> ucs_status_t;
        fn ucp_rkey_destroy(rkey: *mut ucp_rkey);
        fn ucp_get_nbx(
            ep: *mut ucp_ep,
            buffer: *mut c_void,
            count: usize,
            remote_addr: u64,
            rkey: *mut ucp_rkey,
            param: *const ucp_request_param_t,
        ) -> ucs_status_ptr_t;
        fn ucp_request_free(request: *mut c_void);
    }
}

/// Layouts as printed by a C program compiled against the 1.22 headers (x86-64 and aarch64, LP64).
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ucp_params_t>() == 88);
    assert!(offset_of!(ucp_params_t, mt_workers_shared) == 48);
    assert!(offset_of!(ucp_params_t, name) == 72);
    assert!(size_of::<ucp_context_attr_t>() == 72);
    assert!(offset_of!(ucp_context_attr_t, thread_mode) == 16);
    assert!(offset_of!(ucp_context_attr_t, memory_types) == 24);
    assert!(size_of::<ucp_worker_params_t>() == 200);
    assert!(offset_of!(ucp_worker_params_t, thread_mode) == 8);
    assert!(offset_of!(ucp_worker_params_t, events) == 144);
    assert!(size_of::<ucp_worker_attr_t>() == 80);
    assert!(offset_of!(ucp_worker_attr_t, address) == 16);
    assert!(offset_of!(ucp_worker_attr_t, max_am_header) == 32);
    assert!(size_of::<ucp_ep_params_t>() == 104);
    assert!(offset_of!(ucp_ep_params_t, err_mode) == 16);
    assert!(offset_of!(ucp_ep_params_t, err_handler) == 24);
    assert!(offset_of!(ucp_ep_params_t, local_sockaddr) == 88);
    assert!(size_of::<ucp_transports_t>() == 24);
    assert!(size_of::<ucp_ep_attr_t>() == 328);
    assert!(offset_of!(ucp_ep_attr_t, transports) == 296);
    assert!(size_of::<ucp_mem_map_params_t>() == 48);
    assert!(offset_of!(ucp_mem_map_params_t, memory_type) == 32);
    assert!(size_of::<ucp_request_param_t>() == 96);
    assert!(offset_of!(ucp_request_param_t, cb) == 16);
    assert!(offset_of!(ucp_request_param_t, user_data) == 32);
    assert!(offset_of!(ucp_request_param_t, memory_type) == 48);
    assert!(offset_of!(ucp_request_param_t, memh) == 64);
};
