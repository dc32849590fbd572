//! Where the data files are: a trait, so that tests can put a disk that forgets in its place, and the folder.

use super::format::{BLOBS, BlobKey};
use crate::Medium;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Room on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Bytes that can still be written.
    pub(crate) free: u64,
}

/// The data files, one a blob.
pub(crate) trait Disk: fmt::Debug + Send + Sync {
    /// Opens a blob's file, and makes it where it is not there.
    fn open(&self, blob: &BlobKey) -> io::Result<Arc<dyn Medium>>;

    /// Removes a blob's file. One that is not there is removed already.
    fn remove(&self, blob: &BlobKey) -> io::Result<()>;

    /// All files that are ours, with the bytes that they take up.
    fn list(&self) -> io::Result<Vec<(BlobKey, u64)>>;

    /// How much room there is.
    fn room(&self) -> io::Result<Room>;
}

/// The folder `blobs` of a cache's directory.
#[derive(Debug)]
pub(crate) struct Folder {
    blobs: PathBuf,
}

impl Folder {
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let blobs = dir.join(BLOBS);
        fs::create_dir_all(&blobs)?;
        Ok(Self { blobs })
    }

    fn path(&self, blob: &BlobKey) -> PathBuf {
        let (directory, name) = blob.file();
        self.blobs.join(directory).join(name)
    }
}

impl Disk for Folder {
    // The name is not made durable: a file that a crash has taken is one whose chunks turn out to be missing.
    fn open(&self, blob: &BlobKey) -> io::Result<Arc<dyn Medium>> {
        let path = self.path(blob);
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path.parent().unwrap_or(&self.blobs))?;
                open()?
            }
            opened => opened?,
        };
        Ok(Arc::new(file))
    }

    fn remove(&self, blob: &BlobKey) -> io::Result<()> {
        match fs::remove_file(self.path(blob)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn list(&self) -> io::Result<Vec<(BlobKey, u64)>> {
        let mut ours = Vec::new();
        for directory in fs::read_dir(&self.blobs)? {
            let directory = directory?;
            if !directory.file_type()?.is_dir() {
                continue;
            }
            for file in fs::read_dir(directory.path())? {
                let file = file?;
                let names = (directory.file_name(), file.file_name());
                let (Some(above), Some(name)) = (names.0.to_str(), names.1.to_str()) else { continue };
                if let Some(key) = BlobKey::of_file(above, name)
                    && file.file_type()?.is_file()
                {
                    ours.push((key, file.metadata()?.blocks() * 512));
                }
            }
        }
        Ok(ours)
    }

    fn room(&self) -> io::Result<Room> {
        let stat = rustix::fs::statvfs(&self.blobs)?;
        Ok(Room { free: stat.f_bavail.saturating_mul(stat.f_frsize) })
    }
}
