//! The chunks and clusters in use of several blobs as one new blob.

use super::{Blob, MergeError, Merged, open_data};
use crate::blob::order::gathered::{self, Clusters};
use crate::blob::order::{gather, has_long_chunks};
use crate::chunk_table::{self, ChunkTable, Record};
use crate::erofs::format::{BLOCK_SIZE, SEGMENT_BLOCKS};
use crate::extent::FileData;
use crate::layer::BlobRef;
use crate::read_at::ReadAt as _;
use crate::tree::{InodeId, Kind};
use fs3_client::{Digest, Hasher, Store};
use std::fs::File;
use std::io::{self, Write as _};

/// The new blob.
pub(super) struct Packed {
    pub(super) blob: BlobRef,
    pub(super) table: BlobRef,
    /// Bytes that several blobs had.
    pub(super) deduplicated: u64,
}

/// Copies what `merged` uses of `used`, its blobs in device order, into one blob in tree order, and lets its files refer
/// to that. Every chunk is compared with its blob's chunk table; a blob without one is hashed as a whole.
pub(super) fn pack(
    merged: &mut Merged,
    order: &[(InodeId, u32)],
    used: &[&Blob],
    store: &Store,
) -> Result<Packed, MergeError> {
    if has_long_chunks(&merged.tree, order, &merged.runs) {
        return Err(MergeError::LongChunks);
    }
    let sources = Sources(used.iter().map(|blob| Source::open(blob, store)).collect::<Result<_, _>>()?);
    let compressed =
        |(id, _): &(InodeId, u32)| matches!(merged.tree.inode(*id).kind, Kind::Regular(FileData::Compressed(_)));
    let clusters = order.iter().any(compressed) || sources.0.iter().any(|source| source.inputs);
    let staged = store.stage("data")?;
    let mut hasher = Hasher::default();
    let runs = std::mem::take(&mut merged.runs);
    let emit = |segment: &[u8]| {
        hasher.update(segment);
        (&*staged).write_all(segment).map_err(MergeError::Scratch)
    };
    let contents = if clusters {
        gathered::gather(&mut merged.tree, order, &runs, &sources, emit)?
    } else {
        let fetch = |device: u16, block: u32, bytes: &mut [u8]| sources.of(device).fetch(block, bytes);
        gather(&mut merged.tree, order, runs, |_| true, fetch, emit)?
    };
    let blob = BlobRef { size: hasher.len(), digest: hasher.finish() };
    let table = chunk_table::to_bytes(&blob.digest, contents.blocks, &contents.stored)?;
    staged.publish(&blob.digest, blob.size)?;
    let table = store.publish_bytes(&table)?;
    merged.runs = contents.runs;
    let table = BlobRef { digest: table.digest, size: table.size };
    Ok(Packed { blob, table, deduplicated: contents.deduplicated })
}

/// The blobs to copy from, in device order.
struct Sources(Vec<Source>);

impl Sources {
    fn of(&self, device: u16) -> &Source {
        &self.0[usize::from(device) - 1]
    }
}

impl Clusters for Sources {
    type Error = MergeError;

    fn find(&self, device: u16, block: u32) -> Result<Record, MergeError> {
        let source = self.of(device);
        let Some(table) = &source.table else { return Err(MergeError::NoTable { digest: source.digest }) };
        let after = table.partition_point(|record| record.start <= block);
        let record = after.checked_sub(1).map(|before| table[before]).filter(|r| block - r.start < r.blocks);
        record.ok_or_else(|| source.unrecorded(block))
    }

    fn read(&self, device: u16, record: &Record, bytes: &mut [u8]) -> Result<(), MergeError> {
        self.of(device).fetch(record.start, bytes).map(drop)
    }

    fn misfit(&self, device: u16, block: u32, blocks: u32) -> MergeError {
        let source = self.of(device);
        source.corrupt(format!(
            "a file has its blocks {block} to {}, which its chunk table cuts otherwise",
            block + blocks
        ))
    }
}

/// A blob to copy from.
struct Source {
    file: File,
    layer: usize,
    digest: Digest,
    /// By first block; `None` when the whole blob was checked.
    table: Option<Vec<Record>>,
    /// Whether the table is one of a compressed layer.
    inputs: bool,
}

impl Source {
    fn open(blob: &Blob, store: &Store) -> Result<Self, MergeError> {
        let (layer, digest) = (blob.layer, blob.blob.digest);
        let file = open_data(store, blob)?;
        let mut source = Self { file, layer, digest, table: None, inputs: false };
        match &blob.table {
            Some(table) => source.read_table(table, store)?,
            None => source.hash(blob.blob.size)?,
        }
        Ok(source)
    }

    fn corrupt(&self, what: impl Into<String>) -> MergeError {
        MergeError::Corrupt { layer: self.layer, digest: self.digest, what: what.into() }
    }

    fn unrecorded(&self, block: u32) -> MergeError {
        self.corrupt(format!("no record of its chunk table is about block {block}"))
    }

    fn read_table(&mut self, table: &BlobRef, store: &Store) -> Result<(), MergeError> {
        let (layer, digest) = (self.layer, table.digest);
        let fail = |error| MergeError::Table { layer, digest, error };
        let opened = ChunkTable::open(store.open_blob(&table.digest, table.size)?).map_err(fail)?;
        if *opened.blob_digest() != self.digest {
            return Err(self.corrupt(format!("its chunk table {digest} is about {}", opened.blob_digest())));
        }
        let mut records = Vec::new();
        for record in opened.records() {
            let record = record.map_err(fail)?;
            if record.blocks > SEGMENT_BLOCKS {
                return Err(MergeError::LongChunks);
            }
            records.push(record);
        }
        self.inputs = opened.has_inputs();
        self.table = Some(records);
        Ok(())
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
            let record = table.binary_search_by_key(&block, |record| record.start).map(|at| &table[at]);
            match record {
                Ok(record) if record.blocks as usize == blocks && record.digest == found => {}
                Ok(record) if record.blocks as usize == blocks => {
                    return Err(self.corrupt(format!("the chunk at block {block} does not match the chunk table")));
                }
                _ => return Err(self.unrecorded(block)),
            }
        }
        Ok(found)
    }
}
