//! The daemon's own mount namespace.
#![allow(unsafe_code)]

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::UnshareFlags;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// Gives this process a mount namespace of its own, whose mounts nobody else sees, while it sees those of others.
///
/// A process that holds the last reference to a mounted device which it serves itself waits for itself when it ends. So
/// the copies of such mounts are taken away, here and nowhere else. Mounts that others make later still arrive where
/// theirs are shared, and go when they are taken away there.
///
/// # Errors
/// Without the right to (`CAP_SYS_ADMIN`).
pub fn own() -> io::Result<()> {
    // SAFETY: the mount namespace of the calling thread changes, and no memory or descriptor does; it is called before
    // there are other threads.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // Nothing goes back; what others do goes on to arrive.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    for place in of_devices(&mounts).into_iter().rev() {
        // One that went meanwhile is gone.
        if let Err(error) = unmount(&place, UnmountFlags::DETACH) {
            tracing::debug!(%error, place = %place.display(), "a mount of a device");
        }
    }
    Ok(())
}

/// The mounts of ublk devices, and the overlays that stand on them, in the order of `mountinfo`.
fn of_devices(mountinfo: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in mountinfo.lines() {
        // 36 35 98:0 /root /place options shared:1 - type source super-options
        let mut halves = line.splitn(2, " - ");
        let (Some(mount), Some(what)) = (halves.next(), halves.next()) else { continue };
        let (Some(place), Some(source)) = (mount.split(' ').nth(4), what.split(' ').nth(1)) else { continue };
        let layers = what.split(' ').nth(2).unwrap_or_default().split(',').filter_map(|option| {
            let (name, value) = option.split_once('=')?;
            ["lowerdir", "lowerdir+", "datadir+", "upperdir"].contains(&name).then_some(value)
        });
        let stands_on = |layer: &str| {
            layer.split(':').map(unescape).any(|dir| found.iter().any(|place: &PathBuf| dir.starts_with(place)))
        };
        if source.starts_with("/dev/ublkb") || layers.into_iter().any(stands_on) {
            found.push(unescape(place));
        }
    }
    found
}

/// A path as `mountinfo` writes it: `\040` is a space.
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut path = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|digits| bytes[at] == b'\\' && digits.is_ascii());
        let code = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        path.push(code.unwrap_or(bytes[at]));
        at += if code.is_some() { 4 } else { 1 };
    }
    Path::new(&std::ffi::OsString::from_vec(path)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_devices_and_what_stands_on_them() {
        let mounts = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 259:1 / /mnt/my\\040disk rw shared:2 - ext4 /dev/ublkb0 rw
41 22 0:50 / /merged rw - overlay overlay rw,lowerdir=/a:/mnt/my\\040disk/l,upperdir=/u,workdir=/w
42 22 0:51 / /other rw - overlay overlay rw,lowerdir=/mnt/my,upperdir=/u,workdir=/w
43 22 0:52 / /plus rw - overlay overlay rw,lowerdir+=/a,lowerdir+=/merged/x
44 22 259:2 / /odd rw master:3 - xfs /dev/vdb rw
garbage
";
        let found = of_devices(mounts);
        assert_eq!(found, ["/mnt/my disk", "/merged", "/plus"].map(PathBuf::from));
        assert_eq!(unescape("a\\134b\\9\\04"), Path::new("a\\b\\9\\04"));
    }
}
