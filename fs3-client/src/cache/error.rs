//! Why bytes could not be had, or a cache not be opened.

use crate::{BlobError, Digest};
use std::path::PathBuf;
use std::sync::Arc;

/// Why bytes could not be had, or a cache not be opened. Clones are cheap: all who wait for a fetch get its failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CacheError {
    /// The caller asked for bytes that the blob does not have.
    #[error("{digest} has {size} bytes, and those from {start} to {end} were to be read")]
    OutOfRange {
        /// The blob.
        digest: Digest,
        /// Its length.
        size: u64,
        /// First byte asked for.
        start: u64,
        /// The byte after the last.
        end: u64,
    },
    /// The descriptor gives a length that no blob has.
    #[error("{digest} is said to have {size} bytes; a cache of this chunk size takes blobs of at most {most}")]
    TooLarge {
        /// The blob.
        digest: Digest,
        /// The length that was given.
        size: u64,
        /// The most there may be.
        most: u64,
    },
    /// The bytes are not cached, and the store did not give them.
    #[error("{0}")]
    Store(Arc<BlobError>),
    /// The store gave other bytes than the blob's table of digests has, as often as it was asked.
    #[error("bytes {start} to {end} of {digest} are corrupt in the store ({tries} tries): {how}")]
    Corrupt {
        /// The blob.
        digest: Digest,
        /// First byte of the chunk.
        start: u64,
        /// The byte after its last.
        end: u64,
        /// How often it was fetched.
        tries: u32,
        /// How one can tell.
        how: String,
    },
    /// Nothing came within the deadline, not even the turn to ask the store.
    #[error("no bytes of {digest} within {after:?}")]
    TimedOut {
        /// The blob.
        digest: Digest,
        /// The deadline.
        after: std::time::Duration,
    },
    /// The cache was closed.
    #[error("the chunk cache in {} was closed", dir.display())]
    Closed {
        /// Its directory.
        dir: Arc<PathBuf>,
    },
    /// Another process, or another part of this one, has it open.
    #[error("the chunk cache in {} is in use by another process ({holder}); each needs a directory of its own", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// What the lock file says of the holder.
        holder: String,
    },
    /// The directory is not what it should be, or cannot be used.
    #[error("cannot use {} as a chunk cache: {what}", dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Settings that make no sense.
    #[error("{0}")]
    Config(String),
    /// A list of what to warm up is malformed.
    #[error("line {line} of the warm-up list: {what}")]
    WarmList {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
}

impl CacheError {
    /// Whether the bytes are other than they should be.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Corrupt { .. } => true,
            Self::Store(error) => error.is_corrupt(),
            _ => false,
        }
    }

    /// Whether it may go better later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Store(error) => error.is_transient(),
            _ => false,
        }
    }
}

impl From<BlobError> for CacheError {
    fn from(error: BlobError) -> Self {
        Self::Store(Arc::new(error))
    }
}
