//! Codecs between the KV of a chunk and the bytes of a stored value.
//!
//! A chunk is `num_layers * num_blocks` blocks of `num_kv_heads` heads, and each head has the keys and then the values of
//! `block_size` tokens: these are the *slabs* that the codecs work on. [`encode`] reads a slab from a [`Source`], converts
//! it to `f32` in token-major order, quantises it and appends it to a [`Sink`]; [`decode`] is the inverse. So a stream does
//! not depend on the packing of the engine that has written it, and memory in use is that of a few slabs.
//!
//! Any thread may call. Nothing here keeps state between calls, and no input makes it panic or allocate more than in
//! proportion to the [`Layout`].
#![deny(unsafe_code)]
#![cfg_attr(
    test,
    allow(
        clippy::cast_precision_loss,
        clippy::float_cmp,
        reason = "the tests compare small numbers, and exact ones"
    )
)]

#[macro_use]
mod kernels;

mod cachegen;
mod float;

mod kivi;
mod layout;
mod rans;
mod scaled;
mod slab;
mod stream;
#[cfg(test)]
mod tests;

pub use layout::{Dtype, Layout, Packing};
pub use stream::{Sink, Source};

use stream::{HEADER_BYTES, Reader, Writer};

/// A failure, by what the caller can do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument is wrong, or the KV has a value that the codec cannot store: use other arguments, or no codec.
    #[error("{0}")]
    Config(String),
    /// The stream is not what this codec has made of this layout: it must not be used.
    #[error("{0}")]
    Corrupt(String),
}

/// Shorthand of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A lossy codec. Its number is in each stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// 8-bit integers with one scale for each slab.
    Int8 = 1,
    /// 8-bit floats (E4M3) with one scale for each slab.
    Fp8 = 2,
    /// 2-bit integers: keys by channel in groups of tokens, values by token in groups of channels.
    Kivi2 = 3,
    /// As [`Self::Kivi2`], with 4 bits.
    Kivi4 = 4,
    /// Differences to an anchor token, quantised and entropy coded.
    CacheGen = 5,
}

impl Codec {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Int8,
        Self::Fp8,
        Self::Kivi2,
        Self::Kivi4,
        Self::CacheGen,
    ];

    /// Its name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Kivi2 => "kivi2",
            Self::Kivi4 => "kivi4",
            Self::CacheGen => "cachegen",
        }
    }

    /// The codec of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }
}

/// Size that no stream of this codec and layout exceeds. Only that of [`Codec::CacheGen`] depends on the KV.
pub fn max_bytes(codec: Codec, layout: &Layout) -> usize {
    let payload = match codec {
        Codec::Int8 | Codec::Fp8 => layout.num_slabs() * scaled::section_bytes(layout),
        Codec::Kivi2 => layout.num_slabs() / 2 * kivi::pair_bytes(layout, 2),
        Codec::Kivi4 => layout.num_slabs() / 2 * kivi::pair_bytes(layout, 4),
        Codec::CacheGen => cachegen::max_bytes(layout),
    };
    HEADER_BYTES + payload
}

/// Encodes a chunk, and returns the size of its stream.
///
/// # Errors
/// `Config`: a size is wrong, or the KV has a NaN, an infinity, or a magnitude over 2^126. What was written is no stream.
pub fn encode(
    codec: Codec,
    layout: &Layout,
    data: &impl Source,
    out: &mut impl Sink,
) -> Result<usize> {
    layout.check_chunk(data.len())?;
    let needed = max_bytes(codec, layout);
    if out.len() < needed {
        return Err(Error::Config(format!(
            "the output has {} bytes: {} may need {needed}",
            out.len(),
            codec.name()
        )));
    }
    let mut writer = Writer::new(out);
    match codec {
        Codec::Int8 => scaled::encode(&scaled::INT8, layout, data, &mut writer)?,
        Codec::Fp8 => scaled::encode(&scaled::FP8, layout, data, &mut writer)?,
        Codec::Kivi2 => kivi::encode(2, layout, data, &mut writer)?,
        Codec::Kivi4 => kivi::encode(4, layout, data, &mut writer)?,
        Codec::CacheGen => cachegen::encode(layout, data, &mut writer)?,
    }
    writer.finish(codec, layout)
}

/// Decodes a stream of the same codec and layout; the packing may be another.
///
/// # Errors
/// `Config`: the output has not the layout's size. `Corrupt`: the stream is another's, shortened or changed; the output's
/// content is undefined.
pub fn decode(
    codec: Codec,
    layout: &Layout,
    data: &impl Source,
    out: &mut impl Sink,
) -> Result<()> {
    layout.check_chunk(out.len())?;
    let mut reader = Reader::new(data, codec, layout)?;
    match codec {
        Codec::Int8 => scaled::decode(&scaled::INT8, layout, &mut reader, out)?,
        Codec::Fp8 => scaled::decode(&scaled::FP8, layout, &mut reader, out)?,
        Codec::Kivi2 => kivi::decode(2, layout, &mut reader, out)?,
        Codec::Kivi4 => kivi::decode(4, layout, &mut reader, out)?,
        Codec::CacheGen => cachegen::decode(layout, &mut reader, out)?,
    }
    reader.finish()
}
