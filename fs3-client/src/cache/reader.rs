//! Reading from a cached blob: what others see of the cache most of the time.

use super::blob::{Blob, Fetched, Landed};
use super::error::CacheError;
use super::fetch::{self, Ahead, Purpose};
use super::geometry::{bit, bits, by_group, group_of};
use super::inflight::{Flight, Joined};
use super::metrics::{Shard, shard};
use super::shared::Shared;
use crate::{Digest, Medium};
use futures::future::{Either, select};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

/// Requests' worth of bytes that one read has on their way at a time.
const WINDOW: u32 = 4;

/// What a read came to that may not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TryRead {
    /// The buffer is full.
    Done,
    /// Something is not there yet. Nothing was fetched for it, and the buffer may be overwritten in part.
    WouldWait,
}

/// A blob, read through the cache. Clones are cheap and are the same blob.
///
/// Reads may be done from any thread and any runtime, any number at once. They give the bytes of the blob or an error.
#[derive(Debug, Clone)]
pub struct CachedBlob {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    shared: Arc<Shared>,
    blob: Arc<Blob>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.blob.handles.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A part of a blob that lies in a file and stays there as long as this lives: eviction leaves it alone. Keep it for the
/// length of a read, not longer.
#[derive(Debug)]
pub struct Located {
    held: Arc<Held>,
    file: Arc<dyn Medium>,
    chunks: Range<u32>,
    range: Range<u64>,
}

impl Located {
    /// The file, open for reading without `O_DIRECT`. `None` in tests whose disk has no files.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }

    #[cfg(test)]
    pub(crate) fn medium(&self) -> &dyn Medium {
        &*self.file
    }

    /// Where in the file the first byte is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.range.start
    }

    /// How many bytes there are. A read that gives fewer has met damage:
    /// [`drop_range`](CachedBlob::drop_range), then read again.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl Drop for Located {
    fn drop(&mut self) {
        self.held.blob.leave(&self.chunks);
    }
}

impl CachedBlob {
    /// `blob` was held for it.
    pub(crate) fn new(shared: Arc<Shared>, blob: Arc<Blob>) -> Self {
        Self { held: Arc::new(Held { shared, blob }) }
    }

    fn parts(&self) -> (&Arc<Shared>, &Arc<Blob>) {
        (&self.held.shared, &self.held.blob)
    }

    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.held.blob.key.digest
    }

    /// Its length in bytes, as the descriptor has it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.held.blob.key.size
    }

    /// Bytes of it that are in the cache.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.held.blob.present_bytes()
    }

    /// Whether something of it is on its way.
    #[cfg(test)]
    pub(crate) fn is_fetching(&self) -> bool {
        self.held.blob.flights.len() > 0
    }

    /// Drops what no table of digests has vouched for: there is one now.
    pub(crate) fn drop_unchecked(&self) {
        let (shared, blob) = self.parts();
        for group in 0..blob.geometry.groups() {
            let unchecked = blob.group(group).unchecked();
            for chunk in blob.geometry.chunks_in(group).filter(|chunk| unchecked & bit(*chunk) != 0) {
                blob.drop_chunks(shared, chunk..chunk + 1);
            }
        }
    }

    /// Where the bytes may be asked for at all.
    fn admit(&self, offset: u64, len: u64) -> Result<Range<u64>, CacheError> {
        let (shared, blob) = self.parts();
        if shared.is_closed() {
            return Err(shared.closed_error());
        }
        match offset.checked_add(len) {
            Some(end) if end <= blob.key.size => Ok(offset..end),
            end => {
                let (digest, size) = (blob.key.digest, blob.key.size);
                Err(CacheError::OutOfRange { digest, size, start: offset, end: end.unwrap_or(u64::MAX) })
            }
        }
    }

    /// Fills `buffer` with the bytes from `offset`, if they are in the cache. Waits for nothing but the local disk.
    ///
    /// # Errors
    /// [`CacheError::OutOfRange`], [`CacheError::Closed`].
    pub fn try_read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<TryRead, CacheError> {
        let range = self.admit(offset, buffer.len() as u64)?;
        if self.hit(&range, buffer) {
            return Ok(TryRead::Done);
        }
        self.held.shared.metrics.would_wait.add(1);
        Ok(TryRead::WouldWait)
    }

    /// A read from the file, counted.
    fn hit(&self, range: &Range<u64>, buffer: &mut [u8]) -> bool {
        let (shared, blob) = self.parts();
        let (chunks, shard) = (blob.geometry.chunks_of(range), shard());
        let began = shared.metrics.hits.is_turn(shard).then(Instant::now);
        let hit = blob.read_here(shared, &chunks, range.start, buffer);
        if hit {
            self.count_hit(range, &chunks, shard, began);
        }
        hit
    }

    fn count_hit(&self, range: &Range<u64>, chunks: &Range<u32>, shard: Shard, began: Option<Instant>) {
        let metrics = &self.held.shared.metrics;
        metrics.hits.add(shard, 1);
        metrics.hit_bytes.add(shard, range.end - range.start);
        if let Some(began) = began {
            metrics.hit_seconds.note(began.elapsed());
        }
        self.heed_marks(chunks);
    }

    /// Fills `buffer` with the bytes from `offset`: from the cache, or from the store. May be dropped at any time; what
    /// is being fetched arrives in the cache all the same.
    ///
    /// # Errors
    /// [`CacheError`]: nothing is known then of what `buffer` holds.
    pub async fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), CacheError> {
        let range = self.admit(offset, buffer.len() as u64)?;
        let (shared, blob) = self.parts();
        let (chunks, turn) = (blob.geometry.chunks_of(&range), shared.metrics.hits.is_turn(shard()));
        let began = turn.then(Instant::now);
        if blob.read_here_as_task(shared, &chunks, offset, buffer).await {
            // Another thread's by now, perhaps.
            self.count_hit(&range, &chunks, shard(), began);
            return Ok(());
        }
        self.miss(range, buffer).await
    }

    /// [`read_at`](Self::read_at) for threads that belong to no runtime: blocks.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn read_at_blocking(&self, offset: u64, buffer: &mut [u8]) -> Result<(), CacheError> {
        let range = self.admit(offset, buffer.len() as u64)?;
        if self.hit(&range, buffer) {
            return Ok(());
        }
        block_on(self.miss(range, buffer))
    }

    /// A read that needs the store, within the deadline, counted.
    async fn miss(&self, range: Range<u64>, buffer: &mut [u8]) -> Result<(), CacheError> {
        let (shared, blob) = self.parts();
        let (began, metrics) = (Instant::now(), &shared.metrics);
        metrics.misses.add(1);
        metrics.miss_bytes.add(range.end - range.start);
        // A task of the cache's, since only its runtime is known to have a clock.
        let after = shared.config.deadline;
        let mut deadline = Timer(shared.runtime.spawn(async move { tokio::time::sleep(after).await }));
        let outcome = match select(pin!(self.read_missing(range, buffer)), &mut deadline.0).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right((Ok(()), _)) => Err(CacheError::TimedOut { digest: blob.key.digest, after }),
            Either::Right((Err(_), _)) => Err(shared.closed_error()),
        };
        metrics.miss_seconds.note(began.elapsed());
        if outcome.is_err() {
            metrics.read_errors.add(1);
        }
        outcome
    }

    async fn read_missing(&self, range: Range<u64>, buffer: &mut [u8]) -> Result<(), CacheError> {
        let (shared, blob) = self.parts();
        let chunks = blob.geometry.chunks_of(&range);
        let most = shared.config.most_chunks();
        let mut flights = BTreeMap::new();
        let mut joined = chunks.start;
        for chunk in chunks.clone() {
            // Whole requests, some of them beyond the one that is waited for.
            let upto = chunk.saturating_add(WINDOW.saturating_mul(most)) / most * most;
            if joined < upto.min(chunks.end) {
                let span = joined..upto.min(chunks.end);
                joined = span.end;
                flights.extend(self.join(span, false).flights);
                if joined == chunks.end {
                    self.read_ahead(&chunks);
                }
            }
            let part = blob.geometry.bytes(chunk);
            let part = part.start.max(range.start)..part.end.min(range.end);
            let at = |byte: u64| usize::try_from(byte - range.start).unwrap_or(usize::MAX);
            let into = &mut buffer[at(part.start)..at(part.end)];
            self.read_chunk(chunk, part.start, into, flights.remove(&chunk)).await?;
        }
        Ok(())
    }

    /// Joins what is missing of `chunks`, and starts what nobody fetches yet. With `all`, what is there counts as
    /// missing.
    fn join(&self, chunks: Range<u32>, all: bool) -> Joined<Landed> {
        let (shared, blob) = self.parts();
        let mut joined = blob.flights.join(chunks, shared.config.most_chunks(), true, |chunk| !all && blob.has(chunk));
        let begun: u32 = joined.begin.iter().map(|piece| piece.end - piece.start).sum();
        shared.metrics.joined.add((joined.flights.len() as u64).saturating_sub(u64::from(begun)));
        fetch::start(shared, blob, &mut joined, Purpose::Demand);
        joined
    }

    /// Fills `into` with bytes of one chunk, from the file or by a flight.
    async fn read_chunk(
        &self,
        chunk: u32,
        offset: u64,
        into: &mut [u8],
        mut flight: Option<Arc<Flight<Landed>>>,
    ) -> Result<(), CacheError> {
        let (shared, blob) = self.parts();
        let mut rounds = 0;
        loop {
            if let Some(flight) = flight.take() {
                let Fetched { bytes, checked } = flight.landed().await?;
                // It may have begun before there was a table.
                if checked || blob.digests().is_none() {
                    let skip = usize::try_from(offset - blob.geometry.bytes(chunk).start).unwrap_or(usize::MAX);
                    into.copy_from_slice(&bytes[skip..skip + into.len()]);
                    return Ok(());
                }
            } else if blob.read_here_as_task(shared, &(chunk..chunk + 1), offset, into).await {
                return Ok(());
            }
            if shared.is_closed() {
                return Err(shared.closed_error());
            }
            // It was evicted, or dropped, since it was looked for. While an eviction is at it, it seems to be there.
            rounds += 1;
            flight = self.join(chunk..chunk + 1, rounds > 1).flights.pop().map(|(_, flight)| flight);
        }
    }

    /// Fetches ahead if a mark is among `chunks`.
    fn heed_marks(&self, chunks: &Range<u32>) {
        let blob = &self.held.blob;
        let marked = |piece: Range<u32>| blob.group(group_of(piece.start)).take_mark(bits(&piece));
        // All marks are taken, not only the first.
        if by_group(chunks.clone()).filter(|piece| marked(piece.clone())).count() > 0 {
            self.read_ahead(chunks);
        }
    }

    /// `chunks` are read, and one of them was missing or marked.
    fn read_ahead(&self, chunks: &Range<u32>) {
        let (shared, blob) = self.parts();
        let most = u32::try_from(shared.config.read_ahead / shared.config.chunk).unwrap_or(u32::MAX);
        let mut streams = blob.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(ahead) = streams.access(chunks, most, blob.geometry.chunks()) else { return };
        drop(streams);
        let range = blob.geometry.bytes_of(&ahead.fetch);
        let bytes = range.end - range.start;
        let Some(budget) = Ahead::reserve(shared, bytes) else {
            shared.metrics.background_given_up.add(1);
            return;
        };
        blob.group(group_of(ahead.mark)).mark(bit(ahead.mark));
        let mut joined = blob.flights.join(ahead.fetch, shared.config.most_chunks(), false, |chunk| blob.has(chunk));
        let begun: u64 = joined.begin.iter().map(|p| blob.geometry.bytes_of(p)).map(|r| r.end - r.start).sum();
        shared.metrics.ahead_bytes.add(begun);
        fetch::start(shared, blob, &mut joined, Purpose::Background(Some(budget)));
    }

    /// Where the bytes `range` lie in the cache's file, if all of them do: for callers who submit reads by a ring of
    /// their own. Nothing is waited for, except after a crash, when chunks are read once to compare their CRCs.
    ///
    /// # Errors
    /// [`CacheError::OutOfRange`], [`CacheError::Closed`].
    pub fn locate(&self, range: Range<u64>) -> Result<Option<Located>, CacheError> {
        let (shared, blob) = self.parts();
        let range = self.admit(range.start, range.end.saturating_sub(range.start))?;
        let chunks = blob.geometry.chunks_of(&range);
        if chunks.is_empty() || !blob.enter(shared, &chunks) {
            shared.metrics.would_wait.add(1);
            return Ok(None);
        }
        let Ok(file) = blob.open(shared) else {
            blob.leave(&chunks);
            return Ok(None);
        };
        self.count_hit(&range, &chunks, shard(), None);
        Ok(Some(Located { held: Arc::clone(&self.held), file, chunks, range }))
    }

    /// The caller found the bytes of `range` to be wrong. They are fetched again when they are read next; whole chunks
    /// go. Gives the number of chunks that were there. A range that is not in the blob is none.
    pub fn drop_range(&self, range: Range<u64>) -> u32 {
        let (shared, blob) = self.parts();
        let range = range.start..range.end.min(blob.key.size);
        let dropped = blob.drop_chunks(shared, blob.geometry.chunks_of(&range));
        shared.metrics.dropped.add(u64::from(dropped));
        dropped
    }

    /// Fetches `ranges` that are missing, in order, with requests as large as they can be. Gives the bytes that were
    /// asked for. Gives up at the first failure: to a store that fails nothing more is sent for a while.
    ///
    /// # Errors
    /// The failure.
    pub async fn prefetch(&self, ranges: &[Range<u64>]) -> Result<u64, CacheError> {
        let (shared, blob) = self.parts();
        let most = shared.config.most_chunks();
        let mut asked = 0;
        let mut under_way: VecDeque<Arc<Flight<Landed>>> = VecDeque::new();
        let many = most as usize * shared.config.background_requests;
        for range in ranges {
            let range = self.admit(range.start, range.end.saturating_sub(range.start))?;
            let chunks = blob.geometry.chunks_of(&range);
            let mut start = chunks.start;
            while start < chunks.end {
                if let Some(error) = shared.breaker.open() {
                    shared.metrics.background_given_up.add(1);
                    return Err(error);
                }
                let end = chunks.end.min((start / most + 1).saturating_mul(most));
                let mut joined = blob.flights.join(start..end, most, false, |chunk| blob.has(chunk));
                let bytes: u64 = joined.begin.iter().map(|p| blob.geometry.bytes_of(p)).map(|r| r.end - r.start).sum();
                asked += bytes;
                shared.metrics.prefetched_bytes.add(bytes);
                fetch::start(shared, blob, &mut joined, Purpose::Background(None));
                under_way.extend(joined.flights.into_iter().map(|(_, flight)| flight));
                start = end;
                while under_way.len() > many {
                    let Some(flight) = under_way.pop_front() else { break };
                    flight.landed().await?;
                }
            }
        }
        for flight in under_way {
            flight.landed().await?;
        }
        Ok(asked)
    }

    /// Keeps what is cached of `range`, and what will be, from eviction, until as many [`unpin`](Self::unpin)s. Whole
    /// groups are kept (64 chunks). Nothing is fetched. Pins end with the cache.
    ///
    /// # Errors
    /// [`CacheError::OutOfRange`], [`CacheError::Closed`].
    pub fn pin(&self, range: Range<u64>) -> Result<(), CacheError> {
        self.groups(range)?.for_each(|group| self.held.blob.group(group).pin());
        Ok(())
    }

    /// Takes back a [`pin`](Self::pin) of the same range.
    ///
    /// # Errors
    /// [`CacheError::OutOfRange`], [`CacheError::Closed`].
    pub fn unpin(&self, range: Range<u64>) -> Result<(), CacheError> {
        self.groups(range)?.for_each(|group| self.held.blob.group(group).unpin());
        Ok(())
    }

    fn groups(&self, range: Range<u64>) -> Result<impl Iterator<Item = u32> + use<>, CacheError> {
        let range = self.admit(range.start, range.end.saturating_sub(range.start))?;
        Ok(by_group(self.held.blob.geometry.chunks_of(&range)).map(|piece| group_of(piece.start)))
    }
}

/// A task that is over at a certain time, or when nobody waits for it.
struct Timer(tokio::task::JoinHandle<()>);

impl Drop for Timer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        std::thread::park();
    }
}
