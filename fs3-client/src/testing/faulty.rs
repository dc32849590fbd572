//! A store that fails on purpose, the same way each time for the same seed.

use crate::Digest;
use crate::blob_store::{BlobError, BlobStore, Body, Listed, Stat};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How often what happens, in requests of a thousand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// The request fails before it reaches the store.
    pub transient: u64,
    /// The store does what was asked, and the answer is lost.
    pub lost_answer: u64,
    /// A read ends early, which every store has to tell as an error.
    pub short: u64,
    /// A read has a wrong byte, which only digests can tell.
    pub wrong: u64,
    /// Nothing happens for [`Rates::stall`], then all as it should.
    pub stalled: u64,
    /// How long that is.
    pub stall: Duration,
}

/// A store that fails on purpose.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: B,
    rates: Rates,
    seed: u64,
    requests: AtomicU64,
    faults: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Transient,
    LostAnswer,
    Short,
    Wrong,
    Stalled,
    Well,
}

impl<B> Faulty<B> {
    /// Wraps `inner`.
    pub const fn new(inner: B, rates: Rates, seed: u64) -> Self {
        Self { inner, rates, seed, requests: AtomicU64::new(0), faults: AtomicU64::new(0) }
    }

    /// How many requests did not go well so far.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    fn fate(&self) -> (Fate, u64) {
        let mut random = self.seed ^ self.requests.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..2 {
            random ^= random >> 30;
            random = random.wrapping_mul(0xbf58_476d_1ce4_e5b9);
            random ^= random >> 27;
        }
        let mut left = random % 1000;
        let rates = self.rates;
        let table = [
            (Fate::Transient, rates.transient),
            (Fate::LostAnswer, rates.lost_answer),
            (Fate::Short, rates.short),
            (Fate::Wrong, rates.wrong),
            (Fate::Stalled, rates.stalled),
        ];
        for (fate, rate) in table {
            if left < rate {
                self.faults.fetch_add(1, Ordering::Relaxed);
                return (fate, random >> 10);
            }
            left -= rate;
        }
        (Fate::Well, random)
    }

    async fn with<T>(
        &self,
        op: &'static str,
        digest: &Digest,
        request: impl Future<Output = Result<T, BlobError>>,
    ) -> Result<T, BlobError> {
        let broken = || BlobError::Transient {
            place: "a faulty store".to_owned(),
            op,
            what: digest.to_string(),
            retry_after: None,
            source: "it fails on purpose".into(),
        };
        match self.fate().0 {
            Fate::Transient => Err(broken()),
            Fate::LostAnswer => request.await.and_then(|_| Err(broken())),
            Fate::Stalled => {
                tokio::time::sleep(self.rates.stall).await;
                request.await
            }
            _ => request.await,
        }
    }
}

#[async_trait]
impl<B: BlobStore> BlobStore for Faulty<B> {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        self.with("look at", digest, self.inner.stat(digest)).await
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let bytes = self.with("read", digest, self.inner.read_range(digest, range.clone())).await?;
        match self.fate() {
            (Fate::Short, _) => Err(BlobError::Transient {
                place: "a faulty store".to_owned(),
                op: "read",
                what: digest.to_string(),
                retry_after: None,
                source: "the answer ends early, on purpose".into(),
            }),
            (Fate::Wrong, random) if !bytes.is_empty() => {
                let mut wrong = bytes.to_vec();
                let at = usize::try_from(random).unwrap_or(0) % wrong.len();
                wrong[at] ^= 0x55;
                Ok(wrong.into())
            }
            _ => Ok(bytes),
        }
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.with("store", digest, self.inner.put(digest, body)).await
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.with("delete", digest, self.inner.delete(digest)).await
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        if self.fate().0 == Fate::Transient {
            let error = BlobError::Transient {
                place: "a faulty store".to_owned(),
                op: "list",
                what: "its blobs".to_owned(),
                retry_after: None,
                source: "it fails on purpose".into(),
            };
            return futures::stream::once(async { Err(error) }).boxed();
        }
        self.inner.list()
    }
}
