//! A dictionary in RocksDB, beside a store, for one writer at a time.
//!
//! RocksDB's own lock keeps a second writer out. An entry is written only after its blob is published, so a crash at any
//! instant leaves a dictionary that knows too little at most; what is missing is added when the blob is met again, or by
//! [`rebuild`]. An entry may also lead to a blob that has gone: whoever finds it looks whether the blob is there.
//!
//! ```text
//! column family "default"
//!   "format"            u32, 1
//!   "next"              u32: number of the next blob
//!   "b" number          a blob: digest 32, length u64, digest of its table 32, length of its table u64, complete u8
//!   "d" digest          number of the blob
//! column family "chunks"
//!   key of a chunk      blob number, first block, blocks: LEB128 each; of a compressed one also the BLAKE3 of its
//!                       blocks, 32
//! ```
//! Numbers in keys are big-endian, in values little-endian. The first blob with a chunk keeps it, while it is there: so
//! layers come to refer to few blobs rather than to many. Numbers only rise, so a snapshot is the number of the next blob:
//! entries of later ones do not count.

use super::{Dictionary, DictionaryError, Place, Snapshot, key_of, open_table, stored};
use crate::chunk_table::Record;
use crate::entry::Warning;
use crate::layer::{BlobRef, Existing};
use fs3_client::{Digest, Store};
use rocksdb::{
    BlockBasedOptions, ColumnFamilyDescriptor, DBCompressionType, IteratorMode, Options, WriteBatch, WriteOptions,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of the layout above.
const FORMAT: u32 = 1;
const CHUNKS: &str = "chunks";
/// Chunks written at once.
const BATCH: usize = 8192;
/// Bytes of a blob's value.
const BLOB_SIZE: usize = 81;

/// An open dictionary. Clones are the same one.
#[derive(Clone)]
pub struct Db {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Db").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

struct Inner {
    db: rocksdb::DB,
    path: PathBuf,
    /// Number of the next blob; held while one is added.
    next: Mutex<u32>,
}

/// What a dictionary holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stat {
    /// Blobs.
    pub blobs: u64,
    /// Of those, the ones that a crash kept from being taken in whole.
    pub incomplete: u64,
    /// Chunks.
    pub chunks: u64,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Db {
    /// Opens the dictionary in `path`, which is made if it is not there.
    ///
    /// # Errors
    /// [`DictionaryError::Busy`] when another process, or another part of this one, has it open;
    /// [`DictionaryError::Database`] when it is of another format, or RocksDB cannot open it.
    pub fn open(path: &Path) -> Result<Self, DictionaryError> {
        let fail = |e: rocksdb::Error| failure(path, &e);
        std::fs::create_dir_all(path)
            .map_err(|e| DictionaryError::Database { path: path.to_owned(), what: format!("cannot be made: {e}") })?;
        let mut options = Options::default();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_keep_log_file_num(2);
        options.set_max_open_files(256);
        let families = [
            ColumnFamilyDescriptor::new("default", Options::default()),
            ColumnFamilyDescriptor::new(CHUNKS, chunk_options()),
        ];
        let db = rocksdb::DB::open_cf_descriptors(&options, path, families).map_err(fail)?;
        let number = |key: &[u8]| -> Result<Option<u32>, DictionaryError> {
            let value = db.get(key).map_err(fail)?;
            Ok(value.map(|v| v.as_slice().try_into().map_or(u32::MAX, u32::from_le_bytes)))
        };
        match number(b"format")? {
            None => db.put(b"format", FORMAT.to_le_bytes()).map_err(fail)?,
            Some(FORMAT) => {}
            Some(other) => {
                let what = format!("is of format {other}; this program reads format {FORMAT}");
                return Err(DictionaryError::Database { path: path.to_owned(), what });
            }
        }
        let next = number(b"next")?.unwrap_or(0);
        Ok(Self { inner: Arc::new(Inner { db, path: path.to_owned(), next: Mutex::new(next) }) })
    }

    /// Counts what is in it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn stat(&self) -> Result<Stat, DictionaryError> {
        let Inner { db, .. } = &*self.inner;
        let mut stat = Stat::default();
        for entry in db.iterator_cf(self.inner.chunks(), IteratorMode::Start) {
            entry.map_err(|e| self.inner.failure(&e))?;
            stat.chunks += 1;
        }
        for entry in db.iterator(IteratorMode::From(b"b", rocksdb::Direction::Forward)) {
            let (key, value) = entry.map_err(|e| self.inner.failure(&e))?;
            if key.first() != Some(&b'b') {
                break;
            }
            stat.blobs += 1;
            stat.incomplete += u64::from(decode_blob(&value).is_none_or(|(_, complete)| !complete));
        }
        stat.bytes = std::fs::read_dir(&self.inner.path)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()))
            .sum();
        Ok(stat)
    }
}

/// Makes the dictionary in `path` anew, from the chunk tables of the images in `store`. A table that cannot be used is
/// left out with a warning.
///
/// # Errors
/// When the store or the dictionary fails.
pub fn rebuild(path: &Path, store: &Store) -> Result<(Stat, Vec<Warning>), DictionaryError> {
    if path.join("CURRENT").exists() {
        // Takes the lock as well, so that no writer loses it under its feet.
        rocksdb::DB::destroy(&Options::default(), path).map_err(|e| failure(path, &e))?;
    }
    let db = Db::open(path)?;
    let mut stored = stored(store, &[])?;
    for blob in &stored.blobs {
        match db.add(blob, store) {
            Ok(()) => {}
            Err(e @ DictionaryError::Database { .. }) => return Err(e),
            Err(e) => {
                let message = format!("nothing is deduplicated against blob {}: {e}", blob.blob.digest);
                stored.warnings.push(Warning::new(b"", message));
            }
        }
    }
    Ok((db.stat()?, stored.warnings))
}

fn chunk_options() -> Options {
    let mut table = BlockBasedOptions::default();
    // Nearly all lookups of new contents end here.
    table.set_bloom_filter(10.0, false);
    table.set_cache_index_and_filter_blocks(true);
    table.set_block_cache(&rocksdb::Cache::new_lru_cache(64 << 20));
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    // Digests do not compress.
    options.set_compression_type(DBCompressionType::None);
    options.set_write_buffer_size(32 << 20);
    options
}

fn failure(path: &Path, error: &rocksdb::Error) -> DictionaryError {
    let path = path.to_owned();
    let text = error.as_ref();
    // RocksDB has no kind of error for this.
    if text.contains("LOCK") && (text.contains("lock hold") || text.contains("While lock file")) {
        DictionaryError::Busy { path }
    } else {
        DictionaryError::Database { path, what: text.to_owned() }
    }
}

impl Inner {
    fn failure(&self, error: &rocksdb::Error) -> DictionaryError {
        failure(&self.path, error)
    }

    fn chunks(&self) -> &rocksdb::ColumnFamily {
        self.db.cf_handle(CHUNKS).expect("it was opened with it")
    }

    fn next(&self) -> MutexGuard<'_, u32> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn blob(&self, number: u32) -> Result<Option<(Existing, bool)>, DictionaryError> {
        let value = self.db.get_pinned(blob_key(number)).map_err(|e| self.failure(&e))?;
        Ok(value.and_then(|value| decode_blob(&value)))
    }

    fn number_of(&self, digest: &Digest) -> Result<Option<u32>, DictionaryError> {
        let value = self.db.get_pinned(digest_key(digest)).map_err(|e| self.failure(&e))?;
        Ok(value.and_then(|value| Some(u32::from_le_bytes(value.as_ref().try_into().ok()?))))
    }

    fn write(&self, batch: WriteBatch, sync: bool) -> Result<(), DictionaryError> {
        let mut options = WriteOptions::default();
        options.set_sync(sync);
        self.db.write_opt(batch, &options).map_err(|e| self.failure(&e))
    }

    /// Adds those of `records` that no blob has which is in the store.
    fn add_chunks(
        &self,
        number: u32,
        records: &[Record],
        here: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<(), DictionaryError> {
        let mut keys: Vec<([u8; 32], &Record)> = records.iter().map(|record| (key_of(record), record)).collect();
        keys.sort_unstable_by_key(|(key, _)| *key);
        let found = self.db.batched_multi_get_cf(self.chunks(), keys.iter().map(|(key, _)| key.as_slice()), true);
        let mut batch = WriteBatch::default();
        for ((key, record), found) in keys.into_iter().zip(found) {
            let place = found.map_err(|e| self.failure(&e))?.and_then(|value| decode_place(&key, &value));
            if let Some(place) = place
                && here(place.blob)?
            {
                continue;
            }
            let Record { digest, start, blocks, .. } = *record;
            batch.put_cf(self.chunks(), key, encode_place(&key, &Place { blob: number, start, blocks, digest }));
        }
        self.write(batch, false)
    }
}

impl Dictionary for Db {
    fn snapshot(&self) -> Arc<dyn Snapshot> {
        let next = *self.inner.next();
        Arc::new(View { inner: Arc::clone(&self.inner), next })
    }

    fn add(&self, blob: &Existing, store: &Store) -> Result<(), DictionaryError> {
        let inner = &*self.inner;
        let Some(table) = blob.table else { return Ok(()) };
        let mut next = inner.next();
        let number = match inner.number_of(&blob.blob.digest)? {
            Some(number) if inner.blob(number)?.is_some_and(|(_, complete)| complete) => return Ok(()),
            Some(number) => number,
            None => *next,
        };
        let Some(opened) = open_table(blob, store)? else { return Ok(()) };
        let mut batch = WriteBatch::default();
        let after = number
            .checked_add(1)
            .filter(|n| *n < u32::MAX)
            .ok_or_else(|| DictionaryError::Database { path: inner.path.clone(), what: "is full".to_owned() })?;
        batch.put(b"next", after.max(*next).to_le_bytes());
        batch.put(blob_key(number), encode_blob(blob.blob, table, false));
        batch.put(digest_key(&blob.blob.digest), number.to_le_bytes());
        inner.write(batch, false)?;
        // From here on no snapshot counts what is added.
        *next = after.max(*next);
        let mut known: HashMap<u32, bool> = HashMap::new();
        let mut here = |number: u32| -> Result<bool, DictionaryError> {
            if let Some(here) = known.get(&number) {
                return Ok(*here);
            }
            let here = match inner.blob(number)? {
                Some((existing, _)) => store.blob_size(&existing.blob.digest)? == Some(existing.blob.size),
                None => false,
            };
            known.insert(number, here);
            Ok(here)
        };
        let mut records = Vec::with_capacity(BATCH);
        for record in opened.records() {
            records.push(record.map_err(|e| DictionaryError::records(blob, &e))?);
            if records.len() == BATCH {
                inner.add_chunks(number, &records, &mut here)?;
                records.clear();
            }
        }
        inner.add_chunks(number, &records, &mut here)?;
        let mut batch = WriteBatch::default();
        batch.put(blob_key(number), encode_blob(blob.blob, table, true));
        inner.write(batch, true)
    }
}

/// What the dictionary held before blob `next` was added.
#[derive(Clone)]
struct View {
    inner: Arc<Inner>,
    next: u32,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("path", &self.inner.path).field("next", &self.next).finish()
    }
}

impl Snapshot for View {
    fn find(
        &self,
        key: &[u8; 32],
        usable: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<Option<Place>, DictionaryError> {
        let value = self.inner.db.get_pinned_cf(self.inner.chunks(), key).map_err(|e| self.inner.failure(&e))?;
        let Some(place) = value.and_then(|value| decode_place(key, &value)) else { return Ok(None) };
        Ok(if place.blob < self.next && usable(place.blob)? { Some(place) } else { None })
    }

    fn blob(&self, blob: u32) -> Result<Option<Existing>, DictionaryError> {
        Ok(self.inner.blob(blob)?.map(|(existing, _)| existing))
    }
}

fn blob_key(number: u32) -> [u8; 5] {
    let [a, b, c, d] = number.to_be_bytes();
    [b'b', a, b, c, d]
}

fn digest_key(digest: &Digest) -> [u8; 33] {
    let mut key = [b'd'; 33];
    key[1..].copy_from_slice(digest.as_bytes());
    key
}

fn encode_blob(blob: BlobRef, table: BlobRef, complete: bool) -> [u8; BLOB_SIZE] {
    let mut value = [0; BLOB_SIZE];
    value[..32].copy_from_slice(blob.digest.as_bytes());
    value[32..40].copy_from_slice(&blob.size.to_le_bytes());
    value[40..72].copy_from_slice(table.digest.as_bytes());
    value[72..80].copy_from_slice(&table.size.to_le_bytes());
    value[80] = u8::from(complete);
    value
}

/// A blob and whether all its chunks were added; `None` for what no blob is.
fn decode_blob(value: &[u8]) -> Option<(Existing, bool)> {
    let value: &[u8; BLOB_SIZE] = value.try_into().ok()?;
    let reference = |at: usize| {
        let digest = Digest::from_bytes(*value[at..].first_chunk()?);
        Some(BlobRef { digest, size: u64::from_le_bytes(*value[at + 32..].first_chunk()?) })
    };
    let complete = match value[80] {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some((Existing { blob: reference(0)?, table: Some(reference(40)?) }, complete))
}

fn encode_place(key: &[u8; 32], place: &Place) -> Vec<u8> {
    let mut value = Vec::with_capacity(10);
    for mut number in [place.blob, place.start, place.blocks] {
        while number >= 0x80 {
            value.push(u8::try_from(number & 0x7f).expect("7 bits") | 0x80);
            number >>= 7;
        }
        value.push(u8::try_from(number).expect("7 bits"));
    }
    if place.digest != *key {
        value.extend_from_slice(&place.digest);
    }
    value
}

/// A chunk's place; `None` for what no place is.
fn decode_place(key: &[u8; 32], value: &[u8]) -> Option<Place> {
    let mut rest = value;
    let mut number = || -> Option<u32> {
        let mut number = 0u64;
        for shift in (0..35).step_by(7) {
            let (byte, after) = rest.split_first()?;
            rest = after;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                // One spelling for each number.
                return if *byte == 0 && shift > 0 { None } else { u32::try_from(number).ok() };
            }
        }
        None
    };
    let (blob, start, blocks) = (number()?, number()?, number()?);
    let digest = match rest {
        [] => *key,
        rest => *<&[u8; 32]>::try_from(rest).ok().filter(|digest| *digest != key)?,
    };
    (blocks > 0).then_some(Place { blob, start, blocks, digest })
}

#[cfg(test)]
mod tests;
