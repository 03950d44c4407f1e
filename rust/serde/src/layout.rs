//! Memory layout of a chunk: [`Layout`].

use crc_fast::{CrcAlgorithm, checksum};

use crate::{Error, Result};

/// The dtype of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// IEEE binary32.
    F32 = 3,
}

impl Dtype {
    pub(crate) fn num_bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Memory layout of the keys and values of one head of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Both `[block_size, head_size]`.
    Rows,
    /// Keys `[head_size, block_size]`, values `[block_size, head_size]`: vLLM's CPU attention for `vec` and `vec16`.
    KeysByChannel,
}

/// Dtype, shape and packing of a chunk: `[num_layers, num_blocks, num_kv_heads, 2, block_size, head_size]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub(crate) dtype: Dtype,
    pub(crate) packing: Packing,
    pub(crate) num_layers: usize,
    pub(crate) num_blocks: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) block_size: usize,
    pub(crate) head_size: usize,
}

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Keys,
    Values,
}

impl Layout {
    /// A layout of this shape: `[num_layers, num_blocks, num_kv_heads, block_size, head_size]`.
    ///
    /// # Errors
    /// `Config`: a number is 0, `head_size` is not a multiple of 8, or there is no memory of this size.
    pub fn new(dtype: Dtype, packing: Packing, shape: [usize; 5]) -> Result<Self> {
        let [num_layers, num_blocks, num_kv_heads, block_size, head_size] = shape;
        let refused = |why: &str| Err(Error::Config(format!("chunk layout {shape:?}: {why}")));
        if shape.contains(&0) {
            return refused("each number has to be 1 or more");
        }
        if head_size % 8 != 0 {
            return refused(
                "this serde needs a head_size that is a multiple of 8: use the serde naive",
            );
        }
        let num_bytes = shape
            .iter()
            .try_fold(2 * dtype.num_bytes(), |product, &each| {
                product.checked_mul(each)
            });
        // Streams can be larger than chunks, and their sizes are computed without further checks.
        if num_bytes.is_none_or(|num_bytes| num_bytes > isize::MAX as usize / 64) {
            return refused("more bytes than any memory has");
        }
        Ok(Self {
            dtype,
            packing,
            num_layers,
            num_blocks,
            num_kv_heads,
            block_size,
            head_size,
        })
    }

    /// Size of a chunk.
    pub fn num_bytes(&self) -> usize {
        self.num_slabs() * self.slab_bytes()
    }

    pub(crate) fn num_slabs(&self) -> usize {
        self.num_layers * self.num_blocks * self.num_kv_heads * 2
    }

    /// Values of a slab.
    pub(crate) fn slab_len(&self) -> usize {
        self.block_size * self.head_size
    }

    pub(crate) fn slab_bytes(&self) -> usize {
        self.slab_len() * self.dtype.num_bytes()
    }

    /// The slabs in the order of memory, by their number.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = (usize, Kind)> {
        (0..self.num_slabs()).map(|number| (number, [Kind::Keys, Kind::Values][number % 2]))
    }

    /// True if the slab's channels are its rows in memory.
    pub(crate) fn is_by_channel(&self, kind: Kind) -> bool {
        kind == Kind::Keys && self.packing == Packing::KeysByChannel
    }

    pub(crate) fn check_chunk(&self, num_bytes: usize) -> Result<()> {
        if num_bytes == self.num_bytes() {
            return Ok(());
        }
        let expected = self.num_bytes();
        Err(Error::Config(format!(
            "the chunk has {num_bytes} bytes: its layout has {expected}"
        )))
    }

    /// A name of dtype and shape. The packing is left out: streams do not depend on it.
    pub(crate) fn digest(&self) -> u64 {
        let shape = [
            self.dtype as usize,
            self.num_layers,
            self.num_blocks,
            self.num_kv_heads,
            self.block_size,
            self.head_size,
        ];
        let fields: Vec<u8> = shape
            .iter()
            .flat_map(|&each| (each as u64).to_le_bytes())
            .collect();
        checksum(CrcAlgorithm::Crc64Nvme, &fields)
    }
}
