//! The flag of files that nobody may change (`FS_IMMUTABLE_FL`), for stores that put it on their blobs.
//!
//! On 3FS its owner may set it, on a local disk root. It also keeps a blob from being renewed, replaced and removed, so
//! those take it away first. A crash in between leaves a blob without the flag, which harms nobody.

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::fs::File;
use std::io;
use std::path::Path;

/// How often an act is tried that somebody else's flag comes in the way of.
const TRIES: u32 = 4;

/// Puts the flag on a file.
///
/// # Errors
/// What the system says: `ENOTTY` or `EOPNOTSUPP` where the file system has no such flag.
pub(super) fn set(file: &File) -> io::Result<()> {
    let flags = ioctl_getflags(file)?;
    if flags.contains(IFlags::IMMUTABLE) { Ok(()) } else { Ok(ioctl_setflags(file, flags | IFlags::IMMUTABLE)?) }
}

/// Takes the flag from a file; false when it has none, or nothing can be done about it.
fn clear(path: &Path) -> bool {
    let cleared = || -> io::Result<bool> {
        let file = File::open(path)?;
        let flags = ioctl_getflags(&file)?;
        if !flags.contains(IFlags::IMMUTABLE) {
            return Ok(false);
        }
        ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
        Ok(true)
    };
    cleared().unwrap_or(false)
}

/// Does something to the file at `path` that its flag would prevent, and says whether the flag had to be taken away.
///
/// # Errors
/// Those of `act`.
pub(super) fn despite<T>(path: &Path, mut act: impl FnMut() -> io::Result<T>) -> io::Result<(T, bool)> {
    let mut taken = false;
    let mut tries = 1;
    loop {
        match act() {
            Ok(done) => return Ok((done, taken)),
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && tries < TRIES && clear(path) => taken = true,
            Err(e) => return Err(e),
        }
        tries += 1;
    }
}
