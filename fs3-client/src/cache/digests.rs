//! What a chunk should be.

use crate::Digest;
use std::fmt;
use std::ops::Range;

/// A blob's table of digests: what parts of it should be. It is the caller's, who has checked it.
///
/// Both methods are called from any thread, and must not block.
pub trait ChunkDigests: fmt::Debug + Send + Sync {
    /// What has to be read so that all of `range` can be checked: `range` itself, or more of the blob where digests are
    /// of parts that lie otherwise. Called for each request, so what is added is fetched too.
    fn widen(&self, range: Range<u64>) -> Range<u64> {
        range
    }

    /// Whether the blob has `bytes` at `offset`, for a range that [`widen`](Self::widen) gave.
    ///
    /// # Errors
    /// How one can tell that it has not.
    fn check(&self, offset: u64, bytes: &[u8]) -> Result<(), String>;
}

/// SHA-256 digests of pieces of the same length, the last of which may be short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestTable {
    piece: u64,
    size: u64,
    digests: Vec<Digest>,
}

impl DigestTable {
    /// A table for a blob of `size` bytes.
    ///
    /// # Errors
    /// When the number of digests is not what the lengths make it.
    pub fn new(piece: u64, size: u64, digests: Vec<Digest>) -> Result<Self, String> {
        if piece == 0 || digests.len() as u64 != size.div_ceil(piece) {
            return Err(format!("{} digests, of {piece} bytes each, for a blob of {size} bytes", digests.len()));
        }
        Ok(Self { piece, size, digests })
    }

    /// The table of `contents`.
    ///
    /// # Panics
    /// When `piece` is 0.
    #[must_use]
    pub fn of(contents: &[u8], piece: usize) -> Self {
        let digests = contents.chunks(piece).map(Digest::of).collect();
        Self { piece: piece as u64, size: contents.len() as u64, digests }
    }
}

impl ChunkDigests for DigestTable {
    fn widen(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.div_ceil(self.piece).saturating_mul(self.piece).min(self.size);
        range.start / self.piece * self.piece..end.max(range.end)
    }

    fn check(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        if !offset.is_multiple_of(self.piece) {
            return Err(format!("no digest begins at {offset}"));
        }
        let first = usize::try_from(offset / self.piece).unwrap_or(usize::MAX);
        let piece = usize::try_from(self.piece).unwrap_or(usize::MAX);
        for (n, part) in bytes.chunks(piece).enumerate() {
            let Some(wanted) = self.digests.get(first.saturating_add(n)) else {
                return Err(format!("the table has no digest for the bytes from {}", offset + (n * piece) as u64));
            };
            let found = Digest::of(part);
            if found != *wanted {
                let start = offset + (n * piece) as u64;
                return Err(format!(
                    "those from {start} to {} have {found} and not {wanted}",
                    start + part.len() as u64
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_widens_to_whole_pieces_and_finds_a_wrong_byte() {
        let contents: Vec<u8> = (0..10_000u32).map(|n| n.to_le_bytes()[0]).collect();
        let table = DigestTable::of(&contents, 3000);
        assert_eq!(table.widen(3001..3002), 3000..6000);
        assert_eq!(table.widen(9500..10_000), 9000..10_000);
        table.check(3000, &contents[3000..]).unwrap();
        let mut wrong = contents.clone();
        wrong[9999] ^= 1;
        assert!(table.check(3000, &wrong[3000..]).unwrap_err().starts_with("those from 9000 to 10000 have sha256:"));
        assert!(table.check(1, &contents[1..]).is_err());
        assert!(table.check(9000, &[0; 4000]).is_err());
        assert!(DigestTable::new(3000, 10_000, Vec::new()).is_err());
    }
}
