//! Files on their way into the store, and what is left of them when their writer dies.
//!
//! A staged file is `tmp/<boot>.<pid>.<counter>.<purpose>`, and its writer holds it locked (`flock`). The kernel drops
//! the lock with the process, however it ends, so a file of this boot that can be locked has no writer any more.
//! Locks do not tell anything about writers on other machines that share the store; `<boot>` does, and a sweep leaves
//! their files alone.

use super::{StoreDir, StoreError};
use crate::Digest;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// A new file that is in the store under no final name yet. It derefs to the [`File`], open for reading and writing.
///
/// Dropped without [`Staged::publish`], it is unlinked.
#[derive(Debug)]
pub struct Staged {
    file: File,
    path: PathBuf,
    store: StoreDir,
    /// Whether `path` still is ours to unlink.
    linked: bool,
}

/// What became of a staged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// The blob's name.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// Whether the store had it before, so that our copy was dropped.
    pub existed: bool,
}

/// What a [`StoreDir::sweep`] found in `tmp/`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Leftovers removed.
    pub removed: usize,
    /// Files whose writer lives.
    pub alive: usize,
    /// Files of other machines or earlier boots, and names that no writer of ours makes: left alone.
    pub foreign: usize,
}

/// Names this boot of this machine: the start of the kernel's random boot id.
///
/// Where the kernel tells none, nothing can be told apart: then the process stands for itself, and its sweeps remove
/// only what it left itself.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let hex: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        if hex.len() == 16 { hex } else { format!("p{}-{}", std::process::id(), start()) }
    })
}

/// Nanoseconds of the clock when the process first asked. Process ids are used again, and this keeps two processes
/// that had the same one from ever making the same name.
fn start() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| {
            since.as_secs().wrapping_mul(1_000_000_000).wrapping_add(u64::from(since.subsec_nanos()))
        })
    })
}

fn next_name(purpose: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let counter = start().wrapping_add(COUNTER.fetch_add(1, Ordering::Relaxed));
    let purpose: String =
        purpose.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).take(32).collect();
    format!("{}.{}.{counter:x}.{purpose}", boot(), std::process::id())
}

/// Whether the file system has no locks (some network file systems, and NFS without its lock daemon).
fn no_locks_here(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK))
}

impl Staged {
    pub(super) fn new(store: &StoreDir, purpose: &str) -> Result<Self, StoreError> {
        let tmp = store.tmp();
        loop {
            let path = tmp.join(next_name(purpose));
            // Read-only for everybody from the start, our handle excepted: what is published never changes.
            let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(0o444).open(&path);
            let file = match opened {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    // Copies of a store often lose its empty directories.
                    fs::create_dir_all(&tmp).map_err(|e| StoreError::io("create", &tmp, e))?;
                    continue;
                }
                Err(e) => return Err(StoreError::io("create", &path, e)),
            };
            let mut staged = Self { file, path, store: store.clone(), linked: true };
            match staged.file.try_lock() {
                Ok(()) => {}
                // A sweep came between the two calls, and unlinks the file now.
                Err(TryLockError::WouldBlock) => {
                    staged.linked = false;
                    continue;
                }
                // Then no sweep can lock it either, and so leaves it alone.
                Err(TryLockError::Error(e)) if no_locks_here(&e) => {}
                Err(TryLockError::Error(e)) => return Err(StoreError::io("lock", &staged.path, e)),
            }
            let links = staged.file.metadata().map_err(|e| StoreError::io("stat", &staged.path, e))?.nlink();
            if links > 0 {
                return Ok(staged);
            }
            // As before, but the sweep was done before we locked.
            staged.linked = false;
        }
    }

    /// Where the file is now.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the kernel begin to write `len` bytes from `offset` to disk, without waiting: [`Staged::publish`] has to
    /// wait for all that is not there yet.
    pub fn begin_writeback(&self, offset: u64, len: u64) {
        super::writeback::begin(&self.file, offset, len);
    }

    /// Gives the file its final name, after it is on disk; when the store has the blob already, ours is dropped.
    ///
    /// A file of another length under the final name is what a broken disk or a foreign tool left: it is replaced.
    /// At no moment is there no file where there was one. `digest` is the caller's word; only the length is checked.
    ///
    /// # Errors
    /// [`StoreError::ShortStage`] when the file is not `size` bytes long, else what the system says. The file is gone
    /// then, unless the last step (making the new name durable) failed.
    pub fn publish(mut self, digest: &Digest, size: u64) -> Result<Published, StoreError> {
        let written = self.file.metadata().map_err(|e| StoreError::io("stat", &self.path, e))?.len();
        if written != size {
            return Err(StoreError::ShortStage { digest: *digest, written, expected: size });
        }
        let published = |existed| Published { digest: *digest, size, existed };
        let store = self.store.clone();
        if store.blob_size(digest)? == Some(size) {
            // Whoever made it may not have come to the directory's sync yet, and our caller relies on the blob now.
            store.sync_blobs()?;
            return Ok(published(true));
        }
        self.rename_to(&store.blob_path(digest))?;
        store.sync_blobs()?;
        Ok(published(false))
    }

    /// Makes the contents durable, then moves the file; the caller syncs the directory.
    pub(super) fn rename_to(&mut self, target: &Path) -> Result<(), StoreError> {
        self.file.sync_all().map_err(|e| StoreError::io("sync", &self.path, e))?;
        fs::rename(&self.path, target).map_err(|e| StoreError::io("rename to", target, e))?;
        self.linked = false;
        Ok(())
    }
}

impl Deref for Staged {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.linked
            && let Err(e) = fs::remove_file(&self.path)
        {
            tracing::warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

impl StoreDir {
    /// Removes what dead writers of this boot of this machine left in `tmp/`. A living writer's file is never touched,
    /// so this may run at any time, beside any number of writers and other sweeps.
    ///
    /// # Errors
    /// What the system says; files that vanish meanwhile are not errors.
    pub fn sweep(&self) -> Result<Swept, StoreError> {
        let tmp = self.tmp();
        let mut swept = Swept::default();
        let entries = match fs::read_dir(&tmp) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(swept),
            Err(e) => return Err(StoreError::io("list", &tmp, e)),
        };
        for entry in entries {
            let entry = entry.map_err(|e| StoreError::io("list", &tmp, e))?;
            let name = entry.file_name();
            let ours =
                name.to_str().and_then(|name| name.strip_prefix(boot())).is_some_and(|rest| rest.starts_with('.'));
            if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
                swept.foreign += 1;
                continue;
            }
            match sweep_one(&entry.path()) {
                Ok(true) => swept.removed += 1,
                Ok(false) => swept.alive += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("remove", &entry.path(), e)),
            }
        }
        Ok(swept)
    }
}

/// Removes the file unless its writer lives; tells whether it did.
fn sweep_one(path: &Path) -> io::Result<bool> {
    let file = File::open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(e)) if no_locks_here(&e) => return Ok(false),
        Err(TryLockError::Error(e)) => return Err(e),
    }
    fs::remove_file(path)?;
    Ok(true)
}
