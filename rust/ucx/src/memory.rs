//! Buffers that are registered with a context.

use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use crate::buffer::{Buffer, MemoryKind};
use crate::context::Context;
use crate::cuda;
use crate::status::{Status, check};
use crate::sys;

/// A buffer that is registered with a context. Operations in flight hold an `Arc` of it; dropping
/// the last one deregisters it and only then frees the bytes, on any thread.
pub struct Memory {
    handle: NonNull<sys::ucp_mem>,
    context: Arc<Context>,
    /// Freed by hand: bytes whose deregistration failed must stay allocated.
    buffer: ManuallyDrop<Buffer>,
}

// SAFETY: the handle is used for map, unmap, pack and as an argument of operations, which the context's thread mode, MULTI
// (see Context), lets any thread call; the handle itself never changes. Without UCX's registration cache, map and unmap take no
// lock (1.15 to 1.23): what they share then is a number that only keys with invalidation have, and the verbs, which lock.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(context: Arc<Context>, buffer: Buffer) -> Result<Self, Status> {
        const CALL: &str = "ucp_mem_map";
        if buffer.is_empty() {
            return Err(Status::new(sys::UCS_ERR_INVALID_PARAM, CALL));
        }
        if buffer.kind() != MemoryKind::Host && !context.has_cuda() {
            return Err(Status::new(sys::UCS_ERR_UNSUPPORTED, CALL));
        }
        let params = sys::ucp_mem_map_params_t {
            field_mask: sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | sys::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
            address: std::ptr::with_exposed_provenance_mut(buffer.address()),
            length: buffer.len(),
            flags: 0,
            prot: 0,
            memory_type: buffer.kind().as_ucs(),
            exported_memh_buffer: null(),
        };
        let mut handle = null_mut();
        let api = context.library().api();
        let _current = buffer.kind().enter();
        if let MemoryKind::Cuda { device } = buffer.kind() {
            // Without it UCX copies. It is logged.
            let _ = cuda::prepare_copies(device);
        }
        // SAFETY: the context is live; the range is allocated, and stays so until `drop` unmaps.
        let code =
            unsafe { (api.ucp_mem_map)(context.as_ptr(), &raw const params, &raw mut handle) };
        check(code, CALL)?;
        let handle = NonNull::new(handle).ok_or(Status::new(sys::UCS_ERR_NO_MEMORY, CALL))?;
        Ok(Self {
            handle,
            context,
            buffer: ManuallyDrop::new(buffer),
        })
    }

    /// The bytes.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The key by which a peer may access this memory. A peer with the key can read and write all of
    /// it; over TCP, UCX does not even check the key.
    ///
    /// # Errors
    /// The status of UCX.
    pub fn pack_rkey(&self) -> Result<Vec<u8>, Status> {
        let api = self.context.library().api();
        let (mut packed, mut len) = (null_mut(), 0);
        let context = self.context.as_ptr();
        let _current = self.buffer.kind().enter();
        // SAFETY: context and handle are live and belong together.
        let code =
            unsafe { (api.ucp_rkey_pack)(context, self.as_ptr(), &raw mut packed, &raw mut len) };
        check(code, "ucp_rkey_pack")?;
        // SAFETY: on success UCX hands out `len` initialised bytes, ours until released.
        let key = unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), len) }.to_vec();
        // SAFETY: the bytes came from ucp_rkey_pack and are released once.
        unsafe { (api.ucp_rkey_buffer_release)(packed) };
        Ok(key)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ucp_mem {
        self.handle.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _current = self.buffer.kind().enter();
        let library = self.context.library();
        // SAFETY: mapped in this context; operations hold an Arc of self, so none is in flight.
        let code = unsafe { (library.api().ucp_mem_unmap)(self.context.as_ptr(), self.as_ptr()) };
        if let Err(status) = check(code, "ucp_mem_unmap") {
            tracing::error!(buffer = ?*self.buffer, %status, "memory.leaked");
            return;
        }
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("buffer", &*self.buffer)
            .finish_non_exhaustive()
    }
}
