//! The keys or values of one head of one block, as the codecs see them: `f32`, token-major `[block_size, head_size]`.

use crate::float::{HUGE, from_bf16, from_f16, to_bf16, to_f16};
use crate::layout::{Dtype, Kind, Layout};
use crate::{Error, Result, Sink, Source};

/// Side of the squares in which a slab is transposed.
const TILE: usize = 16;

/// Reads and writes the slabs of a chunk, one at a time.
pub(crate) struct Slab {
    /// Of the slab that was read last, or is to be written.
    pub(crate) values: Vec<f32>,
    /// Largest magnitude in the slab that was read last.
    pub(crate) largest: f32,
    raw: Vec<u8>,
    transposed: Vec<f32>,
}

impl Slab {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self {
            values: vec![0.0; layout.slab_len()],
            largest: 0.0,
            raw: Vec::with_capacity(layout.slab_bytes()),
            transposed: vec![0.0; layout.slab_len()],
        }
    }

    /// Reads a slab.
    ///
    /// # Errors
    /// `Config`: it has a value that cannot be quantised, or the chunk ends before.
    pub(crate) fn read(
        &mut self,
        layout: &Layout,
        (number, kind): (usize, Kind),
        source: &impl Source,
    ) -> Result<()> {
        let num_bytes = layout.slab_bytes();
        if !source.read(number * num_bytes, num_bytes, &mut self.raw) {
            return Err(Error::Config("the chunk was shortened".to_owned()));
        }
        let is_by_channel = layout.is_by_channel(kind);
        let to = if is_by_channel {
            &mut self.transposed
        } else {
            &mut self.values
        };
        let largest = match layout.dtype {
            Dtype::Bf16 => load_bf16(&self.raw, to),
            Dtype::F16 => load_f16(&self.raw, to),
            Dtype::F32 => load_f32(&self.raw, to),
        };
        let is_f16_infinite = layout.dtype == Dtype::F16 && f32::from_bits(largest) > 65504.0;
        if largest >= HUGE || is_f16_infinite {
            let layer = number / (layout.num_slabs() / layout.num_layers);
            return Err(Error::Config(format!(
                "the KV of layer {layer} has a value that is not finite or over 2^126, which only the serde naive stores"
            )));
        }
        self.largest = f32::from_bits(largest);
        if is_by_channel {
            transpose(&self.transposed, layout.block_size, &mut self.values);
        }
        Ok(())
    }

    /// Writes `values` as a slab.
    pub(crate) fn write(
        &mut self,
        layout: &Layout,
        (number, kind): (usize, Kind),
        sink: &mut impl Sink,
    ) -> Result<()> {
        let mut from = &self.values;
        if layout.is_by_channel(kind) {
            transpose(&self.values, layout.head_size, &mut self.transposed);
            from = &self.transposed;
        }
        self.raw.resize(layout.slab_bytes(), 0);
        match layout.dtype {
            Dtype::Bf16 => store_bf16(from, &mut self.raw),
            Dtype::F16 => store_f16(from, &mut self.raw),
            Dtype::F32 => store_f32(from, &mut self.raw),
        }
        if sink.write(number * layout.slab_bytes(), &self.raw) {
            return Ok(());
        }
        let why = "the output is read-only, or was shortened";
        Err(Error::Config(why.to_owned()))
    }
}

kernels! {
    /// Converts, and returns the bits of the largest magnitude.
    fn load_bf16(raw: &[u8], values: &mut [f32]) -> u32 {
        let mut largest = 0;
        for (bytes, value) in raw.as_chunks().0.iter().zip(values) {
            *value = from_bf16(u16::from_le_bytes(*bytes));
            largest = largest.max(value.abs().to_bits());
        }
        largest
    }

    fn load_f16(raw: &[u8], values: &mut [f32]) -> u32 {
        let mut largest = 0;
        for (bytes, value) in raw.as_chunks().0.iter().zip(values) {
            *value = from_f16(u16::from_le_bytes(*bytes));
            largest = largest.max(value.abs().to_bits());
        }
        largest
    }

    fn load_f32(raw: &[u8], values: &mut [f32]) -> u32 {
        let mut largest = 0;
        for (bytes, value) in raw.as_chunks().0.iter().zip(values) {
            *value = f32::from_le_bytes(*bytes);
            largest = largest.max(value.abs().to_bits());
        }
        largest
    }

    fn store_bf16(values: &[f32], raw: &mut [u8]) {
        for (value, bytes) in values.iter().zip(raw.as_chunks_mut().0) {
            *bytes = to_bf16(*value).to_le_bytes();
        }
    }

    fn store_f16(values: &[f32], raw: &mut [u8]) {
        for (value, bytes) in values.iter().zip(raw.as_chunks_mut().0) {
            *bytes = to_f16(*value).to_le_bytes();
        }
    }

    fn store_f32(values: &[f32], raw: &mut [u8]) {
        for (value, bytes) in values.iter().zip(raw.as_chunks_mut().0) {
            *bytes = value.to_le_bytes();
        }
    }

    /// Rows of `width` become columns.
    fn transpose(from: &[f32], width: usize, to: &mut [f32]) {
        let height = from.len() / width;
        for top in (0..height).step_by(TILE) {
            for left in (0..width).step_by(TILE) {
                if top + TILE <= height && left + TILE <= width {
                    transpose_tile(from, to, (top, left), (height, width));
                    continue;
                }
                for row in top..height.min(top + TILE) {
                    for column in left..width.min(left + TILE) {
                        to[column * height + row] = from[row * width + column];
                    }
                }
            }
        }
    }
}

/// Transposes a square of `TILE` rows and columns.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "has to be compiled for the caller's level"
)]
fn transpose_tile(
    from: &[f32],
    to: &mut [f32],
    (top, left): (usize, usize),
    (height, width): (usize, usize),
) {
    let mut tile = [[0f32; TILE]; TILE];
    for (row, into) in tile.iter_mut().enumerate() {
        into.copy_from_slice(&from[(top + row) * width + left..][..TILE]);
    }
    for column in 0..TILE {
        let into = &mut to[(left + column) * height + top..][..TILE];
        for row in 0..TILE {
            into[row] = tile[row][column];
        }
    }
}
