//! Blobs of a directory on 3FS, read through USRBIO: rings in shared memory that the mount's daemon serves.
//!
//! Everything but reads goes through the mount, by the rules of [`super::local`]; so do reads where the library is
//! missing, a ring cannot be made, or a file cannot be registered. Which it is, and why, is in [`UsrbioBlobs::path`].
//!
//! A large read becomes transfers of one chunk each (1 to 4 MiB), a small one a transfer of whole 4 KiB units, together
//! with its neighbours where those wait too. Large and small ones have rings of their own, since the daemon completes
//! what it takes together as one. How many bytes there have to be is what the caller asks for: lengths that `stat` tells
//! may be old.

mod abi;
mod counts;
mod files;
mod library;
mod plan;
mod queue;
#[cfg(test)]
mod tests;
mod worker;

pub use counts::UsrbioCounts;

use super::local::LocalBlobs;
use super::{BlobError, BlobStore, Body, Listed, Stat, ends_early};
use crate::{Digest, Rules, StoreDir};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use counts::Counts;
use files::{BlobFile, Files, NoFile};
use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use queue::{Fault, Queue, Want};
use std::env;
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use worker::Lane;

/// The variable that names the library.
pub const LIBRARY_ENV: &str = "FS3_USRBIO_LIB";
/// What the loader looks for where nothing is named.
const LIBRARY: &str = "libhf3fs_api_shared.so";
/// Room that is made for a large read before all of its bytes have come.
const LIKELY: usize = 64 << 20;

/// How rings are made and used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsrbioOptions {
    /// The library; else [`LIBRARY_ENV`] names it, else it is `libhf3fs_api_shared.so`, wherever the loader finds it.
    pub library: Option<PathBuf>,
    /// Rings for large reads, each with a thread and a buffer.
    pub bulk_rings: usize,
    /// Rings for small reads.
    pub small_rings: usize,
    /// Entries of each ring: few, since the daemon completes what it takes together as one.
    pub entries: i32,
    /// Bytes of the buffer of a ring for large reads, in `/dev/shm`; at least 4 MiB are taken.
    pub bulk_buffer: usize,
    /// Bytes of the buffer of a ring for small ones; at least 256 KiB are taken.
    pub small_buffer: usize,
    /// Parts of one large read that are on their way at a time.
    pub parts: usize,
    /// After how long a transfer is given up, and its ring with it. 3FS tries for a minute before it tells an error.
    pub deadline: Duration,
    /// Files that are kept open and registered.
    pub files: usize,
    /// After how long it is looked whether the name of a file that is kept is still its own. 3FS removes the chunks of a
    /// deleted file after five minutes, and reads zeros then; other nodes may see its name for half a minute more.
    pub check_after: Duration,
    /// Rings that may be left behind before the mount does the reading.
    pub most_left_behind: u64,
}

impl Default for UsrbioOptions {
    fn default() -> Self {
        Self {
            library: None,
            bulk_rings: 2,
            small_rings: 1,
            entries: 64,
            bulk_buffer: 32 << 20,
            small_buffer: 8 << 20,
            parts: 16,
            deadline: Duration::from_secs(60),
            files: 256,
            check_after: Duration::from_secs(30),
            most_left_behind: 16,
        }
    }
}

/// The way reads go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadPath {
    /// Rings of this library.
    Usrbio {
        /// What it was loaded by.
        library: OsString,
    },
    /// The mount.
    Mount {
        /// Why not rings.
        why: String,
    },
}

/// The blobs of a [`StoreDir`] on 3FS.
#[derive(Debug)]
pub struct UsrbioBlobs {
    dir: StoreDir,
    mount: LocalBlobs,
    rings: Result<Rings, String>,
}

#[derive(Debug)]
struct Rings {
    bulk: Arc<Lane>,
    small: Arc<Lane>,
    files: Arc<Files>,
    counts: Arc<Counts>,
    options: UsrbioOptions,
    library: OsString,
    /// Workers start with the first read.
    started: Once,
    /// Why they did not.
    failed: Mutex<Option<String>>,
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.bulk.queue.close();
        self.small.queue.close();
    }
}

impl Rings {
    fn new(dir: &StoreDir, options: &UsrbioOptions) -> Result<Self, String> {
        let named = env::var_os(LIBRARY_ENV).filter(|name| !name.is_empty());
        let named = options.library.clone().map(OsString::from).or(named);
        if named.is_none() && Rules::of(dir.root()) != Rules::Fs3 {
            return Err(format!("{} is on no mount of type fuse.hf3fs", dir.root().display()));
        }
        let name = named.unwrap_or_else(|| LIBRARY.into());
        let library = library::load(&name)?;
        let mount = library
            .mount_of(dir.root())
            .ok_or_else(|| format!("the library finds no mount that {} is on", dir.root().display()))?;
        let counts = Arc::new(Counts::new(options.most_left_behind));
        let lane = |buffer, merged| {
            Arc::new(Lane {
                queue: Queue::default(),
                library,
                mount: mount.clone(),
                entries: options.entries,
                buffer,
                merged,
                deadline: options.deadline,
                counts: Arc::clone(&counts),
                paused: Mutex::new(None),
            })
        };
        Ok(Self {
            // One that holds no transfer would never take any.
            bulk: lane(options.bulk_buffer.max(plan::bytes(plan::MOST)), 0),
            small: lane(options.small_buffer.max(plan::bytes(plan::MERGED)), plan::MERGED),
            files: Arc::new(Files::new(library, options.files, options.check_after)),
            counts,
            options: options.clone(),
            library: library.name().to_owned(),
            started: Once::new(),
            failed: Mutex::new(None),
        })
    }

    fn start(&self) {
        self.started.call_once(|| {
            let bulk = (0..self.options.bulk_rings.max(1)).map(|_| worker::start(&self.bulk, "usrbio-bulk"));
            let small = (0..self.options.small_rings.max(1)).map(|_| worker::start(&self.small, "usrbio-small"));
            if let Err(error) = bulk.chain(small).collect::<io::Result<()>>() {
                tracing::warn!("no threads for USRBIO, the mount reads: {error}");
                self.bulk.queue.close();
                self.small.queue.close();
                *self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error.to_string());
            }
        });
    }

    /// Bytes of a file, all of them, on a lane.
    async fn part(&self, file: &Arc<BlobFile>, range: Range<u64>, lane: &Lane) -> Result<Bytes, Fault> {
        let (reply, answer) = oneshot::channel();
        lane.queue.push(Want { file: Arc::clone(file), range, reply });
        // A worker may hang where no deadline is: in the library, or in the kernel.
        let longest = self.options.deadline.saturating_mul(2);
        match tokio::time::timeout(longest, answer).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(_)) => Err(Fault::NoRing),
            Err(_) => {
                lane.pause();
                Err(Fault::TimedOut(longest))
            }
        }
    }

    async fn read(&self, file: &Arc<BlobFile>, range: Range<u64>) -> Result<Bytes, Fault> {
        if range.end - range.start <= plan::SMALL {
            return self.part(file, range, &self.small).await;
        }
        let unit = plan::transfer_bytes(file.chunk);
        // The caller's word, as far as the file system bears it out.
        let likely = plan::bytes(range.end.min(file.size).saturating_sub(range.start)).min(LIKELY);
        let parts = futures::stream::iter(plan::parts(range, unit));
        let mut parts = parts.map(|part| self.part(file, part, &self.bulk)).buffered(self.options.parts.max(1));
        let Some(first) = parts.try_next().await? else { return Ok(Bytes::new()) };
        let mut all = BytesMut::new();
        while let Some(next) = parts.try_next().await? {
            if all.is_empty() {
                all.reserve(likely);
                all.extend_from_slice(&first);
            }
            all.extend_from_slice(&next);
        }
        Ok(if all.is_empty() { first } else { all.freeze() })
    }
}

impl UsrbioBlobs {
    /// The blobs of `dir`, by rings if there can be any.
    #[must_use]
    pub fn new(dir: StoreDir, options: &UsrbioOptions) -> Self {
        let rings = Rings::new(&dir, options);
        match &rings {
            Ok(rings) => tracing::debug!("{dir} is read through USRBIO ({})", rings.library.display()),
            Err(why) => tracing::info!("USRBIO unavailable, {dir} is read through its mount: {why}"),
        }
        Self { mount: LocalBlobs::new(dir.clone()), dir, rings }
    }

    /// The way reads go now.
    #[must_use]
    pub fn path(&self) -> ReadPath {
        let why = match &self.rings {
            Err(why) => why.clone(),
            Ok(rings) => {
                let failed = rings.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
                match failed {
                    Some(why) => why,
                    None if rings.counts.is_quarantine_full() => "too many rings were left behind".to_owned(),
                    None => return ReadPath::Usrbio { library: rings.library.clone() },
                }
            }
        };
        ReadPath::Mount { why }
    }

    /// What rings did so far; `None` where there are none.
    #[must_use]
    pub fn counts(&self) -> Option<UsrbioCounts> {
        let rings = self.rings.as_ref().ok()?;
        Some(rings.counts.snapshot(rings.files.len()))
    }

    fn transient(&self, digest: &Digest, source: impl Into<super::Cause>) -> BlobError {
        let (place, what) = (self.dir.to_string(), digest.to_string());
        BlobError::Transient { place, op: "read", what, retry_after: None, source: source.into() }
    }

    /// The error of a read, or `None` where the mount is to be asked.
    fn error(&self, digest: &Digest, range: &Range<u64>, size: u64, fault: Fault) -> Option<BlobError> {
        let place = self.dir.to_string();
        match fault {
            Fault::NoRing => None,
            Fault::Ended => Some(ends_early(&place, digest, range, size)),
            Fault::TimedOut(after) => Some(BlobError::TimedOut { place, op: "read", what: digest.to_string(), after }),
            Fault::Gone => Some(self.transient(digest, "the mount's daemon has gone")),
            // A hole, where no blob has one.
            Fault::Errno(libc::ENODATA) => {
                let how = "a chunk of it is missing".to_owned();
                Some(BlobError::Corrupt { place, what: digest.to_string(), how })
            }
            Fault::Errno(errno) => Some(self.transient(digest, io::Error::from_raw_os_error(errno))),
        }
    }

    /// The file of a blob, and whether it was kept; `None` where the mount is to be asked.
    async fn file(&self, rings: &Rings, digest: &Digest) -> Result<Option<(Arc<BlobFile>, bool)>, BlobError> {
        if let Some(file) = rings.files.recent(digest) {
            return Ok(Some((file, true)));
        }
        let (files, dir, name) = (Arc::clone(&rings.files), self.dir.clone(), *digest);
        let opened = spawn_blocking(move || files.open(&dir, &name)).await;
        let (place, what) = (self.dir.to_string(), digest.to_string());
        match opened {
            Ok(Ok(file)) => Ok(Some(file)),
            Ok(Err(NoFile::Missing)) => Err(BlobError::NotFound { what, place }),
            Ok(Err(NoFile::Register(error))) => {
                tracing::debug!("{digest} cannot be registered, the mount reads it: {error}");
                Ok(None)
            }
            Ok(Err(NoFile::Open(error))) => {
                Err(super::local::system_error(&place, self.dir.rules(), "read", &what, error))
            }
            Err(error) => Err(self.transient(digest, error)),
        }
    }
}

#[async_trait]
impl BlobStore for UsrbioBlobs {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        self.mount.stat(digest).await
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let Ok(rings) = &self.rings else { return self.mount.read_range(digest, range).await };
        rings.start();
        let lane = if range.end - range.start <= plan::SMALL { &rings.small } else { &rings.bulk };
        // A file that was kept is opened again before its fault is believed; and that it ends early, before any is.
        for attempt in 0..2 {
            if lane.is_paused() {
                break;
            }
            let Some((file, kept)) = self.file(rings, digest).await? else { break };
            // No file is so long, and no offset so large.
            let outcome = if i64::try_from(range.end).is_err() {
                Err(Fault::Ended)
            } else {
                rings.read(&file, range.clone()).await
            };
            match outcome {
                Ok(bytes) => return Ok(bytes),
                Err(fault) => {
                    // Whatever it is, it may be this file's: deleted and made again, or of a daemon that is gone.
                    rings.files.forget(digest);
                    if matches!(fault, Fault::Gone) {
                        rings.files.forget_all();
                    }
                    let again = match fault {
                        Fault::Ended => attempt == 0,
                        Fault::Gone | Fault::Errno(libc::EBADF) => kept,
                        _ => false,
                    };
                    if again {
                        continue;
                    }
                    match self.error(digest, &range, file.size, fault) {
                        Some(error) => return Err(error),
                        None => break,
                    }
                }
            }
        }
        rings.counts.by_mount.add(1);
        self.mount.read_range(digest, range).await
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.mount.put(digest, body).await
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        let deleted = self.mount.delete(digest).await;
        if let Ok(rings) = &self.rings {
            rings.files.forget(digest);
        }
        deleted
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        self.mount.list()
    }
}
