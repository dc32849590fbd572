//! SHA-256 of two streams at once.
//!
//! A layer's plain tar (for its diffID) and its data blob are about the same length and are both hashed. One stream
//! leaves most of a core's SHA unit idle, since each step waits for the one before; two independent streams in turn
//! fill the gaps, so that the second costs a fraction of the first (`benches hash` has the figures).

mod pair;

use fs3_client::Digest;

const BLOCK: usize = 64;

/// One SHA-256 stream.
#[derive(Clone)]
struct Stream {
    state: [u32; 8],
    /// Bytes that do not fill a block yet.
    rest: [u8; BLOCK],
    rest_len: usize,
    total: u64,
}

impl Default for Stream {
    fn default() -> Self {
        // FIPS 180-4, 5.3.3.
        let state =
            [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
        Self { state, rest: [0; BLOCK], rest_len: 0, total: 0 }
    }
}

impl Stream {
    /// Completes a block begun earlier; returns what is left of `bytes`, empty unless the next byte starts a block.
    fn top_up<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        self.total += bytes.len() as u64;
        if self.rest_len == 0 {
            return bytes;
        }
        let take = bytes.len().min(BLOCK - self.rest_len);
        self.rest[self.rest_len..self.rest_len + take].copy_from_slice(&bytes[..take]);
        self.rest_len += take;
        if self.rest_len == BLOCK {
            pair::compress(&mut self.state, std::slice::from_ref(&self.rest));
            self.rest_len = 0;
        }
        &bytes[take..]
    }

    fn keep(&mut self, tail: &[u8]) {
        if !tail.is_empty() {
            self.rest[..tail.len()].copy_from_slice(tail);
            self.rest_len = tail.len();
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        let bytes = self.top_up(bytes);
        let (blocks, tail) = bytes.as_chunks::<BLOCK>();
        pair::compress(&mut self.state, blocks);
        self.keep(tail);
    }

    fn finish(mut self) -> Digest {
        let bits = self.total.wrapping_mul(8);
        let mut padding = [0u8; 2 * BLOCK];
        padding[0] = 0x80;
        let len = if self.rest_len < BLOCK - 8 { BLOCK - self.rest_len } else { 2 * BLOCK - self.rest_len };
        padding[len - 8..len].copy_from_slice(&bits.to_be_bytes());
        self.update(&padding[..len]);
        let mut out = [0u8; 32];
        for (bytes, word) in out.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        Digest::from_bytes(out)
    }
}

/// Two SHA-256 streams that are fed side by side.
#[derive(Clone, Default)]
pub struct PairHasher {
    first: Stream,
    second: Stream,
}

impl std::fmt::Debug for PairHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PairHasher")
            .field("first_len", &self.first.total)
            .field("second_len", &self.second.total)
            .finish_non_exhaustive()
    }
}

impl PairHasher {
    /// Adds `first` to the first stream, and the pieces of `second`, in order, to the second one.
    pub fn update(&mut self, mut first: &[u8], second: &[&[u8]]) {
        for piece in second {
            let mut piece = *piece;
            // The shorter of the two decides how far both go together; what is left of the first waits for the next
            // piece.
            let share = first.len().min(piece.len());
            let (a, b) = (self.first.top_up(&first[..share]), self.second.top_up(&piece[..share]));
            let ((a_blocks, a_tail), (b_blocks, b_tail)) = (a.as_chunks::<BLOCK>(), b.as_chunks::<BLOCK>());
            let common = a_blocks.len().min(b_blocks.len());
            pair::compress_two(&mut self.first.state, &a_blocks[..common], &mut self.second.state, &b_blocks[..common]);
            pair::compress(&mut self.first.state, &a_blocks[common..]);
            pair::compress(&mut self.second.state, &b_blocks[common..]);
            self.first.keep(a_tail);
            self.second.keep(b_tail);
            first = &first[share..];
            piece = &piece[share..];
            self.second.update(piece);
        }
        self.first.update(first);
    }

    /// Bytes seen by the first and the second stream.
    #[must_use]
    pub fn lens(&self) -> (u64, u64) {
        (self.first.total, self.second.total)
    }

    /// Both digests.
    #[must_use]
    pub fn finish(self) -> (Digest, Digest) {
        (self.first.finish(), self.second.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_are_sha256(
            first in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..8),
            second in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..24),
        ) {
            let mut pair = PairHasher::default();
            let mut pieces = second.chunks(3);
            for piece in &first {
                let group: Vec<&[u8]> = pieces.next().unwrap_or(&[]).iter().map(Vec::as_slice).collect();
                pair.update(piece, &group);
            }
            for group in pieces {
                let group: Vec<&[u8]> = group.iter().map(Vec::as_slice).collect();
                pair.update(b"", &group);
            }
            let (a, b) = (first.concat(), second.concat());
            prop_assert_eq!(pair.lens(), (a.len() as u64, b.len() as u64));
            prop_assert_eq!(pair.finish(), (Digest::of(&a), Digest::of(&b)));
        }
    }

    #[test]
    fn long_streams() {
        let a: Vec<u8> = (0..1_000_003u32).map(|i| i.to_le_bytes()[1]).collect();
        let b: Vec<u8> = (0..900_001u32).map(|i| i.to_le_bytes()[0] ^ 0x5a).collect();
        let mut pair = PairHasher::default();
        for (a, b) in a.chunks(65_521).zip(b.chunks(59_000)) {
            pair.update(a, &[b]);
        }
        assert_eq!(pair.finish(), (Digest::of(&a), Digest::of(&b)));
    }
}
