//! Two system calls that the standard library lacks.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};

/// Begins to write `len` bytes from `offset` of `file` to its disk, so that a later `fsync` has less to wait for. It
/// changes nothing but timing, so failures (a file system that cannot, a range too large) are nobody's concern.
pub(super) fn begin(file: &File, offset: u64, len: u64) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    // SAFETY: the call takes no pointers, and `file` keeps the descriptor open for its duration.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Closes `file` and tells what the file system says of it, which dropping does not.
pub(super) fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the descriptor was taken out of its `File`, so nothing else owns it, and it is closed this once.
    if unsafe { libc::close(descriptor) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
