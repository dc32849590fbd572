//! What a directory's file system can be trusted with.

use std::fs;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;

/// How files are published and what is believed of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rules {
    /// A local disk, or a network file system that behaves like one: errors are told by `fsync` at the latest, and what
    /// was synced is there.
    Posix,
    /// 3FS over its FUSE mount. Write errors may be told by `close` only, and a checksum is not verified on reading. So
    /// a file is synced, closed, opened again, and its length and digest are compared before it gets its name. Locks
    /// end at the mount, so they tell nothing of the dead; and lengths that `stat` tells may be half a minute old, so
    /// reads go by the lengths of descriptors.
    Fs3,
}

impl Rules {
    /// Those of the file system that has `path`: [`Rules::Fs3`] on a mount of type `fuse.hf3fs`.
    ///
    /// What cannot be found out is taken as [`Rules::Posix`].
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let found = fs::metadata(path).ok().zip(fs::read_to_string("/proc/self/mountinfo").ok());
        let kind = found.as_ref().and_then(|(meta, mounts)| {
            let device = meta.st_dev();
            file_system(mounts, rustix::fs::major(device), rustix::fs::minor(device))
        });
        if kind == Some("fuse.hf3fs") { Self::Fs3 } else { Self::Posix }
    }
}

/// Type of the file system on device `major:minor` (proc_pid_mountinfo(5)): field 3 is the device, and the type is the
/// first field behind the separator ` - `.
fn file_system(mounts: &str, major: u32, minor: u32) -> Option<&str> {
    let device = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn types_are_found_by_device() {
        let mounts = "\
            36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
            70 36 0:44 / /3fs/stage rw,nosuid,nodev shared:12 - fuse.hf3fs hf3fs.stage rw,allow_other\n\
            torn\n";
        assert_eq!(file_system(mounts, 98, 0), Some("ext3"));
        assert_eq!(file_system(mounts, 0, 44), Some("fuse.hf3fs"));
        assert_eq!(file_system(mounts, 0, 4), None);
    }

    proptest! {
        /// The kernel writes these lines, but names in them are anybody's.
        #[test]
        fn any_lines(text in "([0-9: /a-z.-]{0,40}\n){0,5}|.{0,80}", major: u32, minor: u32) {
            if let Some(kind) = file_system(&text, major, minor) {
                prop_assert!(text.contains(kind) && !kind.contains(' '));
            }
        }
    }

    #[test]
    fn a_temporary_directory_is_no_3fs() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Rules::of(dir.path()), Rules::Posix);
        assert_eq!(Rules::of(&dir.path().join("missing")), Rules::Posix);
    }
}
