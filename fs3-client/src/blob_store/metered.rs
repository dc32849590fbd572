//! Counts what is asked of a store, and what came of it.

use super::{BlobError, BlobStore, Body, Listed, Stat};
use crate::Digest;
use crate::metrics::Times;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What was asked of a store so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meter {
    /// Requests that ask for length and age.
    pub stats: Requests,
    /// Requests for a range of bytes.
    pub reads: Requests,
    /// Requests that bring a blob.
    pub puts: Requests,
    /// Requests that remove one.
    pub deletes: Requests,
    /// Lists that were begun.
    pub lists: Requests,
    /// Failures by their kind, as [`BlobError::kind`] calls them.
    pub failures: BTreeMap<&'static str, u64>,
}

/// One kind of request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// How many ended, the failed ones included.
    pub count: u64,
    /// How many failed.
    pub failed: u64,
    /// Bytes of blobs that moved in those that did not fail; for lists, the number of items.
    pub bytes: u64,
    /// Time they took together.
    pub time: Duration,
    /// How long each of them took.
    pub times: Times,
}

/// A store that counts.
#[derive(Debug)]
pub struct Metered<B> {
    inner: B,
    meter: Arc<Mutex<Meter>>,
}

/// Reads the counts of a [`Metered`] store, wherever that is by now.
#[derive(Debug, Clone, Default)]
pub struct MeterReader(Arc<Mutex<Meter>>);

impl MeterReader {
    /// The counts at this moment.
    #[must_use]
    pub fn snapshot(&self) -> Meter {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<B> Metered<B> {
    /// Wraps `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, meter: Arc::default() }
    }

    /// Where the counts can be read.
    #[must_use]
    pub fn reader(&self) -> MeterReader {
        MeterReader(Arc::clone(&self.meter))
    }

    fn note<T>(
        &self,
        which: fn(&mut Meter) -> &mut Requests,
        began: Instant,
        bytes: u64,
        outcome: &Result<T, BlobError>,
    ) {
        let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        let requests = which(&mut meter);
        requests.count += 1;
        let took = began.elapsed();
        requests.time += took;
        requests.times.note(took);
        match outcome {
            Ok(_) => requests.bytes += bytes,
            Err(error) => {
                requests.failed += 1;
                *meter.failures.entry(error.kind()).or_default() += 1;
            }
        }
    }
}

#[async_trait]
impl<B: BlobStore> BlobStore for Metered<B> {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let began = Instant::now();
        let outcome = self.inner.stat(digest).await;
        self.note(|meter| &mut meter.stats, began, 0, &outcome);
        outcome
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let (began, bytes) = (Instant::now(), range.end.saturating_sub(range.start));
        let outcome = self.inner.read_range(digest, range).await;
        self.note(|meter| &mut meter.reads, began, bytes, &outcome);
        outcome
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        let (began, bytes) = (Instant::now(), body.len());
        let outcome = self.inner.put(digest, body).await;
        self.note(|meter| &mut meter.puts, began, bytes, &outcome);
        outcome
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        let began = Instant::now();
        let outcome = self.inner.delete(digest).await;
        self.note(|meter| &mut meter.deletes, began, 0, &outcome);
        outcome
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner).lists.count += 1;
        let count = |item: Result<Listed, BlobError>| {
            let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
            match &item {
                Ok(_) => meter.lists.bytes += 1,
                Err(error) => {
                    meter.lists.failed += 1;
                    *meter.failures.entry(error.kind()).or_default() += 1;
                }
            }
            item
        };
        self.inner.list().map(count).boxed()
    }
}
