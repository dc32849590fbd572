//! The chunks in use of several blobs as one new blob.

use super::{Blob, MergeError, Merged, open_data};
use crate::blob::order::{gather, has_long_chunks};
use crate::chunk_table::{self, ChunkTable};
use crate::erofs::format::BLOCK_SIZE;
use crate::extent::FileData;
use crate::layer::BlobRef;
use crate::read_at::ReadAt as _;
use crate::tree::{InodeId, Kind};
use fs3_client::{Digest, Hasher, Store};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};

/// The new blob.
pub(super) struct Packed {
    pub(super) blob: BlobRef,
    pub(super) table: BlobRef,
    /// Bytes that several blobs had.
    pub(super) deduplicated: u64,
}

/// Copies the chunks that `merged` uses of `used`, its blobs in device order, into one blob in tree order, and lets its
/// files refer to that. Every chunk is compared with its blob's chunk table; a blob without one is hashed as a whole.
pub(super) fn pack(
    merged: &mut Merged,
    order: &[(InodeId, u32)],
    used: &[&Blob],
    store: &Store,
) -> Result<Packed, MergeError> {
    if has_long_chunks(&merged.tree, order, &merged.runs) {
        return Err(MergeError::LongChunks);
    }
    let is_compressed =
        |(id, _): &(InodeId, u32)| matches!(merged.tree.inode(*id).kind, Kind::Regular(FileData::Compressed(_)));
    if order.iter().any(is_compressed) {
        return Err(MergeError::CompressedPack);
    }
    let mut sources = Vec::with_capacity(used.len());
    for blob in used {
        sources.push(Source::open(blob, store)?);
    }
    let staged = store.stage("data")?;
    let mut hasher = Hasher::default();
    let runs = std::mem::take(&mut merged.runs);
    let fetch = |device: u16, block: u32, bytes: &mut [u8]| sources[usize::from(device) - 1].fetch(block, bytes);
    let emit = |segment: &[u8]| {
        hasher.update(segment);
        (&*staged).write_all(segment).map_err(MergeError::Scratch)
    };
    let contents = gather(&mut merged.tree, order, runs, |_| true, fetch, emit)?;
    let blob = BlobRef { size: hasher.len(), digest: hasher.finish() };
    let table = chunk_table::to_bytes(&blob.digest, contents.blocks, &contents.stored)?;
    staged.publish(&blob.digest, blob.size)?;
    let table = store.publish_bytes(&table)?;
    merged.runs = contents.runs;
    let table = BlobRef { digest: table.digest, size: table.size };
    Ok(Packed { blob, table, deduplicated: contents.deduplicated })
}

/// A blob to copy from.
struct Source {
    file: File,
    layer: usize,
    digest: Digest,
    /// By first block: length in blocks and digest; `None` when the whole blob was checked.
    table: Option<HashMap<u32, (u32, [u8; 32])>>,
}

impl Source {
    fn open(blob: &Blob, store: &Store) -> Result<Self, MergeError> {
        let (layer, digest) = (blob.layer, blob.blob.digest);
        let file = open_data(store, blob)?;
        let mut source = Self { file, layer, digest, table: None };
        match &blob.table {
            Some(table) => source.table = Some(source.read_table(table, store)?),
            None => source.hash(blob.blob.size)?,
        }
        Ok(source)
    }

    fn corrupt(&self, what: impl Into<String>) -> MergeError {
        MergeError::Corrupt { layer: self.layer, digest: self.digest, what: what.into() }
    }

    fn read_table(&self, table: &BlobRef, store: &Store) -> Result<HashMap<u32, (u32, [u8; 32])>, MergeError> {
        let (layer, digest) = (self.layer, table.digest);
        let fail = |error| MergeError::Table { layer, digest, error };
        let opened = ChunkTable::open(store.open_blob(&table.digest, table.size)?).map_err(fail)?;
        if *opened.blob_digest() != self.digest {
            return Err(self.corrupt(format!("its chunk table {digest} is about {}", opened.blob_digest())));
        }
        // Plain files of compressed layers have chunks that are not records of their own.
        if opened.has_inputs() {
            return Err(MergeError::CompressedPack);
        }
        opened.records().map(|r| r.map(|r| (r.start, (r.blocks, r.digest))).map_err(fail)).collect()
    }

    fn hash(&self, size: u64) -> Result<(), MergeError> {
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 1 << 20];
        while hasher.len() < size {
            let want = usize::try_from(size - hasher.len()).map_or(buffer.len(), |left| left.min(buffer.len()));
            self.read(&mut buffer[..want], hasher.len())?;
            hasher.update(&buffer[..want]);
        }
        let found = hasher.finish();
        if found == self.digest { Ok(()) } else { Err(self.corrupt(format!("its contents have {found}"))) }
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), MergeError> {
        self.file.read_exact_at(bytes, at).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.corrupt(format!("it ends before byte {}", at + bytes.len() as u64)),
            _ => self.corrupt(format!("cannot read {} bytes at offset {at}: {e}", bytes.len())),
        })
    }

    /// Reads a chunk, and returns its digest.
    fn fetch(&self, block: u32, bytes: &mut [u8]) -> Result<[u8; 32], MergeError> {
        self.read(bytes, u64::from(block) * u64::from(BLOCK_SIZE))?;
        let found = *blake3::hash(bytes).as_bytes();
        let blocks = bytes.len() / BLOCK_SIZE as usize;
        if let Some(table) = &self.table {
            match table.get(&block) {
                Some((len, digest)) if *len as usize == blocks && *digest == found => {}
                Some((len, _)) if *len as usize == blocks => {
                    return Err(self.corrupt(format!("the chunk at block {block} does not match the chunk table")));
                }
                _ => return Err(self.corrupt(format!("no record of its chunk table is about block {block}"))),
            }
        }
        Ok(found)
    }
}
