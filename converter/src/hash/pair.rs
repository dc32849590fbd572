//! The compression function of SHA-256, for one stream and for two in turn.
//!
//! One stream goes through the `sha2` crate. Two go through the SHA extensions of x86-64 where the processor has
//! them, else one after the other. This is the crate's only module with processor intrinsics.
#![allow(unsafe_code)]

use sha2::digest::generic_array::GenericArray;
use sha2::digest::typenum::U64;

/// Advances `state` over `blocks`.
pub(super) fn compress(state: &mut [u32; 8], blocks: &[[u8; 64]]) {
    // SAFETY: GenericArray<u8, U64> is repr(transparent) over 64 bytes, so that a slice of the one is a slice of the
    // other, with the same length and lifetime.
    let blocks = unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast::<GenericArray<u8, U64>>(), blocks.len()) };
    sha2::compress256(state, blocks);
}

/// Advances `a` over `a_blocks` and `b` over `b_blocks`, which have the same length.
pub(super) fn compress_two(a: &mut [u32; 8], a_blocks: &[[u8; 64]], b: &mut [u32; 8], b_blocks: &[[u8; 64]]) {
    debug_assert_eq!(a_blocks.len(), b_blocks.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sha") && is_x86_feature_detected!("sse4.1") && is_x86_feature_detected!("ssse3") {
        // SAFETY: the processor has the features that the function is compiled for.
        unsafe { x86::compress_two(a, a_blocks, b, b_blocks) };
        return;
    }
    compress(a, a_blocks);
    compress(b, b_blocks);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_blend_epi16, _mm_loadu_si128, _mm_set_epi64x,
        _mm_sha256msg1_epu32, _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8, _mm_shuffle_epi32,
        _mm_storeu_si128,
    };

    /// FIPS 180-4, 4.2.2.
    #[rustfmt::skip]
    static K: [u32; 64] = [
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    ];

    /// The state as the round instruction wants it: (a, b, e, f) and (c, d, g, h), high to low.
    #[derive(Clone, Copy)]
    struct State {
        abef: __m128i,
        cdgh: __m128i,
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn load(state: &[u32; 8]) -> State {
        // SAFETY: both loads read 16 bytes inside the 32 of `state`.
        let (dcba, hgfe) =
            unsafe { (_mm_loadu_si128(state.as_ptr().cast()), _mm_loadu_si128(state.as_ptr().add(4).cast())) };
        let cdab = _mm_shuffle_epi32(dcba, 0xB1);
        let efgh = _mm_shuffle_epi32(hgfe, 0x1B);
        State { abef: _mm_alignr_epi8(cdab, efgh, 8), cdgh: _mm_blend_epi16(efgh, cdab, 0xF0) }
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn store(s: State, state: &mut [u32; 8]) {
        let feba = _mm_shuffle_epi32(s.abef, 0x1B);
        let dchg = _mm_shuffle_epi32(s.cdgh, 0xB1);
        // SAFETY: both stores write 16 bytes inside the 32 of `state`.
        unsafe {
            _mm_storeu_si128(state.as_mut_ptr().cast(), _mm_blend_epi16(feba, dchg, 0xF0));
            _mm_storeu_si128(state.as_mut_ptr().add(4).cast(), _mm_alignr_epi8(dchg, feba, 8));
        }
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn message(block: &[u8; 64]) -> [__m128i; 4] {
        let swap = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
        std::array::from_fn(|i| {
            // SAFETY: reads 16 bytes at 16 * i, inside the 64 of `block`.
            let words = unsafe { _mm_loadu_si128(block.as_ptr().add(16 * i).cast()) };
            _mm_shuffle_epi8(words, swap)
        })
    }

    /// Four rounds, and the message words that are needed four groups later.
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    fn four_rounds(s: &mut State, m: &mut [__m128i; 4], i: usize) {
        // SAFETY: `i` is below 16, so that 16 bytes from word 4 * i are inside K.
        let k = unsafe { _mm_loadu_si128(K.as_ptr().add(4 * i).cast()) };
        let wk = _mm_add_epi32(m[i % 4], k);
        s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, wk);
        s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_shuffle_epi32(wk, 0x0E));
        if i < 12 {
            let (m1, m2, m3) = (m[(i + 1) % 4], m[(i + 2) % 4], m[(i + 3) % 4]);
            let sum = _mm_add_epi32(_mm_sha256msg1_epu32(m[i % 4], m1), _mm_alignr_epi8(m3, m2, 4));
            m[i % 4] = _mm_sha256msg2_epu32(sum, m3);
        }
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    pub(super) fn compress_two(a: &mut [u32; 8], a_blocks: &[[u8; 64]], b: &mut [u32; 8], b_blocks: &[[u8; 64]]) {
        let (mut sa, mut sb) = (load(a), load(b));
        for (block_a, block_b) in a_blocks.iter().zip(b_blocks) {
            let (old_a, old_b) = (sa, sb);
            let (mut ma, mut mb) = (message(block_a), message(block_b));
            macro_rules! both {
                ($($i:literal)*) => { $(
                    four_rounds(&mut sa, &mut ma, $i);
                    four_rounds(&mut sb, &mut mb, $i);
                )* };
            }
            both!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            sa = State { abef: _mm_add_epi32(sa.abef, old_a.abef), cdgh: _mm_add_epi32(sa.cdgh, old_a.cdgh) };
            sb = State { abef: _mm_add_epi32(sb.abef, old_b.abef), cdgh: _mm_add_epi32(sb.cdgh, old_b.cdgh) };
        }
        store(sa, a);
        store(sb, b);
    }
}
