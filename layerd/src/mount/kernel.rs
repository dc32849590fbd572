//! The new mount API (`fsopen(2)` and its kin), with errors that repeat what the kernel wrote into the context.

use crate::MountError;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_fd, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A file system that is being configured.
#[derive(Debug)]
pub(crate) struct FsContext {
    fd: OwnedFd,
    /// What all this is for, in error messages: "mount …".
    what: String,
}

impl FsContext {
    pub(crate) fn open(fs: &CStr, what: String) -> Result<Self, MountError> {
        match fsopen(fs, FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(fd) => Ok(Self { fd, what }),
            Err(errno) => Err(MountError::Kernel { what, errno, log: String::new() }),
        }
    }

    pub(crate) fn flag(&self, key: &CStr) -> Result<(), MountError> {
        fsconfig_set_flag(&self.fd, key).map_err(|errno| self.error(errno))
    }

    /// `value` may have at most 255 bytes: the kernel's limit.
    pub(crate) fn string(&self, key: &CStr, value: &OsStr) -> Result<(), MountError> {
        fsconfig_set_string(&self.fd, key, value).map_err(|errno| self.error(errno))
    }

    pub(crate) fn descriptor(&self, key: &CStr, value: BorrowedFd<'_>) -> Result<(), MountError> {
        fsconfig_set_fd(&self.fd, key, value).map_err(|errno| self.error(errno))
    }

    /// Makes the file system, and a read-only mount of it that is attached nowhere.
    pub(crate) fn mount_read_only(&self) -> Result<OwnedFd, MountError> {
        self.mount(MountAttrFlags::MOUNT_ATTR_RDONLY)
    }

    /// Makes the file system, and a mount of it that is attached nowhere.
    pub(crate) fn mount(&self, attributes: MountAttrFlags) -> Result<OwnedFd, MountError> {
        fsconfig_create(&self.fd)
            .and_then(|()| fsmount(&self.fd, FsMountFlags::FSMOUNT_CLOEXEC, attributes))
            .map_err(|errno| self.error(errno))
    }

    fn error(&self, errno: Errno) -> MountError {
        MountError::Kernel { what: self.what.clone(), errno, log: self.log() }
    }

    /// The context's messages: one a read, `ENODATA` behind the last (Documentation/filesystems/mount_api.rst).
    fn log(&self) -> String {
        let mut messages = Vec::new();
        let mut buffer = [0; 4096];
        // The kernel keeps eight.
        while messages.len() < 16 {
            let Ok(length) = rustix::io::read(&self.fd, &mut buffer) else { break };
            let text = String::from_utf8_lossy(&buffer[..length]);
            // "e overlay: text": a letter for the level first.
            messages
                .push(text.trim_end().split_once(' ').map_or_else(|| text.to_string(), |(_, text)| text.to_owned()));
        }
        messages.join("; ")
    }
}

/// A path that opens what `fd` is, from within this process.
pub(crate) fn fd_path(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Attaches a detached mount at `target`.
pub(crate) fn attach_at(mount: impl AsFd, target: &Path) -> Result<(), MountError> {
    move_mount(mount, c"", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(|errno| {
        MountError::Kernel { what: format!("attach the mount at {}", target.display()), errno, log: String::new() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn privileged_errors_repeat_what_the_kernel_says() {
        let context = FsContext::open(c"overlay", "mount a test".into()).expect("this test needs root and overlayfs");
        context.string(c"lowerdir+", OsStr::new("/nonexistent")).unwrap_err();
        let error = context.string(c"no-such-option", OsStr::new("x")).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::INVAL));
        let text = error.to_string();
        assert!(text.starts_with("cannot mount a test: Invalid argument"), "{text}");
        assert!(text.contains("the kernel says: overlay: Unknown parameter 'no-such-option'"), "{text}");
        let error = FsContext::open(c"no-such-fs", "mount it".into()).unwrap_err();
        assert!(error.hint().unwrap().contains("modprobe"), "{error}");
    }
}
