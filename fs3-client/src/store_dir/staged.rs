//! Files on their way into the store, and what is left of them when their writer dies.
//!
//! A staged file is `tmp/<boot>-<machine>.<pid>.<counter>.<purpose>`, and its writer holds it locked (`flock`). The
//! kernel drops the lock with the process, however it ends; [`super::sweep`] has the rules by which a file has no writer
//! any more.

use super::writeback;
use super::{Rules, StoreDir, StoreError, immutable};
use crate::host;
use crate::{Digest, Hasher};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Bytes that are read at once to verify what was written.
const VERIFY: usize = 1 << 20;

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

/// Whether the file system has no locks (some network file systems, and NFS without its lock daemon).
pub(super) fn no_locks_here(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK))
}

impl Staged {
    pub(super) fn new(store: &StoreDir, purpose: &str) -> Result<Self, StoreError> {
        let tmp = store.tmp();
        loop {
            let path = tmp.join(host::new_name(purpose));
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
            // On 3FS the file is verified through a second handle, which has to be locked before the first is closed.
            let locked = match store.rules() {
                Rules::Posix => staged.file.try_lock(),
                Rules::Fs3 => staged.file.try_lock_shared(),
            };
            match locked {
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
        writeback::begin(&self.file, offset, len);
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
        // On 3FS what was written may still be on its way, and fail: until that is told, a length is none.
        if self.store.rules() == Rules::Fs3 {
            self.file.sync_all().map_err(|e| StoreError::io("sync", &self.path, e))?;
        }
        let written = self.file.metadata().map_err(|e| StoreError::io("stat", &self.path, e))?.len();
        if written != size {
            return Err(StoreError::ShortStage { digest: *digest, written, expected: size });
        }
        let published = |existed| Published { digest: *digest, size, existed };
        let store = self.store.clone();
        if store.blob_size(digest)? == Some(size) {
            store.renew(digest)?;
            // Whoever made it may not have come to the directory's sync yet, and our caller relies on the blob now.
            store.sync_blobs()?;
            return Ok(published(true));
        }
        match self.store.rules() {
            Rules::Posix => self.file.sync_all().map_err(|e| StoreError::io("sync", &self.path, e))?,
            Rules::Fs3 => self.verify_again(size, digest)?,
        }
        let target = store.blob_path(digest);
        if let Err(e) = fs::rename(&self.path, &target) {
            let whole = e.kind() == io::ErrorKind::PermissionDenied && store.blob_size(digest)? == Some(size);
            if whole {
                // Somebody else published it meanwhile, and nobody may replace it: it need not be.
                store.sync_blobs()?;
                return Ok(published(true));
            }
            immutable::despite(&target, || fs::rename(&self.path, &target))
                .map_err(|e| StoreError::io("rename to", &target, e))?;
        }
        self.renamed();
        if store.immutable
            && let Err(e) = immutable::set(&self.file)
        {
            tracing::warn!("{} stays without the immutable flag: {e}", target.display());
        }
        store.sync_blobs()?;
        Ok(published(false))
    }

    /// Makes the contents durable. On 3FS, also looks whether they are the `size` bytes with `digest`.
    pub(super) fn make_durable(&mut self, size: u64, digest: &Digest) -> Result<(), StoreError> {
        self.file.sync_all().map_err(|e| StoreError::io("sync", &self.path, e))?;
        match self.store.rules() {
            Rules::Posix => Ok(()),
            Rules::Fs3 => self.verify_again(size, digest),
        }
    }

    /// Closes the file, sees what that says, and reads it again from where it went.
    fn verify_again(&mut self, size: u64, digest: &Digest) -> Result<(), StoreError> {
        let path = self.path.clone();
        let reopen = || -> Result<File, StoreError> {
            let file = File::open(&path).map_err(|e| StoreError::io("open", &path, e))?;
            match file.try_lock_shared() {
                Err(TryLockError::Error(e)) if !no_locks_here(&e) => Err(StoreError::io("lock", &path, e)),
                _ => Ok(file),
            }
        };
        let written = std::mem::replace(&mut self.file, reopen()?);
        writeback::close(written).map_err(|e| StoreError::io("close", &path, e))?;
        // A handle that was opened after the last writer's was closed sees no page of before.
        self.file = reopen()?;
        let corrupt = |what: String| StoreError::Corrupt { digest: *digest, path: path.clone(), what };
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; VERIFY];
        loop {
            let read = self.file.read_at(&mut buffer, hasher.len()).map_err(|e| StoreError::io("read", &path, e))?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
        }
        if hasher.len() != size {
            return Err(corrupt(format!("{size} bytes were written, and {} come back", hasher.len())));
        }
        let found = hasher.finish();
        if found != *digest {
            return Err(corrupt(format!("what comes back after writing has {found}")));
        }
        Ok(())
    }

    /// The file has another name now, so there is nothing to unlink.
    pub(super) fn renamed(&mut self) {
        self.linked = false;
    }

    /// The file, for whoever keeps it open when it has its name.
    pub(crate) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
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
