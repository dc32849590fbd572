//! CRC-32C by the processor, by folding sixty-four bytes at a time: the fence around its instructions.
//!
//! The instruction for CRC-32C alone waits three cycles for each eight bytes (on some processors three of them side by
//! side do not help either), and the checksum of a block would take as long as decompressing it does. Multiplying without
//! carries moves four vectors of sixteen bytes on by sixty-four at once; the instruction finishes what is left.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_cvtsi128_si64, _mm_set_epi64x,
    _mm_unpackhi_epi64, _mm_xor_si128,
};

/// What a polynomial is multiplied by to get on by some words of eight bytes, as two halves of a vector need it: x to the
/// power of those bits, less the 33 that multiplying reflected numbers brings in.
const fn shift(words: u32) -> i64 {
    // x^31, and on by 64 for each word beyond the first.
    let mut power: u32 = 1;
    let mut bits = 64 * (words - 1);
    while bits > 0 {
        power = (power >> 1) ^ if power & 1 == 1 { 0x82F6_3B78 } else { 0 };
        bits -= 1;
    }
    power as i64
}

/// The register after `bytes`, or `None` where the processor cannot.
#[inline]
pub(super) fn raw(register: u32, bytes: &[u8]) -> Option<u32> {
    if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
        // SAFETY: the processor has both features, as was just asked.
        Some(unsafe { fold(register, bytes) })
    } else {
        None
    }
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
fn fold(register: u32, bytes: &[u8]) -> u32 {
    let (blocks, mut rest): (&[[u8; 64]], _) = bytes.as_chunks();
    // The high half is zero whatever goes in.
    let mut register = u64::from(register);
    if let Some((first, blocks)) = blocks.split_first() {
        let [mut a, mut b, mut c, mut d] = vectors(first);
        a = _mm_xor_si128(a, _mm_cvtsi32_si128(u32::try_from(register).unwrap_or(0).cast_signed()));
        // The low half of a vector, its first eight bytes, has one word further to go.
        let by = _mm_set_epi64x(const { shift(8) }, const { shift(9) });
        for block in blocks {
            let [e, f, g, h] = vectors(block);
            a = _mm_xor_si128(moved(a, by), e);
            b = _mm_xor_si128(moved(b, by), f);
            c = _mm_xor_si128(moved(c, by), g);
            d = _mm_xor_si128(moved(d, by), h);
        }
        let by = _mm_set_epi64x(const { shift(2) }, const { shift(3) });
        let ab = _mm_xor_si128(moved(a, by), b);
        let cd = _mm_xor_si128(moved(c, by), d);
        let by = _mm_set_epi64x(const { shift(4) }, const { shift(5) });
        let all = _mm_xor_si128(moved(ab, by), cd);
        register = _mm_crc32_u64(0, _mm_cvtsi128_si64(all).cast_unsigned());
        register = _mm_crc32_u64(register, _mm_cvtsi128_si64(_mm_unpackhi_epi64(all, all)).cast_unsigned());
    }
    let (words, last) = rest.as_chunks();
    for word in words {
        register = _mm_crc32_u64(register, u64::from_le_bytes(*word));
    }
    rest = last;
    let [a, b, c, d, ..] = register.to_le_bytes();
    rest.iter().fold(u32::from_le_bytes([a, b, c, d]), |register, byte| _mm_crc32_u8(register, *byte))
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
fn moved(vector: __m128i, by: __m128i) -> __m128i {
    _mm_xor_si128(_mm_clmulepi64_si128::<0x00>(vector, by), _mm_clmulepi64_si128::<0x11>(vector, by))
}

#[target_feature(enable = "sse2")]
fn vectors(block: &[u8; 64]) -> [__m128i; 4] {
    let words: &[[u8; 8]] = block.as_chunks().0;
    let word = |i: usize| u64::from_le_bytes(words[i]).cast_signed();
    std::array::from_fn(|i| _mm_set_epi64x(word(2 * i + 1), word(2 * i)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_length_is_as_by_another() {
        let bytes: Vec<u8> = (0..90_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0]).collect();
        let lengths = (0..1000).chain((1000..90_000).step_by(977));
        for length in lengths {
            for register in [0, 100_007, u32::MAX] {
                let expected = !crc32c::crc32c_append(!register, &bytes[..length]);
                if let Some(found) = super::raw(register, &bytes[..length]) {
                    assert_eq!(found, expected, "{length} bytes from {register:#x}");
                }
            }
        }
    }
}
