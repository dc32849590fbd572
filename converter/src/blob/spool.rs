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
        // What is behind the file's end is still in the buffer.
        let in_file = usize::try_from(self.flushed.saturating_sub(offset)).unwrap_or(usize::MAX).min(buf.len());
        let (from_file, from_buffer) = buf.split_at_mut(in_file);
        if !from_file.is_empty() {
            ReadAt::read_exact_at(&self.file, from_file, offset)?;
        }
        if from_buffer.is_empty() {
            return Ok(());
        }
        ReadAt::read_exact_at(&self.buffer, from_buffer, offset + in_file as u64 - self.flushed)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.flushed + self.buffer.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_across_what_is_flushed() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::new(directory.path()).unwrap();
        let mut all = Vec::new();
        for i in 0..3000u32 {
            let bytes: Vec<u8> = i.to_le_bytes().iter().cycle().take(i as usize % 300 + 1).copied().collect();
            assert_eq!(spool.append(&bytes).unwrap(), all.len() as u64);
            all.extend_from_slice(&bytes);
        }
        assert!(spool.flushed > 0 && !spool.buffer.is_empty());
        for (offset, len) in [(0, all.len()), (0, 10), (spool.flushed - 5, 10), (all.len() as u64 - 3, 3)] {
            let mut found = vec![0; len];
            spool.read_exact_at(&mut found, offset).unwrap();
            assert_eq!(found, &all[usize::try_from(offset).unwrap()..][..len]);
        }
        assert!(spool.read_exact_at(&mut [0; 4], all.len() as u64 - 3).is_err());
        assert_eq!(spool.size().unwrap(), all.len() as u64);
    }
}
