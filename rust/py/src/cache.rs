//! The KV cache of a worker in host memory: blocks of all layers are gathered into a chunk, and scattered from one.

use kvpipe_ucx::Buffer;
use pyo3::prelude::*;

use crate::buffer::{from_python, release_dropped};
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
        self.copy(py, (&block_ids, 0), chunk, |block, cached, chunk| {
            let bytes = cached.bytes(block.in_cache, block.num_bytes);
            bytes.is_some_and(|bytes| chunk.copy_from(block.in_chunk, bytes))
        })
    }

    fn scatter(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        block_ids: Vec<usize>,
        first: usize,
    ) -> PyResult<()> {
        let chunk = from_python(data, false)?;
        self.copy(py, (&block_ids, first), chunk, |block, cached, chunk| {
            let bytes = chunk.bytes(block.in_chunk, block.num_bytes);
            bytes.is_some_and(|bytes| cached.copy_from(block.in_cache, bytes))
        })
    }
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
        copy_block: impl Fn(&Block, &Buffer, &Buffer) -> bool + Sync,
    ) -> PyResult<()> {
        let are_copied = py.detach(|| {
            let blocks = self.blocks(block_ids, first);
            let are_within = blocks.iter().all(|(block, cached)| {
                let in_chunk = chunk.bytes(block.in_chunk, block.num_bytes);
                in_chunk.is_some() && cached.bytes(block.in_cache, block.num_bytes).is_some()
            });
            are_within
                && blocks
                    .iter()
                    .all(|(block, cached)| copy_block(block, cached, &chunk))
        });
        drop(chunk);
        release_dropped(py);
        if are_copied {
            return Ok(());
        }
        Err(bad(format!(
            "one of the blocks {block_ids:?} is not in the cache, or the chunk ends before it"
        )))
    }

    /// The blocks of all layers, with the memory of each layer.
    fn blocks(&self, block_ids: &[usize], first: usize) -> Vec<(Block, &Buffer)> {
        let mut blocks = Vec::with_capacity(self.0.len() * block_ids.len());
        let mut in_chunk = 0_usize;
        for layer in &self.0 {
            let num_bytes = layer.block_bytes;
            in_chunk = in_chunk.saturating_add(first.saturating_mul(num_bytes));
            for block_id in block_ids {
                let in_cache = block_id.saturating_mul(layer.stride);
                let block = Block {
                    in_cache,
                    in_chunk,
                    num_bytes,
                };
                blocks.push((block, &layer.memory));
                in_chunk = in_chunk.saturating_add(num_bytes);
            }
        }
        blocks
    }
}

impl Drop for CacheLayers {
    /// Releases the cache, which vLLM may have dropped before.
    fn drop(&mut self) {
        self.0.clear();
        Python::try_attach(release_dropped);
    }
}
