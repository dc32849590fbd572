//! The data blob of a layer: chunks of files, each stored once, 4 KiB-aligned, none across a 1 MiB boundary.
//!
//! The blob is *canonical*: the chunks of all files in tree order, each at the first place that holds it. Files come
//! in the order of the source, which is tree order in nearly every layer (all common tools sort), so chunks are
//! written as they come; [`order::is_canonical`] tells afterwards whether that was right, and [`order::rewrite`] puts
//! the rest in order. So the blob depends on the tree alone.

pub mod clusters;
pub mod order;
mod segments;
pub mod spool;

use crate::chunk_table::Record;
use crate::compress::Compress;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE};
use crate::extent::{Chunked, FileData, Runs};
use clusters::ClusterWriter;
use hashbrown::HashTable;
pub use segments::Segments;
use std::collections::HashSet;

/// How large chunks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSizes {
    /// log2 of the largest chunk of ordinary files. 12 to 20.
    pub max_bits: u8,
}

impl Default for ChunkSizes {
    fn default() -> Self {
        // 16 KiB: `benches chunks` shows why.
        Self { max_bits: 14 }
    }
}

/// Files get larger chunks rather than more indexes than this.
const MANY_CHUNKS: u64 = 1 << 20;
/// Largest chunk that holds data: a segment.
const MAX_DATA_BITS: u8 = 20;
/// Largest chunk that EROFS can express.
const MAX_HOLE_BITS: u8 = 12 + 31;

impl ChunkSizes {
    /// log2 of the chunk size for a file of `size` bytes with data: one chunk if it is small. It depends on the size
    /// alone, so that the same contents make the same chunks wherever they are.
    #[must_use]
    pub fn bits(self, size: u64) -> u8 {
        let mut bits = bits_to_cover(size).clamp(12, self.max_bits);
        while bits < MAX_DATA_BITS && size >> bits > MANY_CHUNKS {
            bits += 1;
        }
        bits
    }
}

fn bits_to_cover(size: u64) -> u8 {
    u8::try_from(64 - size.saturating_sub(1).leading_zeros()).expect("at most 64")
}

/// The chunks of a blob by content.
#[derive(Debug, Default)]
struct Known {
    stored: Vec<Record>,
    index: HashTable<u32>,
}

impl Known {
    fn find(&self, digest: &[u8; 32]) -> Option<u32> {
        self.index
            .find(key(digest), |i| self.stored[*i as usize].digest == *digest)
            .map(|i| self.stored[*i as usize].start)
    }

    fn insert(&mut self, chunk: Record) {
        let index = u32::try_from(self.stored.len()).expect("fewer chunks than blocks");
        self.stored.push(chunk);
        self.index.insert_unique(key(&chunk.digest), index, |i| key(&self.stored[*i as usize].digest));
    }
}

/// A digest is its own hash.
fn key(digest: &[u8; 32]) -> u64 {
    u64::from_le_bytes(*digest.first_chunk().expect("32 bytes"))
}

/// The blob grew past what a block number can say.
#[derive(Debug, thiserror::Error)]
#[error("the layer's data blob exceeds 16 TiB")]
pub struct BlobTooLarge;

/// What a blob is made of, when it is complete.
#[derive(Debug, Default)]
pub struct Contents {
    /// Places of all files' chunks.
    pub runs: Runs,
    /// The stored chunks in the order of their blocks.
    pub stored: Vec<Record>,
    /// Length in blocks.
    pub blocks: u32,
    /// Bytes that were not stored because the blob had them already.
    pub deduplicated: u64,
    /// Whether chunks follow one another without regard to the boundaries of segments, as in compressed layers.
    pub packed: bool,
    /// First blocks of the compressed clusters that are all zeros.
    pub zeros: HashSet<u32>,
}

/// Writes one kind of blob or the other.
#[derive(Debug)]
pub enum Writer {
    /// Plain chunks.
    Plain(BlobWriter),
    /// Compressed clusters.
    Clusters(Box<ClusterWriter>),
}

impl Writer {
    /// An empty blob, compressed if `compress` says how.
    #[must_use]
    pub fn new(sizes: ChunkSizes, compress: Option<Compress>) -> Self {
        match compress {
            None => Self::Plain(BlobWriter::new(sizes)),
            Some(compress) => Self::Clusters(Box::new(ClusterWriter::new(sizes, compress))),
        }
    }

    /// The blob's bytes on their way out.
    pub fn segments(&mut self) -> &mut Segments {
        match self {
            Self::Plain(writer) => writer.segments(),
            Self::Clusters(writer) => writer.segments(),
        }
    }

    /// Begins a file of `size` bytes, more than 0.
    pub fn begin(&mut self, size: u64) {
        match self {
            Self::Plain(writer) => writer.begin(size),
            Self::Clusters(writer) => writer.begin(size),
        }
    }

    /// Adds `bytes` at `offset` of the current file; offsets only rise, what is skipped is a hole.
    ///
    /// # Errors
    /// When the blob is full.
    pub fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BlobTooLarge> {
        match self {
            Self::Plain(writer) => writer.data(offset, bytes),
            Self::Clusters(writer) => writer.data(offset, bytes),
        }
    }

    /// Ends the current file.
    ///
    /// # Errors
    /// When the blob is full.
    pub fn end(&mut self) -> Result<FileData, BlobTooLarge> {
        match self {
            Self::Plain(writer) => writer.end(),
            Self::Clusters(writer) => writer.end(),
        }
    }

    /// Completes the blob; what is left of it is in the segments.
    ///
    /// # Errors
    /// When the blob is full.
    pub fn finish(self) -> Result<(Contents, Segments), BlobTooLarge> {
        match self {
            Self::Plain(writer) => writer.finish(),
            Self::Clusters(writer) => writer.finish(),
        }
    }
}

/// Cuts files into chunks and places those that are new.
#[derive(Debug)]
pub struct BlobWriter {
    sizes: ChunkSizes,
    segments: Segments,
    known: Known,
    runs: Runs,
    file: Option<OpenFile>,
    deduplicated: u64,
}

#[derive(Debug)]
struct OpenFile {
    size: u64,
    /// Decided at the first data: a file that is one hole needs only one chunk.
    bits: Option<u8>,
    first_run: u32,
    /// Chunks that already have their run.
    done: u64,
    chunk: Option<OpenChunk>,
}

#[derive(Debug)]
struct OpenChunk {
    index: u64,
    len: usize,
    filled: usize,
}

impl BlobWriter {
    /// An empty blob.
    #[must_use]
    pub fn new(sizes: ChunkSizes) -> Self {
        Self {
            sizes,
            segments: Segments::default(),
            known: Known::default(),
            runs: Runs::default(),
            file: None,
            deduplicated: 0,
        }
    }

    /// The blob's bytes on their way out.
    pub fn segments(&mut self) -> &mut Segments {
        &mut self.segments
    }

    /// Begins a file of `size` bytes, more than 0.
    pub fn begin(&mut self, size: u64) {
        self.file = Some(OpenFile { size, bits: None, first_run: self.runs.next(), done: 0, chunk: None });
    }

    /// Adds `bytes` at `offset` of the current file; offsets only rise, what is skipped is a hole.
    ///
    /// # Errors
    /// When the blob is full.
    ///
    /// # Panics
    /// Without [`BlobWriter::begin`], or past the file's size.
    pub fn data(&mut self, mut offset: u64, mut bytes: &[u8]) -> Result<(), BlobTooLarge> {
        let file = self.file.as_mut().expect("a file was begun");
        let size = file.size;
        let bits = *file.bits.get_or_insert_with(|| self.sizes.bits(size));
        while !bytes.is_empty() {
            let index = offset >> bits;
            if self.file.as_ref().and_then(|f| f.chunk.as_ref()).is_some_and(|c| c.index != index) {
                self.close_chunk()?;
            }
            let file = self.file.as_mut().expect("a file was begun");
            let start = index << bits;
            let chunk = match &mut file.chunk {
                Some(chunk) => chunk,
                none => {
                    let len = usize::try_from((size - start).min(1 << bits)).expect("at most 1 MiB");
                    self.segments.reserve(len.next_multiple_of(BLOCK_SIZE as usize));
                    none.insert(OpenChunk { index, len, filled: 0 })
                }
            };
            let at = usize::try_from(offset - start).expect("inside a chunk");
            let take = bytes.len().min(chunk.len - at);
            let room = self.segments.reserved();
            room[chunk.filled..at].fill(0);
            room[at..at + take].copy_from_slice(&bytes[..take]);
            chunk.filled = at + take;
            if chunk.filled == chunk.len {
                self.close_chunk()?;
            }
            offset += take as u64;
            bytes = &bytes[take..];
        }
        Ok(())
    }

    /// Ends the current file.
    ///
    /// # Errors
    /// When the blob is full.
    ///
    /// # Panics
    /// Without [`BlobWriter::begin`].
    pub fn end(&mut self) -> Result<FileData, BlobTooLarge> {
        self.close_chunk()?;
        let file = self.file.take().expect("a file was begun");
        let chunk_bits = file.bits.unwrap_or_else(|| bits_to_cover(file.size).clamp(12, MAX_HOLE_BITS));
        let chunks = file.size.div_ceil(1 << chunk_bits);
        self.runs.push_holes(file.first_run, chunks - file.done);
        let count = self.runs.next() - file.first_run;
        Ok(FileData::Chunked(Chunked { size: file.size, chunk_bits, first: file.first_run, count }))
    }

    fn close_chunk(&mut self) -> Result<(), BlobTooLarge> {
        let file = self.file.as_mut().expect("a file was begun");
        let Some(chunk) = file.chunk.take() else { return Ok(()) };
        let bits = file.bits.expect("a chunk is open");
        let blocks_a_chunk = 1u32 << (u32::from(bits) - BLOCK_BITS);
        let room = self.segments.reserved();
        room[chunk.filled..].fill(0);
        self.runs.push_holes(file.first_run, chunk.index - file.done);
        file.done = chunk.index + 1;
        if is_zero(room) {
            self.segments.cancel();
            self.runs.push_holes(file.first_run, 1);
            return Ok(());
        }
        let digest = *blake3::hash(room).as_bytes();
        let blocks = u32::try_from(room.len() / BLOCK_SIZE as usize).expect("at most a segment");
        let block = if let Some(block) = self.known.find(&digest) {
            self.segments.cancel();
            self.deduplicated += chunk.len as u64;
            block
        } else {
            let block = self.segments.commit()?;
            self.known.insert(Record { digest, start: block, blocks, input: None });
            block
        };
        self.runs.push(file.first_run, 1, block, blocks_a_chunk);
        Ok(())
    }

    /// Completes the blob; what is left of it is in [`BlobWriter::segments`].
    ///
    /// # Errors
    /// When the blob is full.
    pub fn finish(mut self) -> Result<(Contents, Segments), BlobTooLarge> {
        let blocks = self.segments.blocks()?;
        self.segments.finish();
        let (stored, deduplicated) = (self.known.stored, self.deduplicated);
        let contents = Contents { runs: self.runs, stored, blocks, deduplicated, ..Contents::default() };
        Ok((contents, self.segments))
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    // Almost every chunk that is not zero shows it at once.
    let (head, rest) = bytes.split_at(bytes.len().min(64));
    head.iter().all(|b| *b == 0) && rest.iter().fold(0, |or, b| or | b) == 0
}

#[cfg(test)]
mod tests;
