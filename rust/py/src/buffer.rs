//! Memory between Python and Rust: Python buffers as [`Buffer`], and received bytes as a Python buffer.

use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use kvpipe_core::Error;
use kvpipe_core::blocks::handoff::DeviceEvent;
use kvpipe_core::tensor::Received;
use kvpipe_ucx::{Buffer, MemoryKind};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::{bad, to_py};

/// The owner of a Python object's memory.
#[allow(dead_code, reason = "held for what their drop does")]
enum Kept {
    Buffer(PyBuffer<u8>),
    Object(Py<PyAny>),
}

/// Owners that our threads have dropped. Releasing them takes the GIL, which only Python's threads may do: the next call
/// from Python releases them.
static LET_GO: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Keeps a Python object's memory alive until UCX is done with it.
struct Owner(Option<Kept>);

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(kept) = self.0.take() {
            LET_GO
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(kept);
        }
    }
}

/// Releases the owners that our threads have dropped, which needs the GIL. Called after waits and before sends.
pub(crate) fn release_dropped(_py: Python<'_>) {
    let kept = std::mem::take(&mut *LET_GO.lock().unwrap_or_else(PoisonError::into_inner));
    drop(kept);
}

/// The memory of an object with the buffer protocol, or of a [`CudaMemory`].
pub(crate) fn from_python(object: &Bound<'_, PyAny>, must_be_writable: bool) -> PyResult<Buffer> {
    let buffer = match PyBuffer::<u8>::get(object) {
        Ok(buffer) => buffer,
        Err(error) => {
            let cuda = object.cast::<CudaMemory>().map_err(|_| error)?;
            return Ok(cuda.get().buffer(object.py()));
        }
    };
    if !buffer.is_c_contiguous() {
        return Err(bad("the memory is not contiguous"));
    }
    if must_be_writable && buffer.readonly() {
        return Err(bad("the memory is read-only, but has to be written"));
    }
    let (address, len) = (buffer.buf_ptr() as usize, buffer.len_bytes());
    let describe = if buffer.readonly() {
        Buffer::read_only
    } else {
        Buffer::from_raw_parts
    };
    let owner = Box::new(Owner(Some(Kept::Buffer(buffer))));
    #[allow(unsafe_code)]
    // SAFETY: the exporter keeps `len` bytes at `address` allocated while the PyBuffer, which `owner` holds, is not
    // released, and says whether they may be written.
    Ok(unsafe { describe(address, len, MemoryKind::Host, owner) })
}

/// Bytes on a GPU, described by Python.
#[pyclass(frozen)]
pub(crate) struct CudaMemory {
    address: usize,
    num_bytes: usize,
    device: u32,
    owner: Py<PyAny>,
}

#[pymethods]
impl CudaMemory {
    #[new]
    fn new(address: usize, num_bytes: usize, device: u32, owner: Py<PyAny>) -> PyResult<Self> {
        if address.checked_add(num_bytes).is_none() {
            return Err(bad("the memory does not fit the address space"));
        }
        Ok(Self {
            address,
            num_bytes,
            device,
            owner,
        })
    }

    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn device(&self) -> u32 {
        self.device
    }

    fn __len__(&self) -> usize {
        self.num_bytes
    }
}

impl CudaMemory {
    fn buffer(&self, py: Python<'_>) -> Buffer {
        let owner = Box::new(Owner(Some(Kept::Object(self.owner.clone_ref(py)))));
        let kind = MemoryKind::Cuda {
            device: self.device,
        };
        #[allow(unsafe_code)]
        // SAFETY: `kvpipe._cuda`, the only maker, takes address, length and device from the tensor in `owner`, which keeps
        // that memory allocated. A tensor with wrong properties is the caller's fault, as for any buffer.
        unsafe {
            Buffer::from_raw_parts(self.address, self.num_bytes, kind, owner)
        }
    }
}

/// The work that a stream had queued when this was recorded.
#[pyclass(frozen)]
pub(crate) struct CudaEvent(Arc<kvpipe_ucx::CudaEvent>);

#[pymethods]
impl CudaEvent {
    #[staticmethod]
    fn record(device: u32, stream: usize) -> PyResult<Self> {
        #[allow(unsafe_code)]
        // SAFETY: `kvpipe._cuda` takes the stream from torch or from the tensor's own protocol, which guarantee that it
        // lives and belongs to the device.
        let event = unsafe { kvpipe_ucx::CudaEvent::record(device, stream) };
        event.map(|event| Self(Arc::new(event))).map_err(no_cuda)
    }

    #[staticmethod]
    fn record_pending(device: u32, stream: usize) -> PyResult<Option<Self>> {
        #[allow(unsafe_code)]
        // SAFETY: as for `record`.
        let event = unsafe { kvpipe_ucx::CudaEvent::record_pending(device, stream) };
        let event = event.map_err(no_cuda)?;
        Ok(event.map(|event| Self(Arc::new(event))))
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.wait()).map_err(no_cuda)
    }
}

/// The event of a [`CudaEvent`] or a [`ManualEvent`].
pub(crate) fn device_event(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn DeviceEvent>> {
    if let Ok(event) = object.cast::<CudaEvent>() {
        return Ok(Arc::clone(&event.get().0) as Arc<dyn DeviceEvent>);
    }
    let event = object.cast::<ManualEvent>()?;
    Ok(Arc::clone(&event.get().0) as Arc<dyn DeviceEvent>)
}

/// An event that a test completes.
#[derive(Default)]
struct Manual {
    outcome: Mutex<Option<Result<(), String>>>,
    is_set: Condvar,
}

impl DeviceEvent for Manual {
    fn wait(&self) -> Result<(), String> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.is_set.wait_while(outcome, |outcome| outcome.is_none());
        let outcome = outcome.unwrap_or_else(PoisonError::into_inner);
        outcome.clone().unwrap_or(Ok(()))
    }
}

/// Stands in for a [`CudaEvent`] in tests of order.
#[pyclass(frozen)]
pub(crate) struct ManualEvent(Arc<Manual>);

#[pymethods]
impl ManualEvent {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    #[pyo3(signature = (error=None))]
    fn complete(&self, error: Option<String>) {
        let outcome = error.map_or(Ok(()), Err);
        *self
            .0
            .outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.0.is_set.notify_all();
    }
}

/// The GPU that an address belongs to.
#[pyfunction]
pub(crate) fn cuda_device_of(address: usize) -> PyResult<u32> {
    kvpipe_ucx::device_of(address).map_err(no_cuda)
}

/// True if other processes can open this CUDA memory by the handles of every UCX version.
#[pyfunction]
pub(crate) fn cuda_is_exportable(address: usize) -> bool {
    kvpipe_ucx::is_exportable(address)
}

pub(crate) fn no_cuda(error: kvpipe_ucx::CudaError) -> PyErr {
    to_py(Error::Unavailable(error.to_string()))
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
        // SAFETY: `view` is valid by the caller's promise; the bytes live as long as `slf`, which the view references.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, len, 0, flags) };
        if status == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
