//! What all parts of a cache share.

use super::blob::Blob;
use super::config::CacheConfig;
use super::disk::Disk;
use super::error::CacheError;
use super::files::OpenFiles;
use super::format::BlobKey;
use super::geometry::{self, MOST_CHUNKS, bits};
use super::index::Index;
use super::ledger::Ledger;
use super::metrics::Metrics;
use super::policy::Policy;
use super::ring::Ring;
use crate::BlobStore;
use crate::blob_store::deadline::Deadline;
use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Groups of the cache's size pass between two touches that both count: 64 epochs a capacity.
const EPOCHS: u64 = 64;

/// The store as the cache asks it: each attempt with its deadline.
pub(crate) type Asked = Deadline<Arc<dyn BlobStore>>;

/// What all parts share. It outlives the [`ChunkCache`](super::ChunkCache) for as long as somebody reads, and so does the
/// lock on the directory.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: CacheConfig,
    pub(crate) dir: Arc<PathBuf>,
    pub(crate) store: Asked,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) index: Arc<dyn Index>,
    pub(crate) files: OpenFiles,
    /// By which tasks wait for the disk; `None` where the kernel gives none.
    pub(crate) ring: Option<Ring>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) demand: tokio::sync::Semaphore,
    pub(crate) background: tokio::sync::Semaphore,
    pub(crate) breaker: Breaker,
    pub(crate) runtime: tokio::runtime::Handle,
    /// Bytes that read-ahead has on its way.
    pub(crate) ahead: AtomicU64,
    pub(crate) policy: Mutex<Policy>,
    pub(crate) closed: AtomicBool,
    /// Until when nothing is written, since the disk is full: milliseconds since `began`.
    pub(crate) full_until: AtomicU64,
    pub(crate) began: Instant,
    /// Whether there was something to be believed only after its CRC matched.
    pub(crate) doubts: bool,
    registry: RwLock<Registry>,
    ledger: Mutex<Ledger>,
    epoch: AtomicU32,
    filled: AtomicU64,
    used: AtomicU64,
    unflushed: AtomicU64,
    bell: (Mutex<bool>, Condvar),
    /// Who flushes or evicts.
    keeping: Mutex<()>,
    _lock: Option<File>,
}

/// The blobs that are known.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) by_key: HashMap<BlobKey, Arc<Blob>>,
    pub(crate) by_id: HashMap<u32, Arc<Blob>>,
    next: u32,
}

impl Registry {
    pub(crate) fn known(&mut self, key: BlobKey, chunk: u64) -> Arc<Blob> {
        let Self { by_key, by_id, next } = self;
        let blob = by_key.entry(key).or_insert_with(|| {
            *next += 1;
            let blob = Arc::new(Blob::new(*next, key, chunk));
            by_id.insert(*next, Arc::clone(&blob));
            blob
        });
        Arc::clone(blob)
    }
}

/// What a cache is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) store: Arc<dyn BlobStore>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) index: Arc<dyn Index>,
    pub(crate) ring: Option<Ring>,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) lock: Option<File>,
}

impl Shared {
    /// Opens a cache over its parts: recalls what the index has. The config was checked.
    pub(crate) fn open(config: CacheConfig, parts: Parts) -> Result<Arc<Self>, CacheError> {
        let dir = Arc::new(config.dir.clone());
        let fail = |what: String| CacheError::Directory { dir: config.dir.clone(), what };
        let clean = parts.index.take_clean().map_err(|error| fail(error.to_string()))?;
        let suspect = !clean || config.verify == super::config::Verify::AfterStart;
        let mut registry = Registry::default();
        let mut policy = Policy::default();
        let (mut used, mut foreign, mut doubts) = (0, Vec::new(), false);
        let recall = &mut |key: super::format::GroupKey, record: super::format::Record| {
            let most = u64::from(MOST_CHUNKS) * config.chunk;
            let geometry = geometry::Geometry { chunk: config.chunk, size: key.blob.size };
            if key.blob.size > most || key.group >= geometry.groups() {
                foreign.push((key, None));
                return;
            }
            let blob = registry.known(key.blob, config.chunk);
            let present = record.present & bits(&geometry.chunks_in(key.group));
            let doubted = if suspect { present } else { record.suspect };
            doubts |= doubted != 0;
            blob.group(key.group).recall(present, record.unchecked, doubted);
            used += geometry.weight(key.group, present);
            policy.recall((blob.id, key.group));
        };
        parts.index.scan(recall).map_err(|error| fail(error.to_string()))?;
        if !foreign.is_empty() {
            tracing::warn!("{} records of the index of {} are of no blob", foreign.len(), dir.display());
            parts.index.apply(&foreign, false).map_err(|error| fail(error.to_string()))?;
        }
        let shared = Self {
            store: Deadline::new(parts.store, config.attempt, "the store".to_owned()),
            demand: tokio::sync::Semaphore::new(config.requests),
            background: tokio::sync::Semaphore::new(config.background_requests),
            config,
            dir,
            disk: parts.disk,
            index: parts.index,
            files: OpenFiles::default(),
            ring: parts.ring,
            metrics: Arc::default(),
            breaker: Breaker::default(),
            runtime: parts.runtime,
            ahead: AtomicU64::new(0),
            policy: Mutex::new(policy),
            closed: AtomicBool::new(false),
            full_until: AtomicU64::new(0),
            began: Instant::now(),
            doubts,
            registry: RwLock::new(registry),
            ledger: Mutex::default(),
            epoch: AtomicU32::new(1),
            filled: AtomicU64::new(0),
            used: AtomicU64::new(used),
            unflushed: AtomicU64::new(0),
            bell: (Mutex::new(false), Condvar::new()),
            keeping: Mutex::new(()),
            _lock: parts.lock,
        };
        shared.clear_away(clean);
        shared.gauges();
        Ok(Arc::new(shared))
    }

    /// The blob `key`, which is held from now on.
    pub(crate) fn hold(&self, key: BlobKey) -> Result<Arc<Blob>, CacheError> {
        let most = u64::from(MOST_CHUNKS) * self.config.chunk;
        if key.size > most {
            return Err(CacheError::TooLarge { digest: key.digest, size: key.size, most });
        }
        if let Some(blob) = self.registry().by_key.get(&key) {
            // Under the lock that its removal takes.
            blob.handles.fetch_add(1, Ordering::AcqRel);
            return Ok(Arc::clone(blob));
        }
        let mut registry = self.registry_mut();
        let blob = registry.known(key, self.config.chunk);
        blob.handles.fetch_add(1, Ordering::AcqRel);
        self.metrics.blobs.set(registry.by_key.len() as u64);
        Ok(blob)
    }

    pub(crate) fn registry(&self) -> std::sync::RwLockReadGuard<'_, Registry> {
        self.registry.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn registry_mut(&self) -> std::sync::RwLockWriteGuard<'_, Registry> {
        self.registry.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn policy(&self) -> MutexGuard<'_, Policy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which stretch of time this is, measured in what was filled: see [`Group::touch`](super::group::Group::touch).
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Bytes of chunks that are there.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes` of the capacity, if there are as many.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.config.capacity);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// `written` bytes more are to be made durable.
    pub(crate) fn wrote(&self, written: u64) {
        let filled = self.filled.fetch_add(written, Ordering::Relaxed) + written;
        let epoch = filled / (self.config.capacity / EPOCHS).max(self.config.chunk) + 1;
        self.epoch.store(u32::try_from(epoch % (1 << 30)).unwrap_or(0), Ordering::Relaxed);
        let unflushed = self.unflushed.fetch_add(written, Ordering::Relaxed) + written;
        self.metrics.unflushed_bytes.set(unflushed);
        if unflushed >= self.config.flush_bytes || self.used() > self.config.high_water() {
            self.ring();
        }
    }

    /// There are `bytes` fewer.
    pub(crate) fn less(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// What waits to be made durable is being seen to.
    pub(crate) fn flushing(&self) {
        self.unflushed.store(0, Ordering::Relaxed);
        self.metrics.unflushed_bytes.set(0);
    }

    /// Milliseconds since the cache was opened.
    pub(crate) fn millis(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Wakes the keeper.
    pub(crate) fn ring(&self) {
        let (rung, bell) = &self.bell;
        *rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        bell.notify_one();
    }

    /// Waits until it is woken, or for `most`.
    pub(crate) fn wait(&self, most: Duration) {
        let (rung, bell) = &self.bell;
        let rung = rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = bell.wait_timeout_while(rung, most, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }

    /// Flushes or evicts: one at a time.
    pub(crate) fn keep<T>(&self, work: impl FnOnce(&Self) -> T) -> T {
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        work(self)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn closed_error(&self) -> CacheError {
        CacheError::Closed { dir: Arc::clone(&self.dir) }
    }

    /// Brings the gauges up to date that nobody else does.
    pub(crate) fn gauges(&self) {
        self.metrics.used_bytes.set(self.used());
        self.metrics.groups.set(self.policy().len() as u64);
        self.metrics.blobs.set(self.registry().by_key.len() as u64);
    }
}

/// Keeps requests that nobody waits for from a store that fails.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: Mutex<(u32, Option<(Instant, CacheError)>)>,
}

/// Failures in a row before it opens.
const PATIENCE: u32 = 2;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl Breaker {
    fn state(&self) -> MutexGuard<'_, (u32, Option<(Instant, CacheError)>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last failure, while no request is to be made.
    pub(crate) fn open(&self) -> Option<CacheError> {
        match &self.state().1 {
            Some((until, error)) if *until > Instant::now() => Some(error.clone()),
            _ => None,
        }
    }

    /// Notes how a request went. Pauses double with each failure in a row.
    pub(crate) fn note(&self, failure: Option<&CacheError>) {
        let mut state = self.state();
        match failure {
            None => *state = (0, None),
            Some(error) if error.is_transient() => {
                state.0 += 1;
                if state.0 >= PATIENCE {
                    let pause = FIRST_PAUSE.saturating_mul(1 << (state.0 - PATIENCE).min(16)).min(LONGEST_PAUSE);
                    state.1 = Some((Instant::now() + pause, error.clone()));
                }
            }
            // The store works, and this blob does not.
            Some(_) => {}
        }
    }
}
