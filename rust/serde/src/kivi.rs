//! `kivi2` and `kivi4`: integers of 2 or 4 bits between the least and the largest value of a group. Keys are grouped by
//! channel, over 32 tokens, because single channels have large keys in all tokens. Values are grouped by token, over 32
//! channels. See Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024.
//!
//! A section has the least value of each group (dtype of the KV, so it is exact), the step of each group (bfloat16, rounded
//! up), and the codes. The error is at most half the group's step.

use crate::float::{TINY, from_bf16, from_f16, round, to_bf16, to_bf16_up, to_f16};
use crate::layout::{Dtype, Kind, Layout};
use crate::slab::Slab;
use crate::stream::{Reader, Writer};
use crate::{Result, Sink, Source};

const GROUP: usize = 32;
const STEP_BYTES: usize = 2;

/// Groups of a slab.
fn num_groups(layout: &Layout, kind: Kind) -> usize {
    match kind {
        Kind::Keys => layout.block_size.div_ceil(GROUP) * layout.head_size,
        Kind::Values => layout.head_size.div_ceil(GROUP) * layout.block_size,
    }
}

fn section_bytes(layout: &Layout, kind: Kind, bits: usize) -> usize {
    num_groups(layout, kind) * (layout.dtype.num_bytes() + STEP_BYTES)
        + layout.slab_len() * bits / 8
}

/// Size of the sections of the keys and values of a head of a block.
pub(crate) fn pair_bytes(layout: &Layout, bits: usize) -> usize {
    section_bytes(layout, Kind::Keys, bits) + section_bytes(layout, Kind::Values, bits)
}

/// A slab, quantised.
struct Quantised {
    codes: Vec<u8>,
    least: Vec<f32>,
    steps: Vec<f32>,
}

impl Quantised {
    fn new(layout: &Layout) -> Self {
        Self {
            codes: vec![0; layout.slab_len()],
            least: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn set_kind(&mut self, layout: &Layout, kind: Kind) {
        let num_groups = num_groups(layout, kind);
        self.least.resize(num_groups, 0.0);
        self.steps.resize(num_groups, 0.0);
    }
}

pub(crate) fn encode<S: Sink>(
    bits: usize,
    layout: &Layout,
    data: &impl Source,
    writer: &mut Writer<'_, S>,
) -> Result<()> {
    let levels = f32::from((1u16 << bits) - 1);
    let mut slab = Slab::new(layout);
    let mut quantised = Quantised::new(layout);
    let mut section = Vec::new();
    for place in layout.slabs() {
        slab.read(layout, place, data)?;
        quantised.set_kind(layout, place.1);
        let Quantised {
            codes,
            least,
            steps,
        } = &mut quantised;
        match place.1 {
            Kind::Keys => {
                quantise_keys(&slab.values, layout.head_size, levels, codes, least, steps);
            }
            Kind::Values => {
                quantise_values(&slab.values, layout.head_size, levels, codes, least, steps);
            }
        }
        section.clear();
        append_floats(least, layout.dtype, &mut section);
        section.extend(
            steps
                .iter()
                .flat_map(|step| to_bf16_up(*step).to_le_bytes()),
        );
        append_packed(codes, bits, &mut section);
        writer.append(&section)?;
    }
    Ok(())
}

pub(crate) fn decode<S: Source>(
    bits: usize,
    layout: &Layout,
    reader: &mut Reader<'_, S>,
    out: &mut impl Sink,
) -> Result<()> {
    let mut slab = Slab::new(layout);
    let mut quantised = Quantised::new(layout);
    let mut section = Vec::new();
    for place in layout.slabs() {
        quantised.set_kind(layout, place.1);
        let Quantised {
            codes,
            least,
            steps,
        } = &mut quantised;
        reader.read(section_bytes(layout, place.1, bits), &mut section)?;
        let (floats, rest) = section.split_at(least.len() * layout.dtype.num_bytes());
        let (step_bytes, packed) = rest.split_at(steps.len() * STEP_BYTES);
        read_floats(floats, layout.dtype, least);
        read_floats(step_bytes, Dtype::Bf16, steps);
        unpack(packed, bits, codes);
        match place.1 {
            Kind::Keys => restore_keys(codes, layout.head_size, least, steps, &mut slab.values),
            Kind::Values => restore_values(codes, layout.head_size, least, steps, &mut slab.values),
        }
        slab.write(layout, place, out)?;
    }
    Ok(())
}

/// The step that the stream has, and what to multiply by.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "has to be compiled for the caller's level"
)]
fn step_of(least: f32, largest: f32, levels: f32) -> (f32, f32) {
    let step = (largest - least) / levels;
    let step = from_bf16(to_bf16_up(if step < TINY { 0.0 } else { step }));
    (step, if step == 0.0 { 0.0 } else { 1.0 / step })
}

/// Quantises one group of a token.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "has to be compiled for the caller's level"
)]
fn quantise_group(values: &[f32], levels: f32, codes: &mut [u8]) -> (f32, f32) {
    // Comparisons, and not f32::min, whose treatment of NaN keeps LLVM from vectorising.
    let (mut least, mut largest) = ([f32::MAX; 8], [f32::MIN; 8]);
    for eight in values.as_chunks::<8>().0 {
        for lane in 0..8 {
            least[lane] = if eight[lane] < least[lane] {
                eight[lane]
            } else {
                least[lane]
            };
            largest[lane] = if eight[lane] > largest[lane] {
                eight[lane]
            } else {
                largest[lane]
            };
        }
    }
    let least = least
        .into_iter()
        .fold(f32::MAX, |a, b| if b < a { b } else { a });
    let largest = largest
        .into_iter()
        .fold(f32::MIN, |a, b| if b > a { b } else { a });
    let (step, inverse) = step_of(least, largest, levels);
    for (value, code) in values.iter().zip(codes) {
        *code = round((value - least) * inverse) as u8;
    }
    (least, step)
}

kernels! {
    fn quantise_keys(values: &[f32], width: usize, levels: f32, codes: &mut [u8], least: &mut [f32], steps: &mut [f32]) {
        let mut inverses = vec![0f32; width];
        let groups = values.chunks(GROUP * width).zip(codes.chunks_mut(GROUP * width));
        let params = least.chunks_exact_mut(width).zip(steps.chunks_exact_mut(width));
        for ((values, codes), (least, largest)) in groups.zip(params) {
            least.copy_from_slice(&values[..width]);
            largest.copy_from_slice(&values[..width]);
            for token in values.chunks_exact(width) {
                for ((value, least), largest) in token.iter().zip(&mut *least).zip(&mut *largest) {
                    *least = if *value < *least { *value } else { *least };
                    *largest = if *value > *largest { *value } else { *largest };
                }
            }
            for ((least, largest), inverse) in least.iter().zip(&mut *largest).zip(&mut inverses) {
                (*largest, *inverse) = step_of(*least, *largest, levels);
            }
            for (token, codes) in values.chunks_exact(width).zip(codes.chunks_exact_mut(width)) {
                for (((value, code), least), inverse) in token.iter().zip(codes).zip(&*least).zip(&inverses) {
                    *code = round((value - least) * inverse) as u8;
                }
            }
        }
    }

    fn quantise_values(values: &[f32], width: usize, levels: f32, codes: &mut [u8], least: &mut [f32], steps: &mut [f32]) {
        let mut params = least.iter_mut().zip(steps);
        for (token, codes) in values.chunks_exact(width).zip(codes.chunks_exact_mut(width)) {
            let (groups, rest) = token.as_chunks::<GROUP>();
            let (code_groups, code_rest) = codes.as_chunks_mut::<GROUP>();
            for ((group, codes), (least, step)) in groups.iter().zip(code_groups).zip(&mut params) {
                (*least, *step) = quantise_group(group, levels, codes);
            }
            if !rest.is_empty() && let Some((least, step)) = params.next() {
                (*least, *step) = quantise_group(rest, levels, code_rest);
            }
        }
    }

    fn restore_keys(codes: &[u8], width: usize, least: &[f32], steps: &[f32], values: &mut [f32]) {
        let groups = values.chunks_mut(GROUP * width).zip(codes.chunks(GROUP * width));
        let params = least.chunks_exact(width).zip(steps.chunks_exact(width));
        for ((values, codes), (least, steps)) in groups.zip(params) {
            for (token, codes) in values.chunks_exact_mut(width).zip(codes.chunks_exact(width)) {
                for (((value, code), least), step) in token.iter_mut().zip(codes).zip(least).zip(steps) {
                    *value = f32::from(*code) * step + least;
                }
            }
        }
    }

    fn restore_values(codes: &[u8], width: usize, least: &[f32], steps: &[f32], values: &mut [f32]) {
        let mut params = least.iter().zip(steps);
        for (token, codes) in values.chunks_exact_mut(width).zip(codes.chunks_exact(width)) {
            let groups = token.chunks_mut(GROUP).zip(codes.chunks(GROUP));
            for ((group, codes), (least, step)) in groups.zip(&mut params) {
                for (value, code) in group.iter_mut().zip(codes) {
                    *value = f32::from(*code) * step + least;
                }
            }
        }
    }

    /// Packs two codes of 4 bits into each byte: one of the first half of them, one of the second.
    fn pack_4(codes: &[u8], packed: &mut [u8]) {
        let (first, second) = codes.split_at(packed.len());
        for ((byte, a), b) in packed.iter_mut().zip(first).zip(second) {
            *byte = a | b << 4;
        }
    }

    fn unpack_4(packed: &[u8], codes: &mut [u8]) {
        let (first, second) = codes.split_at_mut(packed.len());
        for ((byte, a), b) in packed.iter().zip(first).zip(second) {
            (*a, *b) = (byte & 15, byte >> 4);
        }
    }

    /// Packs four codes of 2 bits into each byte: one of each quarter of them.
    fn pack_2(codes: &[u8], packed: &mut [u8]) {
        let (first, second) = codes.split_at(codes.len() / 2);
        let ((a, b), (c, d)) = (first.split_at(packed.len()), second.split_at(packed.len()));
        for ((((byte, a), b), c), d) in packed.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *byte = a | b << 2 | c << 4 | d << 6;
        }
    }

    fn unpack_2(packed: &[u8], codes: &mut [u8]) {
        let (first, second) = codes.split_at_mut(packed.len() * 2);
        let ((a, b), (c, d)) = (first.split_at_mut(packed.len()), second.split_at_mut(packed.len()));
        for ((((byte, a), b), c), d) in packed.iter().zip(a).zip(b).zip(c).zip(d) {
            (*a, *b, *c, *d) = (byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6);
        }
    }
}

fn append_packed(codes: &[u8], bits: usize, section: &mut Vec<u8>) {
    let start = section.len();
    section.resize(start + codes.len() * bits / 8, 0);
    let pack = if bits == 4 { pack_4 } else { pack_2 };
    pack(codes, &mut section[start..]);
}

fn unpack(packed: &[u8], bits: usize, codes: &mut [u8]) {
    let unpack = if bits == 4 { unpack_4 } else { unpack_2 };
    unpack(packed, codes);
}

/// Appends values that the dtype has exactly.
fn append_floats(values: &[f32], dtype: Dtype, section: &mut Vec<u8>) {
    match dtype {
        Dtype::Bf16 => section.extend(
            values
                .iter()
                .flat_map(|value| to_bf16(*value).to_le_bytes()),
        ),
        Dtype::F16 => section.extend(values.iter().flat_map(|value| to_f16(*value).to_le_bytes())),
        Dtype::F32 => section.extend(values.iter().flat_map(|value| value.to_le_bytes())),
    }
}

fn read_floats(bytes: &[u8], dtype: Dtype, values: &mut [f32]) {
    let halves = bytes
        .as_chunks()
        .0
        .iter()
        .map(|pair| u16::from_le_bytes(*pair));
    match dtype {
        Dtype::Bf16 => values
            .iter_mut()
            .zip(halves)
            .for_each(|(value, bits)| *value = from_bf16(bits)),
        Dtype::F16 => values
            .iter_mut()
            .zip(halves)
            .for_each(|(value, bits)| *value = from_f16(bits)),
        Dtype::F32 => {
            let words = bytes.as_chunks().0.iter();
            values
                .iter_mut()
                .zip(words)
                .for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
        }
    }
}
