//! Tree order in the blob of a compressed layer: clusters one right behind the other.

use super::super::clusters::chunked;
use super::super::foreign::{Foreign, OWN};
use super::super::{BlobTooLarge, Contents, Segments, is_zero};
use super::{OrderError, chunks_of};
use crate::chunk_table::{Input, Record};
use crate::compress;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK};
use crate::extent::{Chunked, ClusterRun, Compressed, FileData, Runs};
use crate::read_at::ReadAt;
use crate::tree::{InodeId, Kind, Tree};
use std::collections::{HashMap, HashSet};
use std::io;

/// The stored cluster in which `block` lies, and its position in it.
fn record_of(stored: &[Record], block: u32) -> Option<(&Record, u32)> {
    let after = stored.partition_point(|record| record.start <= block);
    let record = stored.get(after.checked_sub(1)?)?;
    (block - record.start < record.blocks).then_some((record, block - record.start))
}

/// As [`super::is_canonical`].
pub(super) fn is_canonical(tree: &Tree, order: &[(InodeId, u32)], contents: &Contents) -> bool {
    let mut end = 0;
    let mut place = |block: u32| match record_of(&contents.stored, block) {
        Some((record, _)) if record.start < end => true,
        Some((record, 0)) if record.start == end => {
            end += record.blocks;
            true
        }
        _ => false,
    };
    let in_order = order.iter().all(|(id, _)| match &tree.inode(*id).kind {
        Kind::Regular(FileData::Chunked(file)) => {
            let mut own = chunks_of(file, &contents.runs).filter(|(device, ..)| *device == OWN);
            own.all(|(_, block, _)| u32::try_from(block).is_ok_and(&mut place))
        }
        Kind::Regular(FileData::Compressed(file)) => {
            let mut own = contents.runs.clusters_of(file).iter().filter(|run| run.device == OWN);
            own.all(|run| place(run.block))
        }
        _ => true,
    });
    in_order && end == contents.blocks
}

struct Rewrite<'o, E> {
    old: &'o dyn ReadAt,
    old_stored: Vec<Record>,
    segments: Segments,
    stored: Vec<Record>,
    /// New places of old clusters by their old ones, and whether they are plain now.
    moved: HashMap<(u32, bool), u32>,
    buffer: Vec<u8>,
    emit: E,
}

/// As [`super::rewrite`].
pub(super) fn rewrite(
    tree: &mut Tree,
    order: &[(InodeId, u32)],
    contents: Contents,
    plain: &HashSet<InodeId>,
    old: &dyn ReadAt,
    emit: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<Contents, OrderError> {
    let Contents { runs: old_runs, stored: old_stored, deduplicated, zeros: old_zeros, .. } = contents;
    let mut rewrite = Rewrite {
        old,
        old_stored,
        segments: Segments::default(),
        stored: Vec::new(),
        moved: HashMap::new(),
        buffer: Vec::new(),
        emit,
    };
    let mut runs = Runs::default();
    for (id, _) in order {
        let data = match tree.inode(*id).kind {
            Kind::Regular(FileData::Chunked(file)) => rewrite.chunked(file, &old_runs, &mut runs)?,
            Kind::Regular(FileData::Compressed(file)) => {
                rewrite.compressed(file, plain.contains(id), &old_runs, &mut runs)?
            }
            _ => continue,
        };
        tree.inode_mut(*id).kind = Kind::Regular(data);
    }
    let Rewrite { mut segments, stored, moved, mut emit, .. } = rewrite;
    let blocks = segments.blocks()?;
    segments.finish();
    while let Some(segment) = segments.take() {
        emit(&segment)?;
    }
    let zeros = old_zeros.iter().filter_map(|block| moved.get(&(*block, false)).copied()).collect();
    Ok(Contents { runs, stored, blocks, deduplicated, packed: true, zeros, foreign: Foreign::default() })
}

impl<E: FnMut(&[u8]) -> io::Result<()>> Rewrite<'_, E> {
    fn chunked(&mut self, file: Chunked, old: &Runs, runs: &mut Runs) -> Result<FileData, OrderError> {
        let blocks_a_chunk = 1u32 << (u32::from(file.chunk_bits) - BLOCK_BITS).min(31);
        let first = runs.next();
        for run in old.of(&file) {
            if run.block == NULL_BLOCK {
                runs.push_holes(first, u64::from(run.chunks));
                continue;
            }
            for chunk in 0..run.chunks {
                let block = u64::from(run.block) + u64::from(chunk) * u64::from(blocks_a_chunk);
                let mut block = u32::try_from(block).map_err(|_| BlobTooLarge)?;
                if run.device == OWN {
                    block = self.copy(block)?;
                }
                runs.push(first, run.device, block, blocks_a_chunk);
            }
        }
        let count = runs.next() - first;
        Ok(FileData::Chunked(Chunked { first, count, ..file }))
    }

    fn compressed(
        &mut self,
        file: Compressed,
        plain: bool,
        old: &Runs,
        runs: &mut Runs,
    ) -> Result<FileData, OrderError> {
        if plain {
            let clusters: Result<Vec<ClusterRun>, OrderError> =
                old.clusters_of(&file).iter().map(|run| self.unpack(run, &file)).collect();
            return Ok(FileData::Chunked(chunked(&file, &clusters?, runs)));
        }
        let first = runs.next_cluster();
        for run in old.clusters_of(&file) {
            let block = if run.device == OWN { self.copy(run.block)? } else { run.block };
            runs.push_cluster(first, ClusterRun { block, ..*run });
        }
        let count = runs.next_cluster() - first;
        Ok(FileData::Compressed(Compressed { first, count, ..file }))
    }

    /// Copies the cluster that `block` lies in, if it was not yet; returns where the block is now.
    fn copy(&mut self, block: u32) -> Result<u32, OrderError> {
        let (record, within) = record_of(&self.old_stored, block).expect("every block of a file is stored");
        let record = *record;
        let is_plain = record.input.is_none_or(|input| input.algorithm.is_none());
        if let Some(place) = self.moved.get(&(record.start, is_plain)) {
            return Ok(place + within);
        }
        self.read(&record)?;
        let place = self.append(is_plain, record)?;
        Ok(place + within)
    }

    /// The cluster `run` of `file`, stored plain; a hole if it is zeros.
    fn unpack(&mut self, run: &ClusterRun, file: &Compressed) -> Result<ClusterRun, OrderError> {
        if run.device != OWN {
            // Those that are compressed have been given a place in the own blob.
            return Ok(*run);
        }
        if !run.compressed {
            return Ok(ClusterRun { block: self.copy(run.block)?, ..*run });
        }
        let blocks = run.len.div_ceil(BLOCK_SIZE);
        if let Some(place) = self.moved.get(&(run.block, true)) {
            return Ok(ClusterRun { block: *place, blocks, compressed: false, ..*run });
        }
        let (record, _) = record_of(&self.old_stored, run.block).expect("every block of a file is stored");
        let record = *record;
        self.read(&record)?;
        let mut plain = vec![0; blocks as usize * BLOCK_SIZE as usize];
        compress::decompress(file.algorithm, &self.buffer, &mut plain[..run.len as usize])
            .map_err(|source| OrderError::Decompress { block: run.block, source })?;
        if is_zero(&plain) {
            return Ok(ClusterRun { block: NULL_BLOCK, blocks: 0, device: 0, compressed: false, ..*run });
        }
        let digest = *blake3::hash(&plain).as_bytes();
        self.buffer = plain;
        let input = record.input.map(|input| Input { algorithm: None, ..input });
        let block = self.append(true, Record { digest, blocks, input, ..record })?;
        Ok(ClusterRun { block, blocks, compressed: false, ..*run })
    }

    fn read(&mut self, record: &Record) -> io::Result<()> {
        self.buffer.resize(record.blocks as usize * BLOCK_SIZE as usize, 0);
        self.old.read_exact_at(&mut self.buffer, u64::from(record.start) * u64::from(BLOCK_SIZE))
    }

    /// Appends what is in the buffer: what was at `record`'s place, perhaps unpacked.
    fn append(&mut self, is_plain: bool, record: Record) -> Result<u32, OrderError> {
        let place = self.segments.append(&self.buffer)?;
        self.moved.insert((record.start, is_plain), place);
        self.stored.push(Record { start: place, ..record });
        while let Some(segment) = self.segments.take() {
            (self.emit)(&segment)?;
            self.segments.recycle(segment);
        }
        Ok(place)
    }
}
