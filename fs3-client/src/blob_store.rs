//! The one contract that every place for blobs keeps: 3FS, S3, a registry, a directory, memory.

use crate::Digest;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Immutable blobs by digest.
///
/// Methods may be called from any task, any number at a time; a future that is dropped leaves nothing half published.
/// No implementation retries or sets deadlines by itself: the decorators do, so that there is one place for each.
#[async_trait]
pub trait BlobStore: fmt::Debug + Send + Sync {
    /// Length and age of a blob.
    ///
    /// # Errors
    /// [`BlobError::NotFound`], or any other.
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError>;

    /// The bytes `range` of a blob, all of them: fewer, or a range that ends past the blob, are errors and never zeros.
    /// Nothing is checked against the digest, since a part cannot be; see the chunk table for that. An empty range is
    /// empty without a request.
    ///
    /// # Errors
    /// [`BlobError::NotFound`]; [`BlobError::Corrupt`] when the blob ends before the range does; or any other.
    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError>;

    /// Makes `body` the blob `digest`, durable when this returns; harmless when the blob is there already. Checks what
    /// it sends against `digest`, so that no backend ever holds a blob under a wrong name.
    ///
    /// # Errors
    /// [`BlobError::Corrupt`] when `body` has another digest, or any other; readers then see no blob, or the whole.
    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError>;

    /// Removes a blob. One that is not there is removed already.
    ///
    /// # Errors
    /// [`BlobError::Unsupported`] where the backend has no such thing, or any other.
    async fn delete(&self, digest: &Digest) -> Result<(), BlobError>;

    /// All blobs, in no particular order. A blob that is put or deleted meanwhile may be in it or not.
    ///
    /// # Errors
    /// In the stream: [`BlobError::Unsupported`] where the backend has no such thing, or any other.
    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>>;
}

/// What a backend says of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Length in bytes.
    pub size: u64,
    /// When it was put or last touched, where the backend keeps such a time.
    pub modified: Option<SystemTime>,
}

/// A blob in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub digest: Digest,
    /// Its length and age.
    pub stat: Stat,
}

/// The contents of a blob to be put. It can be read as often as a retry needs.
#[derive(Debug, Clone)]
pub enum Body {
    /// In memory.
    Bytes(Bytes),
    /// A file from its start to `len`, read by position.
    File {
        /// The file.
        file: Arc<File>,
        /// Its length in bytes.
        len: u64,
    },
}

impl Body {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The cause as the layer below tells it.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a backend did not do what it was asked. The variants say whose fault it is and so what to do.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// There is no such blob: the caller's (or whoever deleted it).
    #[error("{what} is not in {place}")]
    NotFound {
        /// The blob's digest, or the name of another object.
        what: String,
        /// The backend.
        place: String,
    },
    /// The backend will not, whoever tries again: no permission, no such bucket, a name it does not take.
    #[error("{place} refuses to {op} {what}: {source}")]
    Refused {
        /// The backend.
        place: String,
        /// As a verb.
        op: &'static str,
        /// The blob's digest, or the name of another object.
        what: String,
        /// What it said.
        source: Cause,
    },
    /// The backend has no such operation.
    #[error("{place} cannot {op}")]
    Unsupported {
        /// The backend.
        place: String,
        /// As a verb and its object.
        op: &'static str,
    },
    /// It may go better later: a connection that broke, 429, 5xx.
    #[error("{place} failed to {op} {what}: {source}")]
    Transient {
        /// The backend.
        place: String,
        /// As a verb.
        op: &'static str,
        /// The blob's digest, or the name of another object.
        what: String,
        /// How long the backend asks to wait.
        retry_after: Option<Duration>,
        /// What happened.
        source: Cause,
    },
    /// Bytes are not what they should be.
    #[error("{what} in {place} is corrupt: {how}")]
    Corrupt {
        /// The backend.
        place: String,
        /// The blob's digest, or the name of another object.
        what: String,
        /// How one can tell.
        how: String,
    },
    /// No answer within the deadline.
    #[error("{place} did not {op} {what} within {after:?}")]
    TimedOut {
        /// The backend.
        place: String,
        /// As a verb.
        op: &'static str,
        /// The blob's digest, or the name of another object.
        what: String,
        /// The deadline.
        after: Duration,
    },
}

impl BlobError {
    /// Whether to try again is worth it.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Transient { .. } | Self::TimedOut { .. })
    }
}
