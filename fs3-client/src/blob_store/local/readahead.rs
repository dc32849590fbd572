//! Whether the kernel reads ahead far enough on a FUSE mount.
//!
//! A daemon asks for requests of 1 MiB, and the kernel takes the lesser of that and its own default: buffered reads then
//! arrive in pieces of 128 KiB. The operator can raise it; nobody else may.

use std::fs;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;

/// KiB that a mount of 3FS should read ahead: its largest request.
const WANTED: u64 = 1024;
/// `FUSE_SUPER_MAGIC` (statfs(2)).
const FUSE: i64 = 0x6573_5546;

/// Whether `path` is on a FUSE mount. What cannot be found out is none.
pub(super) fn is_fuse(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| i128::from(stat.f_type) == i128::from(FUSE))
}

/// What the operator should do about the read-ahead of the mount that has `path`; `None` where all is well, or where
/// nothing can be found out.
pub(super) fn advice(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.st_dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    let text = fs::read_to_string(&file).ok()?;
    hint(&path.display().to_string(), &file, text.trim().parse().ok()?)
}

fn hint(place: &str, file: &str, kib: u64) -> Option<String> {
    (kib < WANTED).then(|| {
        format!(
            "{place} reads {kib} KiB ahead, so buffered reads arrive in small pieces; `echo {WANTED} > {file}` helps"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_told_and_enough_is_not() {
        let told = hint("/3fs/x", "/sys/class/bdi/0:44/read_ahead_kb", 128).unwrap();
        assert!(
            told.contains("/3fs/x reads 128 KiB ahead") && told.contains("echo 1024 > /sys/class/bdi/0:44/"),
            "{told}"
        );
        assert_eq!(hint("/3fs/x", "f", 1024), None);
        assert!(!is_fuse(&std::env::temp_dir()) && !is_fuse(Path::new("/nonexistent")));
    }
}
