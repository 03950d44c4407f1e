//! Codecs of stored KV, over Python buffers.

use kvpipe_core::Error;
use kvpipe_serde::{Codec, Dtype, Layout, Packing, Sink, Source};
use kvpipe_ucx::Buffer;
use pyo3::prelude::*;

use crate::buffer::{from_python, release_dropped};
use crate::error::{bad, to_py};

/// Dtype, packing and shape, as `kvpipe.store.serde.Layout` has them.
type LayoutFields = (String, String, [usize; 5]);

/// Memory of Python: its other threads may write to it while it is read.
struct Memory(Buffer);

impl Source for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, offset: usize, num_bytes: usize, into: &mut Vec<u8>) -> bool {
        let bytes = self.0.bytes(offset, num_bytes);
        into.clear();
        bytes.map(|bytes| bytes.append_to(into)).is_some()
    }
}

impl Sink for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        self.0.write(offset, data)
    }
}

/// The largest size of a stream.
#[pyfunction]
pub(crate) fn serde_max_bytes(codec: &str, layout: LayoutFields) -> PyResult<usize> {
    Ok(kvpipe_serde::max_bytes(
        codec_of(codec)?,
        &layout_of(&layout)?,
    ))
}

/// Encodes into memory of the caller, and returns the size of the stream.
#[pyfunction]
pub(crate) fn serde_encode(
    py: Python<'_>,
    codec: &str,
    layout: LayoutFields,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let (codec, layout) = (codec_of(codec)?, layout_of(&layout)?);
    with_memory(py, data, out, |data, out| {
        kvpipe_serde::encode(codec, &layout, data, out)
    })
}

/// Decodes into memory of the caller.
#[pyfunction]
pub(crate) fn serde_decode(
    py: Python<'_>,
    codec: &str,
    layout: LayoutFields,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (codec, layout) = (codec_of(codec)?, layout_of(&layout)?);
    with_memory(py, data, out, |data, out| {
        kvpipe_serde::decode(codec, &layout, data, out)
    })
}

/// Copies all bytes, as the serde `naive` does.
#[pyfunction]
pub(crate) fn serde_copy(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    with_memory(py, data, out, |Memory(data), Memory(out)| {
        let bytes = data.bytes(0, data.len());
        let is_copied =
            data.len() == out.len() && bytes.is_some_and(|bytes| out.copy_from(0, bytes));
        is_copied.then_some(()).ok_or_else(|| {
            let (from, to) = (data.len(), out.len());
            kvpipe_serde::Error::Config(format!("{from} bytes do not fit an output of {to}"))
        })
    })
}

/// Works on both memories without the GIL.
fn with_memory<T: Send>(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    work: impl FnOnce(&Memory, &mut Memory) -> kvpipe_serde::Result<T> + Send,
) -> PyResult<T> {
    let data = Memory(from_python(data, false)?);
    let mut out = Memory(from_python(out, true)?);
    let done = py.detach(|| work(&data, &mut out));
    drop((data, out));
    release_dropped(py);
    done.map_err(|error| match error {
        kvpipe_serde::Error::Config(text) => bad(text),
        kvpipe_serde::Error::Corrupt(text) => to_py(Error::Corrupt(text)),
    })
}

fn codec_of(name: &str) -> PyResult<Codec> {
    Codec::parse(name).ok_or_else(|| bad(format!("serde {name:?} is not known")))
}

fn layout_of((dtype, packing, shape): &LayoutFields) -> PyResult<Layout> {
    let dtype = match dtype.as_str() {
        "bfloat16" => Dtype::Bf16,
        "float16" => Dtype::F16,
        "float32" => Dtype::F32,
        _ => return Err(bad(format!("dtype {dtype:?} is not known"))),
    };
    let packing = match packing.as_str() {
        "rows" => Packing::Rows,
        "vec" | "vec16" => Packing::KeysByChannel,
        _ => return Err(bad(format!("packing {packing:?} is not known"))),
    };
    Layout::new(dtype, packing, *shape).map_err(|error| bad(error.to_string()))
}
