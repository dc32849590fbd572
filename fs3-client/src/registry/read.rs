//! A blob as a stream for blocking code.
//!
//! A task on the runtime fetches, at most a few pieces ahead of the reader, and goes on where a connection broke. Of a
//! large blob it fetches several ranges at a time where that is asked for: memory is bounded by [`PART`] times
//! [`super::Options::ranges`] and a few pieces on their way. Nothing is hashed here: whoever reads does that.

use super::Options;
use super::repository::Repository;
use crate::blob_store::retry::Policy;
use crate::{BlobError, Digest};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream;
use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Bytes of one range.
const PART: u64 = 4 << 20;
/// Blobs of fewer bytes come through one connection.
const LARGE: u64 = 4 * PART;
/// Pieces that may wait for the reader, and most bytes of one that is cut from a range.
const WAITING: usize = 8;
const PIECE: usize = 128 << 10;
/// So many bytes between two failures make the second one the first again.
const PROGRESS: u64 = 64 << 10;

/// A blob in one or several repositories, which can be read any number of times. Cheap to clone.
#[derive(Clone)]
pub struct Remote {
    runtime: Arc<Runtime>,
    fetch: Arc<Fetch>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({} of {} bytes in {})", self.fetch.digest, self.fetch.size, self.place())
    }
}

/// The same blob in the same place.
impl PartialEq for Remote {
    fn eq(&self, other: &Self) -> bool {
        (self.fetch.digest, self.fetch.size, self.place()) == (other.fetch.digest, other.fetch.size, other.place())
    }
}

impl Eq for Remote {}

impl Remote {
    /// The blob `digest` of `size` bytes in `repositories`, of which there is at least one, to be tried in their order.
    #[must_use]
    pub fn new(
        runtime: Arc<Runtime>,
        repositories: Arc<[Repository]>,
        digest: Digest,
        size: u64,
        options: &Options,
    ) -> Self {
        let (retry, ranges) = (options.retry, options.ranges.max(1));
        let (current, whole) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { runtime, fetch: Arc::new(Fetch { repositories, digest, size, retry, ranges, current, whole }) }
    }

    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.fetch.digest
    }

    /// Its length in bytes, by its descriptor.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.fetch.size
    }

    /// The first place it is in, for messages.
    #[must_use]
    pub fn place(&self) -> String {
        self.fetch.repositories.first().map(|repository| repository.place().to_string()).unwrap_or_default()
    }

    /// Begins to fetch it. To be read outside of any runtime.
    #[must_use]
    pub fn open(&self) -> BlobReader {
        let (sender, receiver) = mpsc::channel(WAITING);
        let fetch = Arc::clone(&self.fetch);
        let task = self.runtime.spawn(async move {
            if let Err(error) = fetch.all(&sender).await {
                let _ = sender.send(Err(error)).await;
            }
        });
        let left = self.fetch.size;
        BlobReader {
            receiver,
            piece: Bytes::new(),
            left,
            task: task.abort_handle(),
            runtime: Arc::clone(&self.runtime),
        }
    }
}

/// All bytes of a blob in their order, or an error; never fewer. The errors are [`BlobError`]s inside [`io::Error`]s.
pub struct BlobReader {
    receiver: mpsc::Receiver<Result<Bytes, BlobError>>,
    piece: Bytes,
    left: u64,
    task: AbortHandle,
    /// What the task runs on.
    runtime: Arc<Runtime>,
}

impl fmt::Debug for BlobReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlobReader({} bytes to come, on {:?})", self.left, self.runtime.handle())
    }
}

impl Read for BlobReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && self.left > 0 {
            match self.receiver.blocking_recv() {
                Some(Ok(piece)) => self.piece = piece,
                Some(Err(error)) => return Err(io::Error::other(error)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let len = buf.len().min(self.piece.len());
        buf[..len].copy_from_slice(&self.piece.split_to(len));
        self.left -= len as u64;
        Ok(len)
    }
}

impl Drop for BlobReader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where to fetch a blob, and what was learnt of these places meanwhile.
struct Fetch {
    repositories: Arc<[Repository]>,
    digest: Digest,
    size: u64,
    retry: Policy,
    ranges: usize,
    /// Which of the repositories is asked now.
    current: AtomicUsize,
    /// Whether it sends the whole when a range is asked for.
    whole: AtomicBool,
}

/// Where bytes go.
enum Out<'o> {
    Reader(&'o mpsc::Sender<Result<Bytes, BlobError>>),
    Memory(&'o mut BytesMut),
}

/// Nobody reads any more.
struct Gone;

impl Out<'_> {
    async fn push(&mut self, bytes: Bytes) -> Result<(), Gone> {
        match self {
            Self::Reader(sender) => sender.send(Ok(bytes)).await.map_err(|_| Gone),
            Self::Memory(memory) => {
                memory.extend_from_slice(&bytes);
                Ok(())
            }
        }
    }
}

impl Fetch {
    /// Sends all of the blob to the reader, in order.
    async fn all(self: &Arc<Self>, reader: &mpsc::Sender<Result<Bytes, BlobError>>) -> Result<(), BlobError> {
        if self.ranges == 1 || self.size < LARGE {
            return self.range(0..self.size, Out::Reader(reader)).await;
        }
        // The first part shows whether the registry has ranges at all.
        self.range(0..PART, Out::Reader(reader)).await?;
        if self.whole.load(Ordering::Relaxed) {
            return self.range(PART..self.size, Out::Reader(reader)).await;
        }
        let parts = (1..self.size.div_ceil(PART)).map(|part| part * PART..((part + 1) * PART).min(self.size));
        // Tasks of their own, which go on while the reader is slow. One whose reader is gone ends with its part.
        let parts = parts.map(|part| tokio::spawn(Arc::clone(self).part(part)));
        let mut parts = stream::iter(parts).buffered(self.ranges);
        while let Some(part) = parts.next().await {
            // A task only fails to end when it panicked, or when the runtime ends, and the reader with it.
            let Ok(part) = part else { break };
            let mut part = part?;
            while !part.is_empty() {
                let piece = part.split_to(part.len().min(PIECE));
                if Out::Reader(reader).push(piece).await.is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn part(self: Arc<Self>, range: Range<u64>) -> Result<Bytes, BlobError> {
        let mut memory = BytesMut::with_capacity(usize::try_from(PART).unwrap_or_default());
        self.range(range, Out::Memory(&mut memory)).await?;
        Ok(memory.freeze())
    }

    /// Fetches a range, from one place after the other, each as often as the policy allows.
    async fn range(&self, range: Range<u64>, mut out: Out<'_>) -> Result<(), BlobError> {
        let (mut at, mut mark, mut failed) = (range.start, range.start, 0);
        let mut since = Instant::now();
        let mut current = self.current.load(Ordering::Relaxed);
        while at < range.end {
            let error = match self.attempt(current, &mut at, range.end, &mut out).await {
                Ok(()) => break,
                Err(error) => error,
            };
            if at - mark >= PROGRESS {
                (mark, failed, since) = (at, 0, Instant::now());
            }
            failed += 1;
            if let Some(wait) = self.retry.wait(failed, since.elapsed(), &error) {
                tracing::info!("{error}; goes on from byte {at} in {wait:?}");
                tokio::time::sleep(wait).await;
            } else if current + 1 < self.repositories.len() {
                tracing::warn!("{error}; goes on from byte {at} in {}", self.repositories[current + 1].place());
                (current, failed, since) = (current + 1, 0, Instant::now());
                self.current.fetch_max(current, Ordering::Relaxed);
            } else {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Fetches from `at`, which it moves, to `end`.
    async fn attempt(&self, current: usize, at: &mut u64, end: u64, out: &mut Out<'_>) -> Result<(), BlobError> {
        let mut body = self.repositories[current].open(&self.digest, *at..end, Some(self.size)).await?;
        if body.ignored {
            self.whole.store(true, Ordering::Relaxed);
        }
        while let Some(bytes) = body.next().await? {
            let len = bytes.len() as u64;
            if out.push(bytes).await.is_err() {
                break;
            }
            *at += len;
        }
        Ok(())
    }
}
