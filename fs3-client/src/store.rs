//! A store, wherever it is: what the converter publishes to and reads from.

use crate::{Digest, Published, RefName, Staged, StoreDir, StoreError, Swept};
use oci_spec::image::Descriptor;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A store of immutable blobs, refs, and records of finished layers.
///
/// Whatever its place, files are staged on a local disk, and appear under their final name whole or not at all.
#[derive(Debug, Clone)]
pub struct Store {
    dir: StoreDir,
}

impl From<StoreDir> for Store {
    fn from(dir: StoreDir) -> Self {
        Self { dir }
    }
}

impl Store {
    /// As [`StoreDir::create`].
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        StoreDir::create(path).map(Self::from)
    }

    /// As [`StoreDir::open`].
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] when there is none, or what the system says.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        StoreDir::open(path).map(Self::from)
    }

    /// The store's directory, absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.dir.root()
    }

    /// A local directory for unnamed scratch files.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.dir.scratch()
    }

    /// Where the blob is, if the store has it; absolute.
    #[must_use]
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.dir.blob_path(digest)
    }

    /// Length of the blob in bytes; `None` when the store does not have it.
    ///
    /// # Errors
    /// A blob that cannot be looked at is not a blob that is absent.
    pub fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        self.dir.blob_size(digest)
    }

    /// Opens the blob for reading, after checking that it is `size` bytes long.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Corrupt`] when the length is another, or what the system says.
    pub fn open_blob(&self, digest: &Digest, size: u64) -> Result<File, StoreError> {
        self.dir.open_blob(digest, size)
    }

    /// The whole blob (a manifest, a config), its digest checked.
    ///
    /// # Errors
    /// As [`Store::open_blob`]; [`StoreError::TooLarge`] above 64 MiB; [`StoreError::Corrupt`] when the digest is
    /// another.
    pub fn read_blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>, StoreError> {
        self.dir.read_blob(digest, size)
    }

    /// A new local file to write a blob into; `purpose` becomes part of its name.
    ///
    /// # Errors
    /// What the system says.
    pub fn stage(&self, purpose: &str) -> Result<Staged, StoreError> {
        self.dir.stage(purpose)
    }

    /// Publishes `bytes` as a blob.
    ///
    /// # Errors
    /// What the system says.
    pub fn publish_bytes(&self, bytes: &[u8]) -> Result<Published, StoreError> {
        self.dir.publish_bytes(bytes)
    }

    /// What [`Store::write_record`] last wrote under `key`, or `None`.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], [`StoreError::TooLarge`], or what the system says.
    pub fn record(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.dir.record(key)
    }

    /// Writes a record atomically and durably. `key` is 64 lower-case hex digits.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], or what the system says; the old record stays then.
    pub fn write_record(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.dir.write_record(key, bytes)
    }

    /// Points `name` at `descriptor`, atomically and durably.
    ///
    /// # Errors
    /// What the system says; the ref is then as it was before, or the new one.
    pub fn write_ref(&self, name: &RefName, descriptor: &Descriptor) -> Result<(), StoreError> {
        self.dir.write_ref(name, descriptor)
    }

    /// What `name` points at.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`]; [`StoreError::BadRef`]; what the system says.
    pub fn read_ref(&self, name: &RefName) -> Result<Descriptor, StoreError> {
        self.dir.read_ref(name)
    }

    /// All refs, sorted by name and tag.
    ///
    /// # Errors
    /// [`StoreError::BadRef`] when a ref is not a descriptor; what the system says.
    pub fn list_refs(&self) -> Result<Vec<(RefName, Descriptor)>, StoreError> {
        self.dir.list_refs()
    }

    /// Removes a ref; the blobs stay.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`], or what the system says.
    pub fn remove_ref(&self, name: &RefName) -> Result<(), StoreError> {
        self.dir.remove_ref(name)
    }

    /// Removes what dead local writers left in `tmp/`.
    ///
    /// # Errors
    /// What the system says.
    pub fn sweep(&self) -> Result<Swept, StoreError> {
        self.dir.sweep()
    }
}
