//! What chunks a store has, so that a layer can refer to them instead of storing them again.
//!
//! A [`Dictionary`] maps the digest of a chunk ([`key_of`]) to a blob and a place in it. There are two: [`tables`] is an index in
//! memory, made at the start of a run from the chunk tables of the store's images, for any number of writers; `db` (with
//! the feature `dictionary`) is a RocksDB beside the store, for one writer at a time. Neither holds anything that the
//! store does not: both may be thrown away and made again.
//!
//! A conversion takes a [`Snapshot`] when an image begins, so that what it finds does not depend on what happens
//! meanwhile; the image's blobs are added when it is published. [`Session`] is a snapshot together with what one run
//! remembers of the blobs it leads to.

#[cfg(feature = "dictionary")]
pub mod db;
mod images;
mod index;
mod session;
pub mod tables;

pub(crate) use images::existing;
pub use images::{Stored, stored};
pub use session::Session;

use crate::blob::foreign::Limits;
use crate::chunk_table::{ChunkTable, ChunkTableError, Input, Record};
use crate::compress::Algorithm;
use crate::erofs::format::BLOCK_SIZE;
use crate::layer::Existing;
use crate::manifest::ManifestError;
use fs3_client::{Digest, Hasher, Store, StoreError};
use std::fmt::Debug;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;

/// A chunk of a stored blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The blob, as [`Snapshot::blob`] knows it.
    pub blob: u32,
    /// First block of the chunk.
    pub start: u32,
    /// Its blocks, at least 1.
    pub blocks: u32,
    /// BLAKE3 of those.
    pub digest: [u8; 32],
}

/// By what a stored chunk is found: a plain one by the BLAKE3 of its blocks, a compressed one by algorithm, length and
/// BLAKE3 of what was compressed.
#[must_use]
pub fn key_of(record: &Record) -> [u8; 32] {
    match record.input {
        Some(Input { digest, len, algorithm: Some(algorithm) }) => cluster_key(algorithm, &digest, len),
        _ => record.digest,
    }
}

/// By what a compressed cluster is found: no plain chunk has this key.
fn cluster_key(algorithm: Algorithm, digest: &[u8; 32], len: u32) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("dsec 2026-11-30 compressed cluster by its plain bytes");
    hasher.update(&[algorithm as u8]).update(digest).update(&len.to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// The chunks of stored blobs, as of one moment. Asked from any thread.
pub trait Snapshot: Debug + Send + Sync {
    /// Where the chunk with this key ([`key_of`]) is. Of several places the first counts whose blob `usable` accepts: a
    /// blob may be gone.
    ///
    /// # Errors
    /// When the dictionary cannot be read. A place that makes no sense is no place.
    fn find(
        &self,
        key: &[u8; 32],
        usable: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<Option<Place>, DictionaryError>;

    /// The blob with a number that [`Snapshot::find`] named; `None` when it makes no sense.
    ///
    /// # Errors
    /// When the dictionary cannot be read.
    fn blob(&self, blob: u32) -> Result<Option<Existing>, DictionaryError>;
}

/// Knows the chunks of stored blobs, and takes in new ones.
pub trait Dictionary: Debug + Send + Sync {
    /// What is known now.
    fn snapshot(&self) -> Arc<dyn Snapshot>;

    /// Takes in the chunks of a published blob, from its table; does nothing when the blob is known, or has no table.
    ///
    /// # Errors
    /// When the table cannot be read or is not sound, or the dictionary cannot be written.
    fn add(&self, blob: &Existing, store: &Store) -> Result<(), DictionaryError>;
}

/// Knows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Empty;

impl Snapshot for Empty {
    fn find(
        &self,
        _key: &[u8; 32],
        _usable: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<Option<Place>, DictionaryError> {
        Ok(None)
    }

    fn blob(&self, _blob: u32) -> Result<Option<Existing>, DictionaryError> {
        Ok(None)
    }
}

impl Dictionary for Empty {
    fn snapshot(&self) -> Arc<dyn Snapshot> {
        Arc::new(*self)
    }

    fn add(&self, _blob: &Existing, _store: &Store) -> Result<(), DictionaryError> {
        Ok(())
    }
}

/// That chunks are looked up, where, and how.
#[derive(Debug, Clone)]
pub struct Dedup {
    /// Where.
    pub dictionary: Arc<dyn Dictionary>,
    /// Which blobs are worth to be referred to.
    pub limits: Limits,
    /// Whether each chunk is read back and compared before it is referred to.
    pub verify: bool,
    /// The images whose blobs may be referred to, sorted; empty for all. The dictionary was made of these: here they
    /// only tell its layers from others.
    pub against: Vec<String>,
}

impl Dedup {
    /// What of it decides a layer's bytes, besides what the dictionary knows.
    #[must_use]
    pub fn shape(&self) -> String {
        format!("{} {} {}", self.limits.devices, self.limits.saved, self.against.join(" "))
    }
}

/// Why chunks could not be looked up or added.
#[derive(Debug, thiserror::Error)]
pub enum DictionaryError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A chunk table is not one, not a sound one, or not that of the blob.
    #[error("the chunk table of blob {blob}: {what}")]
    Table {
        /// The blob.
        blob: Digest,
        /// What is wrong.
        what: String,
    },
    /// An image that was named is not one of ours.
    #[error("image {name}: {source}")]
    Image {
        /// Its name.
        name: String,
        /// What is wrong.
        source: ManifestError,
    },
    /// The database failed.
    #[error("the dictionary {}: {what}", path.display())]
    Database {
        /// Its directory.
        path: PathBuf,
        /// What it said.
        what: String,
    },
    /// A blob that was found is not in the store any more.
    #[error("blob {blob}, which chunks of the layer were found in, has gone from the store since")]
    Gone {
        /// The blob.
        blob: Digest,
    },
    /// Another process has the database open.
    #[error("the dictionary {} is in use by another process, and takes one writer at a time", path.display())]
    Busy {
        /// Its directory.
        path: PathBuf,
    },
}

impl DictionaryError {
    /// Whether bytes of the store are damaged.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Store(e) => e.is_corrupt(),
            Self::Table { .. } => true,
            _ => false,
        }
    }
}

impl DictionaryError {
    fn records(blob: &Existing, error: &ChunkTableError) -> Self {
        Self::Table { blob: blob.blob.digest, what: error.to_string() }
    }
}

/// Opens the chunk table of `blob`, after checking its digest and that it is about this blob. `None` when it has none.
fn open_table(blob: &Existing, store: &Store) -> Result<Option<ChunkTable<File>>, DictionaryError> {
    let Some(table) = blob.table else { return Ok(None) };
    let wrong = |what| DictionaryError::Table { blob: blob.blob.digest, what };
    let file = store.open_blob(&table.digest, table.size)?;
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 256 << 10];
    let mut reader = &file;
    loop {
        match reader.read(&mut buffer).map_err(|e| wrong(format!("cannot be read: {e}")))? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    let found = hasher.finish();
    if found != table.digest {
        return Err(wrong(format!("its own digest is {}, its contents have {found}", table.digest)));
    }
    let opened = ChunkTable::open(file).map_err(|e| wrong(e.to_string()))?;
    if *opened.blob_digest() != blob.blob.digest {
        return Err(wrong(format!("it is about blob {}", opened.blob_digest())));
    }
    if opened.blob_blocks().checked_mul(u64::from(BLOCK_SIZE)) != Some(blob.blob.size) {
        return Err(wrong(format!(
            "it is about {} blocks, the blob has {} bytes",
            opened.blob_blocks(),
            blob.blob.size
        )));
    }
    Ok(Some(opened))
}
