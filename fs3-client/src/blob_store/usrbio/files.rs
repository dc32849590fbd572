//! Open, registered files, kept: to open and register one for each read costs more than the read.

use super::library::{Library, Registered};
use crate::{Digest, StoreDir};
use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A blob's file.
#[derive(Debug)]
pub(super) struct BlobFile {
    pub(super) registered: Registered,
    /// Bytes of a chunk: its layout does not change, so unlike a length this is never old.
    pub(super) chunk: u64,
    /// Its length when it was opened, for words only: it may be old.
    pub(super) size: u64,
    identity: (u64, u64),
}

/// Files that are kept, up to a number.
#[derive(Debug)]
pub(super) struct Files {
    library: &'static Library,
    most: usize,
    /// After how long it is looked whether a file still has its name: a deleted one may read as zeros after a while.
    check_after: Duration,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    files: HashMap<Digest, Entry>,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    file: Arc<BlobFile>,
    checked: Instant,
    used: u64,
}

/// Why there is no file.
#[derive(Debug)]
pub(super) enum NoFile {
    /// The blob is not there.
    Missing,
    /// It could not be opened.
    Open(io::Error),
    /// It could not be registered: the mount still reads it.
    Register(io::Error),
}

fn identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

impl Files {
    pub(super) fn new(library: &'static Library, most: usize, check_after: Duration) -> Self {
        Self { library, most: most.max(1), check_after, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of a blob, if it is kept and was looked at not long ago. This blocks for nobody.
    pub(super) fn recent(&self, digest: &Digest) -> Option<Arc<BlobFile>> {
        let mut kept = self.kept();
        kept.clock += 1;
        let clock = kept.clock;
        let entry = kept.files.get_mut(digest)?;
        entry.used = clock;
        (entry.checked.elapsed() < self.check_after).then(|| Arc::clone(&entry.file))
    }

    /// The file of a blob, and whether it was kept. It may block.
    pub(super) fn open(&self, dir: &StoreDir, digest: &Digest) -> Result<(Arc<BlobFile>, bool), NoFile> {
        if let Some(file) = self.recent(digest) {
            return Ok((file, true));
        }
        let path = dir.blob_path(digest);
        let old = self.kept().files.get(digest).map(|entry| Arc::clone(&entry.file));
        if let Some(file) = old {
            match fs::metadata(&path) {
                Ok(meta) if identity(&meta) == file.identity => {
                    if let Some(entry) = self.kept().files.get_mut(digest) {
                        entry.checked = Instant::now();
                    }
                    return Ok((file, true));
                }
                _ => self.forget(digest),
            }
        }
        let file = Arc::new(self.open_new(&path)?);
        self.keep(*digest, &file);
        Ok((file, false))
    }

    fn open_new(&self, path: &Path) -> Result<BlobFile, NoFile> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (meta, file) = match opened {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(NoFile::Missing),
            Err(error) => return Err(NoFile::Open(error)),
        };
        if !meta.is_file() {
            return Err(NoFile::Open(io::Error::other("it is not a regular file")));
        }
        let registered = self.library.register(file).map_err(NoFile::Register)?;
        Ok(BlobFile { registered, chunk: meta.blksize(), size: meta.len(), identity: identity(&meta) })
    }

    fn keep(&self, digest: Digest, file: &Arc<BlobFile>) {
        let mut gone = Vec::new();
        {
            let mut kept = self.kept();
            while kept.files.len() >= self.most && !kept.files.contains_key(&digest) {
                let oldest = kept.files.iter().min_by_key(|(_, entry)| entry.used).map(|(digest, _)| *digest);
                gone.extend(oldest.and_then(|oldest| kept.files.remove(&oldest)));
            }
            let used = kept.clock;
            gone.extend(kept.files.insert(digest, Entry { file: Arc::clone(file), checked: Instant::now(), used }));
        }
        // Without the lock: what is dropped here may wake others.
        drop(gone);
    }

    /// Keeps a file no longer. Whoever reads from it goes on.
    pub(super) fn forget(&self, digest: &Digest) {
        let gone = self.kept().files.remove(digest);
        drop(gone);
    }

    /// Keeps none of them: their daemon is gone.
    pub(super) fn forget_all(&self) {
        let gone = std::mem::take(&mut self.kept().files);
        drop(gone);
    }

    /// How many are kept.
    pub(super) fn len(&self) -> usize {
        self.kept().files.len()
    }
}
