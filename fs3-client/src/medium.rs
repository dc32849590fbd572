//! A file as those see it who must survive a power cut: written by position, in pieces that are lost until they are
//! synced.
//!
//! The chunk cache and the writable layers of disks write through this, so that a test can put a disk that forgets in
//! the file's place: `testing::power_cut`.

use rustix::io::ReadWriteFlags;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};

/// A file that is read and written by position, from any thread, several at once.
///
/// What was written is read back at once. It is durable when a [`sync`](Self::sync) that began after the write returned
/// has succeeded, and not before: until then any part of it may be lost, in any order. After a failed sync nothing is
/// known of what was written since the last that succeeded.
pub trait Medium: fmt::Debug + Send + Sync {
    /// Reads into `buffer` from `offset`: fewer bytes only at the end of the file.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Reads into `buffer` from `offset` what is in memory, without waiting for the disk. Fewer bytes than asked for tell
    /// nothing of the file's length.
    ///
    /// # Errors
    /// `WouldBlock` and `Unsupported` when the disk has to be waited for; what the system says.
    fn read_now(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read_at(buffer, offset)
    }

    /// Writes all of `bytes` at `offset`, beyond the end too.
    ///
    /// # Errors
    /// What the system says; some of the bytes may then be written.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Frees the space of `range` and leaves the length alone; it reads as zeros.
    ///
    /// # Errors
    /// What the system says: `Unsupported` where the file system has no holes.
    fn punch(&self, range: Range<u64>) -> io::Result<()>;

    /// Cuts the file to `len` bytes, or lengthens it with a hole.
    ///
    /// # Errors
    /// What the system says.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> io::Result<u64>;

    /// Makes everything durable that was written, punched or cut before.
    ///
    /// # Errors
    /// What the system says.
    fn sync(&self) -> io::Result<()>;

    /// The descriptor, for those who submit reads by a ring of their own; a medium in memory has none.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Medium for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match std::os::unix::fs::FileExt::read_at(self, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn read_now(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut buffers = [IoSliceMut::new(buffer)];
        Ok(rustix::io::preadv2(self, &mut buffers, offset, ReadWriteFlags::NOWAIT)?)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, bytes, offset)
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        use rustix::fs::FallocateFlags;
        if range.is_empty() {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self, flags, range.start, range.end - range.start)?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Self::set_len(self, len)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}
