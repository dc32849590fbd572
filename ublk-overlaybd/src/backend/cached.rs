//! A blob through the node's chunk cache.

use super::{ReadError, Source};
use fs3_client::cache::{CacheError, CachedBlob, TryRead};
use std::ops::Range;

/// A blob of a store, read through the chunk cache.
#[derive(Debug)]
pub struct Cached {
    blob: CachedBlob,
}

impl Cached {
    /// Reads `blob`, whose size is that of its descriptor.
    #[must_use]
    pub fn new(blob: CachedBlob) -> Self {
        Self { blob }
    }

    /// The blob.
    #[must_use]
    pub fn blob(&self) -> &CachedBlob {
        &self.blob
    }

    fn error(&self, error: CacheError) -> ReadError {
        let what = self.blob.digest().to_string();
        match error {
            CacheError::OutOfRange { size, start, end, .. } => ReadError::OutOfRange { what, start, end, size },
            CacheError::TimedOut { .. } => ReadError::TimedOut { what },
            CacheError::Corrupt { start, .. } => ReadError::Corrupt { what, offset: start, why: error.to_string() },
            error if error.is_corrupt() => ReadError::Corrupt { what, offset: 0, why: error.to_string() },
            error => ReadError::Unavailable { what, source: Box::new(error) },
        }
    }
}

impl Source for Cached {
    fn size(&self) -> u64 {
        self.blob.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.blob.read_at_blocking(offset, buf).map_err(|error| self.error(error))
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        let read = self.blob.try_read_at(offset, buf).map_err(|error| self.error(error))?;
        Ok(read == TryRead::Done)
    }

    fn drop_cached(&self, range: Range<u64>) -> bool {
        self.blob.drop_range(range);
        // There is always the store to ask.
        true
    }
}
