//! Asking the kernel to begin writing dirty pages to disk, without waiting for it. The crate's only unsafe code.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

/// Begins to write `len` bytes from `offset` of `file` to its disk, so that a later `fsync` has less to wait for. It
/// changes nothing but timing, so failures (a file system that cannot, a range too large) are nobody's concern.
pub(super) fn begin(file: &File, offset: u64, len: u64) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    // SAFETY: the call takes no pointers, and `file` keeps the descriptor open for its duration.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}
