//! The one contract that every place for blobs keeps: 3FS, S3, a registry, a directory, memory.
//!
//! Backends: [`local`], [`memory`], [`s3`], [`usrbio`]. Decorators, each over any store: [`retry`], [`deadline`], [`metered`]. What
//! a program uses is put together as `Retry(Deadline(Metered(backend)))`, so that each attempt has its deadline and each
//! request is counted.

pub mod deadline;
pub mod local;
pub mod memory;
pub mod metered;
pub mod retry;
pub mod s3;
pub mod usrbio;

use crate::Digest;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Immutable blobs by digest.
///
/// Methods may be called from any task, any number at a time; a future that is dropped leaves nothing half published.
/// No implementation retries or sets deadlines by itself: the decorators do, so that there is one place for each. The
/// exception is what a decorator cannot see: a backend that sends a body or a list in parts is given a
/// [`retry::Policy`] for the parts, since to begin again at the first byte is no way to move a large blob over a bad
/// network.
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
    /// it sends against `digest`, so that no backend ever holds a blob under a wrong name. Where the backend keeps an
    /// age, that of a blob that was there may start anew or not.
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

#[async_trait]
impl<T: BlobStore + ?Sized> BlobStore for Arc<T> {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        (**self).stat(digest).await
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        (**self).read_range(digest, range).await
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        (**self).put(digest, body).await
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        (**self).delete(digest).await
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        (**self).list()
    }
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

    /// The bytes `range` of it; a file is read on a thread that may block.
    ///
    /// # Errors
    /// What the system says; `UnexpectedEof` when the file is shorter than it was said to be.
    pub async fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
        match self {
            Self::Bytes(bytes) => {
                let start = usize::try_from(range.start).map_err(too_long)?;
                let end = usize::try_from(range.end).map_err(too_long)?;
                if start > end || end > bytes.len() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(bytes.slice(start..end))
            }
            Self::File { file, .. } => {
                let len = usize::try_from(range.end.saturating_sub(range.start)).map_err(too_long)?;
                let file = Arc::clone(file);
                let read = move || {
                    let mut buffer = vec![0; len];
                    file.read_exact_at(&mut buffer, range.start)?;
                    Ok(Bytes::from(buffer))
                };
                tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
            }
        }
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
    /// This machine's own file system failed: a full disk, a file that cannot be read.
    #[error("cannot {op} {what} ({place}): {source}")]
    Local {
        /// The backend.
        place: String,
        /// As a verb.
        op: &'static str,
        /// The blob's digest, or the name of another object.
        what: String,
        /// What the system says.
        source: io::Error,
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

    /// Whether the bytes are other than they should be.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        matches!(self, Self::Corrupt { .. })
    }

    /// One word for counting: `not-found`, `refused`, `unsupported`, `transient`, `corrupt`, `local`, `timed-out`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not-found",
            Self::Refused { .. } => "refused",
            Self::Unsupported { .. } => "unsupported",
            Self::Transient { .. } => "transient",
            Self::Corrupt { .. } => "corrupt",
            Self::Local { .. } => "local",
            Self::TimedOut { .. } => "timed-out",
        }
    }
}

/// A blob is shorter than what was to be read of it.
pub(crate) fn ends_early(place: &str, digest: &Digest, range: &Range<u64>, size: u64) -> BlobError {
    let how = format!("it has {size} bytes, and those from {} to {} were to be read", range.start, range.end);
    BlobError::Corrupt { place: place.to_owned(), what: digest.to_string(), how }
}

/// A body, or what became of it, has another digest than it should.
pub(crate) fn other_contents(place: &str, digest: &Digest, found: &Digest) -> BlobError {
    BlobError::Corrupt { place: place.to_owned(), what: digest.to_string(), how: format!("its contents have {found}") }
}
