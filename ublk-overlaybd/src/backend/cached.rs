//! A blob through the node's chunk cache.

use super::repositories::Repositories;
use super::{Blobs, ReadError, Source};
use fs3_client::Digest;
use fs3_client::cache::{CacheError, CachedBlob, ChunkCache, TryRead};
use std::ops::Range;
use std::sync::Arc;

/// A blob of a store, read through the chunk cache.
#[derive(Debug)]
pub struct Cached {
    blob: CachedBlob,
    /// The cache ends with the last that holds it.
    _cache: Option<ChunkCache>,
}

impl Cached {
    /// Reads `blob`, whose size is that of its descriptor, as long as its cache is open.
    #[must_use]
    pub fn new(blob: CachedBlob) -> Self {
        Self { blob, _cache: None }
    }

    /// The blob.
    #[must_use]
    pub fn blob(&self) -> &CachedBlob {
        &self.blob
    }

    fn error(&self, error: CacheError) -> ReadError {
        read_error(self.blob.digest(), error)
    }
}

fn read_error(digest: Digest, error: CacheError) -> ReadError {
    let what = digest.to_string();
    match error {
        CacheError::OutOfRange { size, start, end, .. } => ReadError::OutOfRange { what, start, end, size },
        CacheError::TimedOut { .. } => ReadError::TimedOut { what },
        CacheError::Corrupt { start, .. } => ReadError::Corrupt { what, offset: start, why: error.to_string() },
        error if error.is_corrupt() => ReadError::Corrupt { what, offset: 0, why: error.to_string() },
        error => ReadError::Unavailable { what, source: Box::new(error) },
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

/// Blobs through a chunk cache, which asks repositories and a store for what it does not have.
#[derive(Debug, Clone)]
pub struct CachedBlobs {
    cache: ChunkCache,
    repositories: Arc<Repositories>,
}

impl CachedBlobs {
    /// Of `cache`, which was opened over `repositories`.
    #[must_use]
    pub fn new(cache: ChunkCache, repositories: Arc<Repositories>) -> Self {
        Self { cache, repositories }
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &ChunkCache {
        &self.cache
    }
}

impl Blobs for CachedBlobs {
    fn open(&self, digest: &Digest, size: u64, repo_blob_url: Option<&str>) -> Result<Arc<dyn Source>, ReadError> {
        if let Some(url) = repo_blob_url {
            self.repositories
                .add(url, digest)
                .map_err(|error| ReadError::Unavailable { what: digest.to_string(), source: Box::new(error) })?;
        }
        let blob = self.cache.blob(*digest, size, None).map_err(|error| read_error(*digest, error))?;
        Ok(Arc::new(Cached { blob, _cache: Some(self.cache.clone()) }))
    }
}
