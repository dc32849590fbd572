//! From the device that does not exist to those that do: once the layer is known, and before its own blob is put in
//! order.

use super::super::Contents;
use super::{FOREIGN, ForeignChunk, Limits, OWN, choose};
use crate::chunk_table::Record;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, NULL_BLOCK};
use crate::extent::{Chunked, ClusterRun, Compressed, FileData, Runs};
use crate::layer::Existing;
use crate::read_at::ReadAt;
use crate::tree::{InodeId, Kind, Tree};
use fs3_client::Digest;
use std::collections::{HashMap, HashSet};
use std::io;

/// How much a layer refers to in other blobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Referred {
    /// Distinct chunks.
    pub chunks: u64,
    /// Bytes of those, in whole blocks.
    pub bytes: u64,
    /// Distinct chunks that were looked for.
    pub lookups: u64,
}

/// What a layer refers to in other blobs.
#[derive(Debug, Default)]
pub struct Settled {
    /// The blobs, as devices behind the layer's own.
    pub devices: Vec<Existing>,
    /// What it refers to in them.
    pub referred: Referred,
    /// Whether there is anything that none of them has, so that the layer has a blob of its own.
    pub own: bool,
    /// Chunks that are to be copied into that: the places of these, in the layer's own blob, are behind its end.
    pub copied: Vec<(ForeignChunk, Existing)>,
}

/// Decides which blobs become devices, and gives the tree's files their final devices. A chunk of a blob that does not
/// become one gets a place in the layer's own blob, behind what is there: [`Copied`] reads it. So do compressed clusters
/// of files in `plain`, which are to be decompressed. What comes of it depends on the tree, on where the store has which
/// chunk, and on `limits`; not on the order in which files came.
///
/// # Panics
/// When `contents` is not of `tree`.
#[must_use]
pub fn settle(
    tree: &mut Tree,
    order: &[(InodeId, u32)],
    contents: &mut Contents,
    plain: &HashSet<InodeId>,
    limits: Limits,
) -> Settled {
    let foreign = std::mem::take(&mut contents.foreign);
    let mut settled = Settled::default();
    settled.referred.lookups = foreign.lookups;
    if foreign.chunks.is_empty() {
        // All runs are on the device of the own blob, and stay.
        settled.own = contents.blocks > 0;
        return settled;
    }
    // Chunks of other blobs that are in use, each once, in tree order; and those that are in a file in `plain`.
    let mut used = Vec::new();
    let (mut seen, mut unpacked) = (vec![false; foreign.chunks.len()], HashSet::new());
    let files: Vec<(InodeId, FileData)> = order.iter().filter_map(|(id, _)| data_of(tree, *id)).collect();
    for (id, file) in &files {
        each_place(file, &contents.runs, |device, block, compressed| {
            if device == FOREIGN {
                let (index, _) = foreign.at(block);
                if compressed && plain.contains(id) {
                    unpacked.insert(index);
                } else if !std::mem::replace(&mut seen[index], true) {
                    used.push(index);
                }
            } else if device == OWN {
                settled.own = true;
            }
        });
    }
    let chosen = choose(&foreign, &used, limits);
    let kept: HashMap<u32, u16> = chosen.iter().copied().zip(0u16..).collect();
    settled.devices = chosen.iter().map(|blob| foreign.blobs[*blob as usize]).collect();
    let mut copies: Vec<usize> = unpacked.into_iter().collect();
    copies.sort_unstable();
    for index in used {
        let chunk = &foreign.chunks[index];
        if kept.contains_key(&chunk.blob) {
            settled.referred.chunks += 1;
            settled.referred.bytes += u64::from(chunk.record.blocks) * u64::from(BLOCK_SIZE);
        } else if copies.binary_search(&index).is_err() {
            copies.push(index);
        }
    }
    // Places behind the own blob, by position in `foreign.chunks`.
    let mut places: HashMap<usize, u32> = HashMap::new();
    let mut end = contents.blocks;
    for index in copies {
        let chunk = foreign.chunks[index];
        settled.own = true;
        places.insert(index, end);
        contents.stored.push(Record { start: end, ..chunk.record });
        settled.copied.push((ForeignChunk { at: end, ..chunk }, foreign.blobs[chunk.blob as usize]));
        // Where it does not fit, the blob in order will not fit either, and say so.
        end = end.saturating_add(chunk.record.blocks);
    }
    let first_device = if settled.own { OWN + 1 } else { OWN };
    let place = |device: u16, block: u32, unpacked: bool| {
        if device != FOREIGN {
            return (device, block);
        }
        let (index, within) = foreign.at(block);
        let chunk = &foreign.chunks[index];
        match kept.get(&chunk.blob) {
            Some(device) if !unpacked => (first_device + device, chunk.record.start + within),
            _ => (OWN, places[&index] + within),
        }
    };
    let mut runs = Runs::default();
    for (id, file) in files {
        let file = match file {
            FileData::Chunked(file) => FileData::Chunked(move_chunks(&file, &contents.runs, &mut runs, &place)),
            FileData::Compressed(file) => {
                let first = runs.next_cluster();
                for run in contents.runs.clusters_of(&file) {
                    let unpacked = run.compressed && plain.contains(&id);
                    let (device, block) = place(run.device, run.block, unpacked);
                    runs.push_cluster(first, ClusterRun { device, block, ..*run });
                }
                FileData::Compressed(Compressed { first, count: runs.next_cluster() - first, ..file })
            }
            other => other,
        };
        tree.inode_mut(id).kind = Kind::Regular(file);
    }
    contents.runs = runs;
    settled
}

fn move_chunks(file: &Chunked, old: &Runs, runs: &mut Runs, place: &dyn Fn(u16, u32, bool) -> (u16, u32)) -> Chunked {
    let first = runs.next();
    let blocks_a_chunk = blocks_a_chunk(file);
    for run in old.of(file) {
        if run.block == NULL_BLOCK {
            runs.push_holes(first, u64::from(run.chunks));
            continue;
        }
        for chunk in 0..run.chunks {
            let (device, block) = place(run.device, run.block + chunk * blocks_a_chunk, false);
            runs.push(first, device, block, blocks_a_chunk);
        }
    }
    Chunked { first, count: runs.next() - first, ..*file }
}

fn blocks_a_chunk(file: &Chunked) -> u32 {
    1u32 << (u32::from(file.chunk_bits) - BLOCK_BITS).min(31)
}

fn data_of(tree: &Tree, id: InodeId) -> Option<(InodeId, FileData)> {
    match tree.inode(id).kind {
        Kind::Regular(data @ (FileData::Chunked(_) | FileData::Compressed(_))) => Some((id, data)),
        _ => None,
    }
}

/// Calls `f` with the device and first block of each chunk or cluster of a file that is no hole, and whether it is
/// compressed.
fn each_place(file: &FileData, runs: &Runs, mut f: impl FnMut(u16, u32, bool)) {
    match file {
        FileData::Chunked(file) => {
            for run in runs.of(file).iter().filter(|run| run.block != NULL_BLOCK) {
                (0..run.chunks).for_each(|chunk| f(run.device, run.block + chunk * blocks_a_chunk(file), false));
            }
        }
        FileData::Compressed(file) => {
            let clusters = runs.clusters_of(file).iter().filter(|run| run.block != NULL_BLOCK);
            clusters.for_each(|run| f(run.device, run.block, run.compressed));
        }
        FileData::Empty | FileData::Inline { .. } => {}
    }
}

/// A chunk that was to be copied from another blob is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It cannot be read.
    #[error("cannot read blob {blob}, which has chunks of the layer: {what}")]
    Unreadable {
        /// The other blob.
        blob: Digest,
        /// Why.
        what: String,
    },
    /// It is not what that blob's table says.
    #[error(
        "blob {blob}, which has chunks of the layer, is corrupt: the {blocks} blocks from {start} do not match its chunk table"
    )]
    Corrupt {
        /// The other blob.
        blob: Digest,
        /// First block.
        start: u32,
        /// Number of blocks.
        blocks: u32,
    },
}

/// A layer's own blob as it was written, and behind it the chunks that are to be copied into it, from where they are.
/// A read is of a whole chunk.
pub struct Copied<'c, R> {
    own: Option<&'c dyn ReadAt>,
    /// Bytes of the own blob.
    end: u64,
    copied: &'c [(ForeignChunk, Existing)],
    read: R,
}

impl<R> std::fmt::Debug for Copied<'_, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copied").field("end", &self.end).field("copied", &self.copied.len()).finish_non_exhaustive()
    }
}

impl<'c, R: Fn(&Existing, u64, usize) -> Result<Vec<u8>, String> + Sync> Copied<'c, R> {
    /// `blocks` of the own blob, and what [`settle`] left to be copied; `read` gets bytes of another blob: (blob, offset,
    /// length).
    pub fn new(own: Option<&'c dyn ReadAt>, blocks: u32, copied: &'c [(ForeignChunk, Existing)], read: R) -> Self {
        Self { own, end: u64::from(blocks) * u64::from(BLOCK_SIZE), copied, read }
    }

    fn copy(&self, buf: &mut [u8], offset: u64) -> Result<(), CopyError> {
        let block = offset / u64::from(BLOCK_SIZE);
        let index = self.copied.binary_search_by_key(&block, |(chunk, _)| chunk.at.into()).expect("a chunk was placed");
        let (ForeignChunk { record, .. }, existing) = &self.copied[index];
        let blob = existing.blob.digest;
        let at = u64::from(record.start) * u64::from(BLOCK_SIZE);
        let bytes = (self.read)(existing, at, buf.len()).map_err(|what| CopyError::Unreadable { blob, what })?;
        if bytes.len() != buf.len() || *blake3::hash(&bytes).as_bytes() != record.digest {
            return Err(CopyError::Corrupt { blob, start: record.start, blocks: record.blocks });
        }
        buf.copy_from_slice(&bytes);
        Ok(())
    }
}

impl<R: Fn(&Existing, u64, usize) -> Result<Vec<u8>, String> + Sync> ReadAt for Copied<'_, R> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if offset < self.end {
            self.own.ok_or(io::ErrorKind::UnexpectedEof)?.read_exact_at(buf, offset)
        } else {
            self.copy(buf, offset).map_err(io::Error::other)
        }
    }

    fn size(&self) -> io::Result<u64> {
        let behind: u64 = self.copied.iter().map(|(chunk, _)| u64::from(chunk.record.blocks)).sum();
        Ok(self.end + behind * u64::from(BLOCK_SIZE))
    }
}
