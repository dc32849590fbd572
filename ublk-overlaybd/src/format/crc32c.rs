//! CRC-32C by the processor, by folding sixty-four bytes at a time: the fence around its instructions.
//!
//! The instruction for CRC-32C alone waits three cycles for each eight bytes (on some processors three of them side by
//! side do not help either), and the checksum of a block would take as long as decompressing it does. Multiplying without
//! carries moves four vectors of sixteen bytes on by sixty-four at once; the instruction finishes what is left.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, __m512i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_cvtsi128_si64,
    _mm_loadu_si128, _mm_set_epi64x, _mm_unpackhi_epi64, _mm_xor_si128, _mm512_broadcast_i32x4,
    _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_xor_si512, _mm512_zextsi128_si512,
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
    if !is_x86_feature_detected!("sse4.2") || !is_x86_feature_detected!("pclmulqdq") {
        return None;
    }
    if bytes.len() >= 512 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq") {
        // SAFETY: the processor has all four features, as was just asked.
        return Some(unsafe { wide(register, bytes) });
    }
    // SAFETY: the processor has both features, as was just asked.
    Some(unsafe { narrow(register, bytes) })
}

/// By vectors of sixteen bytes.
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn narrow(register: u32, bytes: &[u8]) -> u32 {
    let Some((first, rest)) = bytes.split_first_chunk() else { return word_by_word(register.into(), bytes) };
    let [a, b, c, d] = vectors(first);
    finish([_mm_xor_si128(a, _mm_cvtsi32_si128(register.cast_signed())), b, c, d], rest)
}

/// By vectors of sixty-four bytes, four at a time, and then as `narrow`.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2,pclmulqdq")]
fn wide(register: u32, bytes: &[u8]) -> u32 {
    let (blocks, rest): (&[[u8; 256]], _) = bytes.as_chunks();
    let Some((first, blocks)) = blocks.split_first() else { return narrow(register, bytes) };
    let [mut a, mut b, mut c, mut d] = wide_vectors(first);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(register.cast_signed())));
    let by = _mm512_broadcast_i32x4(_mm_set_epi64x(const { shift(32) }, const { shift(33) }));
    for block in blocks {
        let [e, f, g, h] = wide_vectors(block);
        a = _mm512_xor_si512(wide_moved(a, by), e);
        b = _mm512_xor_si512(wide_moved(b, by), f);
        c = _mm512_xor_si512(wide_moved(c, by), g);
        d = _mm512_xor_si512(wide_moved(d, by), h);
    }
    let by = _mm512_broadcast_i32x4(_mm_set_epi64x(const { shift(8) }, const { shift(9) }));
    b = _mm512_xor_si512(wide_moved(a, by), b);
    c = _mm512_xor_si512(wide_moved(b, by), c);
    d = _mm512_xor_si512(wide_moved(c, by), d);
    let parts = [
        _mm512_extracti32x4_epi32::<0>(d),
        _mm512_extracti32x4_epi32::<1>(d),
        _mm512_extracti32x4_epi32::<2>(d),
        _mm512_extracti32x4_epi32::<3>(d),
    ];
    finish(parts, rest)
}

/// Goes on from four vectors, and brings them together at the end.
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn finish(vectors_so_far: [__m128i; 4], bytes: &[u8]) -> u32 {
    let [mut a, mut b, mut c, mut d] = vectors_so_far;
    let (blocks, rest): (&[[u8; 64]], _) = bytes.as_chunks();
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
    let register = _mm_crc32_u64(0, _mm_cvtsi128_si64(all).cast_unsigned());
    let register = _mm_crc32_u64(register, _mm_cvtsi128_si64(_mm_unpackhi_epi64(all, all)).cast_unsigned());
    word_by_word(register, rest)
}

/// The high half of the register is zero, and stays so.
#[target_feature(enable = "sse4.2")]
fn word_by_word(mut register: u64, bytes: &[u8]) -> u32 {
    let (words, last) = bytes.as_chunks();
    for word in words {
        register = _mm_crc32_u64(register, u64::from_le_bytes(*word));
    }
    let [a, b, c, d, ..] = register.to_le_bytes();
    last.iter().fold(u32::from_le_bytes([a, b, c, d]), |register, byte| _mm_crc32_u8(register, *byte))
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
#[inline]
fn moved(vector: __m128i, by: __m128i) -> __m128i {
    _mm_xor_si128(_mm_clmulepi64_si128::<0x00>(vector, by), _mm_clmulepi64_si128::<0x11>(vector, by))
}

#[target_feature(enable = "avx512f,vpclmulqdq")]
#[inline]
fn wide_moved(vector: __m512i, by: __m512i) -> __m512i {
    _mm512_xor_si512(_mm512_clmulepi64_epi128::<0x00>(vector, by), _mm512_clmulepi64_epi128::<0x11>(vector, by))
}

#[target_feature(enable = "sse4.2")]
#[inline]
fn vectors(block: &[u8; 64]) -> [__m128i; 4] {
    let start: *const __m128i = block.as_ptr().cast();
    // SAFETY: the block has the sixty-four bytes that are read, and loading needs no alignment.
    unsafe {
        [
            _mm_loadu_si128(start),
            _mm_loadu_si128(start.add(1)),
            _mm_loadu_si128(start.add(2)),
            _mm_loadu_si128(start.add(3)),
        ]
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn wide_vectors(block: &[u8; 256]) -> [__m512i; 4] {
    let start: *const __m512i = block.as_ptr().cast();
    // SAFETY: the block has the 256 bytes that are read, and loading needs no alignment.
    unsafe {
        [
            _mm512_loadu_si512(start),
            _mm512_loadu_si512(start.add(1)),
            _mm512_loadu_si512(start.add(2)),
            _mm512_loadu_si512(start.add(3)),
        ]
    }
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
                    // SAFETY: what `raw` needs is enough for this.
                    let narrow = unsafe { super::narrow(register, &bytes[..length]) };
                    assert_eq!(narrow, expected, "{length} bytes from {register:#x}, by narrow vectors");
                }
            }
        }
    }
}
