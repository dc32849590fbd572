//! A store that is a directory, on a local disk or a mounted 3FS.
//!
//! ```text
//! blobs/sha256/<hex>      immutable: metadata images, data blobs, manifests, configs
//! refs/<name>/<tag>       a descriptor, replaced by rename; `/` in the name is written `+`
//! converted/<key>         notes of a converter on what it has finished, so that it need not do it again
//! leases/<id>             who is writing
//! tmp/                    files that are being written, each locked by its writer
//! ```
//!
//! Nothing under a final name is ever half written: a file is staged in `tmp/`, written, synced and then renamed. A
//! crash at any instant leaves the whole file or none, and a leftover in `tmp/` for [`StoreDir::sweep`].
//! All of it is safe between any number of threads and processes.

mod blobs;
mod error;
mod immutable;
mod leases;
mod objects;
mod refs;
mod rules;
mod staged;
mod sweep;
mod writeback;

pub use error::StoreError;
pub(crate) use leases::HeldFile;
pub(crate) use refs::ref_bytes;
pub use rules::Rules;
pub use staged::{Published, Staged};
pub use sweep::Swept;

use crate::Digest;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Longest record in bytes.
const RECORD_MAX: u64 = 16 << 20;
/// Longest blob that is read whole (a manifest, a config) in bytes.
pub(crate) const WHOLE_BLOB_MAX: u64 = 64 << 20;

/// A store that is a directory.
#[derive(Debug, Clone)]
pub struct StoreDir {
    root: PathBuf,
    rules: Rules,
    /// Whether blobs get the flag of files that nobody may change.
    immutable: bool,
}

/// As one names it on a command line.
impl fmt::Display for StoreDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.rules == Rules::Fs3 { "3fs:" } else { "" };
        write!(f, "{scheme}{}", self.root.display())
    }
}

impl StoreDir {
    /// Opens the store at `path`, making it (and the directories above it) where it does not exist. Harmless on an
    /// existing store, and when several do it at once. The rules are those of the file system ([`Rules::of`]).
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        let mut store = Self { root: absolute(path)?, rules: Rules::Posix, immutable: false };
        for dir in [store.blobs(), store.refs(), store.tmp(), store.converted()] {
            fs::create_dir_all(&dir).map_err(|e| StoreError::io("create", &dir, e))?;
        }
        sync_dir(&store.root.join("blobs"))?;
        sync_dir(&store.root)?;
        store.rules = Rules::of(&store.root);
        Ok(store)
    }

    /// The same store under other rules.
    #[must_use]
    pub fn with_rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// The same store, whose blobs get the flag of files that nobody may change (`FS_IMMUTABLE_FL`) once they are
    /// published. Where the file system has no such flag, or not for this user, they go without, and a warning says so.
    /// Blobs that have it are renewed and removed as others are.
    #[must_use]
    pub fn with_immutable(self, immutable: bool) -> Self {
        Self { immutable, ..self }
    }

    /// The rules that it keeps.
    #[must_use]
    pub const fn rules(&self) -> Rules {
        self.rules
    }

    /// Opens the store at `path`.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] when there is none, or what the system says.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let root = absolute(path)?;
        let store = Self { rules: Rules::of(&root), root, immutable: false };
        for (dir, missing) in
            [(store.root.clone(), "the directory itself"), (store.blobs(), "blobs/sha256"), (store.refs(), "refs")]
        {
            match fs::metadata(&dir) {
                Ok(meta) if meta.is_dir() => {}
                Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    return Err(StoreError::io("open", &dir, e));
                }
                _ => return Err(StoreError::NotAStore { path: path.to_owned(), missing }),
            }
        }
        Ok(store)
    }

    /// The store's directory, absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    fn refs(&self) -> PathBuf {
        self.root.join("refs")
    }

    /// A directory of the store for unnamed scratch files: on the same disk, and never listed.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.tmp()
    }

    fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    fn converted(&self) -> PathBuf {
        self.root.join("converted")
    }

    /// Where the blob is, if the store has it; absolute.
    #[must_use]
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// Length of the blob in bytes; `None` when the store does not have it.
    ///
    /// # Errors
    /// What the system says: a blob that cannot be looked at is not a blob that is absent.
    pub fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let path = self.blob_path(digest);
        match fs::metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(Some(meta.len())),
            Ok(_) => Err(not_a_file(digest, path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io("stat", &path, e)),
        }
    }

    /// Opens the blob for reading, after checking that it is `size` bytes long.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Corrupt`] when the length is another, or what the system says.
    pub fn open_blob(&self, digest: &Digest, size: u64) -> Result<File, StoreError> {
        let path = self.blob_path(digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(StoreError::Missing { digest: *digest, path }),
            Err(e) => return Err(StoreError::io("open", &path, e)),
        };
        let meta = file.metadata().map_err(|e| StoreError::io("stat", &path, e))?;
        if !meta.is_file() {
            return Err(not_a_file(digest, path));
        }
        // Another node's length may be old on 3FS: then whether the last byte is there tells.
        let old = self.rules == Rules::Fs3 && meta.len() < size && file.read_exact_at(&mut [0], size - 1).is_ok();
        if meta.len() != size && !old {
            let what = format!("it has {} bytes where {size} are expected", meta.len());
            return Err(StoreError::Corrupt { digest: *digest, path, what });
        }
        Ok(file)
    }

    /// The whole blob (a manifest, a config), its digest checked.
    ///
    /// # Errors
    /// As [`StoreDir::open_blob`]; [`StoreError::TooLarge`] above 64 MiB; [`StoreError::Corrupt`] when the digest is
    /// another.
    pub fn read_blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>, StoreError> {
        let path = self.blob_path(digest);
        if size > WHOLE_BLOB_MAX {
            return Err(StoreError::TooLarge { path, size, limit: WHOLE_BLOB_MAX });
        }
        let file = self.open_blob(digest, size)?;
        let mut bytes = Vec::new();
        file.take(size).read_to_end(&mut bytes).map_err(|e| StoreError::io("read", &path, e))?;
        let actual = Digest::of(&bytes);
        if actual != *digest {
            return Err(StoreError::Corrupt { digest: *digest, path, what: format!("its contents have {actual}") });
        }
        Ok(bytes)
    }

    /// A new file to write a blob into; `purpose` becomes part of its name, for whoever looks into `tmp/`.
    ///
    /// # Errors
    /// What the system says.
    pub fn stage(&self, purpose: &str) -> Result<Staged, StoreError> {
        Staged::new(self, purpose)
    }

    /// Publishes `bytes` as a blob.
    ///
    /// # Errors
    /// What the system says.
    pub fn publish_bytes(&self, bytes: &[u8]) -> Result<Published, StoreError> {
        let digest = Digest::of(bytes);
        let staged = self.stage("bytes")?;
        (&*staged).write_all(bytes).map_err(|e| StoreError::io("write", staged.path(), e))?;
        staged.publish(&digest, bytes.len() as u64)
    }

    fn sync_blobs(&self) -> Result<(), StoreError> {
        sync_dir(&self.blobs())
    }

    fn record_path(&self, key: &str) -> Result<PathBuf, StoreError> {
        if is_record_key(key) {
            Ok(self.converted().join(key))
        } else {
            Err(StoreError::BadKey { key: key.chars().take(200).collect() })
        }
    }

    /// What [`StoreDir::write_record`] last wrote under `key`, or `None`.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], [`StoreError::TooLarge`] above 16 MiB, or what the system says.
    pub fn record(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        read_small(&self.record_path(key)?, RECORD_MAX)
    }

    /// Writes a small file `converted/<key>`, atomically and durably. `key` is 64 lower-case hex digits: a hash of
    /// whatever the record depends on.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], or what the system says; the old record stays then.
    pub fn write_record(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.write_small(&self.record_path(key)?, "record", bytes, false)?;
        Ok(())
    }
}

/// Whether `key` can be a record's.
pub(crate) fn is_record_key(key: &str) -> bool {
    key.len() == 64 && key.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn absolute(path: &Path) -> Result<PathBuf, StoreError> {
    std::path::absolute(path).map_err(|e| StoreError::io("find", path, e))
}

fn not_a_file(digest: &Digest, path: PathBuf) -> StoreError {
    StoreError::Corrupt { digest: *digest, path, what: "it is not a regular file".to_owned() }
}

/// The whole file, or `None` when it does not exist.
fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
    // Whoever can write to the store can put a pipe there, whose opening waits for ever.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("a flag of open(2)");
    let file = match File::options().read(true).custom_flags(nonblock).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io("open", path, e)),
    };
    if !file.metadata().map_err(|e| StoreError::io("stat", path, e))?.is_file() {
        let source = io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file");
        return Err(StoreError::io("read", path, source));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| StoreError::io("read", path, e))?;
    if bytes.len() as u64 > limit {
        let size = fs::metadata(path).map_or(limit + 1, |meta| meta.len());
        return Err(StoreError::TooLarge { path: path.to_owned(), size, limit });
    }
    Ok(Some(bytes))
}

/// Makes the names in a directory durable.
fn sync_dir(path: &Path) -> Result<(), StoreError> {
    let synced = File::open(path).and_then(|dir| dir.sync_all());
    match synced {
        // Some network file systems have no such call for directories: their renames are durable, or nothing is.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(|e| StoreError::io("sync", path, e)),
    }
}

#[cfg(test)]
mod tests;
