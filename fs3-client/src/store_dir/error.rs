//! What can go wrong with a store that is a directory.

use crate::{Digest, RefName};
use std::io;
use std::path::{Path, PathBuf};

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The path is not a store: the caller named the wrong one, or has not made it yet.
    #[error("{} is not a store: {missing} is missing", path.display())]
    NotAStore {
        /// What was opened.
        path: PathBuf,
        /// The first thing that a store has and it lacks.
        missing: &'static str,
    },
    /// The store does not have this blob.
    #[error("blob {digest} is not in the store ({} does not exist)", path.display())]
    Missing {
        /// Which blob.
        digest: Digest,
        /// Where it would be.
        path: PathBuf,
    },
    /// The store has the blob, but with other contents than its name promises.
    #[error("blob {digest} is corrupt: {what} ({})", path.display())]
    Corrupt {
        /// Which blob.
        digest: Digest,
        /// Where it is.
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
    #[error("{name} is not in the store {}", store.display())]
    NoSuchRef {
        /// What was asked for.
        name: RefName,
        /// The store's directory.
        store: PathBuf,
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
        matches!(self, Self::Corrupt { .. } | Self::BadRef { .. })
    }
}
