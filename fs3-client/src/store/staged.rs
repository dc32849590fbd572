//! Files on their way into a store.

use super::remote::Remote;
use super::writing::Writing;
use crate::store_dir;
use crate::{Digest, Published, StoreError};
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A new local file that is in the store under no name yet. It derefs to the [`File`], open for reading and writing.
///
/// Dropped without [`Staged::publish`], it is unlinked.
#[derive(Debug)]
pub struct Staged {
    file: store_dir::Staged,
    /// Where it goes; `None` when it is in the store's own directory already.
    remote: Option<Arc<Remote>>,
    /// Whose it is.
    owner: Option<Owner>,
}

/// Tells the writer when the file has ended.
#[derive(Debug)]
struct Owner {
    writing: Arc<Writing>,
    path: PathBuf,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.writing.end(&self.path);
    }
}

impl Staged {
    pub(super) fn new(
        file: store_dir::Staged,
        remote: Option<Arc<Remote>>,
        writing: Option<&Arc<Writing>>,
    ) -> Result<Self, StoreError> {
        let mut staged = Self { file, remote, owner: None };
        if let Some(writing) = writing {
            writing.begin(staged.path())?;
            staged.owner = Some(Owner { writing: Arc::clone(writing), path: staged.path().to_owned() });
        }
        Ok(staged)
    }

    /// Where the file is now.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Lets the kernel begin to write `len` bytes from `offset` to disk, without waiting: [`Staged::publish`] has to
    /// wait for all that is not there yet. Where the file is sent elsewhere, it does nothing.
    pub fn begin_writeback(&self, offset: u64, len: u64) {
        if self.remote.is_none() {
            self.file.begin_writeback(offset, len);
        }
    }

    /// Makes the file a blob of the store, durable when this returns; when the store has the blob already, ours is
    /// dropped, and the age of that one starts anew.
    ///
    /// In a directory, `digest` is the caller's word and only the length is checked; what is sent elsewhere is hashed on
    /// its way.
    ///
    /// # Errors
    /// [`StoreError::ShortStage`] when the file is not `size` bytes long, else what the system or the backend says.
    /// Readers then see no blob, or the whole.
    pub fn publish(self, digest: &Digest, size: u64) -> Result<Published, StoreError> {
        if let Some(owner) = &self.owner {
            owner.writing.publishing(digest)?;
        }
        match self.remote {
            None => self.file.publish(digest, size),
            Some(remote) => remote.publish(self.file, digest, size),
        }
    }
}

impl Deref for Staged {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}
