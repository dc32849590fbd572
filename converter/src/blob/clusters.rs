//! The data blob of a compressed layer: clusters of files, each compressed alone and stored once, one right behind the
//! other.
//!
//! A file of `s` bytes has as many clusters as `s` is clusters long, rounded: so its last one has between half and one
//! and a half times the bytes of the others, and no short rest takes up a block of its own. Compressed clusters carry no
//! device id in EROFS, so such a blob cannot be cut into segments, and nothing in it keeps clear of their boundaries.
//!
//! The blob is canonical as a plain one is: the clusters of all files in tree order, without gaps. Clusters are handed to
//! `Pool` and come back in order; one that was seen before is not compressed again.

use super::foreign::{FOREIGN, Find, Foreign, Found, OWN, Wanted};
use super::{BlobTooLarge, ChunkError, ChunkSizes, Contents, Segments, bits_to_cover, is_zero, key};
use crate::chunk_table::{Input, Record};
use crate::compress::{Compress, Piece, Pool};
use crate::dictionary::DictionaryError;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK};
use crate::extent::{Chunked, ClusterRun, Compressed, FileData, Runs};
use crate::tree::{InodeId, Kind, Tree};
use hashbrown::HashTable;
use std::collections::HashSet;

/// Files of more clusters are stored plain: 16 GiB in clusters of 64 KiB, whose index has 32 MiB.
const MANY_CLUSTERS: u64 = 1 << 18;
/// Blocks of a file from which on it is looked at whether it is mostly zeros.
const SPARSE_FROM: u64 = 4096;

/// How a file is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    size: u64,
    bits: u8,
}

impl Cut {
    const fn clusters(self) -> u64 {
        let rounded = (self.size >> self.bits) + ((self.size >> (self.bits - 1)) & 1);
        if rounded == 0 { 1 } else { rounded }
    }

    fn index_of(self, offset: u64) -> u64 {
        (offset >> self.bits).min(self.clusters() - 1)
    }

    const fn start_of(self, index: u64) -> u64 {
        index << self.bits
    }

    const fn len_of(self, index: u64) -> u64 {
        let start = self.start_of(index);
        if index + 1 == self.clusters() { self.size - start } else { 1 << self.bits }
    }
}

/// Cuts files into clusters, and places those that are new.
#[derive(Debug)]
pub struct ClusterWriter<'f> {
    sizes: ChunkSizes,
    compress: Compress,
    find: Option<&'f dyn Find>,
    foreign: Foreign,
    segments: Segments,
    pool: Pool,
    /// By content: position in `inputs`.
    known: HashTable<u32>,
    /// What was handed to the pool, in order.
    inputs: Vec<Handed>,
    /// What came back: the beginning of `inputs`.
    stored: Vec<Record>,
    /// Clusters have their number in `inputs` as their block until the blob is finished.
    runs: Runs,
    file: Option<OpenFile>,
    deduplicated: u64,
}

#[derive(Debug, Clone, Copy)]
struct Handed {
    digest: [u8; 32],
    len: u32,
    compress: bool,
    zero: bool,
}

#[derive(Debug)]
struct OpenFile {
    cut: Cut,
    compress: bool,
    first: u32,
    /// Clusters that already have their entry.
    done: u64,
    /// Whether there was anything but zeros. Until then nothing has an entry.
    any: bool,
    open: Option<(u64, Piece)>,
}

impl<'f> ClusterWriter<'f> {
    /// An empty blob. Clusters that `find` finds elsewhere, compressed or plain, are not put into it.
    #[must_use]
    pub fn new(sizes: ChunkSizes, compress: Compress, find: Option<&'f dyn Find>) -> Self {
        Self {
            sizes,
            compress,
            find,
            foreign: Foreign::default(),
            segments: Segments::default(),
            pool: Pool::new(compress.codec),
            known: HashTable::new(),
            inputs: Vec::new(),
            stored: Vec::new(),
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
        let mut cut = Cut { size, bits: self.compress.cluster_bits };
        let compress = cut.clusters() <= MANY_CLUSTERS;
        if !compress {
            cut.bits = cut.bits.max(self.sizes.bits(size));
        }
        let first = self.runs.next_cluster();
        self.file = Some(OpenFile { cut, compress, first, done: 0, any: false, open: None });
    }

    /// Adds `bytes` at `offset` of the current file; offsets only rise, what is skipped is zero.
    ///
    /// # Errors
    /// When the blob is full.
    ///
    /// # Panics
    /// Without [`ClusterWriter::begin`], or past the file's size.
    pub fn data(&mut self, mut offset: u64, mut bytes: &[u8]) -> Result<(), ChunkError> {
        while !bytes.is_empty() {
            let file = self.file.as_mut().expect("a file was begun");
            let index = file.cut.index_of(offset);
            if file.open.as_ref().is_some_and(|(open, _)| *open != index) {
                self.close()?;
                continue;
            }
            let (_, piece) = file.open.get_or_insert_with(|| (index, self.pool.piece()));
            let at = usize::try_from(offset - file.cut.start_of(index)).expect("inside a cluster");
            let len = usize::try_from(file.cut.len_of(index)).expect("at most 1.5 MiB");
            let take = bytes.len().min(len - at);
            piece.input.resize(at, 0);
            piece.input.extend_from_slice(&bytes[..take]);
            if piece.input.len() == len {
                self.close()?;
            }
            offset += take as u64;
            bytes = &bytes[take..];
        }
        Ok(())
    }

    /// Ends the current file. What it is may change when the blob is finished: see [`settle`].
    ///
    /// # Errors
    /// When the blob is full.
    ///
    /// # Panics
    /// Without [`ClusterWriter::begin`].
    pub fn end(&mut self) -> Result<FileData, ChunkError> {
        self.close()?;
        let mut file = self.file.take().expect("a file was begun");
        let size = file.cut.size;
        if !file.any {
            let chunk_bits = bits_to_cover(size).clamp(12, super::MAX_HOLE_BITS);
            let first = self.runs.next();
            self.runs.push_holes(first, size.div_ceil(1 << chunk_bits));
            let count = self.runs.next() - first;
            return Ok(FileData::Chunked(Chunked { size, chunk_bits, first, count }));
        }
        let end = file.cut.clusters();
        self.zeros(&mut file, end)?;
        let count = self.runs.next_cluster() - file.first;
        let algorithm = self.compress.codec.algorithm();
        Ok(FileData::Compressed(Compressed { size, algorithm, first: file.first, count }))
    }

    fn close(&mut self) -> Result<(), ChunkError> {
        let mut file = self.file.take().expect("a file was begun");
        if let Some((index, mut piece)) = file.open.take() {
            piece.input.resize(usize::try_from(file.cut.len_of(index)).expect("at most 1.5 MiB"), 0);
            if is_zero(&piece.input) {
                // It is as if it had been skipped.
                self.pool.recycle(piece);
            } else {
                self.zeros(&mut file, index)?;
                file.any = true;
                file.done = index + 1;
                self.place(&file, piece, 1, false)?;
            }
        }
        self.file = Some(file);
        Ok(())
    }

    /// Gives all clusters of `file` up to `end` their entries: they are zeros.
    fn zeros(&mut self, file: &mut OpenFile, end: u64) -> Result<(), ChunkError> {
        while file.done < end {
            let len = file.cut.len_of(file.done);
            let last = file.cut.clusters() - 1;
            let same = if file.cut.len_of(last) == len { end } else { end.min(last) };
            let repeat = if file.done == last { 1 } else { same - file.done };
            file.done += repeat;
            let repeat = u32::try_from(repeat).unwrap_or(u32::MAX);
            if file.compress {
                let mut piece = self.pool.piece();
                piece.input.resize(usize::try_from(len).expect("at most 1.5 MiB"), 0);
                self.place(file, piece, repeat, true)?;
            } else {
                let len = u32::try_from(len).expect("at most 1.5 MiB");
                let hole = ClusterRun { repeat, len, block: NULL_BLOCK, blocks: 0, device: 0, compressed: false };
                self.runs.push_cluster(file.first, hole);
            }
        }
        Ok(())
    }

    /// Gives the next `repeat` clusters of `file` their entry.
    fn place(&mut self, file: &OpenFile, mut piece: Piece, repeat: u32, zero: bool) -> Result<(), ChunkError> {
        let digest = *blake3::hash(&piece.input).as_bytes();
        let (compress, inputs) = (file.compress, &self.inputs);
        let same = |i: &u32| inputs[*i as usize].digest == digest && inputs[*i as usize].compress == compress;
        let len = u32::try_from(piece.input.len()).expect("at most 1.5 MiB");
        let number = if let Some(number) = self.known.find(key(&digest), same) {
            if !zero {
                self.deduplicated += u64::from(len);
            }
            self.pool.recycle(piece);
            *number
        } else if let Some(run) = self.find_elsewhere(file, &digest, &piece.input, zero)? {
            self.pool.recycle(piece);
            self.runs.push_cluster(file.first, ClusterRun { repeat, ..run });
            return Ok(());
        } else {
            let number = u32::try_from(self.inputs.len()).map_err(|_| BlobTooLarge)?;
            self.inputs.push(Handed { digest, len, compress, zero });
            self.known.insert_unique(key(&digest), number, |i| key(&self.inputs[*i as usize].digest));
            piece.compress = compress;
            self.pool.put(piece);
            self.collect(false)?;
            number
        };
        let run = ClusterRun { repeat, len, block: number, blocks: 0, device: OWN, compressed: false };
        self.runs.push_cluster(file.first, run);
        Ok(())
    }

    /// The entry of a cluster that another blob has. Zeros, and clusters of files that stay plain, are not looked for:
    /// there are few of either.
    fn find_elsewhere(
        &mut self,
        file: &OpenFile,
        digest: &[u8; 32],
        bytes: &[u8],
        zero: bool,
    ) -> Result<Option<ClusterRun>, DictionaryError> {
        let len = u32::try_from(bytes.len()).expect("at most 1.5 MiB");
        let run =
            |at, blocks, compressed| ClusterRun { repeat: 1, len, block: at, blocks, device: FOREIGN, compressed };
        let Some(find) = self.find.filter(|_| file.compress && !zero) else { return Ok(None) };
        if let Some(chunk) = self.foreign.find(digest) {
            self.deduplicated += u64::from(len);
            let compressed = chunk.record.input.is_some_and(|input| input.algorithm.is_some());
            return Ok(Some(run(chunk.at, chunk.record.blocks, compressed)));
        }
        self.foreign.lookups += 1;
        let algorithm = self.compress.codec.algorithm();
        let cluster = find.find(Wanted::Cluster { digest, bytes, algorithm })?;
        let (found, algorithm): (Found, _) = match cluster {
            Some(found) => (found, Some(algorithm)),
            None => match find.find(Wanted::Plain { digest: &padded(digest, bytes), bytes, across: true })? {
                Some(found) => (found, None),
                None => return Ok(None),
            },
        };
        let input = Some(Input { digest: *digest, len, algorithm });
        let at = self.foreign.insert(*digest, input, &found);
        Ok(at.map(|at| run(at, found.blocks, algorithm.is_some())))
    }

    /// Appends to the blob what the pool has done.
    fn collect(&mut self, all: bool) -> Result<(), BlobTooLarge> {
        while let Some(piece) = self.pool.next(all) {
            let start = self.segments.append(&piece.stored)?;
            let blocks = u32::try_from(piece.stored.len() / BLOCK_SIZE as usize).expect("at most 1.5 MiB");
            let Handed { digest, len, .. } = self.inputs[self.stored.len()];
            let algorithm = piece.compressed.then(|| self.compress.codec.algorithm());
            let input = Some(Input { digest, len, algorithm });
            self.stored.push(Record { digest: piece.digest, start, blocks, input });
            self.pool.recycle(piece);
        }
        Ok(())
    }

    /// Completes the blob; what is left of it is in the segments.
    ///
    /// # Errors
    /// When the blob is full.
    pub fn finish(mut self) -> Result<(Contents, Segments), BlobTooLarge> {
        self.collect(true)?;
        for run in self.runs.all_clusters_mut() {
            if run.block != NULL_BLOCK && run.device == OWN {
                let record = &self.stored[run.block as usize];
                run.block = record.start;
                run.blocks = record.blocks;
                run.compressed = record.input.is_some_and(|input| input.algorithm.is_some());
            }
        }
        let blocks = self.segments.blocks()?;
        self.segments.finish();
        let zeros = self.inputs.iter().zip(&self.stored).filter(|(input, _)| input.zero);
        let zeros = zeros.map(|(_, record)| record.start).collect();
        let Self { runs, stored, deduplicated, segments, foreign, .. } = self;
        Ok((Contents { runs, stored, blocks, deduplicated, packed: true, zeros, foreign }, segments))
    }
}

/// BLAKE3 of `bytes`, whose own it is `digest`, padded to whole blocks.
fn padded(digest: &[u8; 32], bytes: &[u8]) -> [u8; 32] {
    let padding = bytes.len().next_multiple_of(BLOCK_SIZE as usize) - bytes.len();
    if padding == 0 {
        return *digest;
    }
    let zeros = [0; BLOCK_SIZE as usize];
    *blake3::Hasher::new().update(bytes).update(&zeros[..padding]).finalize().as_bytes()
}

/// Decides what each file is, now that all its clusters are known. One that has no compressed cluster becomes an
/// ordinary chunked file. One that is long and mostly zeros, and whose compressed clusters save less than their index
/// costs, is returned: it is to be stored plain, which takes another blob.
pub fn settle(tree: &mut Tree, contents: &mut Contents) -> HashSet<InodeId> {
    let mut plain = HashSet::new();
    for id in 0..u32::try_from(tree.inodes().len()).unwrap_or(u32::MAX) {
        let Kind::Regular(FileData::Compressed(file)) = tree.inode(id).kind else { continue };
        let clusters = contents.runs.clusters_of(&file);
        if clusters.iter().all(|run| !run.compressed) {
            let clusters = clusters.to_vec();
            tree.inode_mut(id).kind = Kind::Regular(FileData::Chunked(chunked(&file, &clusters, &mut contents.runs)));
        } else if is_too_sparse(&file, clusters, &contents.zeros) {
            plain.insert(id);
        }
    }
    plain
}

fn is_too_sparse(file: &Compressed, clusters: &[ClusterRun], zeros: &HashSet<u32>) -> bool {
    let block = u64::from(BLOCK_SIZE);
    let blocks = file.size.div_ceil(block);
    if blocks < SPARSE_FROM {
        return false;
    }
    let (mut zero, mut saved) = (0, 0);
    for run in clusters {
        let (repeat, plain) = (u64::from(run.repeat), u64::from(run.len).div_ceil(block));
        if run.compressed && run.device == OWN && zeros.contains(&run.block) {
            zero += repeat * plain;
        } else {
            saved += repeat * plain.saturating_sub(u64::from(run.blocks));
        }
    }
    // Each block of a compressed file has 8 bytes of index.
    zero > blocks / 2 && saved * block < blocks * 8
}

/// `file` as chunks: none of its `clusters` is compressed.
pub(super) fn chunked(file: &Compressed, clusters: &[ClusterRun], runs: &mut Runs) -> Chunked {
    let single = clusters.len() == 1 && clusters[0].repeat == 1;
    let chunk_bits =
        if single { bits_to_cover(file.size).max(12) } else { bits_to_cover(clusters[0].len.into()).max(12) };
    let blocks_a_chunk = 1u32 << (u32::from(chunk_bits) - BLOCK_BITS);
    let first = runs.next();
    for run in clusters {
        // The last cluster may be longer than a chunk.
        let chunks = run.len.div_ceil(1 << chunk_bits);
        if run.block == NULL_BLOCK {
            runs.push_holes(first, u64::from(chunks) * u64::from(run.repeat));
            continue;
        }
        for _ in 0..run.repeat {
            for chunk in 0..chunks {
                runs.push(first, run.device, run.block + chunk * blocks_a_chunk, blocks_a_chunk);
            }
        }
    }
    Chunked { size: file.size, chunk_bits, first, count: runs.next() - first }
}

#[cfg(test)]
mod tests;
