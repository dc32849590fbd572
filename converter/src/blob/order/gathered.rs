//! The clusters in use of several blobs as one blob, compressed ones as they are.

use super::super::foreign::OWN;
use super::super::{BlobTooLarge, Contents, Known, Segments};
use super::chunks_of;
use crate::chunk_table::{Input, Record};
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK};
use crate::extent::{Chunked, ClusterRun, Compressed, FileData, Runs};
use crate::tree::{InodeId, Kind, Tree};
use hashbrown::HashMap;

/// Blobs to gather clusters from, by device.
pub trait Clusters {
    /// Why one cannot be read.
    type Error: From<BlobTooLarge>;

    /// The stored cluster or chunk that a block lies in. What is not compressed may be several.
    ///
    /// # Errors
    /// When there is none.
    fn find(&self, device: u16, block: u32) -> Result<Record, Self::Error>;

    /// Reads what is stored there, checked against its digest: whole blocks.
    ///
    /// # Errors
    /// When it cannot be read, or is something else.
    fn read(&self, device: u16, record: &Record, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Why a file cannot have `blocks` blocks from `block` on: what is stored there is not cut that way.
    fn misfit(&self, device: u16, block: u32, blocks: u32) -> Self::Error;
}

struct Gather<'c, C, E> {
    clusters: &'c C,
    emit: E,
    segments: Segments,
    known: Known,
    /// New places by device and old first block.
    moved: HashMap<(u16, u32), u32>,
    buffer: Vec<u8>,
    deduplicated: u64,
}

/// Makes one blob of what the tree's files use, in tree order, each cluster once whatever blob it is in, one right behind
/// the other. `emit` gets the new blob's segments in order. The tree's files are changed to refer to the result, as
/// device 1.
///
/// # Errors
/// What `clusters` and `emit` fail with, and when the blob would be too large.
///
/// # Panics
/// When `old` are not the runs of `tree`.
pub fn gather<C: Clusters>(
    tree: &mut Tree,
    order: &[(InodeId, u32)],
    old: &Runs,
    clusters: &C,
    emit: impl FnMut(&[u8]) -> Result<(), C::Error>,
) -> Result<Contents, C::Error> {
    let mut gather = Gather {
        clusters,
        emit,
        segments: Segments::default(),
        known: Known::default(),
        moved: HashMap::new(),
        buffer: Vec::new(),
        deduplicated: 0,
    };
    let mut runs = Runs::default();
    for (id, _) in order {
        let data = match tree.inode(*id).kind {
            Kind::Regular(FileData::Chunked(file)) => gather.chunked(file, old, &mut runs)?,
            Kind::Regular(FileData::Compressed(file)) => gather.compressed(file, old, &mut runs)?,
            _ => continue,
        };
        tree.inode_mut(*id).kind = Kind::Regular(data);
    }
    let Gather { mut segments, known, mut emit, deduplicated, .. } = gather;
    let blocks = segments.blocks()?;
    segments.finish();
    while let Some(segment) = segments.take() {
        emit(&segment)?;
    }
    Ok(Contents { runs, stored: known.stored, blocks, deduplicated, packed: true, ..Contents::default() })
}

impl<C: Clusters, E: FnMut(&[u8]) -> Result<(), C::Error>> Gather<'_, C, E> {
    fn chunked(&mut self, file: Chunked, old: &Runs, runs: &mut Runs) -> Result<FileData, C::Error> {
        let blocks_a_chunk = 1u32 << (u32::from(file.chunk_bits) - BLOCK_BITS).min(31);
        let first = runs.next();
        let mut chunks = chunks_of(&file, old);
        let mut left = file.size;
        for run in old.of(&file) {
            let plain = u64::from(run.chunks) << file.chunk_bits;
            if run.block == NULL_BLOCK {
                runs.push_holes(first, u64::from(run.chunks));
                left = left.saturating_sub(plain);
                continue;
            }
            for _ in 0..run.chunks {
                let (device, block, blocks) = chunks.next().expect("the run has this many");
                let block = u32::try_from(block).map_err(|_| BlobTooLarge)?;
                let place = self.place(device, block, blocks, left.min(1 << file.chunk_bits))?;
                runs.push(first, OWN, place, blocks_a_chunk);
                left = left.saturating_sub(1 << file.chunk_bits);
            }
        }
        let count = runs.next() - first;
        Ok(FileData::Chunked(Chunked { first, count, ..file }))
    }

    fn compressed(&mut self, file: Compressed, old: &Runs, runs: &mut Runs) -> Result<FileData, C::Error> {
        let first = runs.next_cluster();
        for run in old.clusters_of(&file) {
            if run.compressed {
                let record = self.clusters.find(run.device, run.block)?;
                if (record.start, record.blocks) != (run.block, run.blocks) {
                    return Err(self.clusters.misfit(run.device, run.block, run.blocks));
                }
                let block = self.place(run.device, run.block, run.blocks, run.len.into())?;
                runs.push_cluster(first, ClusterRun { block, device: OWN, ..*run });
                continue;
            }
            for _ in 0..run.repeat {
                self.plain(run, first, runs)?;
            }
        }
        let count = runs.next_cluster() - first;
        Ok(FileData::Compressed(Compressed { first, count, ..file }))
    }

    /// A plain cluster, which may have been put together from several that were stored apart.
    fn plain(&mut self, run: &ClusterRun, first: u32, runs: &mut Runs) -> Result<(), C::Error> {
        let (mut block, mut left) = (run.block, run.len);
        while left > 0 {
            let record = self.clusters.find(run.device, block)?;
            let blocks = (record.start + record.blocks - block).min(left.div_ceil(BLOCK_SIZE));
            let len = left.min(blocks * BLOCK_SIZE);
            let place = self.place(run.device, block, blocks, len.into())?;
            let piece = ClusterRun { repeat: 1, len, block: place, blocks, device: OWN, compressed: false };
            runs.push_cluster(first, piece);
            block += blocks;
            left -= len;
        }
        Ok(())
    }

    /// Where the `blocks` blocks from `block` on are now, where a file has `plain` bytes. Copies what is stored around
    /// them if that was not done yet.
    fn place(&mut self, device: u16, block: u32, blocks: u32, plain: u64) -> Result<u32, C::Error> {
        let record = self.clusters.find(device, block)?;
        let within = block - record.start;
        if within + blocks > record.blocks {
            return Err(self.clusters.misfit(device, block, blocks));
        }
        if let Some(place) = self.moved.get(&(device, record.start)) {
            return Ok(place + within);
        }
        self.buffer.resize(record.blocks as usize * BLOCK_SIZE as usize, 0);
        self.clusters.read(device, &record, &mut self.buffer)?;
        // Tables of plain layers do not say how many of the bytes are a file's.
        let whole = plain.div_ceil(BLOCK_SIZE.into()) == u64::from(record.blocks) && within == 0;
        let len = usize::try_from(plain).ok().filter(|len| whole && *len > 0).unwrap_or(self.buffer.len());
        let input = record.input.unwrap_or_else(|| Input {
            digest: *blake3::hash(&self.buffer[..len]).as_bytes(),
            len: u32::try_from(len).expect("a cluster is at most 1 MiB"),
            algorithm: None,
        });
        let place = match self.known.find(&record.digest) {
            Some(place) => {
                self.deduplicated += self.buffer.len() as u64;
                place
            }
            None => {
                let start = self.segments.append(&self.buffer)?;
                self.known.insert(Record { start, input: Some(input), ..record });
                start
            }
        };
        self.moved.insert((device, record.start), place);
        while let Some(segment) = self.segments.take() {
            (self.emit)(&segment)?;
            self.segments.recycle(segment);
        }
        Ok(place + within)
    }
}
