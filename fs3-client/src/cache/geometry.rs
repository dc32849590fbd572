//! Which bytes of a blob are which chunk, and which chunks are which group.

use std::ops::Range;

/// Chunks of a group: the bits of a word. A group is what one record of the index has, and what is evicted as one.
pub(crate) const GROUP: u32 = 64;

/// The longest blob: 4 TiB in chunks of 256 KiB, whose groups take 16 MiB of memory. A length beyond that is a mistake.
pub(crate) const MOST_CHUNKS: u32 = 1 << 24;

/// A blob's length, cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Length of a chunk, a power of two.
    pub(crate) chunk: u64,
    /// Length of the blob.
    pub(crate) size: u64,
}

impl Geometry {
    /// How many chunks there are, the last of which may be short. Lengths with more than [`MOST_CHUNKS`] were refused.
    pub(crate) fn chunks(&self) -> u32 {
        u32::try_from(self.size.div_ceil(self.chunk)).unwrap_or(u32::MAX)
    }

    pub(crate) fn groups(&self) -> u32 {
        self.chunks().div_ceil(GROUP)
    }

    /// The bytes of a chunk.
    pub(crate) fn bytes(&self, chunk: u32) -> Range<u64> {
        self.bytes_of(&(chunk..chunk + 1))
    }

    /// The bytes of chunks that follow one another.
    pub(crate) fn bytes_of(&self, chunks: &Range<u32>) -> Range<u64> {
        u64::from(chunks.start) * self.chunk..(u64::from(chunks.end) * self.chunk).min(self.size)
    }

    /// The chunks that `range`, which lies in the blob, touches.
    pub(crate) fn chunks_of(&self, range: &Range<u64>) -> Range<u32> {
        if range.is_empty() {
            return 0..0;
        }
        // A shift, since every hit comes here and divisions are slow.
        let at = |byte: u64| u32::try_from(byte >> self.chunk.trailing_zeros()).unwrap_or(u32::MAX - 1);
        at(range.start)..at(range.end - 1) + 1
    }

    /// The chunks of a group.
    pub(crate) fn chunks_in(&self, group: u32) -> Range<u32> {
        group * GROUP..((group + 1) * GROUP).min(self.chunks())
    }

    /// Bytes that the chunks of `bits` in `group` have together.
    pub(crate) fn weight(&self, group: u32, bits: u64) -> u64 {
        let whole = u64::from(bits.count_ones()) * self.chunk;
        let last = self.chunks().saturating_sub(1);
        let short = last / GROUP == group && bits & bit(last) != 0;
        if short { whole - (u64::from(last + 1) * self.chunk - self.size) } else { whole }
    }
}

/// The group that a chunk is in.
pub(crate) fn group_of(chunk: u32) -> u32 {
    chunk / GROUP
}

/// A chunk's bit in its group's words.
pub(crate) fn bit(chunk: u32) -> u64 {
    1 << (chunk % GROUP)
}

/// The bits of chunks that follow one another and are all in one group.
pub(crate) fn bits(chunks: &Range<u32>) -> u64 {
    match chunks.end - chunks.start {
        0 => 0,
        GROUP => u64::MAX,
        count => ((1 << count) - 1) << (chunks.start % GROUP),
    }
}

/// `chunks`, cut where groups end.
pub(crate) fn by_group(chunks: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let mut start = chunks.start;
    std::iter::from_fn(move || {
        if start >= chunks.end {
            return None;
        }
        let end = ((start / GROUP + 1) * GROUP).min(chunks.end);
        let piece = start..end;
        start = end;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_is_short() {
        let g = Geometry { chunk: 4096, size: 4096 * 65 + 1 };
        assert_eq!((g.chunks(), g.groups()), (66, 2));
        assert_eq!(g.bytes(65), 4096 * 65..4096 * 65 + 1);
        assert_eq!(g.weight(1, 0b11), 4097);
        assert_eq!(g.weight(0, u64::MAX), 4096 * 64);
        assert_eq!(g.chunks_of(&(4095..4097)), 0..2);
        assert_eq!(g.chunks_of(&(4096..4096)), 0..0);
        assert_eq!(g.chunks_in(1), 64..66);
        assert_eq!(Geometry { chunk: 4096, size: 0 }.chunks(), 0);
    }

    #[test]
    fn words_hold_whole_groups() {
        assert_eq!(bits(&(0..64)), u64::MAX);
        assert_eq!(bits(&(66..68)), 0b1100);
        assert_eq!(by_group(60..130).collect::<Vec<_>>(), [60..64, 64..128, 128..130]);
    }
}
