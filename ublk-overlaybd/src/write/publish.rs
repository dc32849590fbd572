//! A file that has its name only once it is whole and on the disk.

use super::WriteError;
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file being written under a temporary name beside its own; gone if it is dropped.
#[derive(Debug)]
pub struct NewFile {
    file: NamedTempFile,
    path: PathBuf,
    replace: bool,
}

impl NewFile {
    /// Begins the file that will be at `path`. What is there is replaced only if `replace`.
    ///
    /// # Errors
    /// It exists already, or the directory cannot be written.
    pub fn create(path: &Path, replace: bool) -> Result<Self, WriteError> {
        if !replace && path.symlink_metadata().is_ok() {
            return Err(WriteError::Exists(path.to_owned()));
        }
        if path.is_dir() {
            let source = std::io::Error::from(std::io::ErrorKind::IsADirectory);
            return Err(WriteError::Io { path: path.to_owned(), doing: "create it", source });
        }
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(path.file_name().unwrap_or_default());
        prefix.push(".tmp-");
        let mut builder = tempfile::Builder::new();
        // As any new file's, less the umask.
        let builder = builder.prefix(&prefix).permissions(std::fs::Permissions::from_mode(0o666));
        let file = builder.tempfile_in(directory(path)).map_err(WriteError::io(path, "create it"))?;
        Ok(Self { file, path: path.to_owned(), replace })
    }

    /// What it is written through.
    #[must_use]
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Where it will be.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error of the system about it.
    pub fn error(&self, doing: &'static str) -> impl Fn(std::io::Error) -> WriteError {
        WriteError::io(&self.path, doing)
    }

    /// Makes it durable and gives it its name.
    ///
    /// # Errors
    /// What the system says; there is then no such file, or the old one.
    pub fn publish(self) -> Result<(), WriteError> {
        let Self { file, path, replace } = self;
        file.as_file().sync_all().map_err(WriteError::io(&path, "sync it"))?;
        let named = if replace { file.persist(&path) } else { file.persist_noclobber(&path) };
        named.map_err(|error| {
            if error.error.kind() == std::io::ErrorKind::AlreadyExists {
                WriteError::Exists(path.clone())
            } else {
                WriteError::Io { path: path.clone(), doing: "name it", source: error.error }
            }
        })?;
        sync_directory(&path)
    }
}

/// The directory that `path` is in.
fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the name of `path` durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), WriteError> {
    let directory = directory(path);
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(WriteError::io(directory, "sync the directory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn nothing_is_seen_before_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let new = NewFile::create(&path, false).unwrap();
        new.file().write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(new);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);

        let new = NewFile::create(&path, false).unwrap();
        new.file().write_all(b"whole").unwrap();
        new.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert!(matches!(NewFile::create(&path, false), Err(WriteError::Exists(_))));
        NewFile::create(&path, true).unwrap().publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }
}
