//! One repository as a [`BlobStore`].

use super::repository::Repository;
use crate::blob_store::ends_early;
use crate::{BlobError, BlobStore, Body, Digest, Listed, Stat};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream, StreamExt as _};
use std::ops::Range;
use std::sync::Arc;

/// One repository of a registry as a store of blobs.
///
/// A registry lists no blobs, keeps no times, and may remove what no manifest refers to.
#[derive(Debug, Clone)]
pub struct RegistryStore {
    repository: Repository,
}

impl RegistryStore {
    /// The blobs of `repository`.
    #[must_use]
    pub const fn new(repository: Repository) -> Self {
        Self { repository }
    }

    fn name(&self) -> String {
        self.repository.place().to_string()
    }
}

#[async_trait]
impl BlobStore for RegistryStore {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let size = self.repository.blob_size(digest).await?;
        let size = size.ok_or_else(|| BlobError::NotFound { what: digest.to_string(), place: self.name() })?;
        Ok(Stat { size, modified: None })
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if *digest == Digest::of(b"") {
            // Some registries break the connection when a part of nothing is asked for.
            let size = self.stat(digest).await?.size;
            return Err(ends_early(&self.name(), digest, &range, size));
        }
        let mut body = self.repository.open(digest, range, None).await?;
        let mut bytes = BytesMut::new();
        while let Some(piece) = body.next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.repository.put_blob(digest, &body, Arc::new(|_| ())).await.map(drop)
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.repository.delete(digest).await
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        let error = BlobError::Unsupported { place: self.name(), op: "list its blobs" };
        stream::once(async { Err(error) }).boxed()
    }
}
