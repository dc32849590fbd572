//! Small objects of a store's directory by their names: one file each, replaced by rename.

use super::staged::no_locks_here;
use super::{Staged, StoreDir, StoreError, read_small, sync_dir};
use crate::Digest;
use crate::names::{Condition, ListedName, Named, OBJECT_MAX, PutOutcome, Version, check_name};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The file whose lock puts conditional writers of one machine in a row.
const LOCK: &str = ".names.lock";

impl StoreDir {
    fn object_path(&self, name: &str) -> Result<PathBuf, StoreError> {
        check_name(name)?;
        Ok(self.root().join(name))
    }

    /// The small object `name` (a path below the store's directory) and its version; `None` when there is none.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`], [`StoreError::Blob`] when it is no name, or what the system says.
    pub fn object(&self, name: &str) -> Result<Option<Named>, StoreError> {
        let bytes = read_small(&self.object_path(name)?, OBJECT_MAX)?;
        Ok(bytes.map(|bytes| Named { version: version(&bytes), bytes: bytes.into() }))
    }

    /// Replaces a small object as far as `condition` allows, atomically and durably.
    ///
    /// # Errors
    /// [`StoreError::Blob`] when it is no name, or what the system says; the object is as it was then, or the new one.
    pub fn put_object(&self, name: &str, bytes: &[u8], condition: &Condition) -> Result<PutOutcome, StoreError> {
        let path = self.object_path(name)?;
        if bytes.len() as u64 > OBJECT_MAX {
            return Err(StoreError::TooLarge { path, size: bytes.len() as u64, limit: OBJECT_MAX });
        }
        let placed = match condition {
            Condition::Always => self.write_small(&path, "object", bytes, false)?,
            Condition::Absent => self.write_small(&path, "object", bytes, true)?,
            Condition::Unchanged(expected) => {
                let _lock = self.lock_names()?;
                let there = self.object(name)?.map(|there| there.version);
                there.as_ref() == Some(expected) && self.write_small(&path, "object", bytes, false)?
            }
        };
        Ok(if placed { PutOutcome::Done(version(bytes)) } else { PutOutcome::Conflict })
    }

    /// Removes a small object, durably. One that is not there is removed already.
    ///
    /// # Errors
    /// [`StoreError::Blob`] when it is no name, or what the system says.
    pub fn delete_object(&self, name: &str) -> Result<(), StoreError> {
        let path = self.object_path(name)?;
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
            Err(e) => return Err(StoreError::io("remove", &path, e)),
        }
        match sync_dir(path.parent().unwrap_or(self.root())) {
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// All small objects below the directory `below`, at any depth. Files whose names no object has are passed over.
    ///
    /// # Errors
    /// [`StoreError::Blob`] when it is no name, or what the system says.
    pub fn list_objects(&self, below: &str) -> Result<Vec<ListedName>, StoreError> {
        let mut found = Vec::new();
        if below.is_empty() {
            // The blobs and what is being written are no small objects.
            for dir in self.names_in(self.root())? {
                if dir != "blobs" && dir != "tmp" && self.root().join(&dir).is_dir() {
                    self.walk(&dir, &mut found)?;
                }
            }
        } else {
            check_name(below)?;
            self.walk(below, &mut found)?;
        }
        Ok(found)
    }

    /// The names in a directory that are UTF-8; none if there is no such directory.
    pub(super) fn names_in(&self, dir: &Path) -> Result<Vec<String>, StoreError> {
        match fs::read_dir(dir) {
            Ok(entries) => entries
                .map(|entry| entry.map(|entry| entry.file_name().into_string().ok()))
                .filter_map(Result::transpose)
                .collect::<io::Result<_>>()
                .map_err(|e| StoreError::io("list", dir, e)),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(Vec::new()),
            Err(e) => Err(StoreError::io("list", dir, e)),
        }
    }

    fn walk(&self, dir: &str, found: &mut Vec<ListedName>) -> Result<(), StoreError> {
        for entry in self.names_in(&self.root().join(dir))? {
            let name = format!("{dir}/{entry}");
            if check_name(&name).is_err() {
                continue;
            }
            let path = self.root().join(&name);
            match fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_dir() => self.walk(&name, found)?,
                Ok(meta) if meta.is_file() => {
                    let modified = meta.modified().map_err(|e| StoreError::io("stat", &path, e))?;
                    found.push(ListedName { name, size: meta.len(), modified });
                }
                Ok(_) => {}
                // Removed while we were listing.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("stat", &path, e)),
            }
        }
        Ok(())
    }

    /// Writes a small file and gives it its name, making its directory as often as somebody else removes that; with
    /// `absent`, only where there is none. Tells whether it did.
    pub(super) fn write_small(
        &self,
        path: &Path,
        purpose: &str,
        bytes: &[u8],
        absent: bool,
    ) -> Result<bool, StoreError> {
        let mut staged = self.stage(purpose)?;
        self.write_staged(&mut staged, path, bytes, absent)
    }

    /// The same, and the file stays open, with its lock.
    pub(super) fn write_small_held(&self, path: &Path, bytes: &[u8]) -> Result<File, StoreError> {
        let mut staged = self.stage("held")?;
        self.write_staged(&mut staged, path, bytes, false)?;
        staged.handle().map_err(|e| StoreError::io("open", path, e))
    }

    fn write_staged(&self, staged: &mut Staged, path: &Path, bytes: &[u8], absent: bool) -> Result<bool, StoreError> {
        (&**staged).write_all(bytes).map_err(|e| StoreError::io("write", staged.path(), e))?;
        staged.make_durable(bytes.len() as u64, &Digest::of(bytes))?;
        let dir = path.parent().unwrap_or(self.root());
        loop {
            match fs::create_dir_all(dir) {
                Ok(()) => {}
                // It was there when it was to be made, and gone when that was looked at.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && fs::symlink_metadata(dir).is_err() => continue,
                Err(_) if dir.is_dir() => {}
                Err(e) => return Err(StoreError::io("create", dir, e)),
            }
            let named = if absent { link_new(staged.path(), path) } else { fs::rename(staged.path(), path) };
            match named {
                Ok(()) => break,
                Err(e) if absent && e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::NotFound && staged.path().exists() => {}
                Err(e) => return Err(StoreError::io("rename to", path, e)),
            }
        }
        if !absent {
            staged.renamed();
        }
        // A directory that was removed again meanwhile took the file with it: that is as if it came later.
        for dir in path.ancestors().skip(1).take_while(|dir| dir.starts_with(self.root())).take(2) {
            match sync_dir(dir) {
                Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
        Ok(true)
    }

    /// Waits until no other process of this machine is between a check and its write.
    fn lock_names(&self) -> Result<File, StoreError> {
        let path = self.root().join(LOCK);
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(|e| StoreError::io("open", &path, e))?;
        match file.lock() {
            Err(e) if !no_locks_here(&e) => Err(StoreError::io("lock", &path, e)),
            _ => Ok(file),
        }
    }
}

fn version(bytes: &[u8]) -> Version {
    Version(Digest::of(bytes).hex())
}

/// Gives the file at `from` the name `to`, which must be free. `from` may stay as a second name of it.
fn link_new(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        // A file system without hard links; those have the rename that does not replace.
        Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS)) => {
            Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
        }
        done => done,
    }
}
