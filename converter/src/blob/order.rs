//! Whether a blob has its chunks in tree order, and putting them there.

use super::{BlobTooLarge, Contents, Segments};
use crate::chunk_table::Record;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK, SEGMENT_BLOCKS};
use crate::extent::{Chunked, FileData, Runs};
use crate::read_at::ReadAt;
use crate::tree::{InodeId, Kind, Tree};
use std::collections::HashMap;
use std::io;

/// Why a blob could not be put in order.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    /// It would be too large.
    #[error(transparent)]
    TooLarge(#[from] BlobTooLarge),
    /// Reading the old blob or writing the new one failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Each chunk of `file` that is not a hole: (first block, number of blocks).
fn chunks_of<'r>(file: &Chunked, runs: &'r Runs) -> impl Iterator<Item = (u64, u32)> + use<'r> {
    let (size, bits) = (file.size, u32::from(file.chunk_bits));
    let mut index = 0u64;
    runs.of(file).iter().flat_map(move |run| {
        let first = index;
        index += u64::from(run.chunks);
        let chunks = if run.block == NULL_BLOCK { 0 } else { u64::from(run.chunks) };
        (0..chunks).map(move |i| {
            let len = (size - ((first + i) << bits)).min(1 << bits);
            let blocks =
                u32::try_from(len.div_ceil(u64::from(BLOCK_SIZE))).expect("a chunk with data is at most 1 MiB");
            (u64::from(run.block) + (i << (bits - BLOCK_BITS)), blocks)
        })
    })
}

fn files<'t>(tree: &'t Tree, order: &'t [(InodeId, u32)]) -> impl Iterator<Item = (InodeId, Chunked)> + 't {
    order.iter().filter_map(|(id, _)| match tree.inode(*id).kind {
        Kind::Regular(FileData::Chunked(file)) => Some((*id, file)),
        _ => None,
    })
}

/// Whether the blob holds the chunks of the tree's files in tree order, each once, and nothing else.
#[must_use]
pub fn is_canonical(tree: &Tree, order: &[(InodeId, u32)], contents: &Contents) -> bool {
    let mut end = 0u64;
    for (_, file) in files(tree, order) {
        for (block, blocks) in chunks_of(&file, &contents.runs) {
            let segment = u64::from(SEGMENT_BLOCKS);
            let expected =
                if end % segment + u64::from(blocks) > segment { end.next_multiple_of(segment) } else { end };
            if block == expected {
                end = expected + u64::from(blocks);
            } else if block >= end {
                return false;
            }
        }
    }
    end == u64::from(contents.blocks)
}

/// Copies the chunks that the tree's files use from `old` into tree order. `emit` gets the new blob's segments in
/// order. The tree's files are changed to refer to the result.
///
/// # Errors
/// When reading or emitting fails.
///
/// # Panics
/// When `contents` is not of `tree`.
pub fn rewrite(
    tree: &mut Tree,
    order: &[(InodeId, u32)],
    contents: Contents,
    old: &dyn ReadAt,
    mut emit: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<Contents, OrderError> {
    let digests: HashMap<u32, [u8; 32]> = contents.stored.iter().map(|s| (s.start, s.digest)).collect();
    let mut moved: HashMap<u32, u32> = HashMap::with_capacity(digests.len());
    let mut segments = Segments::default();
    let mut stored = Vec::with_capacity(digests.len());
    let mut runs = Runs::default();
    let all: Vec<(InodeId, Chunked)> = files(tree, order).collect();
    for (id, file) in all {
        let blocks_a_chunk = 1u32 << (u32::from(file.chunk_bits) - BLOCK_BITS).min(31);
        let first = runs.next();
        let mut chunks = chunks_of(&file, &contents.runs);
        for run in contents.runs.of(&file) {
            if run.block == NULL_BLOCK {
                runs.push_holes(first, u64::from(run.chunks));
                continue;
            }
            for _ in 0..run.chunks {
                let (block, blocks) = chunks.next().expect("the run has this many");
                let block = u32::try_from(block).map_err(|_| BlobTooLarge)?;
                let place = match moved.get(&block) {
                    Some(place) => *place,
                    None => {
                        segments.reserve(blocks as usize * BLOCK_SIZE as usize);
                        old.read_exact_at(segments.reserved(), u64::from(block) * u64::from(BLOCK_SIZE))?;
                        let place = segments.commit()?;
                        moved.insert(block, place);
                        stored.push(Record { digest: digests[&block], start: place, blocks, input: None });
                        while let Some(segment) = segments.take() {
                            emit(&segment)?;
                            segments.recycle(segment);
                        }
                        place
                    }
                };
                runs.push(first, 1, place, blocks_a_chunk);
            }
        }
        let count = runs.next() - first;
        tree.inode_mut(id).kind = Kind::Regular(FileData::Chunked(Chunked { first, count, ..file }));
    }
    let blocks = segments.blocks()?;
    segments.finish();
    while let Some(segment) = segments.take() {
        emit(&segment)?;
    }
    Ok(Contents { runs, stored, blocks, deduplicated: contents.deduplicated })
}
