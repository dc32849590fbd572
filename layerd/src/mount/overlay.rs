//! One overlayfs mount over attached layers.

use super::kernel::{FsContext, attach_at};
use super::table::OVERLAY_SOURCE;
use super::upper::Upper;
use super::{Handover, STRING_MAX};
use crate::MountError;
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, UnmountFlags, unmount};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// What overlayfs is to be mounted over.
#[derive(Debug)]
pub(super) struct Overlay<'a> {
    /// Detached mounts, bottom first.
    pub(super) lowers: &'a [OwnedFd],
    /// The writable layer.
    pub(super) upper: Option<&'a Upper>,
    /// Whether overlay marks are in `user.overlay.*`.
    pub(super) user_xattrs: bool,
}

impl Overlay<'_> {
    /// Mounts it, attached nowhere.
    ///
    /// Descriptors as layers need Linux 6.13, and detached mounts as layers 6.15 (before, a layer has to be in the
    /// mount namespace). Kernels from 6.13 on say `EINVAL` to that; older ones say `EBADF`, since a detached mount is an
    /// `O_PATH` descriptor and fsconfig took none.
    pub(super) fn mount(&self, handover: Handover) -> Result<OwnedFd, MountError> {
        if handover == Handover::Auto {
            match self.mount_by_descriptors() {
                Err(e) if matches!(e.errno(), Some(Errno::INVAL | Errno::BADF)) => {
                    tracing::debug!("overlayfs does not take descriptors: {e}");
                }
                done => return done,
            }
        }
        let parked = Parked::park(self.lowers)?;
        self.mount_by_paths(&parked)
    }

    fn mount_by_descriptors(&self) -> Result<OwnedFd, MountError> {
        let context = self.context()?;
        for lower in self.lowers.iter().rev() {
            context.descriptor(c"lowerdir+", lower.as_fd())?;
        }
        if let Some(upper) = self.upper {
            context.descriptor(c"upperdir", open_directory(upper.upper())?.as_fd())?;
            context.descriptor(c"workdir", open_directory(upper.work())?.as_fd())?;
        }
        self.finish(&context)
    }

    fn mount_by_paths(&self, parked: &Parked) -> Result<OwnedFd, MountError> {
        let context = self.context()?;
        for lower in parked.mounts.iter().rev() {
            context.string(c"lowerdir+", lower.as_os_str())?;
        }
        if let Some(upper) = self.upper {
            for (key, path) in [(c"upperdir", upper.upper()), (c"workdir", upper.work())] {
                let escaped = escape(path);
                if escaped.len() <= STRING_MAX {
                    context.string(key, &escaped)?;
                } else {
                    context.descriptor(key, open_directory(path)?.as_fd())?;
                }
            }
        }
        self.finish(&context)
    }

    fn context(&self) -> Result<FsContext, MountError> {
        let what = format!("mount overlayfs over {} layers", self.lowers.len());
        let context = FsContext::open(c"overlay", what)?;
        context.string(c"source", OsStr::new(OVERLAY_SOURCE))?;
        Ok(context)
    }

    fn finish(&self, context: &FsContext) -> Result<OwnedFd, MountError> {
        if self.user_xattrs {
            context.flag(c"userxattr")?;
        }
        // Whatever this kernel's defaults are: a changed file is whole in the writable layer, and a renamed directory
        // is a copy there, so that the writable layer means the same without its lower ones.
        context.string(c"metacopy", OsStr::new("off"))?;
        context.string(c"redirect_dir", OsStr::new("nofollow"))?;
        context.string(c"index", OsStr::new("off"))?;
        // One device number for the whole root where inode numbers have room for it: `find -xdev`, `du -x` and `tar
        // --one-file-system` go by it.
        context.string(c"xino", OsStr::new("auto"))?;
        if self.upper.is_none() { context.mount_read_only() } else { context.mount(MountAttrFlags::empty()) }
    }
}

/// A read-only directory with nothing in it, mounted nowhere.
pub(super) fn empty_directory() -> Result<OwnedFd, MountError> {
    let context = FsContext::open(c"tmpfs", "make an empty lower directory".to_owned())?;
    context.string(c"mode", OsStr::new("0555"))?;
    context.mount_read_only()
}

fn open_directory(path: &Path) -> Result<OwnedFd, MountError> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(MountError::io("open", path))
}

/// `upperdir` and `workdir` strings are unescaped by overlayfs (`lowerdir+` is not).
fn escape(path: &Path) -> OsString {
    let escaped = path.as_os_str().as_bytes().iter().flat_map(|byte| {
        let escape: &[u8] = if *byte == b'\\' { b"\\" } else { b"" };
        escape.iter().chain(std::slice::from_ref(byte)).copied()
    });
    OsString::from_vec(escaped.collect())
}

/// Where layers are parked: only root can write there, and nothing outlives a boot.
const PLACE: &str = "/run";
/// How the directories of parked layers are named; process id and a number follow.
const PARKED: &str = "layerd.";

/// Frees what processes that were killed while they had layers parked left behind.
fn remove_leftovers() {
    for entry in fs::read_dir(PLACE).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(PARKED));
        let pid = rest.and_then(|rest| rest.split_once('.')?.0.parse::<u32>().ok());
        if pid.is_none_or(|pid| Path::new("/proc").join(pid.to_string()).exists()) {
            continue;
        }
        // Containers may share the directory but not the process ids: the lock is what counts.
        let dir = entry.path();
        let Some(lock) = fs::File::open(&dir).ok().filter(|lock| lock.try_lock().is_ok()) else { continue };
        let mounts = fs::read_dir(&dir).into_iter().flatten().flatten().map(|place| place.path()).collect();
        drop(Parked { dir, mounts, _lock: lock });
    }
}

/// Layer mounts attached below a directory of their own, for a moment: overlayfs makes its own copies of them.
#[derive(Debug)]
struct Parked {
    dir: PathBuf,
    mounts: Vec<PathBuf>,
    /// Goes with the process: whoever gets it knows that we are gone.
    _lock: fs::File,
}

impl Parked {
    fn park(layers: &[OwnedFd]) -> Result<Self, MountError> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        remove_leftovers();
        let name = format!("{PARKED}{}.{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let dir = Path::new(PLACE).join(name);
        fs::create_dir(&dir).map_err(MountError::io("create", &dir))?;
        let lock = fs::File::open(&dir).and_then(|opened| opened.lock().map(|()| opened));
        let lock = lock.map_err(MountError::io("lock", &dir))?;
        let mut parked = Self { dir, mounts: Vec::with_capacity(layers.len()), _lock: lock };
        for (index, layer) in layers.iter().enumerate() {
            let place = parked.dir.join(index.to_string());
            fs::create_dir(&place).map_err(MountError::io("create", &place))?;
            // Registered before it is mounted: unmounting what is not mounted does no harm.
            parked.mounts.push(place.clone());
            attach_at(layer, &place)?;
        }
        Ok(parked)
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        for place in self.mounts.iter().rev() {
            if let Err(e) = unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                && !matches!(e, Errno::INVAL | Errno::NOENT)
            {
                tracing::warn!("cannot unmount {}: {e}", place.display());
            }
            let _ = fs::remove_dir(place);
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backslashes_are_doubled() {
        assert_eq!(escape(Path::new("/a\\b,c:d")), OsString::from("/a\\\\b,c:d"));
    }
}
