//! Chunks of a layer that the store has already, in blobs of other layers.
//!
//! While a layer is read, such a chunk gets a place on a device that does not exist ([`FOREIGN`]), by which its files
//! refer to it; which blobs really become devices is decided when the whole layer is known ([`settle`]).

mod settle;

use crate::chunk_table::{Input, Record};
use crate::compress::Algorithm;
use crate::dictionary::DictionaryError;
use crate::erofs::format::BLOCK_SIZE;
use crate::layer::Existing;
use fs3_client::Digest;
use hashbrown::HashTable;
pub use settle::{Copied, CopyError, Referred, Settled, settle};
use std::collections::HashMap;
use std::fmt::Debug;

/// The device of a layer's own blob while the layer is read.
pub const OWN: u16 = 1;
/// The device of chunks in other blobs while the layer is read; its blocks are counted as chunks are found.
pub const FOREIGN: u16 = 2;

/// A chunk that is looked for.
#[derive(Debug, Clone, Copy)]
pub enum Wanted<'b> {
    /// As plain blocks.
    Plain {
        /// BLAKE3 of `bytes`, padded with zeros to whole blocks.
        digest: &'b [u8; 32],
        /// The chunk.
        bytes: &'b [u8],
        /// Whether it may lie across a segment's end, as in blobs of compressed layers.
        across: bool,
    },
    /// As a compressed cluster.
    Cluster {
        /// BLAKE3 of `bytes`.
        digest: &'b [u8; 32],
        /// The cluster.
        bytes: &'b [u8],
        /// By what it is compressed.
        algorithm: Algorithm,
    },
}

/// Finds chunks that the store has already.
pub trait Find: Debug + Sync {
    /// Where a chunk is.
    ///
    /// # Errors
    /// When that cannot be looked up.
    fn find(&self, wanted: Wanted<'_>) -> Result<Option<Found>, DictionaryError>;
}

/// A chunk that the store has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The blob that it is in.
    pub blob: Existing,
    /// Its first block there.
    pub start: u32,
    /// Its blocks there.
    pub blocks: u32,
    /// BLAKE3 of those.
    pub digest: [u8; 32],
}

/// Which blobs are worth to be referred to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most blobs of other layers that a layer refers to because of equal chunks. 0 to 65,000.
    pub devices: u16,
    /// Bytes that a blob must save to be one of them.
    pub saved: u64,
}

impl Default for Limits {
    fn default() -> Self {
        // Measured by `benches dedup` (docs/benchmarks.md): more devices, or blobs that save less, gain nothing there.
        Self { devices: 16, saved: 256 << 10 }
    }
}

/// One chunk in another blob.
#[derive(Debug, Clone, Copy)]
pub struct ForeignChunk {
    /// What the layer knows it by.
    pub key: [u8; 32],
    /// As in that blob's chunk table.
    pub record: Record,
    /// Position of that blob in [`Foreign::blobs`].
    pub blob: u32,
    /// First block on the device [`FOREIGN`].
    pub at: u32,
}

/// All chunks of a layer in other blobs.
#[derive(Debug, Default)]
pub struct Foreign {
    /// The blobs, in the order in which they were met.
    pub blobs: Vec<Existing>,
    /// The chunks, by their place on the device [`FOREIGN`].
    pub chunks: Vec<ForeignChunk>,
    /// Chunks that were looked for.
    pub lookups: u64,
    numbers: HashMap<Digest, u32>,
    index: HashTable<u32>,
    end: u32,
}

impl Foreign {
    pub(super) fn find(&self, key: &[u8; 32]) -> Option<&ForeignChunk> {
        let same = |i: &u32| self.chunks[*i as usize].key == *key;
        self.index.find(super::key(key), same).map(|i| &self.chunks[*i as usize])
    }

    /// Takes note of a chunk; `None` when there is no place for it.
    pub(super) fn insert(&mut self, key: [u8; 32], input: Option<Input>, found: &Found) -> Option<u32> {
        let at = self.end;
        self.end = at.checked_add(found.blocks).filter(|end| *end < u32::MAX)?;
        let next = u32::try_from(self.blobs.len()).ok()?;
        let blob = *self.numbers.entry(found.blob.blob.digest).or_insert(next);
        if blob == next {
            self.blobs.push(found.blob);
        }
        let index = u32::try_from(self.chunks.len()).ok()?;
        let record = Record { digest: found.digest, start: found.start, blocks: found.blocks, input };
        self.chunks.push(ForeignChunk { key, record, blob, at });
        let chunks = &self.chunks;
        self.index.insert_unique(super::key(&key), index, |i| super::key(&chunks[*i as usize].key));
        Some(at)
    }

    /// The chunk in which a block of the device [`FOREIGN`] is: its position in `chunks`, and that of the block in it.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn at(&self, block: u32) -> (usize, u32) {
        let index = self.chunks.partition_point(|chunk| chunk.at <= block).checked_sub(1).expect("a file refers to it");
        (index, block - self.chunks[index].at)
    }
}

/// Of the blobs that `used` chunks (positions in [`Foreign::chunks`], each once, in tree order) are in, those worth a
/// device: the ones that save most, of equal ones those that come first by digest. In the order of their first use.
#[must_use]
pub fn choose(foreign: &Foreign, used: &[usize], limits: Limits) -> Vec<u32> {
    let mut saved = vec![0u64; foreign.blobs.len()];
    let mut met = Vec::new();
    for index in used {
        let chunk = &foreign.chunks[*index];
        let saved = &mut saved[chunk.blob as usize];
        if *saved == 0 {
            met.push(chunk.blob);
        }
        *saved += u64::from(chunk.record.blocks) * u64::from(BLOCK_SIZE);
    }
    let mut best: Vec<u32> = met.iter().copied().filter(|b| saved[*b as usize] >= limits.saved).collect();
    best.sort_by(|a, b| {
        let digest = |blob: &u32| *foreign.blobs[*blob as usize].blob.digest.as_bytes();
        saved[*b as usize].cmp(&saved[*a as usize]).then_with(|| digest(a).cmp(&digest(b)))
    });
    best.truncate(usize::from(limits.devices));
    best.sort_unstable();
    met.retain(|blob| best.binary_search(blob).is_ok());
    met
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::BlobRef;

    fn blob(n: u8) -> Existing {
        Existing { blob: BlobRef { digest: Digest::from_bytes([n; 32]), size: 1 << 20 }, table: None }
    }

    /// Chunks of one block each, in these blobs.
    fn foreign(blobs: &[u8]) -> Foreign {
        let mut foreign = Foreign::default();
        for (n, number) in (0u32..).zip(blobs) {
            let digest = *blake3::hash(&n.to_le_bytes()).as_bytes();
            let found = Found { blob: blob(*number), start: n, blocks: 1, digest };
            assert!(foreign.find(&digest).is_none());
            let at = foreign.insert(digest, None, &found).unwrap();
            let chunk = foreign.find(&digest).unwrap();
            assert_eq!((chunk.at, chunk.record.start, foreign.at(at)), (at, n, (n as usize, 0)));
        }
        foreign
    }

    fn chosen(blobs: &[u8], devices: u16, saved: u64) -> Vec<u8> {
        let foreign = foreign(blobs);
        let used: Vec<usize> = (0..blobs.len()).collect();
        let chosen = choose(&foreign, &used, Limits { devices, saved });
        chosen.iter().map(|b| foreign.blobs[*b as usize].blob.digest.as_bytes()[0]).collect()
    }

    #[test]
    fn the_best_stay_in_the_order_of_their_use() {
        let blobs = [5, 9, 9, 1, 2, 2, 2, 5];
        assert_eq!(chosen(&blobs, 9, 0), [5, 9, 1, 2]);
        assert_eq!(chosen(&blobs, 9, 4097), [5, 9, 2]);
        assert_eq!(chosen(&blobs, 2, 0), [5, 2]);
        assert_eq!(chosen(&blobs, 1, 0), [2]);
        assert_eq!(chosen(&blobs, 1, 12_289), [0; 0]);
        assert_eq!(chosen(&blobs, 0, 0), [0; 0]);
    }

    #[test]
    fn only_chunks_in_use_count() {
        let foreign = foreign(&[1, 1, 1, 2, 3]);
        assert_eq!(choose(&foreign, &[4, 3], Limits { devices: 1, saved: 0 }), [1]);
        assert!(choose(&foreign, &[], Limits { devices: 1, saved: 0 }).is_empty());
    }

    #[test]
    fn a_chunk_without_room_is_not_taken() {
        let mut foreign = foreign(&[1]);
        foreign.end = u32::MAX - 2;
        let found = Found { blob: blob(2), start: 0, blocks: 2, digest: [9; 32] };
        assert_eq!(foreign.insert([9; 32], None, &found), None);
    }
}
