//! An end to waiting: every request has a deadline, which grows with the bytes it moves.

use super::{BlobError, BlobStore, Body, Listed, Stat};
use crate::Digest;
use crate::names::{Condition, ListedName, NameStore, Named, PutOutcome};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::ops::Range;
use std::time::Duration;

/// How long a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A request that moves nothing; and between two items of a list.
    pub request: Duration,
    /// The least rate in bytes a second at which a body has to move, on top of that.
    pub rate: u64,
}

impl Default for Limits {
    /// Half a minute, and 256 KiB/s: what is slower is broken.
    fn default() -> Self {
        Self { request: Duration::from_secs(30), rate: 256 << 10 }
    }
}

impl Limits {
    /// The deadline of a request that moves `bytes`.
    #[must_use]
    pub fn of(&self, bytes: u64) -> Duration {
        self.request + Duration::from_millis(bytes.saturating_mul(1000) / self.rate.max(1))
    }
}

/// A store whose requests end in time.
#[derive(Debug)]
pub struct Deadline<B> {
    inner: B,
    limits: Limits,
    place: String,
}

impl<B> Deadline<B> {
    /// Wraps `inner`; `place` is what errors call it.
    pub const fn new(inner: B, limits: Limits, place: String) -> Self {
        Self { inner, limits, place }
    }

    async fn within<T>(
        &self,
        op: &'static str,
        what: &(dyn std::fmt::Display + Sync),
        bytes: u64,
        request: impl Future<Output = Result<T, BlobError>>,
    ) -> Result<T, BlobError> {
        let after = self.limits.of(bytes);
        match tokio::time::timeout(after, request).await {
            Ok(done) => done,
            Err(_) => Err(BlobError::TimedOut { place: self.place.clone(), op, what: what.to_string(), after }),
        }
    }

    fn items<'s, T: Send + 's>(
        &self,
        stream: BoxStream<'s, Result<T, BlobError>>,
    ) -> BoxStream<'s, Result<T, BlobError>> {
        let (place, after) = (self.place.clone(), self.limits.request);
        let next = move |mut stream: BoxStream<'s, Result<T, BlobError>>| {
            let place = place.clone();
            async move {
                match tokio::time::timeout(after, stream.next()).await {
                    Ok(item) => item.map(|item| (item, stream)),
                    Err(_) => {
                        let what = "what it has".to_owned();
                        let error = BlobError::TimedOut { place, op: "list", what, after };
                        Some((Err(error), futures::stream::empty().boxed()))
                    }
                }
            }
        };
        futures::stream::unfold(stream, next).boxed()
    }
}

#[async_trait]
impl<B: BlobStore> BlobStore for Deadline<B> {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        self.within("look at", digest, 0, self.inner.stat(digest)).await
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let bytes = range.end.saturating_sub(range.start);
        self.within("read", digest, bytes, self.inner.read_range(digest, range)).await
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.within("store", digest, body.len(), self.inner.put(digest, body)).await
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.within("delete", digest, 0, self.inner.delete(digest)).await
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        self.items(self.inner.list())
    }
}

#[async_trait]
impl<N: NameStore> NameStore for Deadline<N> {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        self.within("read", &name, 0, self.inner.get(name)).await
    }

    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        let len = bytes.len() as u64;
        self.within("store", &name, len, self.inner.put(name, bytes, condition)).await
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        self.within("delete", &name, 0, self.inner.delete(name)).await
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        self.items(self.inner.list(below))
    }
}
