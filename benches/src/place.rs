//! Where contenders write: memory by default, so that no disk decides.

use anyhow::{Context as _, Result, bail};
use rustix::fs::statvfs;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A directory of our own, gone when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    dir: Option<TempDir>,
    mounted: bool,
    /// What the report says about it.
    pub(crate) description: String,
}

impl Place {
    /// In the given directory, else in `/dev/shm`, else on a tmpfs mounted for the purpose; `room` in bytes.
    pub(crate) fn new(dir: Option<&Path>, room: u64) -> Result<Self> {
        if let Some(parent) = dir {
            let dir = subdirectory(parent)?;
            return Ok(Self { description: format!("output in {}", parent.display()), dir: Some(dir), mounted: false });
        }
        let shm = Path::new("/dev/shm");
        if statvfs(shm).is_ok_and(|fs| fs.f_bavail * fs.f_frsize >= room) {
            let description = "output on tmpfs (/dev/shm)".to_owned();
            return Ok(Self { dir: Some(subdirectory(shm)?), mounted: false, description });
        }
        let dir = subdirectory(&std::env::temp_dir())?;
        let options = std::ffi::CString::new(format!("size={room},mode=0700"))?;
        mount("dsec-bench", dir.path(), "tmpfs", MountFlags::empty(), Some(options.as_c_str())).with_context(|| {
            format!(
                "/dev/shm has less than {} MB, and mounting a tmpfs failed: run as root, or give --dir",
                room / 1_000_000
            )
        })?;
        Ok(Self { dir: Some(dir), mounted: true, description: "output on a tmpfs".to_owned() })
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new(""), TempDir::path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.mounted && unmount(self.path(), UnmountFlags::DETACH).is_err() {
            // Deleting the directory would now delete nothing but what is on the mount, so that is left as well.
            self.dir.take().map(TempDir::keep);
        }
    }
}

fn subdirectory(parent: &Path) -> Result<TempDir> {
    if !parent.is_dir() {
        bail!("{} is not a directory", parent.display());
    }
    let made = tempfile::Builder::new().prefix("dsec-bench-").tempdir_in(parent);
    made.with_context(|| format!("cannot make a directory in {}", parent.display()))
}

/// The workspace that this crate was built from.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_in_the_given_directory_and_goes_away() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::new(Some(parent.path()), u64::MAX).unwrap();
        assert!(place.path().starts_with(parent.path()) && place.path().is_dir());
        drop(place);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
        let error = Place::new(Some(&parent.path().join("none")), 0).unwrap_err().to_string();
        assert!(error.contains("not a directory"), "{error}");
    }

    #[test]
    fn privileged_a_tmpfs_is_mounted_where_shm_is_too_small() {
        // No machine has an exabyte of shared memory, and a tmpfs may promise more than there is.
        let place = Place::new(None, 1 << 60).unwrap();
        assert!(place.mounted && statvfs(place.path()).unwrap().f_bavail > 1 << 40);
        let path = place.path().to_owned();
        std::fs::write(path.join("file"), b"x").unwrap();
        drop(place);
        assert!(!path.exists());
    }
}
