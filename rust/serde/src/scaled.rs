//! `int8` and `fp8`: each slab has one scale, so that its largest magnitude is the codec's largest number.
//!
//! A section is the scale (`f32`) and a byte for each value. For `int8` the error is at most half the scale, that is
//! 1/254 of the slab's largest magnitude. For `fp8` it is at most 1/16 of the value, or 2^-10 of the scale if that is more.

use crate::float::{TINY, from_e4m3, round, to_e4m3};
use crate::layout::Layout;
use crate::slab::Slab;
use crate::stream::{Reader, Writer};
use crate::{Result, Sink, Source};

const SCALE_BYTES: usize = 4;

/// Differences between the two codecs.
pub(crate) struct Scaled {
    /// Largest number that it has.
    largest: f32,
    quantise: fn(&[f32], f32, &mut [u8]),
    restore: fn(&[u8], f32, &mut [f32]),
}

pub(crate) const INT8: Scaled = Scaled {
    largest: 127.0,
    quantise: quantise_int8,
    restore: restore_int8,
};

pub(crate) const FP8: Scaled = Scaled {
    largest: 448.0,
    quantise: quantise_fp8,
    restore: restore_fp8,
};

pub(crate) fn section_bytes(layout: &Layout) -> usize {
    SCALE_BYTES + layout.slab_len()
}

pub(crate) fn encode<S: Sink>(
    codec: &Scaled,
    layout: &Layout,
    data: &impl Source,
    writer: &mut Writer<'_, S>,
) -> Result<()> {
    let mut slab = Slab::new(layout);
    let mut section = vec![0; section_bytes(layout)];
    for place in layout.slabs() {
        slab.read(layout, place, data)?;
        let scale = slab.largest / codec.largest;
        let inverse = if scale < TINY { 0.0 } else { scale.recip() };
        let (scale_bytes, bytes) = section.split_at_mut(SCALE_BYTES);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        (codec.quantise)(&slab.values, inverse, bytes);
        writer.append(&section)?;
    }
    Ok(())
}

pub(crate) fn decode<S: Source>(
    codec: &Scaled,
    layout: &Layout,
    reader: &mut Reader<'_, S>,
    out: &mut impl Sink,
) -> Result<()> {
    let mut slab = Slab::new(layout);
    let mut section = Vec::new();
    for place in layout.slabs() {
        reader.read(section_bytes(layout), &mut section)?;
        let (scale_bytes, bytes) = section.split_at(SCALE_BYTES);
        let scale = scale_bytes
            .first_chunk()
            .copied()
            .map_or(0.0, f32::from_le_bytes);
        (codec.restore)(bytes, scale, &mut slab.values);
        slab.write(layout, place, out)?;
    }
    Ok(())
}

kernels! {
    fn quantise_int8(values: &[f32], inverse: f32, codes: &mut [u8]) {
        for (value, code) in values.iter().zip(codes) {
            *code = round(value * inverse) as u8;
        }
    }

    fn restore_int8(codes: &[u8], scale: f32, values: &mut [f32]) {
        for (code, value) in codes.iter().zip(values) {
            *value = f32::from(code.cast_signed()) * scale;
        }
    }

    fn quantise_fp8(values: &[f32], inverse: f32, codes: &mut [u8]) {
        for (value, code) in values.iter().zip(codes) {
            *code = to_e4m3(value * inverse);
        }
    }

    fn restore_fp8(codes: &[u8], scale: f32, values: &mut [f32]) {
        for (code, value) in codes.iter().zip(values) {
            *value = from_e4m3(*code) * scale;
        }
    }
}
