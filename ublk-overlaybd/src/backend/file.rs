//! A local file.

use super::{ReadError, Source, check_range};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A local file, whose size is taken once.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    size: u64,
    path: PathBuf,
}

impl FileSource {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// What the system says; directories and devices without a size are refused.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ReadError> {
        let path = path.into();
        let local = |source| ReadError::Local { what: path.display().to_string(), source };
        let file = File::open(&path).map_err(local)?;
        if file.metadata().map_err(local)?.is_dir() {
            return Err(local(io::Error::from(io::ErrorKind::IsADirectory)));
        }
        Self::new(file, path)
    }

    /// Takes an open file; `path` is for messages.
    ///
    /// # Errors
    /// What the system says when asked for the size.
    pub fn new(mut file: File, path: impl Into<PathBuf>) -> Result<Self, ReadError> {
        let path = path.into();
        // Not by its metadata: a block device has a size too.
        let size = io::Seek::seek(&mut file, io::SeekFrom::End(0));
        match size {
            Ok(size) => Ok(Self { file, size, path }),
            Err(source) => Err(ReadError::Local { what: path.display().to_string(), source }),
        }
    }

    /// What messages call it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file itself.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        check_range(&self.path.display(), self.size, buf.len(), offset)?;
        self.file.read_exact_at(buf, offset).map_err(|source| {
            let what = self.path.display().to_string();
            if source.kind() == io::ErrorKind::UnexpectedEof {
                ReadError::Corrupt { what, offset, why: "the file has become shorter".to_owned() }
            } else {
                ReadError::Local { what, source }
            }
        })
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        check_range(&self.path.display(), self.size, buf.len(), offset)?;
        // From the page cache alone. File systems that have no such call are in memory anyway, or too old to mind.
        let len = buf.len();
        match preadv2(&self.file, &mut [IoSliceMut::new(buf)], offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == len => Ok(true),
            Ok(_) | Err(Errno::AGAIN) => Ok(false),
            Err(_) => self.read_exact_at(buf, offset).map(|()| true),
        }
    }

    fn locate(&self, range: Range<u64>) -> Option<(BorrowedFd<'_>, u64)> {
        (range.start <= range.end && range.end <= self.size).then(|| (self.file.as_fd(), range.start))
    }
}

/// Bytes in memory, for tests and for what is small.
impl Source for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        check_range(&"bytes in memory", self.size(), buf.len(), offset)?;
        if let Some(bytes) = self.bytes(offset..offset + buf.len() as u64) {
            buf.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read_exact_at(buf, offset).map(|()| true)
    }

    fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        self.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_within_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"0123456789").unwrap();
        let source = FileSource::open(&path).unwrap();
        let mut buf = [0; 4];
        source.read_exact_at(&mut buf, 6).unwrap();
        assert_eq!(&buf, b"6789");
        assert!(matches!(source.read_exact_at(&mut buf, 7), Err(ReadError::OutOfRange { end: 11, size: 10, .. })));
        assert!(matches!(source.read_exact_at(&mut buf, u64::MAX), Err(ReadError::OutOfRange { .. })));
        assert_eq!(source.locate(2..10).unwrap().1, 2);
        assert!(source.locate(2..11).is_none());
        std::fs::write(&path, b"0").unwrap();
        assert!(source.read_exact_at(&mut buf, 0).unwrap_err().is_corrupt());
        assert!(FileSource::open(dir.path()).is_err());
    }
}
