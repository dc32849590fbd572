//! Refs: one small file for each `name:tag`, holding the descriptor of what it names, replaced by rename.

use super::{StoreDir, StoreError, read_small, sync_dir};
use crate::RefName;
use oci_spec::image::Descriptor;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Longest ref file in bytes; a descriptor has a few hundred.
const REF_MAX: u64 = 64 << 10;

/// What is written for a ref. Through `Value`, whose maps are sorted: the same descriptor gives the same bytes.
pub(crate) fn ref_bytes(descriptor: &Descriptor) -> Vec<u8> {
    let value = serde_json::to_value(descriptor).expect("a descriptor always serialises");
    format!("{value}\n").into_bytes()
}

impl StoreDir {
    fn ref_path(&self, name: &RefName) -> PathBuf {
        self.refs().join(name.store_path())
    }

    /// Points `name` at `descriptor`, atomically and durably.
    ///
    /// # Errors
    /// What the system says; the ref is then as it was before, or the new one.
    pub fn write_ref(&self, name: &RefName, descriptor: &Descriptor) -> Result<(), StoreError> {
        self.write_small(&self.ref_path(name), "ref", &ref_bytes(descriptor), false)?;
        Ok(())
    }

    /// What `name` points at.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`]; [`StoreError::BadRef`] when the file is not a descriptor; what the system says.
    pub fn read_ref(&self, name: &RefName) -> Result<Descriptor, StoreError> {
        let path = self.ref_path(name);
        let no_such = || StoreError::NoSuchRef { name: name.clone(), store: self.to_string() };
        let bytes = read_small(&path, REF_MAX)?.ok_or_else(no_such)?;
        serde_json::from_slice(&bytes).map_err(|source| StoreError::BadRef { path, source })
    }

    /// All refs, sorted by name and tag. Files that are no refs by their names are passed over.
    ///
    /// # Errors
    /// [`StoreError::BadRef`] when a ref is not a descriptor: what it named is unknown, so a list without it would
    /// mislead whoever decides what may be deleted. Else what the system says.
    pub fn list_refs(&self) -> Result<Vec<(RefName, Descriptor)>, StoreError> {
        let mut found = Vec::new();
        let refs = self.refs();
        for dir in self.names_in(&refs)? {
            for file in self.names_in(&refs.join(&dir))? {
                let Some(name) = RefName::from_store_path(&dir, &file) else { continue };
                if refs.join(&dir).join(&file).is_dir() {
                    continue;
                }
                match self.read_ref(&name) {
                    Ok(descriptor) => found.push((name, descriptor)),
                    // Removed while we were listing.
                    Err(StoreError::NoSuchRef { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Removes a ref; the blobs stay.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`], or what the system says.
    pub fn remove_ref(&self, name: &RefName) -> Result<(), StoreError> {
        let path = self.ref_path(name);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::NoSuchRef { name: name.clone(), store: self.to_string() });
            }
            Err(e) => return Err(StoreError::io("remove", &path, e)),
        }
        let dir = path.parent().expect("a ref has a directory");
        if fs::remove_dir(dir).is_ok() {
            return sync_dir(&self.refs());
        }
        // Other tags are left in it.
        match sync_dir(dir) {
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }
}
