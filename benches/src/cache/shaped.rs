//! A store with a latency and a bandwidth, and blobs of any length that take no memory.

use async_trait::async_trait;
use bytes::Bytes;
use fs3_client::blob_store::{Body, Listed, Stat};
use fs3_client::{BlobError, BlobStore, Digest};
use futures::stream::BoxStream;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The bytes of all blobs: this, again and again. A prime length, so that no two chunks are alike.
const PATTERN: usize = (8 << 20) - 15;

/// A store whose blobs are all there, with the same bytes.
#[derive(Debug)]
pub(crate) struct Shaped {
    pattern: Bytes,
    latency: Duration,
    /// Bytes a second of all requests together; 0 for no limit.
    bandwidth: u64,
    /// When the line is free again.
    free: Mutex<Instant>,
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// What blobs begin with: a pattern, and the largest request beyond its end.
fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(2 * PATTERN + 8);
    while bytes.len() < PATTERN {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(PATTERN);
    bytes.extend_from_within(..);
    bytes
}

impl Shaped {
    pub(crate) fn new(latency: Duration, bandwidth: u64) -> Self {
        Self {
            pattern: pattern().into(),
            latency,
            bandwidth,
            free: Mutex::new(Instant::now()),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// The bytes of any blob in `range`, which is no longer than the pattern.
    pub(crate) fn contents(&self, range: &Range<u64>) -> Bytes {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let start = usize::try_from(range.start % PATTERN as u64).unwrap_or(usize::MAX);
        self.pattern.slice(start..start + len)
    }

    /// Requests and bytes so far.
    pub(crate) fn asked(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// When a request that begins now has its last byte: behind those that are on the line.
    fn done(&self, len: u64) -> Instant {
        let first = Instant::now() + self.latency;
        if self.bandwidth == 0 {
            return first;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = first.max(*free) + Duration::from_nanos(len * 1_000_000_000 / self.bandwidth);
        *free
    }
}

fn refused(digest: &Digest) -> BlobError {
    BlobError::NotFound { what: digest.to_string(), place: "a store to read from".to_owned() }
}

#[async_trait]
impl BlobStore for Shaped {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        Err(refused(digest))
    }

    async fn read_range(&self, _: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let len = range.end - range.start;
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(len, Ordering::Relaxed);
        let done = self.done(len);
        if done > Instant::now() {
            tokio::time::sleep_until(done.into()).await;
        }
        Ok(self.contents(&range))
    }

    async fn put(&self, digest: &Digest, _: Body) -> Result<(), BlobError> {
        Err(refused(digest))
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        Err(refused(digest))
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        Box::pin(futures::stream::empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_shared_and_the_bytes_are_those_of_their_place() {
        let store = Shaped::new(Duration::from_millis(1), 1 << 30);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let began = Instant::now();
        let digest = Digest::of(b"x");
        let read = |at: u64| store.read_range(&digest, at..at + (4 << 20));
        let (first, second) = runtime.block_on(async { tokio::join!(read(5), read(5 + PATTERN as u64)) });
        assert!(first.unwrap() == second.unwrap());
        // Eight mebibytes on a line of a gibibyte a second.
        assert!(began.elapsed() >= Duration::from_micros(8_800), "{:?}", began.elapsed());
        assert_eq!(store.asked(), (2, 8 << 20));
        assert!(store.contents(&(0..4096)) != store.contents(&(4096..8192)));
    }
}
