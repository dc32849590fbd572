//! LZ4 blocks by liblz4: the fence around its C interface.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// A buffer's length as liblz4 takes it; `None` when it is too long.
fn length(len: usize) -> Option<c_int> {
    c_int::try_from(len).ok()
}

/// Compresses `input` into `output`; returns the length, or `None` when `output` is too small.
pub(super) fn compress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    let (source, target) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    let (len, room) = (length(input.len())?, length(output.len())?);
    // SAFETY: `source` is readable for `len` bytes and `target` writable for `room` bytes, as they are the slices' own,
    // and the two do not overlap, since one is borrowed exclusively. liblz4 keeps neither.
    let written = unsafe { lz4_sys::LZ4_compress_default(source, target, len, room) };
    usize::try_from(written).ok().filter(|written| *written > 0)
}

/// Decompresses the one block that `input` is into `output`; returns the length, or `None` when it is damaged or more
/// than fits. `output` is overwritten in part even then.
pub(super) fn decompress(input: &[u8], output: &mut [u8]) -> Option<usize> {
    let (source, target) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    let (len, room) = (length(input.len())?, length(output.len())?);
    // SAFETY: as for compressing; `LZ4_decompress_safe` reads and writes inside these lengths whatever the bytes are.
    let written = unsafe { lz4_sys::LZ4_decompress_safe(source, target, len, room) };
    usize::try_from(written).ok()
}
