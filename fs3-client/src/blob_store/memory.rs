//! Blobs in memory, for tests.

use super::{BlobError, BlobStore, Body, Listed, Stat};
use crate::Digest;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

const PLACE: &str = "memory";

type Held = BTreeMap<Digest, (Bytes, SystemTime)>;

/// Blobs in memory.
#[derive(Debug, Default)]
pub struct MemoryBlobs {
    blobs: Mutex<Held>,
}

impl MemoryBlobs {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, digest: &Digest) -> Result<(Bytes, SystemTime), BlobError> {
        let missing = || BlobError::NotFound { what: digest.to_string(), place: PLACE.to_owned() };
        self.held().get(digest).cloned().ok_or_else(missing)
    }
}

#[async_trait]
impl BlobStore for MemoryBlobs {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let (bytes, modified) = self.get(digest)?;
        Ok(Stat { size: bytes.len() as u64, modified: Some(modified) })
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let (bytes, _) = self.get(digest)?;
        match (usize::try_from(range.start), usize::try_from(range.end)) {
            (Ok(start), Ok(end)) if end <= bytes.len() => Ok(bytes.slice(start..end)),
            _ => Err(super::ends_early(PLACE, digest, &range, bytes.len() as u64)),
        }
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        let local = |source| BlobError::Local { place: PLACE.to_owned(), op: "read", what: digest.to_string(), source };
        let bytes = body.read(0..body.len()).await.map_err(local)?;
        let found = Digest::of(&bytes);
        if found != *digest {
            return Err(super::other_contents(PLACE, digest, &found));
        }
        self.held().insert(*digest, (bytes, SystemTime::now()));
        Ok(())
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.held().remove(digest);
        Ok(())
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        let listed = |(digest, (bytes, modified)): (&Digest, &(Bytes, SystemTime))| {
            Ok(Listed { digest: *digest, stat: Stat { size: bytes.len() as u64, modified: Some(*modified) } })
        };
        let all: Vec<_> = self.held().iter().map(listed).collect();
        futures::stream::iter(all).boxed()
    }
}
