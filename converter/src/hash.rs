//! SHA-256 of several streams at once.
//!
//! A layer's stored bytes, its plain tar (for its diffID) and its data blob are all hashed. One stream leaves half of a
//! core's SHA unit idle, since each step waits for the one before; two independent streams in turn fill the gaps, so
//! that the second is nearly free (`benches hash` has the figures).

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

/// `N` SHA-256 streams that are fed side by side, two at a time.
#[derive(Clone)]
pub struct Hashers<const N: usize> {
    streams: [Stream; N],
}

impl<const N: usize> Default for Hashers<N> {
    fn default() -> Self {
        Self { streams: std::array::from_fn(|_| Stream::default()) }
    }
}

impl<const N: usize> std::fmt::Debug for Hashers<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hashers").field("lens", &self.lens()).finish_non_exhaustive()
    }
}

/// Most bytes of two streams before the choice of the two is made anew.
const SHARE: usize = 16 << 10;

/// What one stream is still to be fed.
struct Feed<'b> {
    pieces: &'b [&'b [u8]],
    /// Bytes of the first piece that are done.
    done: usize,
    left: usize,
}

impl<'b> Feed<'b> {
    fn new(pieces: &'b [&'b [u8]]) -> Self {
        let mut feed = Self { pieces, done: 0, left: pieces.iter().map(|p| p.len()).sum() };
        feed.skip_done();
        feed
    }

    fn skip_done(&mut self) {
        while let [first, rest @ ..] = self.pieces
            && first.len() == self.done
        {
            (self.pieces, self.done) = (rest, 0);
        }
    }

    /// What is left of the piece at hand.
    fn piece(&self) -> &'b [u8] {
        self.pieces.first().map_or(&[], |piece| &piece[self.done..])
    }

    fn take(&mut self, len: usize) -> &'b [u8] {
        let taken = &self.piece()[..len];
        self.done += len;
        self.left -= len;
        self.skip_done();
        taken
    }
}

impl<const N: usize> Hashers<N> {
    /// Adds to every stream its pieces, in order.
    pub fn update(&mut self, pieces: [&[&[u8]]; N]) {
        let mut feeds = pieces.map(Feed::new);
        loop {
            // The two with most to go, so that as little as possible is left for one alone.
            let mut order: [usize; N] = std::array::from_fn(|i| i);
            order.sort_unstable_by_key(|i| std::cmp::Reverse(feeds[*i].left));
            let Some(first) = order.first().copied().filter(|i| feeds[*i].left > 0) else { return };
            match order.get(1).copied().filter(|i| feeds[*i].left > 0) {
                None => {
                    let len = feeds[first].piece().len();
                    self.streams[first].update(feeds[first].take(len));
                }
                Some(second) => {
                    let len = feeds[first].piece().len().min(feeds[second].piece().len()).min(SHARE);
                    let (a, b) = (feeds[first].take(len), feeds[second].take(len));
                    let [first, second] =
                        self.streams.get_disjoint_mut([first, second]).expect("two different streams");
                    update_two(first, a, second, b);
                }
            }
        }
    }

    /// Bytes seen by each stream.
    #[must_use]
    pub fn lens(&self) -> [u64; N] {
        std::array::from_fn(|i| self.streams[i].total)
    }

    /// The digests.
    #[must_use]
    pub fn finish(self) -> [Digest; N] {
        self.streams.map(Stream::finish)
    }
}

/// Adds `a` to one stream and `b`, of the same length, to another.
fn update_two(first: &mut Stream, a: &[u8], second: &mut Stream, b: &[u8]) {
    let ((a_blocks, a_tail), (b_blocks, b_tail)) =
        (first.top_up(a).as_chunks::<BLOCK>(), second.top_up(b).as_chunks::<BLOCK>());
    let common = a_blocks.len().min(b_blocks.len());
    pair::compress_two(&mut first.state, &a_blocks[..common], &mut second.state, &b_blocks[..common]);
    pair::compress(&mut first.state, &a_blocks[common..]);
    pair::compress(&mut second.state, &b_blocks[common..]);
    first.keep(a_tail);
    second.keep(b_tail);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_are_sha256(
            rounds in proptest::collection::vec(
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..4), 0..12),
        ) {
            let mut hashers = Hashers::<3>::default();
            let mut want = [const { Vec::new() }; 3];
            for round in rounds.chunks(3) {
                let mut pieces: [Vec<&[u8]>; 3] = std::array::from_fn(|_| Vec::new());
                for (stream, given) in round.iter().enumerate() {
                    pieces[stream] = given.iter().map(Vec::as_slice).collect();
                    want[stream].extend(given.concat());
                }
                hashers.update(std::array::from_fn(|i| pieces[i].as_slice()));
            }
            prop_assert_eq!(hashers.lens(), want.each_ref().map(|w| w.len() as u64));
            prop_assert_eq!(hashers.finish(), want.map(|w| Digest::of(&w)));
        }
    }

    #[test]
    fn long_streams() {
        let a: Vec<u8> = (0..1_000_003u32).map(|i| i.to_le_bytes()[1]).collect();
        let b: Vec<u8> = (0..900_001u32).map(|i| i.to_le_bytes()[0] ^ 0x5a).collect();
        let mut hashers = Hashers::<2>::default();
        for (a, b) in a.chunks(65_521).zip(b.chunks(59_000)) {
            hashers.update([&[a], &[b]]);
        }
        assert_eq!(hashers.finish(), [Digest::of(&a), Digest::of(&b)]);
    }
}
