//! The writable layer: `DIR/upper` and `DIR/work`, on a local disk.

use super::table;
use crate::MountError;
use converter::manifest::OverlayXattrs;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// `<linux/magic.h>`: `OVERLAYFS_SUPER_MAGIC`.
const OVERLAYFS: u64 = 0x794c_7630;
/// `<linux/magic.h>`: `NFS_SUPER_MAGIC`.
const NFS: u64 = 0x6969;
/// `<linux/magic.h>`: `EROFS_SUPER_MAGIC_V1`.
const EROFS: u64 = 0xe0f5_e1e2;
/// Longest list of xattr names, and longest value, that Linux has: 64 KiB.
const XATTR_MAX: usize = 64 << 10;

/// A prepared writable layer. Directories that were made for it go again, unless [`Upper::keep`] is called.
#[derive(Debug)]
pub(super) struct Upper {
    upper: PathBuf,
    work: PathBuf,
    /// Directories we made, outermost first.
    created: Vec<PathBuf>,
    /// Locks the directory until it is mounted, and the mount table says so to the next one.
    lock: Option<File>,
}

impl Upper {
    /// Makes what is missing of `dir`, `dir/upper` and `dir/work`, and checks that overlayfs can use them.
    ///
    /// The root of the mount gets its attributes from the upper directory, so a new one takes over those of `top`, the
    /// root of the topmost layer.
    pub(super) fn prepare(dir: &Path, top: BorrowedFd<'_>, xattrs: OverlayXattrs) -> Result<Self, MountError> {
        let fail = |why: String| MountError::Upper { path: dir.to_owned(), why };
        let dir = std::path::absolute(dir).map_err(MountError::io("find", dir))?;
        let mut upper = Self { upper: PathBuf::new(), work: PathBuf::new(), created: Vec::new(), lock: None };
        upper.make_all(&dir)?;
        let dir = fs::canonicalize(&dir).map_err(MountError::io("find", &dir))?;
        if let Some(why) = unfit(&dir)? {
            return Err(fail(why));
        }
        let lock = File::open(&dir).and_then(|opened| opened.lock().map(|()| opened));
        upper.lock = Some(lock.map_err(MountError::io("lock", &dir))?);
        upper.upper = dir.join("upper");
        upper.work = dir.join("work");
        if let Some(other) = table::read()?.iter().find(|mount| mount.upper_dir().as_ref() == Some(&upper.upper)) {
            return Err(fail(format!("it is in use as the writable layer of {}", other.target.display())));
        }
        // What overlayfs leaves when a mount with `volatile` ends: the upper directory may have lost writes.
        let volatile = upper.work.join("work/incompat/volatile");
        if volatile.exists() {
            return Err(fail(format!(
                "it was mounted with `volatile`, so what is in it may be incomplete after a crash (to use it all the same, remove {})",
                volatile.display()
            )));
        }
        if !upper.upper.exists() {
            upper.make_upper(&dir, top)?;
        }
        upper.make(&upper.work.clone())?;
        probe_xattrs(&upper.work, xattrs).map_err(|errno| {
            fail(format!("its file system does not keep {}* attributes ({})", xattrs.prefix(), io::Error::from(errno)))
        })?;
        Ok(upper)
    }

    pub(super) fn upper(&self) -> &Path {
        &self.upper
    }

    pub(super) fn work(&self) -> &Path {
        &self.work
    }

    /// The mount is there: the directories stay.
    pub(super) fn keep(mut self) {
        self.created.clear();
    }

    /// Makes the directory unless it is there.
    fn make(&mut self, path: &Path) -> Result<(), MountError> {
        match fs::create_dir(path) {
            Ok(()) => self.created.push(path.to_owned()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            Err(e) => return Err(MountError::io("create", path)(e)),
        }
        Ok(())
    }

    /// Makes the upper directory under another name first: whoever finds one finds one with its attributes.
    fn make_upper(&mut self, dir: &Path, top: BorrowedFd<'_>) -> Result<(), MountError> {
        let new = dir.join(".upper-new");
        self.make(&new)?;
        copy_attributes(top, &new)?;
        fs::rename(&new, &self.upper).map_err(MountError::io("create", &self.upper))?;
        self.created.retain(|path| *path != new);
        self.created.push(self.upper.clone());
        Ok(())
    }

    fn make_all(&mut self, path: &Path) -> Result<(), MountError> {
        let missing: Vec<&Path> = path.ancestors().take_while(|path| !path.exists()).collect();
        for path in missing.into_iter().rev() {
            self.make(path)?;
        }
        Ok(())
    }
}

impl Drop for Upper {
    fn drop(&mut self) {
        for path in self.created.iter().rev() {
            // Overlayfs puts directories of its own into the work directory, and nothing into a fresh upper one.
            let removed = if *path == self.work { fs::remove_dir_all(path) } else { fs::remove_dir(path) };
            if let Err(e) = removed {
                tracing::warn!("cannot remove {}: {e}", path.display());
            }
        }
    }
}

/// Why overlayfs could not have its upper directory on the file system of `dir`.
fn unfit(dir: &Path) -> Result<Option<String>, MountError> {
    let statfs = rustix::fs::statfs(dir).map_err(MountError::io("look at the file system of", dir))?;
    let what = match u64::try_from(statfs.f_type).unwrap_or_default() {
        OVERLAYFS => "overlayfs (is this inside a container?)",
        NFS => "NFS",
        EROFS => "a read-only EROFS image",
        _ => return Ok(None),
    };
    Ok(Some(format!("it is on {what}, and overlayfs needs a local disk for it, such as ext4, xfs or btrfs")))
}

/// Overlayfs goes on with half of its features where it cannot set its xattrs, so we ask first.
fn probe_xattrs(dir: &Path, xattrs: OverlayXattrs) -> Result<(), Errno> {
    let name = format!("{}dsec-probe", xattrs.prefix());
    rustix::fs::setxattr(dir, &name, b"y", XattrFlags::empty())?;
    rustix::fs::removexattr(dir, &name)
}

/// Gives the directory at `to` the owner, mode, times and xattrs of the directory `from`; overlayfs' own marks excepted.
fn copy_attributes(from: BorrowedFd<'_>, to: &Path) -> Result<(), MountError> {
    let step = |op: &'static str| MountError::io::<Errno>(op, to);
    // `from` may be a path-only descriptor, which has no xattrs.
    let directory = |fd: BorrowedFd<'_>, path: &Path| -> Result<OwnedFd, MountError> {
        rustix::fs::openat(fd, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(MountError::io("open", path))
    };
    let from = directory(from, Path::new("."))?;
    let target = directory(rustix::fs::CWD, to)?;
    let stat = rustix::fs::statat(&from, c"", AtFlags::EMPTY_PATH).map_err(step("read the root's attributes for"))?;
    rustix::fs::fchown(&target, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))
        .map_err(step("set the owner of"))?;
    rustix::fs::fchmod(&target, Mode::from_raw_mode(stat.st_mode & 0o7777)).map_err(step("set the mode of"))?;
    for (name, value) in xattrs_of(from.as_fd()).map_err(step("read the root's attributes for"))? {
        rustix::fs::fsetxattr(&target, name, &value, XattrFlags::empty())
            .map_err(step("set an extended attribute of"))?;
    }
    let mtime = Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec.cast_signed() };
    rustix::fs::futimens(&target, &Timestamps { last_access: mtime, last_modification: mtime })
        .map_err(step("set the times of"))
}

fn xattrs_of(fd: BorrowedFd<'_>) -> Result<Vec<(String, Vec<u8>)>, Errno> {
    let mut names = vec![0u8; XATTR_MAX];
    let length = rustix::fs::flistxattr(fd, &mut names)?;
    let mut xattrs = Vec::new();
    for name in names[..length].split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let Ok(name) = std::str::from_utf8(name) else { continue };
        if name.starts_with("trusted.overlay.") || name.starts_with("user.overlay.") {
            continue;
        }
        let mut value = vec![0u8; XATTR_MAX];
        let length = rustix::fs::fgetxattr(fd, name, &mut value)?;
        value.truncate(length);
        xattrs.push((name.to_owned(), value));
    }
    Ok(xattrs)
}
