//! Memory across the border: Python buffers as [`Buffer`], and received bytes as a Python buffer.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use kvpipe_core::pipe::Received;
use kvpipe_ucx::{Buffer, MemoryKind};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::bad;

/// Python buffers that our threads have let go. Releasing one takes the GIL, which only Python's threads may do: the
/// next call from Python releases them.
static LET_GO: Mutex<Vec<PyBuffer<u8>>> = Mutex::new(Vec::new());

/// Keeps a Python object's memory alive until UCX is done with it.
struct Owner(Option<PyBuffer<u8>>);

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            LET_GO
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(buffer);
        }
    }
}

/// Releases what our threads have let go; called with the GIL, at the end of waits and at the start of sends.
pub(crate) fn release_let_go(_py: Python<'_>) {
    let buffers = std::mem::take(&mut *LET_GO.lock().unwrap_or_else(PoisonError::into_inner));
    drop(buffers);
}

/// The memory of anything that speaks the buffer protocol with bytes.
pub(crate) fn from_python(object: &Bound<'_, PyAny>, must_be_writable: bool) -> PyResult<Buffer> {
    let buffer = PyBuffer::<u8>::get(object)?;
    if !buffer.is_c_contiguous() {
        return Err(bad("the memory is not contiguous"));
    }
    if must_be_writable && buffer.readonly() {
        return Err(bad("the memory is read-only, but has to be written"));
    }
    let (address, len) = (buffer.buf_ptr() as usize, buffer.len_bytes());
    let owner = Box::new(Owner(Some(buffer)));
    #[allow(unsafe_code)]
    // SAFETY: the exporter keeps `len` bytes at `address` allocated while the PyBuffer, which `owner` holds, is not
    // released. Read-only memory is never a destination: that was checked above for those that are.
    Ok(unsafe { Buffer::from_raw_parts(address, len, MemoryKind::Host, owner) })
}

/// The bytes of a received tensor; exports them as a writable buffer.
#[pyclass(frozen)]
pub(crate) struct ReceivedBuffer(Arc<Received>);

impl ReceivedBuffer {
    pub(crate) fn new(received: Arc<Received>) -> Self {
        Self(received)
    }
}

#[pymethods]
impl ReceivedBuffer {
    fn __len__(&self) -> usize {
        self.0.buffer.as_ref().map_or(0, Buffer::len)
    }

    #[allow(unsafe_code)]
    /// # Safety
    /// Called by Python with a valid `view`.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (address, len) = match &slf.get().0.buffer {
            Some(buffer) => (buffer.address(), buffer.len()),
            None => {
                return Err(PyBufferError::new_err(
                    "the tensor was received into memory of the caller",
                ));
            }
        };
        let address = std::ptr::with_exposed_provenance_mut(address);
        let len = isize::try_from(len).map_err(|_| PyBufferError::new_err("too large"))?;
        // SAFETY: `view` is valid by the caller's word; the bytes live as long as `slf`, which the view references.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, len, 0, flags) };
        if status == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
