//! `cachegen`: differences of the tokens to an anchor token, quantised with one step for each channel of a slab, and entropy
//! coded. See Liu et al., "`CacheGen`: KV Cache Compression and Streaming for Fast Large Language Model Serving", SIGCOMM 2024.
//!
//! Every 16th token of a block is the anchor of its group; it is kept in 8 bits, and its own difference is coded as those of
//! the others. A symbol is a difference in steps, of at most 15 for keys and 7 for values, which bear coarser ones. The
//! error is at most half the channel's step. Symbols of one layer and head, keys and values apart, share a table of
//! frequencies over all blocks.
//!
//! A section, for each layer, head, keys and values: number of words (`u32`), frequencies (31 `u16`), states (8 `u32`); for
//! each block the anchors' scale (`f32`), anchors (`i8`), steps (bfloat16, rounded up); then the words (`u16`).

use crate::float::{TINY, from_bf16, round, to_bf16_up};
use crate::layout::{Kind, Layout};
use crate::rans::{self, Decoder, Frequencies, LANES, NUM_SYMBOLS};
use crate::slab::Slab;
use crate::stream::{Reader, Writer, corrupt};
use crate::{Result, Sink, Source};

/// Tokens that share an anchor.
const GROUP: usize = 16;
const TABLE_BYTES: usize = 4 + 2 * NUM_SYMBOLS + 4 * LANES;
const SCALE_BYTES: usize = 4;
const STEP_BYTES: usize = 2;

/// Largest difference in steps.
fn largest_difference(kind: Kind) -> u8 {
    match kind {
        Kind::Keys => 15,
        Kind::Values => 7,
    }
}

fn num_anchors(layout: &Layout) -> usize {
    layout.block_size.div_ceil(GROUP) * layout.head_size
}

/// Bytes of a section for each block, beside the words.
fn side_bytes(layout: &Layout) -> usize {
    SCALE_BYTES + num_anchors(layout) + layout.head_size * STEP_BYTES
}

/// A value takes one word at most.
pub(crate) fn max_bytes(layout: &Layout) -> usize {
    let num_sections = layout.num_slabs() / layout.num_blocks;
    num_sections * TABLE_BYTES + layout.num_slabs() * (side_bytes(layout) + 2 * layout.slab_len())
}

/// For each section the number of its first slab, and how far apart its slabs are.
fn sections(layout: &Layout) -> impl Iterator<Item = (usize, Kind)> {
    let a_block = layout.num_kv_heads * 2;
    let a_layer = layout.num_blocks * a_block;
    (0..layout.num_layers).flat_map(move |layer| {
        (0..a_block).map(move |at| (layer * a_layer + at, [Kind::Keys, Kind::Values][at % 2]))
    })
}

/// Numbers of a section's slabs, one for each block.
fn slabs_of(layout: &Layout, first: usize) -> impl Iterator<Item = usize> + use<> {
    (first..)
        .step_by(layout.num_kv_heads * 2)
        .take(layout.num_blocks)
}

pub(crate) fn encode<S: Sink>(
    layout: &Layout,
    data: &impl Source,
    writer: &mut Writer<'_, S>,
) -> Result<()> {
    let mut slab = Slab::new(layout);
    let mut symbols = vec![0; layout.num_blocks * layout.slab_len()];
    let mut side = vec![0; layout.num_blocks * side_bytes(layout)];
    let (mut words, mut section) = (Vec::new(), Vec::new());
    for (first, kind) in sections(layout) {
        let places = symbols
            .chunks_exact_mut(layout.slab_len())
            .zip(side.chunks_exact_mut(side_bytes(layout)));
        for (number, (symbols, side)) in slabs_of(layout, first).zip(places) {
            slab.read(layout, (number, kind), data)?;
            quantise(&slab, layout, largest_difference(kind), symbols, side);
        }
        let frequencies = rans::frequencies(&symbols);
        let coded = rans::encode(&symbols, &frequencies, &mut words);
        section.clear();
        section.extend((coded.words.len() as u32).to_le_bytes());
        section.extend(frequencies.iter().flat_map(|each| each.to_le_bytes()));
        section.extend(coded.states.iter().flat_map(|each| each.to_le_bytes()));
        section.extend_from_slice(&side);
        section.extend(coded.words.iter().flat_map(|each| each.to_le_bytes()));
        writer.append(&section)?;
    }
    Ok(())
}

pub(crate) fn decode<S: Source>(
    layout: &Layout,
    reader: &mut Reader<'_, S>,
    out: &mut impl Sink,
) -> Result<()> {
    let mut slab = Slab::new(layout);
    let mut symbols = vec![0; layout.slab_len()];
    let (mut head, mut side, mut bytes, mut words) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (first, kind) in sections(layout) {
        reader.read(TABLE_BYTES, &mut head)?;
        let (num_words, frequencies, states) = table(&head);
        if num_words > layout.num_blocks * layout.slab_len() {
            return corrupt("it has more words than symbols");
        }
        reader.read(layout.num_blocks * side_bytes(layout), &mut side)?;
        reader.read(2 * num_words, &mut bytes)?;
        words.clear();
        words.extend(
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|pair| u16::from_le_bytes(*pair)),
        );
        words.extend([0; LANES]);
        let mut decoder = Decoder::new(&frequencies, states, &words)?;
        for (number, side) in slabs_of(layout, first).zip(side.chunks_exact(side_bytes(layout))) {
            decoder.decode(&mut symbols)?;
            restore(
                &symbols,
                layout,
                largest_difference(kind),
                side,
                &mut slab.values,
            );
            slab.write(layout, (number, kind), out)?;
        }
        decoder.finish()?;
    }
    Ok(())
}

/// Number of words, frequencies, and states of the lanes.
fn table(head: &[u8]) -> (usize, Frequencies, [u32; LANES]) {
    let (count, rest) = head.split_at(4);
    let (frequency_bytes, state_bytes) = rest.split_at(2 * NUM_SYMBOLS);
    let num_words = count.first_chunk().copied().map_or(0, u32::from_le_bytes);
    let (mut frequencies, mut states) = ([0; NUM_SYMBOLS], [0; LANES]);
    for (to, bytes) in frequencies.iter_mut().zip(frequency_bytes.as_chunks().0) {
        *to = u16::from_le_bytes(*bytes);
    }
    for (to, bytes) in states.iter_mut().zip(state_bytes.as_chunks().0) {
        *to = u32::from_le_bytes(*bytes);
    }
    (num_words as usize, frequencies, states)
}

fn quantise(slab: &Slab, layout: &Layout, most: u8, symbols: &mut [u8], side: &mut [u8]) {
    let (scale_bytes, rest) = side.split_at_mut(SCALE_BYTES);
    let (anchors, step_bytes) = rest.split_at_mut(num_anchors(layout));
    let scale = slab.largest / 127.0;
    let scale = if scale < TINY { 0.0 } else { scale };
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    let mut steps = vec![0.0; layout.head_size];
    differences(&slab.values, layout.head_size, scale, anchors, &mut steps);
    for (step, bytes) in steps.iter_mut().zip(step_bytes.as_chunks_mut().0) {
        let wanted = *step / f32::from(most);
        let rounded = to_bf16_up(if wanted < TINY { 0.0 } else { wanted });
        *bytes = rounded.to_le_bytes();
        *step = from_bf16(rounded);
    }
    symbols_of(&slab.values, scale, anchors, &steps, most, symbols);
}

fn restore(symbols: &[u8], layout: &Layout, most: u8, side: &[u8], values: &mut [f32]) {
    let (scale, rest) = side.split_at(SCALE_BYTES);
    let (anchors, step_bytes) = rest.split_at(num_anchors(layout));
    let scale = scale.first_chunk().copied().map_or(0.0, f32::from_le_bytes);
    let pairs = step_bytes.as_chunks().0.iter();
    let steps: Vec<f32> = pairs
        .map(|pair| from_bf16(u16::from_le_bytes(*pair)))
        .collect();
    values_of(symbols, scale, anchors, &steps, most, values);
}

kernels! {
    /// Quantises the anchors, and finds the largest difference of each channel.
    fn differences(values: &[f32], width: usize, scale: f32, anchors: &mut [u8], largest: &mut [f32]) {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let groups = values.chunks(GROUP * width).zip(anchors.chunks_exact_mut(width));
        for (group, anchors) in groups {
            for (value, anchor) in group.iter().zip(&mut *anchors) {
                *anchor = round(value * inverse) as u8;
            }
            for token in group.chunks_exact(width) {
                for ((value, anchor), largest) in token.iter().zip(&*anchors).zip(&mut *largest) {
                    let difference = (value - f32::from(anchor.cast_signed()) * scale).abs();
                    *largest = if difference > *largest { difference } else { *largest };
                }
            }
        }
    }

    fn symbols_of(values: &[f32], scale: f32, anchors: &[u8], steps: &[f32], most: u8, symbols: &mut [u8]) {
        let width = steps.len();
        let mut inverses = vec![0f32; width];
        for (inverse, step) in inverses.iter_mut().zip(steps) {
            *inverse = if *step == 0.0 { 0.0 } else { 1.0 / step };
        }
        let groups = values.chunks(GROUP * width).zip(symbols.chunks_mut(GROUP * width));
        for ((group, symbols), anchors) in groups.zip(anchors.chunks_exact(width)) {
            for (token, symbols) in group.chunks_exact(width).zip(symbols.chunks_exact_mut(width)) {
                for (((value, symbol), anchor), inverse) in token.iter().zip(symbols).zip(anchors).zip(&inverses) {
                    let difference = value - f32::from(anchor.cast_signed()) * scale;
                    *symbol = (round(difference * inverse) as u8).wrapping_add(most);
                }
            }
        }
    }

    fn values_of(symbols: &[u8], scale: f32, anchors: &[u8], steps: &[f32], most: u8, values: &mut [f32]) {
        let width = steps.len();
        let groups = values.chunks_mut(GROUP * width).zip(symbols.chunks(GROUP * width));
        for ((group, symbols), anchors) in groups.zip(anchors.chunks_exact(width)) {
            for (token, symbols) in group.chunks_exact_mut(width).zip(symbols.chunks_exact(width)) {
                for (((value, symbol), anchor), step) in token.iter_mut().zip(symbols).zip(anchors).zip(steps) {
                    let difference = f32::from(symbol.wrapping_sub(most).cast_signed()) * step;
                    *value = f32::from(anchor.cast_signed()) * scale + difference;
                }
            }
        }
    }
}
