//! A store in memory that does as it is told: well, badly, slowly or not at all.

use crate::blob_store::{BlobError, BlobStore, Body, Listed, Stat};
use crate::{Digest, blob_store};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Well,
    /// After a while.
    Slow(Duration),
    /// Never.
    Hang,
    /// Fewer bytes than asked for, as no store may.
    Short,
    /// The blob ends early, it says.
    EndsEarly,
    /// A byte is another.
    Corrupt,
    NotFound,
    /// No connection.
    Refuse,
    /// One request in this many goes well.
    Flap(u64),
    /// All of the blob, whatever part was asked for.
    Whole,
    /// As many bytes as asked for, from elsewhere.
    Shifted,
    /// The first of these many go badly: short.
    ShortFor(u64),
}

#[derive(Debug)]
pub(super) struct Backend {
    blobs: Mutex<HashMap<Digest, Bytes>>,
    mode: Mutex<Mode>,
    requests: Mutex<Vec<(Digest, Range<u64>)>>,
    count: AtomicU64,
    /// Bytes that are wrong whenever they are read, in any blob.
    pub(super) rotten: Mutex<Option<u64>>,
}

impl Backend {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            blobs: Mutex::default(),
            mode: Mutex::new(Mode::Well),
            requests: Mutex::default(),
            count: AtomicU64::new(0),
            rotten: Mutex::new(None),
        })
    }

    pub(super) fn add(&self, bytes: Vec<u8>) -> Digest {
        let digest = Digest::of(&bytes);
        self.blobs.lock().unwrap().insert(digest, bytes.into());
        digest
    }

    pub(super) fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
        self.count.store(0, Ordering::Relaxed);
    }

    /// Ranges that were asked for since the last time.
    pub(super) fn asked(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut *self.requests.lock().unwrap()).into_iter().map(|(_, range)| range).collect()
    }

    fn transient() -> BlobError {
        BlobError::Transient {
            place: "the test's store".to_owned(),
            op: "read",
            what: "a blob".to_owned(),
            retry_after: None,
            source: "no connection, on purpose".into(),
        }
    }
}

#[async_trait]
impl BlobStore for Backend {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        panic!("the cache asked for the length of {digest}");
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let mode = *self.mode.lock().unwrap();
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        self.requests.lock().unwrap().push((*digest, range.clone()));
        let missing = || BlobError::NotFound { what: digest.to_string(), place: "the test's store".to_owned() };
        let blob = self.blobs.lock().unwrap().get(digest).cloned().ok_or_else(missing)?;
        let at = |byte: u64| usize::try_from(byte).unwrap();
        if range.end > blob.len() as u64 {
            return Err(blob_store::ends_early("the test's store", digest, &range, blob.len() as u64));
        }
        let mut bytes = blob.slice(at(range.start)..at(range.end));
        if let Some(rotten) = *self.rotten.lock().unwrap()
            && range.contains(&rotten)
        {
            let mut wrong = bytes.to_vec();
            wrong[at(rotten - range.start)] ^= 0xff;
            bytes = wrong.into();
        }
        let half = bytes.slice(..bytes.len() / 2);
        match mode {
            Mode::Well => Ok(bytes),
            Mode::Slow(time) => {
                tokio::time::sleep(time).await;
                Ok(bytes)
            }
            Mode::Hang => std::future::pending().await,
            Mode::Short => Ok(half),
            Mode::ShortFor(first) => Ok(if number < first { half } else { bytes }),
            Mode::EndsEarly => Err(blob_store::ends_early("the test's store", digest, &range, range.start + 1)),
            Mode::Corrupt => {
                let mut wrong = bytes.to_vec();
                let at = at(number) % wrong.len();
                wrong[at] ^= 0x20;
                Ok(wrong.into())
            }
            Mode::Whole => Ok(blob),
            Mode::Shifted => Ok(blob.slice(..bytes.len())),
            Mode::NotFound => Err(missing()),
            Mode::Flap(every) if number % every == every - 1 => Ok(bytes),
            Mode::Flap(_) => Err(Self::transient()),
            Mode::Refuse => Err(Self::transient()),
        }
    }

    async fn put(&self, _: &Digest, _: Body) -> Result<(), BlobError> {
        panic!("the cache does not put");
    }

    async fn delete(&self, _: &Digest) -> Result<(), BlobError> {
        panic!("the cache does not delete");
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        panic!("the cache does not list");
    }
}
