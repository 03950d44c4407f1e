//! The KV cache of a worker: blocks of all layers are gathered into a chunk in host memory, and scattered from one.

use kvpipe_ucx::{Buffer, CudaError, DeviceWrites, MemoryKind};
use pyo3::prelude::*;

use crate::buffer::{from_python, no_cuda, release_dropped};
use crate::error::bad;

/// The cache of one layer.
struct Layer {
    memory: Buffer,
    /// From the start of a block to the start of the next.
    stride: usize,
    block_bytes: usize,
}

#[pyclass(frozen)]
pub(crate) struct CacheLayers(Vec<Layer>);

#[pymethods]
impl CacheLayers {
    #[new]
    fn new(layers: Vec<(Bound<'_, PyAny>, usize, usize)>) -> PyResult<Self> {
        let layer = |(memory, stride, block_bytes): &(Bound<'_, PyAny>, usize, usize)| {
            Ok(Layer {
                memory: from_python(memory, true)?,
                stride: *stride,
                block_bytes: *block_bytes,
            })
        };
        layers.iter().map(layer).collect::<PyResult<_>>().map(Self)
    }

    fn make_pages(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let layer = self
            .0
            .get(layer)
            .ok_or_else(|| bad("there is no such layer"))?;
        let memory = layer.memory.clone();
        py.detach(|| memory.make_pages().map_err(PyErr::from))
    }

    fn gather(
        &self,
        py: Python<'_>,
        block_ids: Vec<usize>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let chunk = from_python(out, true)?;
        self.copy(py, (&block_ids, 0), chunk, gather_layer)
    }

    fn scatter(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        block_ids: Vec<usize>,
        first: usize,
    ) -> PyResult<()> {
        let chunk = from_python(data, false)?;
        self.copy(py, (&block_ids, first), chunk, scatter_layer)
    }
}

/// Copies blocks of a layer into a chunk. A GPU copies them through page-locked memory, and has computed them.
fn gather_layer(cached: &Buffer, blocks: &[Block], chunk: &Buffer) -> Result<bool, CudaError> {
    let Some(first) = blocks.first() else {
        return Ok(true);
    };
    if cached.kind() == MemoryKind::Host {
        return Ok(blocks.iter().all(|block| {
            let bytes = cached.bytes(block.in_cache, block.num_bytes);
            bytes.is_some_and(|bytes| chunk.copy_from(block.in_chunk, bytes))
        }));
    }
    let ranges: Vec<_> = blocks
        .iter()
        .map(|block| (block.in_cache, block.num_bytes))
        .collect();
    let (mut at, mut is_copied) = (first.in_chunk, true);
    cached.read_staged(&ranges, &mut |bytes| {
        is_copied = chunk.copy_from(at, bytes);
        at += bytes.len();
        is_copied
    })?;
    Ok(is_copied)
}

/// Copies blocks of a chunk into a layer, where they are in place when this returns.
fn scatter_layer(cached: &Buffer, blocks: &[Block], chunk: &Buffer) -> Result<bool, CudaError> {
    let mut on_device = DeviceWrites::begin(cached);
    for block in blocks {
        let Some(bytes) = chunk.bytes(block.in_chunk, block.num_bytes) else {
            return Ok(false);
        };
        match &mut on_device {
            Some(writes) => writes.write(block.in_cache, bytes)?,
            None if cached.copy_from(block.in_cache, bytes) => {}
            None => return Ok(false),
        }
    }
    on_device.map_or(Ok(true), |mut writes| writes.finish().map(|()| true))
}

/// Positions of a block of one layer.
struct Block {
    in_cache: usize,
    in_chunk: usize,
    num_bytes: usize,
}

impl CacheLayers {
    /// Copies blocks without the GIL: all of them, or none if one is not in the cache or not in the chunk.
    fn copy(
        &self,
        py: Python<'_>,
        (block_ids, first): (&[usize], usize),
        chunk: Buffer,
        copy_layer: impl Fn(&Buffer, &[Block], &Buffer) -> Result<bool, CudaError> + Sync,
    ) -> PyResult<()> {
        let copied = py.detach(|| {
            let layers = self.blocks(block_ids, first);
            let is_within = |(cached, blocks): &(&Buffer, Vec<Block>)| {
                blocks.iter().all(|block| {
                    let ends = [block.in_cache, block.in_chunk];
                    let ends = ends.map(|at| at.checked_add(block.num_bytes));
                    ends[0].is_some_and(|end| end <= cached.len())
                        && ends[1].is_some_and(|end| end <= chunk.len())
                })
            };
            if !layers.iter().all(is_within) {
                return Ok(false);
            }
            for (cached, blocks) in &layers {
                if !copy_layer(cached, blocks, &chunk)? {
                    return Ok(false);
                }
            }
            Ok(true)
        });
        drop(chunk);
        release_dropped(py);
        if copied.map_err(no_cuda)? {
            return Ok(());
        }
        Err(bad(format!(
            "one of the blocks {block_ids:?} is not in the cache, or the chunk ends before it"
        )))
    }

    /// The memory of each layer, with its blocks.
    fn blocks(&self, block_ids: &[usize], first: usize) -> Vec<(&Buffer, Vec<Block>)> {
        let mut in_chunk = 0_usize;
        let layers = self.0.iter().map(|layer| {
            let num_bytes = layer.block_bytes;
            in_chunk = in_chunk.saturating_add(first.saturating_mul(num_bytes));
            let blocks = block_ids.iter().map(|block_id| {
                let at = in_chunk;
                in_chunk = in_chunk.saturating_add(num_bytes);
                Block {
                    in_cache: block_id.saturating_mul(layer.stride),
                    in_chunk: at,
                    num_bytes,
                }
            });
            (&layer.memory, blocks.collect())
        });
        layers.collect()
    }
}

impl Drop for CacheLayers {
    /// Releases the cache, which vLLM may have dropped before.
    fn drop(&mut self) {
        self.0.clear();
        Python::try_attach(release_dropped);
    }
}
