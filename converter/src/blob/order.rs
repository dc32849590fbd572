//! Whether a blob has its chunks in tree order, and putting them there.

pub mod gathered;
pub(super) mod packed;

use super::foreign::OWN;
use super::{BlobTooLarge, Contents, Known, Segments};
use crate::chunk_table::Record;
use crate::compress::DecompressError;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK, SEGMENT_BLOCKS};
use crate::extent::{Chunked, FileData, Runs};
use crate::read_at::ReadAt;
use crate::tree::{InodeId, Kind, Tree};
use hashbrown::HashMap;
use std::collections::HashSet;
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
    /// A cluster that was just written does not decompress.
    #[error("reading back the cluster at block {block}: {source}")]
    Decompress {
        /// Its first block.
        block: u32,
        /// Why.
        source: DecompressError,
    },
}

/// Each chunk of `file` that is not a hole: (device, first block, number of blocks).
fn chunks_of<'r>(file: &Chunked, runs: &'r Runs) -> impl Iterator<Item = (u16, u64, u32)> + use<'r> {
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
            (run.device, u64::from(run.block) + (i << (bits - BLOCK_BITS)), blocks)
        })
    })
}

fn files<'t>(tree: &'t Tree, order: &'t [(InodeId, u32)]) -> impl Iterator<Item = (InodeId, Chunked)> + 't {
    order.iter().filter_map(|(id, _)| match tree.inode(*id).kind {
        Kind::Regular(FileData::Chunked(file)) => Some((*id, file)),
        _ => None,
    })
}

/// Whether the layer's own blob holds the chunks of the tree's files that refer to it in tree order, each once, and
/// nothing else.
#[must_use]
pub fn is_canonical(tree: &Tree, order: &[(InodeId, u32)], contents: &Contents) -> bool {
    if contents.packed {
        return packed::is_canonical(tree, order, contents);
    }
    let mut end = 0u64;
    for (_, file) in files(tree, order) {
        for (device, block, blocks) in chunks_of(&file, &contents.runs) {
            if device != OWN {
                continue;
            }
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

/// Copies the chunks of the layer's own blob that the tree's files use from `old` into tree order; those on other
/// devices stay there. `emit` gets the new blob's segments in order. The tree's files are changed to refer to the
/// result. Compressed files in `plain` are stored plain. A read of `old` is of a whole chunk.
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
    plain: &HashSet<InodeId>,
    old: &dyn ReadAt,
    mut emit: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<Contents, OrderError> {
    if contents.packed {
        return packed::rewrite(tree, order, contents, plain, old, emit);
    }
    let digests: HashMap<u32, [u8; 32]> = contents.stored.iter().map(|s| (s.start, s.digest)).collect();
    let fetch = |_: u16, block: u32, bytes: &mut [u8]| {
        old.read_exact_at(bytes, u64::from(block) * u64::from(BLOCK_SIZE))?;
        Ok::<_, OrderError>(digests[&block])
    };
    let own = |device| device == OWN;
    let gathered = gather(tree, order, contents.runs, own, fetch, |segment| Ok(emit(segment)?))?;
    Ok(Contents { deduplicated: contents.deduplicated, ..gathered })
}

/// Makes one blob of the chunks that the tree's files use on the devices that `which` says, in tree order, each once
/// whatever blob it is in; chunks on other devices stay there. `fetch` reads a chunk (device, first block, its bytes) and
/// tells its BLAKE3; `emit` gets the new blob's segments in order. The tree's files are changed to refer to the result, as
/// device 1.
///
/// # Errors
/// What `fetch` and `emit` fail with, and when the blob would be too large.
///
/// # Panics
/// When `runs` are not of `tree`.
pub fn gather<E: From<BlobTooLarge>>(
    tree: &mut Tree,
    order: &[(InodeId, u32)],
    old: Runs,
    which: impl Fn(u16) -> bool,
    mut fetch: impl FnMut(u16, u32, &mut [u8]) -> Result<[u8; 32], E>,
    mut emit: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<Contents, E> {
    let mut moved: HashMap<(u16, u32, u32), u32> = HashMap::new();
    let mut segments = Segments::default();
    let mut known = Known::default();
    let mut runs = Runs::default();
    let mut deduplicated = 0;
    let all: Vec<(InodeId, Chunked)> = files(tree, order).collect();
    for (id, file) in all {
        let blocks_a_chunk = 1u32 << (u32::from(file.chunk_bits) - BLOCK_BITS).min(31);
        let first = runs.next();
        let mut chunks = chunks_of(&file, &old);
        for run in old.of(&file) {
            if run.block == NULL_BLOCK {
                runs.push_holes(first, u64::from(run.chunks));
                continue;
            }
            for _ in 0..run.chunks {
                let (_, block, blocks) = chunks.next().expect("the run has this many");
                let block = u32::try_from(block).map_err(|_| BlobTooLarge)?;
                if !which(run.device) {
                    runs.push(first, run.device, block, blocks_a_chunk);
                    continue;
                }
                let place = match moved.get(&(run.device, block, blocks)) {
                    Some(place) => *place,
                    None => {
                        segments.reserve(blocks as usize * BLOCK_SIZE as usize);
                        let digest = fetch(run.device, block, segments.reserved())?;
                        let place = if let Some(place) = known.find(&digest) {
                            segments.cancel();
                            deduplicated += u64::from(blocks) * u64::from(BLOCK_SIZE);
                            place
                        } else {
                            let start = segments.commit()?;
                            known.insert(Record { digest, start, blocks, input: None });
                            start
                        };
                        moved.insert((run.device, block, blocks), place);
                        while let Some(segment) = segments.take() {
                            emit(&segment)?;
                            segments.recycle(segment);
                        }
                        place
                    }
                };
                runs.push(first, OWN, place, blocks_a_chunk);
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
    Ok(Contents { runs, stored: known.stored, blocks, deduplicated, ..Contents::default() })
}

/// Whether a chunk with data of the tree's files is longer than a segment, so that [`gather`] cannot place it.
#[must_use]
pub fn has_long_chunks(tree: &Tree, order: &[(InodeId, u32)], runs: &Runs) -> bool {
    files(tree, order).any(|(_, file)| chunks_of(&file, runs).any(|(.., blocks)| blocks > SEGMENT_BLOCKS))
}
