//! The inner loops, compiled once for each level of vector instructions. They are plain Rust in a form that LLVM
//! vectorises; the level is chosen at run time. The build's own target, x86-64 with SSE2, runs them at 0.4 to 0.7 of the
//! speed of AVX-512.

/// Vector instructions that this process may use.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Avx512,
    Avx2,
    Baseline,
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn level() -> Level {
    // The macro keeps its answers.
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        Level::Avx512
    } else if is_x86_feature_detected!("avx2") {
        Level::Avx2
    } else {
        Level::Baseline
    }
}

/// Defines functions that are compiled for each [`Level`]. Their callees have to be `#[inline(always)]`, or they are
/// compiled for the baseline.
macro_rules! kernels {
    ($($(#[$attribute:meta])* $visible:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$attribute])*
        $visible fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::inline_always, reason = "has to be compiled for the caller's level")]
            fn generic($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    generic($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    generic($($argument),*)
                }
                #[allow(unsafe_code)]
                match $crate::kernels::level() {
                    // SAFETY: the processor has these instructions, and the system saves their registers.
                    $crate::kernels::Level::Avx512 => unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    $crate::kernels::Level::Avx2 => unsafe { avx2($($argument),*) },
                    $crate::kernels::Level::Baseline => generic($($argument),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            generic($($argument),*)
        }
    )*};
}
