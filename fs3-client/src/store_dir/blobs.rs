//! Blobs of a directory as backends and collectors want them: brought as a body, read in parts, listed, renewed.

use super::{Published, Rules, StoreDir, StoreError, immutable};
use crate::blob_store::{Listed, Stat, ends_early};
use crate::{Digest, Hasher};
use bytes::Bytes;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::{Duration, SystemTime};

/// Bytes that are copied at once: large, since 3FS likes few large writes.
const COPY: u64 = 4 << 20;
/// A blob that was put or renewed less than this ago is not renewed again.
const RENEW_AFTER: Duration = Duration::from_secs(60);

impl StoreDir {
    /// Makes the first `size` bytes of `source` the blob `digest`. They are copied in large pieces and hashed on the
    /// way.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] when their digest is another, or what the system says; nothing is published then.
    pub fn publish_copy(
        &self,
        digest: &Digest,
        size: u64,
        mut source: impl FnMut(Range<u64>) -> io::Result<Bytes>,
    ) -> Result<Published, StoreError> {
        if self.blob_size(digest)? == Some(size) {
            self.renew(digest)?;
            self.sync_blobs()?;
            return Ok(Published { digest: *digest, size, existed: true });
        }
        let staged = self.stage("put")?;
        let mut hasher = Hasher::default();
        while hasher.len() < size {
            let piece = hasher.len()..(hasher.len() + COPY).min(size);
            let bytes = source(piece).map_err(|e| StoreError::io("read what becomes", &self.blob_path(digest), e))?;
            hasher.update(&bytes);
            (&*staged).write_all(&bytes).map_err(|e| StoreError::io("write", staged.path(), e))?;
        }
        let found = hasher.finish();
        if found != *digest {
            let what = format!("it was to be published with contents that have {found}");
            return Err(StoreError::Corrupt { digest: *digest, path: self.blob_path(digest), what });
        }
        staged.publish(digest, size)
    }

    /// The bytes `range` of a blob, all of them.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Blob`] when the blob ends before the range does, or what the system says.
    pub fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, StoreError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let (file, len) = self.open_range(digest, &range, false)?;
        let mut buffer = vec![0; len];
        match file.read_exact_at(&mut buffer, range.start) {
            Ok(()) => Ok(buffer.into()),
            Err(error) => Err(self.range_error(digest, &range, &file, error)),
        }
    }

    /// Opens a blob to read `range` of it, which is not empty, and says how many bytes that is; `direct` is without the
    /// page cache, where the file system can.
    pub(crate) fn open_range(
        &self,
        digest: &Digest,
        range: &Range<u64>,
        direct: bool,
    ) -> Result<(File, usize), StoreError> {
        let path = self.blob_path(digest);
        let open = |flags| File::options().read(true).custom_flags(flags).open(&path);
        let opened = match open(if direct { libc::O_DIRECT } else { 0 }) {
            Err(e) if direct && e.kind() == io::ErrorKind::InvalidInput => open(0),
            opened => opened,
        };
        let file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(StoreError::Missing { digest: *digest, path }),
            Err(e) => return Err(StoreError::io("open", &path, e)),
        };
        let short = |size| StoreError::from(ends_early(&self.to_string(), digest, range, size));
        // A length that nobody checked must not become an allocation. 3FS may tell an old length for a while, but never
        // one that is too long, and a blob has its name only after its last byte was there.
        let size = file.metadata().map_err(|e| StoreError::io("stat", &path, e))?.len();
        if size < range.end {
            let there = self.rules() == Rules::Fs3
                && is_there(&file, range.end - 1).map_err(|e| StoreError::io("read", &path, e))?;
            if !there {
                return Err(short(size));
            }
        }
        let len = usize::try_from(range.end - range.start).map_err(|_| short(size))?;
        Ok((file, len))
    }

    /// What became of a read from a file that [`StoreDir::open_range`] opened.
    pub(crate) fn range_error(&self, digest: &Digest, range: &Range<u64>, file: &File, error: io::Error) -> StoreError {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let size = file.metadata().map_or(0, |meta| meta.len());
            return ends_early(&self.to_string(), digest, range, size).into();
        }
        StoreError::io("read", &self.blob_path(digest), error)
    }

    /// Length and age of a blob; `None` when the store does not have it.
    ///
    /// # Errors
    /// What the system says.
    pub fn stat_blob(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        let path = self.blob_path(digest);
        match fs::metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(Some(Stat { size: meta.len(), modified: meta.modified().ok() })),
            Ok(_) => Err(super::not_a_file(digest, path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io("stat", &path, e)),
        }
    }

    /// Makes the blob's age start anew, as if it had been published now: whoever relies on a blob that is there already
    /// says so, to whoever removes old ones. One that is not there is left so.
    ///
    /// # Errors
    /// What the system says.
    pub fn renew(&self, digest: &Digest) -> Result<(), StoreError> {
        let path = self.blob_path(digest);
        let renewed = File::open(&path).and_then(|file| {
            let modified = file.metadata()?.modified()?;
            if SystemTime::now().duration_since(modified).is_ok_and(|age| age < RENEW_AFTER) {
                return Ok(());
            }
            let ((), taken) = immutable::despite(&path, || file.set_modified(SystemTime::now()))?;
            if taken { immutable::set(&file) } else { Ok(()) }
        });
        match renewed {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            // Another user's blob: this user's lease protects it all the same.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                tracing::debug!("cannot renew {}: {e}", path.display());
                Ok(())
            }
            done => done.map_err(|e| StoreError::io("renew", &path, e)),
        }
    }

    /// Removes a blob, durably. One that is not there is removed already.
    ///
    /// # Errors
    /// What the system says.
    pub fn delete_blob(&self, digest: &Digest) -> Result<(), StoreError> {
        let path = self.blob_path(digest);
        match immutable::despite(&path, || fs::remove_file(&path)) {
            Ok(_) => self.sync_blobs(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(StoreError::io("remove", &path, e)),
        }
    }

    /// Calls `each` with every blob. Files whose names are no digests are passed over.
    ///
    /// # Errors
    /// What the system says; or the first error of `each`.
    pub fn each_blob(&self, each: &mut dyn FnMut(Listed) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let dir = self.blobs();
        let entries = fs::read_dir(&dir).map_err(|e| StoreError::io("list", &dir, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| StoreError::io("list", &dir, e))?;
            let name = entry.file_name();
            let digest = name.to_str().and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok());
            let Some(digest) = digest else { continue };
            match entry.metadata() {
                Ok(meta) if meta.is_file() => {
                    each(Listed { digest, stat: Stat { size: meta.len(), modified: meta.modified().ok() } })?;
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("stat", &entry.path(), e)),
            }
        }
        Ok(())
    }
}

/// Whether a file has a byte there, whatever its length is said to be.
fn is_there(file: &File, at: u64) -> io::Result<bool> {
    match file.read_at(&mut [0], at) {
        Ok(read) => Ok(read > 0),
        // No file is so long.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(e) => Err(e),
    }
}
