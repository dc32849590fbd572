//! One cluster: compressed into whole blocks, and back.

use super::{Algorithm, Codec, lz4};
use crate::erofs::format::BLOCK_SIZE;
use std::fmt;

const BLOCK: usize = BLOCK_SIZE as usize;

/// The level of zstd at which clusters are compressed again that spill into another block.
const HARDER: u8 = 9;
/// A cluster spills if one part in so many lies in its last block.
const SPILL: usize = 40;

/// Compresses clusters one after the other with the same buffers and context. What it makes of a cluster depends on
/// that cluster alone.
pub(crate) struct Compressor {
    codec: Codec,
    zstd: Zstd,
    /// For clusters that are compressed again.
    harder: Zstd,
    buffer: Vec<u8>,
    again: Vec<u8>,
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compressor").field("codec", &self.codec).finish_non_exhaustive()
    }
}

impl Compressor {
    pub(crate) const fn new(codec: Codec) -> Self {
        Self { codec, zstd: None, harder: None, buffer: Vec::new(), again: Vec::new() }
    }

    /// Appends `input` to `out` as it is stored: compressed, with zeros in front up to whole blocks, or, when that
    /// would take no fewer blocks, plain with zeros behind. Returns whether it is compressed.
    ///
    /// # Panics
    /// When there is no memory for a context.
    pub(crate) fn store(&mut self, input: &[u8], out: &mut Vec<u8>) -> bool {
        let plain = input.len().div_ceil(BLOCK);
        match self.compress(input, plain.saturating_sub(1) * BLOCK) {
            Some(len) => {
                out.resize(out.len() + len.next_multiple_of(BLOCK) - len, 0);
                out.extend_from_slice(&self.buffer[..len]);
                true
            }
            None => {
                out.extend_from_slice(input);
                out.resize(out.len() + plain * BLOCK - input.len(), 0);
                false
            }
        }
    }

    /// Compresses into `buffer`; returns the length if it is at most `room`.
    fn compress(&mut self, input: &[u8], room: usize) -> Option<usize> {
        if room == 0 {
            return None;
        }
        let level = match self.codec {
            Codec::Zstd { level } => return Some(self.zstd(input, level)).filter(|len| *len <= room),
            Codec::Lz4Hc { level } => Some(level),
            Codec::Lz4 => None,
        };
        self.buffer.resize(room, 0);
        lz4::compress(input, &mut self.buffer, level)
    }

    /// Compresses into `buffer`. What spills a little into another block is compressed again at a higher level, which
    /// nearly always saves that block. What that brings in all, and costs, has yet to be measured (`benches compress`).
    fn zstd(&mut self, input: &[u8], level: u8) -> usize {
        // With all the room it may need, no error is left but that of memory.
        self.buffer.resize(zstd::zstd_safe::compress_bound(input.len()), 0);
        let len = zstd_at(&mut self.zstd, level, input, &mut self.buffer);
        let spilled = len % BLOCK;
        if spilled == 0 || len < BLOCK || spilled > len / SPILL || level >= HARDER {
            return len;
        }
        self.again.resize(self.buffer.len(), 0);
        let shorter = zstd_at(&mut self.harder, HARDER, input, &mut self.again);
        if shorter.div_ceil(BLOCK) < len.div_ceil(BLOCK) {
            std::mem::swap(&mut self.buffer, &mut self.again);
            shorter
        } else {
            len
        }
    }
}

type Zstd = Option<zstd::bulk::Compressor<'static>>;

fn zstd_at(context: &mut Zstd, level: u8, input: &[u8], output: &mut [u8]) -> usize {
    let new = || zstd::bulk::Compressor::new(level.into()).expect("memory for a context");
    context.get_or_insert_with(new).compress_to_buffer(input, output).expect("memory for zstd")
}

/// Why a cluster could not be decompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// Nothing but zeros where the data should begin.
    #[error("its first block holds nothing")]
    Empty,
    /// The decoder refuses it.
    #[error("the {0} data is damaged")]
    Damaged(&'static str),
    /// It is sound, but not as long as it should be.
    #[error("it decompresses to {found} bytes, not {expected}")]
    Length {
        /// What there is.
        found: usize,
        /// What the metadata says.
        expected: usize,
    },
}

/// Decompresses the blocks `stored` of one cluster into `output`, which it has to fill.
///
/// # Errors
/// When it is damaged, or of another length.
pub fn decompress(algorithm: Algorithm, stored: &[u8], output: &mut [u8]) -> Result<(), DecompressError> {
    let padding = stored.iter().take(BLOCK).take_while(|byte| **byte == 0).count();
    if padding == stored.len().min(BLOCK) {
        return Err(DecompressError::Empty);
    }
    let input = &stored[padding..];
    let found = match algorithm {
        Algorithm::Lz4 => lz4::decompress(input, output),
        Algorithm::Zstd => {
            let decoder = &mut zstd::bulk::Decompressor::new().map_err(|_| DecompressError::Damaged("zstd"))?;
            decoder.decompress_to_buffer(input, output).ok()
        }
    };
    match found {
        None => Err(DecompressError::Damaged(algorithm.name())),
        Some(found) if found != output.len() => Err(DecompressError::Length { found, expected: output.len() }),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CODECS: [Codec; 4] =
        [Codec::Lz4, Codec::Lz4Hc { level: 9 }, Codec::Zstd { level: 3 }, Codec::Zstd { level: 19 }];

    /// Text-like, noisy or zero bytes.
    fn bytes(kind: u8, len: usize) -> Vec<u8> {
        let mut state = 0x9E37_79B9u32;
        (0..len)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match kind {
                    0 => 0,
                    1 => state.to_le_bytes()[3],
                    2 => b'a' + (state.to_le_bytes()[3] >> 6),
                    _ => u8::try_from((i / 100) % 251).unwrap(),
                }
            })
            .collect()
    }

    #[test]
    fn what_is_stored_comes_back() {
        for codec in CODECS {
            let mut compressor = Compressor::new(codec);
            for (kind, len) in [0u8, 1, 2, 3].into_iter().flat_map(|kind| {
                [1, 4095, 4096, 4097, 8192, 65_535, 65_536, 65_537, 98_303, 131_072, 196_607].map(|len| (kind, len))
            }) {
                let input = bytes(kind, len);
                let mut stored = vec![7; 10];
                let compressed = compressor.store(&input, &mut stored);
                let stored = &stored[10..];
                assert!(stored.len().is_multiple_of(BLOCK));
                assert_eq!(compressed, stored.len() < len.next_multiple_of(BLOCK), "{codec} {kind} {len}");
                // Noise of few values shrinks by less than a block when there is little of it.
                if kind != 2 || len > 8 * BLOCK {
                    assert_eq!(compressed, kind != 1 && len > BLOCK, "{codec} {kind} {len}");
                }
                if compressed {
                    let mut output = vec![0; len];
                    decompress(codec.algorithm(), stored, &mut output).unwrap();
                    assert_eq!(output, input, "{codec} {kind} {len}");
                    output.pop();
                    assert!(decompress(codec.algorithm(), stored, &mut output).is_err());
                    output.extend([0; 3]);
                    assert!(decompress(codec.algorithm(), stored, &mut output).is_err());
                } else {
                    assert_eq!((&stored[..len], &stored[len..]), (&input[..], &vec![0; stored.len() - len][..]));
                }
                // The next one does not show what came before.
                let mut again = Vec::new();
                Compressor::new(codec).store(&input, &mut again);
                assert_eq!(again, stored);
            }
        }
    }

    #[test]
    fn emptiness_is_no_cluster() {
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            assert_eq!(decompress(algorithm, &[], &mut [0; 9]), Err(DecompressError::Empty));
            assert_eq!(decompress(algorithm, &[0; 8192], &mut [0; 9]), Err(DecompressError::Empty));
        }
    }

    proptest! {
        #[test]
        fn damage_is_no_panic(zstd: bool, at in 0..4096usize, to: u8, len in 1..70_000usize) {
            let codec = if zstd { Codec::Zstd { level: 3 } } else { Codec::Lz4 };
            let mut stored = Vec::new();
            Compressor::new(codec).store(&bytes(2, 60_000), &mut stored);
            let at = stored.len() - 1 - at;
            stored[at] = to;
            let _ = decompress(codec.algorithm(), &stored, &mut vec![0; len]);
        }

        #[test]
        fn noise_is_no_panic(zstd: bool, mut noise in proptest::collection::vec(any::<u8>(), 0..5000)) {
            if zstd {
                for (to, from) in noise.iter_mut().zip([0x28, 0xb5, 0x2f, 0xfd]) {
                    *to = from;
                }
            }
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let _ = decompress(algorithm, &noise, &mut vec![0; 9000]);
        }
    }
}
