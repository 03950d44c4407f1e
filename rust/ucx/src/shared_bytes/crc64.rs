//! CRC-64/NVME of bytes that may change meanwhile. The crate crc-fast hashes slices only, and a copy for it costs a fifth to
//! two fifths of its speed. With AVX-512 the bytes are therefore folded as they lie: each goes into a
//! register once, and the 64 bytes that are left, which have the same checksum, are crc-fast's.

use crc_fast::{CrcAlgorithm, Digest};

use super::SharedBytes;

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// The state after `bytes`.
pub(super) fn update(state: u64, bytes: SharedBytes<'_>) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= avx512::MIN_BYTES && avx512::is_available() {
        // SAFETY: both were just checked.
        return unsafe { avx512::update(state, bytes) };
    }
    update_copied(state, bytes)
}

/// The state after `bytes`, from copies in the cache.
fn update_copied(state: u64, bytes: SharedBytes<'_>) -> u64 {
    let mut digest = Digest::new_with_init_state(ALGORITHM, state);
    bytes.all_chunks(|_, chunk| {
        digest.update(chunk);
        true
    });
    digest.get_state()
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m512i, _mm_cvtsi64_si128, _mm512_clmulepi64_epi128, _mm512_set_epi64,
        _mm512_setzero_si512, _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
        _mm512_zextsi128_si512,
    };

    use super::{ALGORITHM, Digest, SharedBytes, update_copied};

    const WIDTH: usize = size_of::<__m512i>();
    /// Registers that are folded side by side: enough to hide the latency of a multiplication.
    const LANES: usize = 8;
    const STRIDE: usize = LANES * WIDTH;
    /// Fewer bytes are copied.
    pub(super) const MIN_BYTES: usize = 2 * STRIDE;

    /// x to the power of `exponent` modulo the polynomial, bits reversed as in the checksum.
    const fn power(exponent: usize) -> i64 {
        const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
        let (mut power, mut at) = (1_u64 << 63, 0);
        while at < exponent {
            power = (power >> 1) ^ (POLYNOMIAL * (power & 1));
            at += 1;
        }
        power.cast_signed()
    }

    /// Constants that move the first and the second half of 128 bits so many bytes ahead. A product of reversed bits is
    /// short of one power of x.
    const fn keys(num_bytes: usize) -> (i64, i64) {
        (power(8 * num_bytes + 64 - 1), power(8 * num_bytes - 1))
    }

    const STRIDE_KEYS: (i64, i64) = keys(STRIDE);
    /// Those that fold eight registers into four, four into two, two into one.
    const HALVES: [(usize, (i64, i64)); 3] =
        [(4, keys(4 * WIDTH)), (2, keys(2 * WIDTH)), (1, keys(WIDTH))];

    pub(super) fn is_available() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
    }

    /// # Safety
    /// The processor must have AVX-512F, and `from` be valid for reads of 64 bytes.
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512i {
        let loaded;
        // SAFETY: one read of bytes that the caller vouches for. The compiler knows nothing of it, so that it reads
        // neither twice nor in parts, whatever is written there meanwhile.
        unsafe {
            asm!(
                "vmovdqu64 {loaded}, [{from}]",
                from = in(reg) from,
                loaded = lateout(zmm_reg) loaded,
                options(nostack, readonly, preserves_flags),
            );
        }
        loaded
    }

    #[target_feature(enable = "avx512f")]
    fn register((first, second): (i64, i64)) -> __m512i {
        _mm512_set_epi64(second, first, second, first, second, first, second, first)
    }

    /// Folds `bytes` into `next`: the result has the checksum of `bytes` and of those that follow up to the end of
    /// `next`.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold(bytes: __m512i, keys: __m512i, next: __m512i) -> __m512i {
        let first = _mm512_clmulepi64_epi128::<0x00>(bytes, keys);
        let second = _mm512_clmulepi64_epi128::<0x11>(bytes, keys);
        _mm512_ternarylogic_epi64::<0x96>(first, second, next)
    }

    /// # Safety
    /// The processor must have the features, and there must be at least `STRIDE` bytes.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn update(state: u64, bytes: SharedBytes<'_>) -> u64 {
        let (mut from, num_strides) = (bytes.as_ptr(), bytes.len() / STRIDE);
        let mut folded = [_mm512_setzero_si512(); LANES];
        for (lane, register) in folded.iter_mut().enumerate() {
            // SAFETY: a part of the first stride.
            *register = unsafe { load(from.wrapping_add(lane * WIDTH)) };
        }
        let state = _mm512_zextsi128_si512(_mm_cvtsi64_si128(state.cast_signed()));
        folded[0] = _mm512_xor_si512(folded[0], state);
        let keys = register(STRIDE_KEYS);
        for _ in 1..num_strides {
            from = from.wrapping_add(STRIDE);
            for (lane, register) in folded.iter_mut().enumerate() {
                // SAFETY: a part of the next stride, which there is.
                let next = unsafe { load(from.wrapping_add(lane * WIDTH)) };
                *register = fold(*register, keys, next);
            }
        }
        for (half, keys) in HALVES {
            let keys = register(keys);
            for lane in 0..half {
                folded[lane] = fold(folded[lane], keys, folded[lane + half]);
            }
        }
        let mut left = [0_u8; WIDTH];
        // SAFETY: `left` is as long as a register.
        unsafe { _mm512_storeu_si512(left.as_mut_ptr().cast(), folded[0]) };
        let mut digest = Digest::new_with_init_state(ALGORITHM, 0);
        digest.update(&left);
        let rest = bytes.after(num_strides * STRIDE);
        if rest.is_empty() {
            return digest.get_state();
        }
        update_copied(digest.get_state(), rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_checksum_of_crc_fast_wherever_they_lie_and_however_many_they_are() {
        let bytes: Vec<u8> = (0..40_000_u32)
            .map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8)
            .collect();
        for start in [0, 1, 7, 64] {
            for len in (0..2200).chain([4096, 16 << 10, (16 << 10) + 1, 39_000]) {
                let (slice, state) = (&bytes[start..start + len], 0x0123_4567_89ab_cdef);
                let mut digest = Digest::new_with_init_state(ALGORITHM, state);
                digest.update(slice);
                let shared = SharedBytes::from(slice);
                assert_eq!(shared.update_crc64(state), digest.get_state(), "{len}");
                assert_eq!(update_copied(state, shared), digest.get_state(), "{len}");
            }
        }
    }
}
