//! Leases in a directory: a file each, locked by its holder for as long as that lives.

use super::staged::no_locks_here;
use super::sweep::{is_unlocked, remove_unlocked};
use super::{Rules, StoreDir, StoreError, read_small};
use crate::host;
use crate::lease::{Body, LEASES, LeaseInfo, LeaseKind};
use crate::names::OBJECT_MAX;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::SystemTime;

/// The file of a lease that this process holds. Dropping it ends the lease.
#[derive(Debug)]
pub(crate) struct HeldFile {
    /// Has the lock.
    file: File,
    path: PathBuf,
    left: bool,
}

impl StoreDir {
    /// Takes a lease. It is on disk, and seen by all, when this returns.
    pub(crate) fn hold_lease(&self, body: &Body) -> Result<HeldFile, StoreError> {
        let path = self.root().join(LEASES).join(host::new_name("lease"));
        let file = self.write_small_held(&path, &body.to_json())?;
        Ok(HeldFile { file, path, left: false })
    }

    /// All leases that live; the files of those that ended are removed if `tidy`.
    ///
    /// # Errors
    /// What the system says.
    pub fn leases(&self, tidy: bool) -> Result<Vec<LeaseInfo>, StoreError> {
        let mut living = Vec::new();
        for listed in self.list_objects(LEASES)? {
            let path = self.root().join(&listed.name);
            let Some(bytes) = read_small(&path, OBJECT_MAX)? else { continue };
            let id = listed.name.rsplit('/').next().unwrap_or_default();
            let lease = LeaseInfo::new(id, &bytes, listed.modified);
            // The lock knows better than any clock, where it can be asked.
            let of_writer = lease.kind != LeaseKind::Reader;
            if of_writer && lease.boot == host::boot() && self.rules() == Rules::Posix && self.locks() {
                match if tidy { remove_unlocked(&path) } else { is_unlocked(&path) } {
                    Ok(true) => {}
                    Ok(false) => living.push(lease),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(StoreError::io("lock", &path, e)),
                }
            } else if lease.lasts(SystemTime::now()) {
                living.push(lease);
            } else if tidy {
                self.delete_object(&listed.name)?;
            }
        }
        Ok(living)
    }

    /// Whether files here can be locked.
    fn locks(&self) -> bool {
        let probe = File::open(self.root()).and_then(|dir| dir.try_lock_shared().map_err(io::Error::from));
        !probe.is_err_and(|e| no_locks_here(&e))
    }
}

impl HeldFile {
    /// The lease's name.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }

    /// Dropping it does not end the lease any more.
    pub(crate) fn leave(&mut self) {
        self.left = true;
    }

    /// Makes the lease last from now on. `NotFound` when somebody ended it.
    pub(crate) fn renew(&self) -> io::Result<()> {
        if self.file.metadata()?.nlink() == 0 || !self.path.exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.file.set_modified(SystemTime::now())
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove the lease {}: {e}", self.path.display());
            }
            _ => {}
        }
    }
}
