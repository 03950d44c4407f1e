//! Conversions between `f32` and narrower floats, without branches, so that loops over them are vectorised. They take
//! finite values and round to nearest, ties to even. Larger values become the largest finite one.
#![allow(
    clippy::inline_always,
    reason = "has to be compiled for the caller's level of vector instructions"
)]

const SIGN: u32 = 0x8000_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;
/// Added to a small `f32`, it leaves the nearest integer in the low bits of the mantissa.
const ROUNDING: f32 = 12_582_912.0;

/// Values below do not count: their scale would have no inverse.
pub(crate) const TINY: f32 = 1e-30;
/// Magnitudes from here on are refused: differences of two would not be finite.
pub(crate) const HUGE: u32 = 0x7e80_0000;

/// The nearest integer to a value of at most 2^22, in the low bits. Negative ones are in two's complement.
#[inline(always)]
pub(crate) fn round(value: f32) -> u32 {
    (value + ROUNDING)
        .to_bits()
        .wrapping_sub(ROUNDING.to_bits())
}

#[inline(always)]
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(crate) fn to_bf16(value: f32) -> u16 {
    let (sign, magnitude) = parts(value);
    let magnitude = magnitude.min(0x7f7f_0000);
    (((magnitude + 0x7fff + (magnitude >> 16 & 1)) | sign) >> 16) as u16
}

/// The smallest bfloat16 that is not below a value of 0 or more.
#[inline(always)]
pub(crate) fn to_bf16_up(value: f32) -> u16 {
    (value.to_bits().saturating_add(0xffff) >> 16) as u16
}

/// Infinities and NaNs become values over 65504.
#[inline(always)]
pub(crate) fn from_f16(bits: u16) -> f32 {
    // 2^112 is the difference of the exponents' biases.
    let magnitude = widened(u32::from(bits) << 13 & 0x0fff_e000, 0x7780_0000);
    f32::from_bits(magnitude | u32::from(bits) << 16 & SIGN)
}

#[inline(always)]
pub(crate) fn to_f16(value: f32) -> u16 {
    let (sign, magnitude) = parts(value);
    // 65504, 2^-14, and 2^-1, whose unit is that of subnormals.
    narrowed::<13>(magnitude.min(0x477f_e000), 0x3880_0000, 0x3f00_0000) | (sign >> 16) as u16
}

/// Of the format E4M3, in which all bits set are a NaN: here they are 480.
#[inline(always)]
pub(crate) fn from_e4m3(bits: u8) -> f32 {
    let magnitude = widened(u32::from(bits) << 20 & 0x07f0_0000, 0x7b80_0000);
    f32::from_bits(magnitude | u32::from(bits) << 24 & SIGN)
}

#[inline(always)]
pub(crate) fn to_e4m3(value: f32) -> u8 {
    let (sign, magnitude) = parts(value);
    // 448, 2^-6, and 2^14, whose unit is that of subnormals.
    let magnitude = narrowed::<20>(magnitude.min(0x43e0_0000), 0x3c80_0000, 0x4680_0000);
    magnitude as u8 | (sign >> 24) as u8
}

#[inline(always)]
fn parts(value: f32) -> (u32, u32) {
    (value.to_bits() & SIGN, value.to_bits() & MAGNITUDE)
}

/// The bits of a narrow float at their place in an `f32`, times a factor for the difference of the biases.
#[inline(always)]
fn widened(bits: u32, factor: u32) -> u32 {
    (f32::from_bits(bits) * f32::from_bits(factor)).to_bits()
}

/// Cuts `CUT` bits of the mantissa. From `least` on a value is normal; below, `unit` aligns it.
#[inline(always)]
fn narrowed<const CUT: u32>(magnitude: u32, least: u32, unit: u32) -> u16 {
    let bias = (least >> 23) - 1;
    let half = (1 << (CUT - 1)) - 1 + (magnitude >> CUT & 1);
    let normal = (magnitude.wrapping_add(half) >> CUT).wrapping_sub(bias << (23 - CUT));
    let aligned = f32::from_bits(magnitude) + f32::from_bits(unit);
    let subnormal = aligned.to_bits().wrapping_sub(unit);
    (if magnitude < least { subnormal } else { normal }) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The number that a float's fields say.
    fn value_of(bits: u16, mantissa_bits: i32, offset: i32) -> f32 {
        let mantissa = f32::from(bits & ((1 << mantissa_bits) - 1));
        let exponent = i32::from(bits >> mantissa_bits);
        let fraction = mantissa * (-mantissa_bits as f32).exp2();
        if exponent == 0 {
            fraction * ((1 - offset) as f32).exp2()
        } else {
            (1.0 + fraction) * ((exponent - offset) as f32).exp2()
        }
    }

    #[test]
    fn every_finite_narrow_float_survives_both_directions() {
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7fff < 0x7c00) {
            let value = value_of(bits & 0x7fff, 10, 15);
            assert_eq!(from_f16(bits).abs(), value);
            assert_eq!(from_f16(bits).is_sign_negative(), bits > 0x7fff);
            assert_eq!(to_f16(from_f16(bits)), bits);
        }
        for bits in (0..=u8::MAX).filter(|bits| bits & 0x7f != 0x7f) {
            assert_eq!(
                from_e4m3(bits).abs(),
                value_of(u16::from(bits) & 0x7f, 3, 7)
            );
            assert_eq!(to_e4m3(from_e4m3(bits)), bits);
        }
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7fff < 0x7f80) {
            assert_eq!(to_bf16(from_bf16(bits)), bits);
        }
    }

    #[test]
    fn what_is_too_large_becomes_the_largest() {
        for value in [f32::MAX, f32::INFINITY, 1e30] {
            assert_eq!(from_f16(to_f16(-value)), -65504.0);
            assert_eq!(from_e4m3(to_e4m3(value)), 448.0);
            assert!(from_bf16(to_bf16(value)).is_finite());
        }
        assert!(from_f16(0x7c00) > 65504.0 && from_f16(0x7e01) > 65504.0);
    }

    proptest! {
        #[test]
        fn the_nearest_narrow_float_is_chosen(value in -448f32..448f32, small in -0.03f32..0.03f32) {
            for value in [value, small] {
                let chosen = to_e4m3(value);
                let error = (from_e4m3(chosen) - value).abs();
                for other in [chosen.wrapping_sub(1), chosen.wrapping_add(1)] {
                    if other & 0x7f != 0x7f {
                        prop_assert!(error <= (from_e4m3(other) - value).abs());
                    }
                }
                prop_assert!((from_f16(to_f16(value)) - value).abs() <= value.abs() / 2048.0 + 3e-8);
                prop_assert!((from_bf16(to_bf16(value)) - value).abs() <= value.abs() / 256.0);
                prop_assert!(from_bf16(to_bf16_up(value.abs())) >= value.abs());
            }
        }

        #[test]
        fn rounding_is_to_the_nearest_integer(value in -100_000f32..100_000f32) {
            prop_assert_eq!(round(value).cast_signed(), value.round_ties_even() as i32);
        }
    }
}
