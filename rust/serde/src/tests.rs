//! Promises of all codecs: what comes back, and what is refused.

use proptest::prelude::*;

use super::*;
use crate::float::{from_bf16, from_f16, to_bf16, to_f16};
use crate::stream::HEADER_BYTES;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

fn layout(dtype: Dtype, shape: [usize; 5]) -> Layout {
    Layout::new(dtype, Packing::Rows, shape).unwrap()
}

fn encoded(codec: Codec, layout: &Layout, chunk: &[u8]) -> Result<Vec<u8>> {
    let mut stream = vec![0xab; max_bytes(codec, layout)];
    let num_bytes = encode(codec, layout, &chunk, &mut &mut stream[..])?;
    stream.truncate(num_bytes);
    Ok(stream)
}

fn decoded(codec: Codec, layout: &Layout, stream: &[u8]) -> Result<Vec<u8>> {
    let mut chunk = vec![0xcd; layout.num_bytes()];
    decode(codec, layout, &stream, &mut &mut chunk[..])?;
    Ok(chunk)
}

/// Values as bytes of a dtype.
fn bytes_of(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let bytes = |&value: &f32| match dtype {
        Dtype::Bf16 => to_bf16(value).to_le_bytes().to_vec(),
        Dtype::F16 => to_f16(value).to_le_bytes().to_vec(),
        Dtype::F32 => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn values_of(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let half = |pair: &[u8; 2]| u16::from_le_bytes(*pair);
    match dtype {
        Dtype::Bf16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|pair| from_bf16(half(pair)))
            .collect(),
        Dtype::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|pair| from_f16(half(pair)))
            .collect(),
        Dtype::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|four| f32::from_le_bytes(*four))
            .collect(),
    }
}

/// Values of a chunk, with channels of different size, some of one sign.
fn noise(layout: &Layout, seed: u32, size: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    let num_values = layout.num_slabs() * layout.slab_len();
    (0..num_values)
        .map(|at| {
            let channel = at % layout.head_size;
            let offset = if channel.is_multiple_of(5) { 3.0 } else { 0.0 };
            (next() * (1 + channel % 7) as f32 + offset) * size
        })
        .collect()
}

/// Rounding to the dtype adds half a unit of its last place.
fn rounding(value: f32, dtype: Dtype) -> f32 {
    let relative = match dtype {
        Dtype::Bf16 => 1.0 / 256.0,
        Dtype::F16 => 1.0 / 2048.0,
        Dtype::F32 => 1e-6,
    };
    value.abs() * relative + 3e-8
}

fn spread(values: impl Iterator<Item = f32> + Clone) -> f32 {
    values.clone().fold(f32::MIN, f32::max) - values.fold(f32::MAX, f32::min)
}

/// The documented bound of each value of a slab `[block_size, head_size]`, before the rounding to the dtype.
fn bounds(codec: Codec, layout: &Layout, slab: &[f32], is_keys: bool) -> Vec<f32> {
    let width = layout.head_size;
    let largest = slab.iter().fold(0f32, |most, value| most.max(value.abs()));
    let column = |from: usize, to: usize, channel: usize| {
        slab[from * width..to * width]
            .iter()
            .skip(channel)
            .step_by(width)
            .copied()
    };
    let bound = |at: usize| {
        let (token, channel) = (at / width, at % width);
        let by_group = |levels: f32| {
            let spread = if is_keys {
                let from = token / 32 * 32;
                spread(column(from, layout.block_size.min(from + 32), channel))
            } else {
                let from = channel / 32 * 32;
                spread(
                    slab[token * width..][from..width.min(from + 32)]
                        .iter()
                        .copied(),
                )
            };
            // bfloat16 rounds the step up by 1/128 at most.
            spread / levels / 2.0 * (1.0 + 1.0 / 128.0)
        };
        match codec {
            Codec::Int8 => largest / 254.0,
            Codec::Fp8 => (slab[at].abs() / 16.0).max(largest / 448.0 / 1024.0),
            Codec::Kivi2 => by_group(3.0),
            Codec::Kivi4 => by_group(15.0),
            Codec::CacheGen => {
                let most = if is_keys { 15.0 } else { 7.0 };
                // The anchor in 8 bits may be off by half a step of its own.
                let spread = spread(column(0, layout.block_size, channel)) + largest / 254.0;
                spread / most / 2.0 * (1.0 + 1.0 / 128.0)
            }
        }
    };
    (0..slab.len()).map(bound).collect()
}

fn check_bounds(codec: Codec, layout: &Layout, values: &[f32]) {
    let chunk = bytes_of(values, layout.dtype);
    let stream = encoded(codec, layout, &chunk).unwrap();
    assert!(stream.len() <= max_bytes(codec, layout));
    let (before, after) = (
        values_of(&chunk, layout.dtype),
        values_of(&decoded(codec, layout, &stream).unwrap(), layout.dtype),
    );
    let slabs = before
        .chunks_exact(layout.slab_len())
        .zip(after.chunks_exact(layout.slab_len()));
    for (number, (before, after)) in slabs.enumerate() {
        let bounds = bounds(codec, layout, before, number % 2 == 0);
        for ((before, after), bound) in before.iter().zip(after).zip(bounds) {
            let bound = bound * 1.00001 + rounding(before.abs() + bound, layout.dtype);
            assert!(
                (before - after).abs() <= bound,
                "{codec:?} {layout:?}: {before} became {after}, bound {bound}"
            );
        }
    }
}

/// Each codec with each dtype.
fn cases() -> impl Iterator<Item = (Codec, Dtype)> {
    Codec::ALL
        .into_iter()
        .flat_map(|codec| DTYPES.map(|dtype| (codec, dtype)))
}

#[test]
fn each_codec_keeps_its_error_bound_in_every_dtype_and_shape() {
    let shapes = [
        [2, 3, 2, 32, 64],
        [1, 1, 1, 128, 128],
        [1, 2, 1, 16, 80],
        [2, 1, 3, 5, 8],
        [1, 2, 2, 1, 40],
        [1, 1, 2, 100, 32],
    ];
    for (codec, dtype) in cases() {
        for shape in shapes {
            let layout = layout(dtype, shape);
            for (seed, size) in [(1, 1.0), (2, 1e-3), (3, 2000.0)] {
                check_bounds(codec, &layout, &noise(&layout, seed, size));
            }
        }
    }
}

#[test]
fn a_chunk_of_zeros_is_exact() {
    for (codec, dtype) in cases() {
        let layout = layout(dtype, [1, 2, 1, 32, 32]);
        let chunk = vec![0; layout.num_bytes()];
        let stream = encoded(codec, &layout, &chunk).unwrap();
        let values = values_of(&decoded(codec, &layout, &stream).unwrap(), dtype);
        assert!(values.iter().all(|value| *value == 0.0), "{codec:?}");
    }
}

#[test]
fn a_stream_is_the_same_for_every_packing() {
    for (codec, dtype) in cases() {
        for shape in [[2, 2, 2, 32, 64], [1, 1, 3, 20, 40]] {
            let rows = layout(dtype, shape);
            let by_channel = Layout::new(dtype, Packing::KeysByChannel, shape).unwrap();
            let values = noise(&rows, 4, 1.0);
            let mut packed = values.clone();
            let (num_tokens, num_channels) = (shape[3], shape[4]);
            for (slab, packed) in values
                .chunks_exact(rows.slab_len())
                .zip(packed.chunks_exact_mut(rows.slab_len()))
                .step_by(2)
            {
                for (at, value) in slab.iter().enumerate() {
                    packed[at % num_channels * num_tokens + at / num_channels] = *value;
                }
            }
            let stream = encoded(codec, &rows, &bytes_of(&values, dtype)).unwrap();
            assert!(encoded(codec, &by_channel, &bytes_of(&packed, dtype)).unwrap() == stream);
            let from_rows = decoded(codec, &rows, &stream).unwrap();
            let from_packed = decoded(codec, &by_channel, &stream).unwrap();
            assert!(encoded(codec, &rows, &from_rows) == encoded(codec, &by_channel, &from_packed));
            assert!(from_rows != from_packed);
        }
    }
}

#[test]
fn a_value_that_cannot_be_quantised_is_refused_with_its_layer() {
    for (codec, dtype) in cases() {
        let layout = layout(dtype, [3, 1, 1, 32, 32]);
        for bits in [0x7f80u16, 0xff80, 0x7fc1, 0x7e80] {
            let f16_bits = [0x7c00u16, 0xfc00, 0x7e01, 0x7fff][usize::from(bits % 4)];
            let bad = match dtype {
                Dtype::F16 => f16_bits.to_le_bytes().to_vec(),
                Dtype::Bf16 => bits.to_le_bytes().to_vec(),
                Dtype::F32 => [[0; 2], bits.to_le_bytes()].concat(),
            };
            let mut chunk = bytes_of(&noise(&layout, 5, 1.0), dtype);
            let end = chunk.len();
            chunk[end - bad.len()..].copy_from_slice(&bad);
            let Err(Error::Config(why)) = encoded(codec, &layout, &chunk) else {
                panic!("{codec:?} {dtype:?} stored {bits:x}");
            };
            assert!(why.contains("layer 2") && why.contains("naive"), "{why}");
        }
    }
}

#[test]
fn another_size_of_chunk_or_output_is_refused() {
    let layout = layout(Dtype::Bf16, [1, 1, 1, 32, 32]);
    let chunk = vec![0; layout.num_bytes()];
    for codec in Codec::ALL {
        assert!(matches!(
            encoded(codec, &layout, &chunk[1..]),
            Err(Error::Config(_))
        ));
        let mut small = vec![0; max_bytes(codec, &layout) - 1];
        let refused = encode(codec, &layout, &&chunk[..], &mut &mut small[..]);
        assert!(matches!(refused, Err(Error::Config(_))));
        let stream = encoded(codec, &layout, &chunk).unwrap();
        let mut out = vec![0; layout.num_bytes() + 1];
        let refused = decode(codec, &layout, &&stream[..], &mut &mut out[..]);
        assert!(matches!(refused, Err(Error::Config(_))));
    }
}

#[test]
fn a_layout_without_memory_for_it_is_refused() {
    for shape in [
        [1 << 40, 1 << 20, 1, 32, 64],
        [usize::MAX, 2, 1, 8, 8],
        [1, 0, 1, 32, 64],
        [1, 1, 1, 32, 60],
    ] {
        assert!(matches!(
            Layout::new(Dtype::F32, Packing::Rows, shape),
            Err(Error::Config(_))
        ));
    }
}

#[test]
fn a_stream_of_another_codec_or_layout_is_corrupt() {
    let ours = layout(Dtype::Bf16, [2, 3, 2, 32, 64]);
    let others = [
        layout(Dtype::F16, [2, 3, 2, 32, 64]),
        layout(Dtype::Bf16, [3, 2, 2, 32, 64]),
        layout(Dtype::Bf16, [2, 3, 2, 64, 32]),
    ];
    for codec in Codec::ALL {
        let stream = encoded(codec, &ours, &bytes_of(&noise(&ours, 6, 1.0), Dtype::Bf16)).unwrap();
        for other in &others {
            assert!(matches!(
                decoded(codec, other, &stream),
                Err(Error::Corrupt(_))
            ));
        }
        for other in Codec::ALL.into_iter().filter(|&other| other != codec) {
            assert!(matches!(
                decoded(other, &ours, &stream),
                Err(Error::Corrupt(_))
            ));
        }
    }
}

/// Gives changed bytes a valid header, so that they reach the decoder of the codec.
fn sealed(codec: Codec, layout: &Layout, payload: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; HEADER_BYTES + payload.len()];
    let mut out = &mut stream[..];
    let mut writer = Writer::new(&mut out);
    writer.append(payload).unwrap();
    writer.finish(codec, layout).unwrap();
    stream
}

fn small_layout() -> impl Strategy<Value = Layout> {
    let packings = prop_oneof![Just(Packing::Rows), Just(Packing::KeysByChannel)];
    let dtypes = prop::sample::select(&DTYPES[..]);
    let shape = (1usize..3, 1usize..4, 1usize..3, 1usize..40, 1usize..6);
    (packings, dtypes, shape).prop_map(
        |(packing, dtype, (layers, blocks, heads, tokens, eights))| {
            Layout::new(dtype, packing, [layers, blocks, heads, tokens, eights * 8]).unwrap()
        },
    )
}

proptest! {
    #[test]
    fn any_layout_and_any_finite_bits_survive(layout in small_layout(), seed: u32, size in -6f32..4f32, at in 0..5usize) {
        let layout = Layout { packing: Packing::Rows, ..layout };
        check_bounds(Codec::ALL[at], &layout, &noise(&layout, seed, size.exp2()));
    }

    #[test]
    fn any_bytes_are_refused_or_stored(layout in small_layout(), seed: u64, at in 0..5usize) {
        let mut state = seed | 1;
        let chunk: Vec<u8> = (0..layout.num_bytes()).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Exponents are mostly far from infinity.
            (state >> 56) as u8 & 0xbf
        }).collect();
        if let Ok(stream) = encoded(Codec::ALL[at], &layout, &chunk) {
            prop_assert!(decoded(Codec::ALL[at], &layout, &stream).is_ok());
        }
    }

    #[test]
    fn every_changed_or_missing_byte_is_seen(layout in small_layout(), at in 0..5usize, place: prop::sample::Index, bit in 0..8u32) {
        let codec = Codec::ALL[at];
        let mut stream = encoded(codec, &layout, &bytes_of(&noise(&layout, 7, 1.0), layout.dtype)).unwrap();
        let place = place.index(stream.len());
        let is_corrupt = |stream: &[u8]| matches!(decoded(codec, &layout, stream), Err(Error::Corrupt(_)));
        prop_assert!(is_corrupt(&stream[..place]));
        prop_assert!(is_corrupt(&[&stream[..], b"x"].concat()));
        stream[place] ^= 1 << bit;
        prop_assert!(is_corrupt(&stream));
    }

    #[test]
    fn any_bytes_decode_or_are_corrupt(
        layout in small_layout(),
        at in 0..5usize,
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        start: prop::sample::Index,
    ) {
        let codec = Codec::ALL[at];
        prop_assert!(matches!(decoded(codec, &layout, &bytes), Err(Error::Corrupt(_))));
        let good = encoded(codec, &layout, &bytes_of(&noise(&layout, 8, 1.0), layout.dtype)).unwrap();
        let mut payload = good[HEADER_BYTES..].to_vec();
        let start = start.index(payload.len());
        for (to, from) in payload[start..].iter_mut().zip(&bytes) {
            *to = *from;
        }
        for payload in [&payload[..], &payload[..start], &bytes] {
            let result = decoded(codec, &layout, &sealed(codec, &layout, payload));
            prop_assert!(matches!(result, Ok(_) | Err(Error::Corrupt(_))));
        }
    }
}
