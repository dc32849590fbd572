//! From the store to the readers, and into the file on the way.
//!
//! A job takes its turn, takes a run of chunks, fetches them in one request, checks them, writes them, and lands them.
//! What cannot be written is given to the readers all the same. Jobs run on their own, not in any reader: a reader that
//! goes away cancels nothing for others.

use super::blob::{Blob, Fetched, Landed};
use super::digests::ChunkDigests;
use super::error::CacheError;
use super::geometry::{bits, by_group, group_of};
use super::inflight::{Joined, Landing, Ticket};
use super::ledger::Fresh;
use super::shared::Shared;
use crate::{BlobError, BlobStore as _, Digest};
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// For how long nothing is written after the disk was full.
const FULL_PAUSE: Duration = Duration::from_secs(1);

/// Why chunks are fetched.
#[derive(Debug)]
pub(crate) enum Purpose {
    /// Somebody waits.
    Demand,
    /// Somebody may come.
    Background(Option<Ahead>),
}

/// Bytes of the budget for read-ahead, until they are here.
#[derive(Debug)]
pub(crate) struct Ahead {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Ahead {
    /// `bytes` of the budget, if there are as many.
    pub(crate) fn reserve(shared: &Arc<Shared>, bytes: u64) -> Option<Self> {
        let before = shared.ahead.fetch_add(bytes, Ordering::Relaxed);
        let reserved = Self { shared: Arc::clone(shared), bytes };
        (before + bytes <= shared.config.read_ahead_budget).then_some(reserved)
    }

    /// A part of it.
    fn split(&mut self, bytes: u64) -> Self {
        let part = bytes.min(self.bytes);
        self.bytes -= part;
        Self { shared: Arc::clone(&self.shared), bytes: part }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.ahead.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Starts the jobs that joining asks for.
pub(crate) fn start(shared: &Arc<Shared>, blob: &Arc<Blob>, joined: &mut Joined<Landed>, mut purpose: Purpose) {
    for piece in std::mem::take(&mut joined.begin) {
        let ticket = Ticket {
            flights: Arc::clone(&blob.flights),
            piece: piece.clone(),
            number: joined.ticket,
            lost: Err(shared.closed_error()),
        };
        let range = blob.geometry.bytes_of(&piece);
        let purpose = match &mut purpose {
            Purpose::Demand => Purpose::Demand,
            Purpose::Background(ahead) => {
                Purpose::Background(ahead.as_mut().map(|ahead| ahead.split(range.end - range.start)))
            }
        };
        shared.runtime.spawn(job(Arc::clone(shared), Arc::clone(blob), ticket, purpose));
    }
}

/// Sees to it that the chunks of a piece are fetched, by itself or by others.
async fn job(shared: Arc<Shared>, blob: Arc<Blob>, mut ticket: Ticket<Landed>, purpose: Purpose) {
    let deadline = Instant::now() + shared.config.deadline;
    let (turns, is_demand) = match &purpose {
        Purpose::Demand => (&shared.demand, true),
        Purpose::Background(_) => (&shared.background, false),
    };
    loop {
        let late = CacheError::TimedOut { digest: blob.key.digest, after: shared.config.deadline };
        let turn = match timeout_at(deadline, turns.acquire()).await {
            Ok(Ok(turn)) => turn,
            Ok(Err(_)) | Err(_) => {
                ticket.lost = Err(late);
                return;
            }
        };
        if !is_demand && let Some(error) = shared.breaker.open() {
            shared.metrics.background_given_up.add(1);
            ticket.lost = Err(error);
            return;
        }
        if shared.is_closed() {
            return;
        }
        let lost = Err(shared.closed_error());
        let Some(landing) = blob.flights.take(&ticket.piece, shared.config.most_chunks(), &lost) else { return };
        let run = landing.run();
        let merged =
            (run.end - run.start) - run.end.min(ticket.piece.end).saturating_sub(run.start.max(ticket.piece.start));
        shared.metrics.merged.add(u64::from(merged));
        shared.metrics.in_flight.add(1);
        let _under_way = UnderWay(&shared);
        let outcome = request(&shared, &blob, landing, deadline).await;
        if !is_demand {
            shared.breaker.note(outcome.as_ref().err());
        } else if outcome.is_ok() {
            shared.breaker.note(None);
        }
        drop(turn);
    }
}

struct UnderWay<'s>(&'s Shared);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.metrics.in_flight.sub(1);
    }
}

/// One request for a run of chunks, and one for each of them if there is a wrong byte in it.
async fn request(
    shared: &Arc<Shared>,
    blob: &Arc<Blob>,
    mut landing: Landing<Landed>,
    deadline: Instant,
) -> Result<(), CacheError> {
    let run = landing.run();
    let tries = if run.end - run.start == 1 { shared.config.corrupt_tries } else { 1 };
    match fetch(shared, blob, run.clone(), deadline, tries).await {
        Ok(answer) => {
            finish(shared, blob, landing, answer).await;
            Ok(())
        }
        Err(error) if error.is_corrupt() && run.end - run.start > 1 => {
            let mut worst = Ok(());
            for chunk in run {
                match fetch(shared, blob, chunk..chunk + 1, deadline, shared.config.corrupt_tries).await {
                    Ok(answer) => {
                        let fetched = keep_on_a_thread(shared, blob, answer).await;
                        landing.land_next(fetched);
                    }
                    Err(error) => {
                        landing.land_next(Err(error.clone()));
                        worst = Err(error);
                    }
                }
            }
            worst
        }
        Err(error) => {
            run.for_each(|_| landing.land_next(Err(error.clone())));
            Err(error)
        }
    }
}

/// Chunks as the store gave them, checked.
#[derive(Debug)]
struct Answer {
    run: Range<u32>,
    bytes: Bytes,
    checked: bool,
}

/// Fetches a run of chunks and checks it, `tries` times if the bytes are wrong.
async fn fetch(
    shared: &Arc<Shared>,
    blob: &Arc<Blob>,
    run: Range<u32>,
    deadline: Instant,
    tries: u32,
) -> Result<Answer, CacheError> {
    let began = Instant::now();
    let mut tried = 0;
    let outcome = loop {
        tried += 1;
        let attempt = fetch_once(shared, blob, run.clone());
        let outcome = match timeout_at(deadline, attempt).await {
            Ok(outcome) => outcome,
            Err(_) => Err(CacheError::TimedOut { digest: blob.key.digest, after: shared.config.deadline }),
        };
        match outcome {
            Err(error) if error.is_corrupt() => {
                shared.metrics.corrupt_store.add(1);
                tracing::warn!("{error}");
                if tried >= tries {
                    break Err(match error {
                        CacheError::Corrupt { digest, start, end, how, .. } => {
                            CacheError::Corrupt { digest, start, end, tries: tried, how }
                        }
                        other => other,
                    });
                }
                tokio::time::sleep(shared.config.retry.first_wait).await;
            }
            other => break other,
        }
    };
    shared.metrics.request_seconds.note(began.elapsed());
    if outcome.is_err() {
        shared.metrics.failures.add(1);
    }
    outcome
}

async fn fetch_once(shared: &Arc<Shared>, blob: &Arc<Blob>, run: Range<u32>) -> Result<Answer, CacheError> {
    let digests = blob.digests();
    let wanted = blob.geometry.bytes_of(&run);
    let range = match &digests {
        Some(digests) => digests.widen(wanted.clone()),
        None => wanted.clone(),
    };
    if range.start > wanted.start || range.end < wanted.end || range.end > blob.key.size {
        return Err(corrupt(blob, &wanted, format!("its table of digests has {range:?} for {wanted:?}")));
    }
    let attempt = |number| {
        shared.metrics.requests.add(1);
        shared.metrics.retries.add(u64::from(number > 0));
        shared.store.read_range(&blob.key.digest, range.clone())
    };
    let bytes = match shared.config.retry.run(attempt).await {
        // The blob ends early: perhaps not for the next who asks.
        Err(BlobError::Corrupt { how, .. }) => return Err(corrupt(blob, &wanted, how)),
        other => other?,
    };
    if bytes.len() as u64 != range.end - range.start {
        let how = format!("{} bytes came and not {}", bytes.len(), range.end - range.start);
        return Err(corrupt(blob, &wanted, how));
    }
    shared.metrics.fetched_bytes.add(bytes.len() as u64);
    shared.metrics.fetched_chunks.add(u64::from(run.end - run.start));
    let whole = run == (0..blob.geometry.chunks()) && blob.geometry.chunks() == 1;
    let checked = digests.is_some() || whole;
    if !checked {
        return Ok(Answer { run, bytes, checked });
    }
    let (key, start) = (blob.key, range.start);
    let check = move || {
        check(&key.digest, digests.as_deref(), start, &bytes)?;
        let skip = usize::try_from(wanted.start - start).unwrap_or(usize::MAX);
        let len = usize::try_from(wanted.end - wanted.start).unwrap_or(usize::MAX);
        Ok(bytes.slice(skip..skip + len))
    };
    let wanted = blob.geometry.bytes_of(&run);
    match tokio::task::spawn_blocking(check).await {
        Ok(Ok(bytes)) => Ok(Answer { run, bytes, checked }),
        Ok(Err(how)) => Err(corrupt(blob, &wanted, how)),
        Err(_) => Err(shared.closed_error()),
    }
}

/// By the blob's table; without one, a blob that is a single chunk by its own digest.
fn check(digest: &Digest, digests: Option<&dyn ChunkDigests>, start: u64, bytes: &[u8]) -> Result<(), String> {
    if let Some(digests) = digests {
        return digests.check(start, bytes);
    }
    let found = Digest::of(bytes);
    if found == *digest { Ok(()) } else { Err(format!("its contents have {found}")) }
}

fn corrupt(blob: &Blob, range: &Range<u64>, how: String) -> CacheError {
    CacheError::Corrupt { digest: blob.key.digest, start: range.start, end: range.end, tries: 1, how }
}

/// Writes what was fetched, on a thread that may block, and lands it.
async fn finish(shared: &Arc<Shared>, blob: &Arc<Blob>, mut landing: Landing<Landed>, answer: Answer) {
    let (shared, blob) = (Arc::clone(shared), Arc::clone(blob));
    let work = move || {
        keep(&shared, &blob, &answer);
        let start = blob.geometry.bytes_of(&answer.run).start;
        for chunk in answer.run.clone() {
            let range = blob.geometry.bytes(chunk);
            let at = |byte: u64| usize::try_from(byte - start).unwrap_or(usize::MAX);
            let bytes = answer.bytes.slice(at(range.start)..at(range.end));
            landing.land_next(Ok(Fetched { bytes, checked: answer.checked }));
        }
    };
    // When the runtime is gone, the landing has told those who wait.
    let _ = tokio::task::spawn_blocking(work).await;
}

/// Writes a single chunk.
async fn keep_on_a_thread(shared: &Arc<Shared>, blob: &Arc<Blob>, answer: Answer) -> Landed {
    let fetched = Fetched { bytes: answer.bytes.clone(), checked: answer.checked };
    let (shared, blob) = (Arc::clone(shared), Arc::clone(blob));
    let _ = tokio::task::spawn_blocking(move || keep(&shared, &blob, &answer)).await;
    Ok(fetched)
}

/// Writes chunks to the file and says that they are there. Where that is not possible they are passed through.
fn keep(shared: &Shared, blob: &Arc<Blob>, answer: &Answer) {
    let start = blob.geometry.bytes_of(&answer.run).start;
    for piece in by_group(answer.run.clone()) {
        let range = blob.geometry.bytes_of(&piece);
        let at = |byte: u64| usize::try_from(byte - start).unwrap_or(usize::MAX);
        let bytes = &answer.bytes[at(range.start)..at(range.end)];
        let group = blob.group(group_of(piece.start));
        let room = bytes.len() as u64;
        let mut kept = 0;
        if has_room(shared, room) {
            if group.enter() {
                kept = keep_in_group(shared, blob, &piece, bytes, answer.checked);
                group.leave();
            }
            let new = blob.geometry.weight(group_of(piece.start), kept);
            shared.less(room - new);
        }
        if kept == 0 && !has_all(blob, &piece) {
            shared.metrics.passed_through.add(u64::from(piece.end - piece.start));
        }
    }
}

fn has_all(blob: &Blob, piece: &Range<u32>) -> bool {
    let wanted = bits(piece);
    blob.group(group_of(piece.start)).present() & wanted == wanted
}

/// The caller is inside the group. Gives the chunks that are there now and were not before.
fn keep_in_group(shared: &Shared, blob: &Arc<Blob>, piece: &Range<u32>, bytes: &[u8], checked: bool) -> u64 {
    let generation = blob.sync_failures.load(Ordering::Acquire);
    let range = blob.geometry.bytes_of(piece);
    let file = match blob.open(shared) {
        Ok(file) => file,
        Err(error) => {
            failed(shared, &error);
            return 0;
        }
    };
    if let Err(error) = file.write_all_at(bytes, range.start) {
        // Where others of these bytes were there already, nobody knows what is there now.
        blob.drop_chunks(shared, piece.clone());
        failed(shared, &error);
        return 0;
    }
    let chunk_len = usize::try_from(blob.geometry.chunk).unwrap_or(usize::MAX);
    let fresh: Vec<(u32, Fresh)> =
        piece.clone().zip(bytes.chunks(chunk_len).map(|chunk| (crc32c::crc32c(chunk), checked))).collect();
    let new = {
        // Under one lock, as they are dropped: what is to be read is what is to be made durable.
        let mut ledger = shared.ledger();
        if !ledger.add(blob, &file, generation, &fresh) {
            drop(ledger);
            blob.drop_chunks(shared, piece.clone());
            return 0;
        }
        blob.group(group_of(piece.start)).filled(bits(piece), checked)
    };
    shared.wrote(bytes.len() as u64);
    // A table of digests may have come meanwhile, and its owner wants nothing that it has not vouched for.
    if !checked && blob.digests().is_some() {
        blob.drop_chunks(shared, piece.clone());
    }
    new
}

/// Whether `bytes` more may be written, which are then taken from the capacity.
fn has_room(shared: &Shared, bytes: u64) -> bool {
    if shared.is_closed() || shared.full_until.load(Ordering::Relaxed) > shared.millis() {
        return false;
    }
    let room = shared.disk.room();
    if room.is_ok_and(|room| room.free >= bytes.saturating_add(shared.config.keep_free)) && shared.reserve(bytes) {
        return true;
    }
    shared.ring();
    false
}

fn failed(shared: &Shared, error: &io::Error) {
    shared.metrics.write_errors.add(1);
    tracing::warn!("the chunk cache in {} cannot be written: {error}", shared.dir.display());
    let pause = u64::try_from(FULL_PAUSE.as_millis()).unwrap_or(0);
    shared.full_until.store(shared.millis() + pause, Ordering::Relaxed);
    shared.ring();
}
