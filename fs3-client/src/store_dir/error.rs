//! What can go wrong with a store that is a directory.

use crate::{BlobError, Digest, RefName};
use std::io;
use std::path::{Path, PathBuf};

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The path is not a store: the caller named the wrong one, or has not made it yet.
    #[error("{} is not a store: {missing} is missing", path.display())]
    NotAStore {
        /// What was opened; for a store that is no directory, its address.
        path: PathBuf,
        /// The first thing that a store has and it lacks.
        missing: &'static str,
    },
    /// The store does not have this blob.
    #[error("blob {digest} is not in the store ({} does not exist)", path.display())]
    Missing {
        /// Which blob.
        digest: Digest,
        /// Where it would be; for a store that is no directory, the object's address.
        path: PathBuf,
    },
    /// The store has the blob, but with other contents than its name promises.
    #[error("blob {digest} is corrupt: {what} ({})", path.display())]
    Corrupt {
        /// Which blob.
        digest: Digest,
        /// Where it is; for a store that is no directory, the object's address.
        path: PathBuf,
        /// How one can tell.
        what: String,
    },
    /// The caller staged other bytes than it said.
    #[error("blob {digest} was not published: {written} bytes were written, {expected} announced")]
    ShortStage {
        /// Which blob it was to become.
        digest: Digest,
        /// Length of the staged file in bytes.
        written: u64,
        /// Length that was promised in bytes.
        expected: u64,
    },
    /// No such ref.
    #[error("{name} is not in the store {store}")]
    NoSuchRef {
        /// What was asked for.
        name: RefName,
        /// The store, as one names it on a command line.
        store: String,
    },
    /// A ref's file is not a descriptor.
    #[error("{} is not a ref: {source}", path.display())]
    BadRef {
        /// The ref's file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A record's key is not 64 lower-case hex digits.
    #[error("`{key}` is not a record key (expected 64 lower-case hex digits)")]
    BadKey {
        /// What was given.
        key: String,
    },
    /// A small file, or a blob that is read whole, is larger than any such thing may be.
    #[error("{} has {size} bytes, more than the {limit} that are read at once", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// What a gc has left cannot be understood, or does not end.
    #[error("{name} in the store: {what}")]
    Collector {
        /// The object.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// The disk or the quota is full.
    #[error("no space left to {op} {}", path.display())]
    NoSpace {
        /// The file that did not fit.
        path: PathBuf,
        /// What was being done, as a verb.
        op: &'static str,
        /// `ENOSPC` or `EDQUOT`.
        source: io::Error,
    },
    /// A backend that is no directory failed.
    #[error(transparent)]
    Blob(Box<BlobError>),
    /// Others changed the ref each time it was to be replaced.
    #[error("{name} was not written: others changed it each of {attempts} times")]
    Contended {
        /// The ref.
        name: RefName,
        /// How often it was tried.
        attempts: u32,
    },
    /// A lease could not be kept, so what depends on it may be gone.
    #[error("the lease on {store} was lost ({why}): what this run relied on may have been removed meanwhile")]
    LeaseLost {
        /// The store.
        store: String,
        /// How.
        why: String,
    },
    /// There is no directory for local copies.
    #[error("no local directory for {store}: {why}")]
    NoLocalDirectory {
        /// The store.
        store: String,
        /// What is missing.
        why: &'static str,
    },
    /// The operating system refused.
    #[error("cannot {op} {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done, as a verb.
        op: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

impl StoreError {
    /// An I/O error of `op` (a verb: "write") on `path`; a full disk is told apart as [`StoreError::NoSpace`].
    ///
    /// For callers that write into a staged file themselves.
    #[must_use]
    pub fn io(op: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { path, op, source },
            _ => Self::Io { path, op, source },
        }
    }

    /// Whether the store holds bytes that it should not (as opposed to lacking some, or the system failing).
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::BadRef { .. } => true,
            Self::Blob(error) => error.is_corrupt(),
            _ => false,
        }
    }

    /// The same as a backend tells it.
    #[must_use]
    pub(crate) fn into_blob_error(self, place: &str, op: &'static str, what: &str) -> BlobError {
        let (place, what) = (place.to_owned(), what.to_owned());
        match self {
            Self::Blob(error) => *error,
            Self::Missing { .. } => BlobError::NotFound { what, place },
            Self::Io { source, op, .. } | Self::NoSpace { source, op, .. } => {
                BlobError::Local { place, op, what, source }
            }
            error @ (Self::Corrupt { .. } | Self::ShortStage { .. } | Self::TooLarge { .. }) => {
                BlobError::Corrupt { place, what, how: error.to_string() }
            }
            error => BlobError::Refused { place, op, what, source: Box::new(error) },
        }
    }
}

impl From<BlobError> for StoreError {
    fn from(error: BlobError) -> Self {
        Self::Blob(Box::new(error))
    }
}
