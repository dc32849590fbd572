//! The chunk cache of a node: blobs of a slow store, read at the speed of the local disk.
//!
//! ```text
//! read ─► group of chunks: there? ── yes ─► pread of the blob's sparse file, io_uring for what is not in memory
//!             │ no
//!             ▼
//!         flights: on its way? ── yes ─► wait for it
//!             │ no
//!             ▼
//!         job: its turn ─► a run of neighbours ─► one request ─► digests ─► file ─► bitmap ─► those who wait
//!                                                                             │
//!         keeper, every two seconds:                            sync ─► CRCs and presence into the index
//! ```
//!
//! **A byte is right or an error.** A chunk is read only if its bit says that it is there, and a bit is set only after
//! the store gave all of the chunk, the blob's table of digests (if there is one) agreed, and the file took it. Lengths
//! are those of descriptors. A short read, of the store or of the file, is never filled up with zeros.
//!
//! **Crashes.** Bytes are synced before the index says that they are there; the index says that they are gone, durably,
//! before a hole is punched. So whatever the index says after a crash is true; and since disks lie too, after an end that
//! was not a proper one no chunk is believed before its CRC32C matched.
//!
//! **Nobody waits for housekeeping.** Who meets a group that is being evicted, a full disk or a failing one gets the
//! bytes from the store, as if there were no cache.
//!
//! The modules, from the inside: `geometry` and `format` (bytes and names), `group` (the hot path's words), `inflight`
//! (single flight), `blob`, `local` and `ring` (hits), `reader`, `fetch`; `ledger`, `keeper` and `evict` (what is durable); `policy` and `readahead`
//! (what goes and what comes, both pure).

mod blob;
mod config;
mod digests;
mod dir;
mod disk;
mod error;
mod evict;
mod fetch;
mod files;
mod format;
mod geometry;
mod group;
mod index;
mod inflight;
mod keeper;
mod ledger;
mod local;
pub mod metrics;
mod policy;
mod readahead;
mod reader;
mod ring;
mod shared;
mod sync;
#[cfg(test)]
mod tests;
pub mod warm;

pub use config::{CacheConfig, Verify};
pub use digests::{ChunkDigests, DigestTable};
pub use error::CacheError;
pub use metrics::Metrics;
pub use reader::{CachedBlob, Located, TryRead};

use crate::{BlobStore, Digest};
use disk::Folder;
use format::BlobKey;
use ring::Ring;
use shared::{Parts, Shared};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// An open chunk cache. Clones are the same one; the last that goes closes it.
#[derive(Debug, Clone)]
pub struct ChunkCache {
    owner: Arc<Owner>,
}

#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    /// What has to be ended.
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    keeper: std::thread::JoinHandle<()>,
    runtime: Option<tokio::runtime::Runtime>,
}

/// Threads that the cache's own runtime has for what does not block.
const WORKERS: usize = 2;

/// How long a write to the disk may take that is under way when the cache is closed.
const LAST_WAIT: Duration = Duration::from_secs(10);

impl ChunkCache {
    /// Opens the cache in `config.dir` over `store`, whose requests it tries again and gives deadlines. Blocks for as
    /// long as it takes to read the index. The store is not asked anything.
    ///
    /// # Errors
    /// [`CacheError::InUse`], [`CacheError::Directory`], [`CacheError::Config`].
    pub fn open(config: CacheConfig, store: Arc<dyn BlobStore>) -> Result<Self, CacheError> {
        config.check()?;
        let fail = |what: String| CacheError::Directory { dir: config.dir.clone(), what };
        let lock = dir::take(&config)?;
        let index = dir::index(&config.dir)?;
        let disk = Folder::new(&config.dir).map_err(|error| fail(format!("its folder cannot be made: {error}")))?;
        let (runtime, handle) = match &config.runtime {
            Some(handle) => (None, handle.clone()),
            None => {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(WORKERS)
                    .thread_name("dsec-cache")
                    .enable_all()
                    .build()
                    .map_err(|error| fail(format!("no threads for it: {error}")))?;
                let handle = runtime.handle().clone();
                (Some(runtime), handle)
            }
        };
        let ring = Ring::new()
            .inspect_err(|error| tracing::info!("no io_uring for the chunk cache, threads wait for its disk: {error}"));
        let (disk, index): (Arc<Folder>, Arc<_>) = (Arc::new(disk), Arc::new(index));
        let parts = Parts { store, disk, index, ring: ring.ok(), runtime: handle, lock: Some(lock) };
        let fail =
            |error| CacheError::Directory { dir: config.dir.clone(), what: format!("no thread for it: {error}") };
        let begin = || {
            let shared = Shared::open(config.clone(), parts)?;
            let keeping = Arc::clone(&shared);
            let keeper = std::thread::Builder::new().name("dsec-cache-keep".to_owned());
            Ok((keeper.spawn(move || keeper::run(&keeping)).map_err(fail)?, shared))
        };
        match begin() {
            Ok((keeper, shared)) => {
                let running = Mutex::new(Some(Running { keeper, runtime }));
                Ok(Self { owner: Arc::new(Owner { shared, running }) })
            }
            Err(error) => {
                // A runtime that is dropped where another runs would panic.
                if let Some(runtime) = runtime {
                    runtime.shutdown_background();
                }
                Err(error)
            }
        }
    }

    /// The blob `digest`, which has `size` bytes by its descriptor: the backend is never asked for that. With `digests`
    /// every chunk is checked before anybody sees it, and what was cached without is fetched again.
    ///
    /// Cheap, and nothing is asked of the store: a blob that it does not have fails when it is read.
    ///
    /// # Errors
    /// [`CacheError::TooLarge`], [`CacheError::Closed`].
    pub fn blob(
        &self,
        digest: Digest,
        size: u64,
        digests: Option<Arc<dyn ChunkDigests>>,
    ) -> Result<CachedBlob, CacheError> {
        let shared = &self.owner.shared;
        if shared.is_closed() {
            return Err(shared.closed_error());
        }
        let blob = shared.hold(BlobKey { digest, size })?;
        let first = digests.is_some_and(|digests| blob.set_digests(digests));
        let cached = CachedBlob::new(Arc::clone(shared), blob);
        if first {
            cached.drop_unchecked();
        }
        Ok(cached)
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> Arc<Metrics> {
        self.owner.shared.gauges();
        Arc::clone(&self.owner.shared.metrics)
    }

    /// Makes durable what was fetched so far. Blocks. Whether all of it is durable.
    #[must_use]
    pub fn sync(&self) -> bool {
        self.owner.shared.keep(Shared::flush)
    }

    /// Ends it properly, so that the next start believes what it finds: blocks for a last sync. Reads fail from here on.
    /// The directory is free when the last [`CachedBlob`] is gone too.
    pub fn close(&self) {
        self.owner.close();
    }
}

impl Owner {
    fn close(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { keeper, runtime }) = running else { return };
        self.shared.closed.store(true, Ordering::Release);
        self.shared.ring();
        let kept = keeper.join().is_ok();
        if kept && self.shared.end() {
            tracing::debug!("the chunk cache in {} ended properly", self.shared.dir.display());
        }
        if let Some(runtime) = runtime {
            // Whoever still waits for a fetch is told, since its job goes. On a thread of its own, since the caller may
            // be one that must not wait like this; and waited for, so that the directory is free then.
            let ended = std::thread::Builder::new().spawn(move || runtime.shutdown_timeout(LAST_WAIT));
            if let Ok(thread) = ended {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.close();
    }
}
