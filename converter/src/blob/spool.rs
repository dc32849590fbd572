//! A scratch file for the contents of small files, until the metadata image is written.

use crate::read_at::ReadAt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const BUFFER: usize = 256 << 10;

/// Bytes appended once and read at any offset afterwards; the file has no name and goes with the value.
#[derive(Debug)]
pub struct Spool {
    file: File,
    buffer: Vec<u8>,
    flushed: u64,
}

impl Spool {
    /// An empty spool in `directory`.
    ///
    /// # Errors
    /// When no file can be made there.
    pub fn new(directory: &Path) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(directory)?, buffer: Vec::new(), flushed: 0 })
    }

    /// Appends `bytes`; returns where they are.
    ///
    /// # Errors
    /// When writing fails.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        if self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        let at = self.flushed + self.buffer.len() as u64;
        self.buffer.extend_from_slice(bytes);
        Ok(at)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.flushed)?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

impl ReadAt for Spool {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        // Appends go whole to the file or the buffer, and are read as they were appended.
        if offset >= self.flushed {
            ReadAt::read_exact_at(&self.buffer, buf, offset - self.flushed)
        } else {
            ReadAt::read_exact_at(&self.file, buf, offset)
        }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.flushed + self.buffer.len() as u64)
    }
}
