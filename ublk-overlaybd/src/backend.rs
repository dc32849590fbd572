//! Where the bytes of layers come from.

#[cfg(feature = "cache")]
mod cached;
mod file;
mod gzip;
mod joined;
mod part;
#[cfg(feature = "cache")]
mod repositories;
mod zfile;

#[cfg(feature = "cache")]
pub use cached::{Cached, CachedBlobs};
pub use file::FileSource;
pub use gzip::Gzip;
pub(crate) use joined::Joined;
pub use part::Part;
#[cfg(feature = "cache")]
pub use repositories::{Repositories, RepositoryError};
pub use zfile::ZFile;

use fs3_client::Digest;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Bytes that do not change, read by position from any number of threads.
pub trait Source: fmt::Debug + Send + Sync {
    /// How many there are.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`. It may wait for a backend.
    ///
    /// # Errors
    /// Says whose fault it is; a range that ends beyond [`size`](Self::size) is the caller's, see
    /// [`ReadError::OutOfRange`].
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError>;

    /// The same without waiting for a backend: `false` if that were needed, and then what `buf` holds means nothing.
    ///
    /// # Errors
    /// As [`read_exact_at`](Self::read_exact_at).
    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError>;

    /// Where the whole of `range` lies in a local file, as it is: for those who submit reads by a ring of their own.
    fn locate(&self, range: Range<u64>) -> Option<(BorrowedFd<'_>, u64)> {
        let _ = range;
        None
    }

    /// The bytes of `range` themselves, of a source that has them in memory: nothing need be copied then.
    fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        let _ = range;
        None
    }

    /// Forgets local copies of `range`, whose bytes have proved wrong: the next read asks the backend again.
    ///
    /// `false` if there is no other copy to ask, so that reading again is no use.
    fn drop_cached(&self, range: Range<u64>) -> bool {
        let _ = range;
        false
    }
}

/// Where blobs are that are in no local file.
pub trait Blobs: fmt::Debug + Send + Sync {
    /// Blob `digest` of `size` bytes, which a configuration says to be at `repo_blob_url`, or says nothing about where it
    /// is. It need not be asked for before it is read.
    ///
    /// # Errors
    /// Whoever has it cannot be asked.
    fn open(&self, digest: &Digest, size: u64, repo_blob_url: Option<&str>) -> Result<Arc<dyn Source>, ReadError>;
}

/// Why bytes could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The backend does not answer, or refuses.
    #[error("{what}: the backend is unavailable")]
    Unavailable {
        /// Which blob.
        what: String,
        /// What it or the network said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The backend did not answer in time.
    #[error("{what}: the backend did not answer in time")]
    TimedOut {
        /// Which blob.
        what: String,
    },
    /// The bytes are wrong.
    #[error("{what}: at byte {offset}: {why}")]
    Corrupt {
        /// Which file or blob.
        what: String,
        /// Where in it.
        offset: u64,
        /// What is wrong: names the field or block.
        why: String,
    },
    /// This machine's fault.
    #[error("{what}: cannot read")]
    Local {
        /// Which file.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The caller's fault.
    #[error("{what}: bytes {start} to {end} were asked for, it has {size}")]
    OutOfRange {
        /// Which file or blob.
        what: String,
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
        /// How many there are.
        size: u64,
    },
}

impl ReadError {
    /// Whether the bytes themselves are wrong, rather than out of reach.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::Corrupt { .. })
    }
}

/// The range of a read, checked against the size.
///
/// # Errors
/// It ends beyond.
pub(crate) fn check_range(what: &impl fmt::Display, size: u64, len: usize, offset: u64) -> Result<(), ReadError> {
    let end = offset.saturating_add(len as u64);
    if end > size { Err(ReadError::OutOfRange { what: what.to_string(), start: offset, end, size }) } else { Ok(()) }
}
