//! A store, wherever it is: what the converter publishes to and reads from.
//!
//! Calls block, and come from any number of threads. For a store that is no plain directory there is a tokio runtime
//! behind them, which the caller gives ([`StoreOptions::runtime`]) or the store owns; calls must then not come from its
//! own tasks.

mod copies;
mod held;
mod options;
mod remote;
mod staged;
mod writing;

pub use held::Lease;
pub use options::StoreOptions;
pub use staged::Staged;

use crate::blob_store::{Listed, Stat};
use crate::lease::{LeaseInfo, LeaseKind};
use crate::names::{Condition, ListedName, Named, PutOutcome};
use crate::{Digest, Meter, Published, RefName, Rules, StoreDir, StoreError, StoreLocation, Swept};
use oci_spec::image::Descriptor;
use remote::Remote;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use writing::Writing;

/// A store of immutable blobs, refs, and records of finished layers.
///
/// Whatever its place, files are staged on a local disk, and appear under their final name whole or not at all. A clone
/// is the same store.
#[derive(Debug, Clone)]
pub struct Store {
    place: Place,
    /// Who writes, if that was said.
    writing: Option<Arc<Writing>>,
}

#[derive(Debug, Clone)]
enum Place {
    /// A directory that can be written like a local disk.
    Dir(StoreDir),
    /// Anything else: 3FS, S3.
    Remote(Arc<Remote>),
}

impl From<StoreDir> for Store {
    fn from(dir: StoreDir) -> Self {
        Self { place: Place::Dir(dir), writing: None }
    }
}

impl Store {
    /// Opens the store at `location`, making it where it does not exist.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn create_at(location: &StoreLocation, options: &StoreOptions) -> Result<Self, StoreError> {
        Self::at(location, options, true)
    }

    /// Opens the store at `location`.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] when there is none, or what the system or the backend says.
    pub fn open_at(location: &StoreLocation, options: &StoreOptions) -> Result<Self, StoreError> {
        Self::at(location, options, false)
    }

    fn at(location: &StoreLocation, options: &StoreOptions, create: bool) -> Result<Self, StoreError> {
        let dir = |path: &Path| if create { StoreDir::create(path) } else { StoreDir::open(path) };
        let remote = match location {
            StoreLocation::Dir(path) => match dir(path)? {
                found if found.rules() == Rules::Posix => return Ok(found.into()),
                found => Remote::fs3(found, options)?,
            },
            StoreLocation::Fs3(path) => Remote::fs3(dir(path)?.with_rules(Rules::Fs3), options)?,
            StoreLocation::S3 { bucket, prefix } => Remote::s3(bucket, prefix, options, create)?,
        };
        Ok(Self { place: Place::Remote(Arc::new(remote)), writing: None })
    }

    /// The directory at `path`, as [`StoreDir::create`]; of a 3FS it is the bare directory, without local copies.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        StoreDir::create(path).map(Self::from)
    }

    /// The directory at `path`, as [`StoreDir::open`]; of a 3FS it is the bare directory, without local copies.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] when there is none, or what the system says.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        StoreDir::open(path).map(Self::from)
    }

    /// Where it is; paths are absolute.
    #[must_use]
    pub fn location(&self) -> StoreLocation {
        match &self.place {
            Place::Dir(dir) => StoreLocation::Dir(dir.root().to_owned()),
            Place::Remote(remote) => remote.location(),
        }
    }

    /// The store's directory, where it is one (3FS too): for what needs paths, as mounts do.
    #[must_use]
    pub fn local_dir(&self) -> Option<&StoreDir> {
        match &self.place {
            Place::Dir(dir) => Some(dir),
            Place::Remote(remote) => remote.dir(),
        }
    }

    /// A store that believes no local copy it did not fetch itself: for who checks the store, and not the copies.
    #[must_use]
    pub fn without_old_copies(&self) -> Self {
        match &self.place {
            Place::Dir(_) => self.clone(),
            Place::Remote(remote) => {
                Self { place: Place::Remote(Arc::new(remote.without_old_copies())), writing: self.writing.clone() }
            }
        }
    }

    /// A local directory for unnamed scratch files.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        match &self.place {
            Place::Dir(dir) => dir.scratch(),
            Place::Remote(remote) => remote.copies().dir().scratch(),
        }
    }

    /// Length of the blob in bytes; `None` when the store does not have it.
    ///
    /// # Errors
    /// A blob that cannot be looked at is not a blob that is absent.
    pub fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.stat(digest)?.map(|stat| stat.size))
    }

    /// Length and age of a blob; `None` when the store does not have it.
    ///
    /// # Errors
    /// As [`Store::blob_size`].
    pub fn stat(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        self.claim(&[*digest])?;
        self.unclaimed_stat(digest)
    }

    pub(crate) fn unclaimed_stat(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.stat_blob(digest),
            Place::Remote(remote) => remote.stat(digest),
        }
    }

    /// Opens the blob for reading, after checking that it is `size` bytes long. Where the store is no local disk, that is
    /// a local copy, made if there is none, and checked against the digest.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Corrupt`] when the length is another (or the digest, of a copy), or what
    /// the system or the backend says.
    pub fn open_blob(&self, digest: &Digest, size: u64) -> Result<File, StoreError> {
        self.claim(&[*digest])?;
        match &self.place {
            Place::Dir(dir) => dir.open_blob(digest, size),
            Place::Remote(remote) => remote.open_blob(digest, size),
        }
    }

    /// The bytes `range` of a blob, all of them, without making a local copy. They are not checked against the digest.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Blob`] when the blob ends before, or what the system or the backend says.
    pub fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        self.claim(&[*digest])?;
        match &self.place {
            Place::Dir(dir) => dir.read_range(digest, range).map(Vec::from),
            Place::Remote(remote) => remote.read_range(digest, range).map(Vec::from),
        }
    }

    /// The whole blob (a manifest, a config), its digest checked.
    ///
    /// # Errors
    /// As [`Store::open_blob`]; [`StoreError::TooLarge`] above 64 MiB; [`StoreError::Corrupt`] when the digest is
    /// another.
    pub fn read_blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>, StoreError> {
        self.claim(&[*digest])?;
        match &self.place {
            Place::Dir(dir) => dir.read_blob(digest, size),
            Place::Remote(remote) => remote.read_blob(digest, size),
        }
    }

    /// A new local file to write a blob into; `purpose` becomes part of its name.
    ///
    /// # Errors
    /// What the system says.
    pub fn stage(&self, purpose: &str) -> Result<Staged, StoreError> {
        match &self.place {
            Place::Dir(dir) => Staged::new(dir.stage(purpose)?, None, self.writing.as_ref()),
            Place::Remote(remote) => {
                let file = remote.copies().dir().stage(purpose)?;
                Staged::new(file, Some(Arc::clone(remote)), self.writing.as_ref())
            }
        }
    }

    /// Publishes `bytes` as a blob.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn publish_bytes(&self, bytes: &[u8]) -> Result<Published, StoreError> {
        let digest = Digest::of(bytes);
        let staged = self.stage("bytes")?;
        (&*staged).write_all(bytes).map_err(|e| StoreError::io("write", staged.path(), e))?;
        staged.publish(&digest, bytes.len() as u64)
    }

    /// Makes the age of a blob start anew, as if it had been published now. Whoever comes to rely on a blob that is
    /// there already (a finished layer, a deduplicated chunk) calls this; publishing it again does so too. One that is
    /// not there is left so.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn renew(&self, digest: &Digest) -> Result<(), StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.renew(digest),
            Place::Remote(remote) => remote.renew(digest),
        }
    }

    /// All blobs, with their length and when each was put or last renewed; in no particular order. Memory grows with
    /// their number, about a hundred bytes each.
    ///
    /// # Errors
    /// What the system or the backend says: a list that is not whole is none.
    pub fn list_blobs(&self) -> Result<Vec<Listed>, StoreError> {
        match &self.place {
            Place::Dir(dir) => {
                let mut all = Vec::new();
                dir.each_blob(&mut |listed| {
                    all.push(listed);
                    Ok(())
                })?;
                Ok(all)
            }
            Place::Remote(remote) => remote.list_blobs(),
        }
    }

    /// Removes a blob, durably, and its local copy. One that is not there is removed already.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn delete_blob(&self, digest: &Digest) -> Result<(), StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.delete_blob(digest),
            Place::Remote(remote) => remote.delete_blob(digest),
        }
    }

    /// What [`Store::write_record`] last wrote under `key`, or `None`.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], [`StoreError::TooLarge`], or what the system or the backend says.
    pub fn record(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        match self.local_dir() {
            Some(dir) => dir.record(key),
            None => Ok(self.object(&record_name(key)?)?.map(|named| named.bytes.into())),
        }
    }

    /// Writes a record atomically and durably. `key` is 64 lower-case hex digits.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], or what the system or the backend says; the old record stays then.
    pub fn write_record(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.check_lease()?;
        match self.local_dir() {
            Some(dir) => dir.write_record(key, bytes),
            None => self.put_object(&record_name(key)?, bytes, &Condition::Always).map(drop),
        }
    }

    /// All records: keys, sizes and ages.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn list_records(&self) -> Result<Vec<ListedName>, StoreError> {
        let mut records = self.list_objects("converted")?;
        for record in &mut records {
            record.name = record.name.trim_start_matches("converted/").to_owned();
        }
        records.retain(|record| crate::store_dir::is_record_key(&record.name));
        Ok(records)
    }

    /// Removes a record. One that is not there is removed already.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], or what the system or the backend says.
    pub fn delete_record(&self, key: &str) -> Result<(), StoreError> {
        self.delete_object(&record_name(key)?)
    }

    /// Points `name` at `descriptor`, atomically and durably. Of several writers at once, one is last.
    ///
    /// # Errors
    /// [`StoreError::Contended`], [`StoreError::LeaseLost`] of a writer's store, or what the system or the backend says;
    /// the ref is then as it was before, or the new one.
    pub fn write_ref(&self, name: &RefName, descriptor: &Descriptor) -> Result<(), StoreError> {
        self.check_lease()?;
        match &self.place {
            Place::Dir(dir) => dir.write_ref(name, descriptor),
            Place::Remote(remote) => remote.write_ref(name, descriptor),
        }?;
        // Lost just now: the ref is there, but what it names may not be. Whoever gets this error writes it again.
        self.check_lease()
    }

    /// What `name` points at.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`]; [`StoreError::BadRef`]; what the system or the backend says.
    pub fn read_ref(&self, name: &RefName) -> Result<Descriptor, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.read_ref(name),
            Place::Remote(remote) => remote.read_ref(name),
        }
    }

    /// All refs, sorted by name and tag.
    ///
    /// # Errors
    /// [`StoreError::BadRef`] when a ref is not a descriptor; what the system or the backend says.
    pub fn list_refs(&self) -> Result<Vec<(RefName, Descriptor)>, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.list_refs(),
            Place::Remote(remote) => remote.list_refs(),
        }
    }

    /// Removes a ref; the blobs stay.
    ///
    /// # Errors
    /// [`StoreError::NoSuchRef`], or what the system or the backend says.
    pub fn remove_ref(&self, name: &RefName) -> Result<(), StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.remove_ref(name),
            Place::Remote(remote) => remote.remove_ref(name),
        }
    }

    /// A small object beside the blobs, and its version: see [`crate::names`].
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn object(&self, name: &str) -> Result<Option<Named>, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.object(name),
            Place::Remote(remote) => remote.object(name),
        }
    }

    /// Replaces a small object as far as `condition` allows, atomically and durably; every later read, from any machine,
    /// sees it.
    ///
    /// # Errors
    /// What the system or the backend says; the object is then as it was before, or the new one.
    pub fn put_object(&self, name: &str, bytes: &[u8], condition: &Condition) -> Result<PutOutcome, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.put_object(name, bytes, condition),
            Place::Remote(remote) => remote.put_object(name, bytes, condition),
        }
    }

    /// Removes a small object. One that is not there is removed already.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn delete_object(&self, name: &str) -> Result<(), StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.delete_object(name),
            Place::Remote(remote) => remote.delete_object(name),
        }
    }

    /// All small objects below a directory (`refs`, `gc`), at any depth.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn list_objects(&self, below: &str) -> Result<Vec<ListedName>, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.list_objects(below),
            Place::Remote(remote) => remote.list_objects(below),
        }
    }

    /// Takes a lease: a sign to all who may remove blobs that somebody writes. It is durable and seen by all when this
    /// returns, is renewed in the background, and ends when dropped.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn lease(&self, purpose: &str) -> Result<Lease, StoreError> {
        Lease::of_kind(self, LeaseKind::Writer, purpose, Vec::new())
    }

    /// Ends a lease that another process has left ([`Lease::leave`]).
    ///
    /// # Errors
    /// What the system or the backend says. A lease that is not there has ended.
    pub fn end_lease(&self, id: &str) -> Result<(), StoreError> {
        self.delete_object(&format!("{}/{id}", crate::lease::LEASES))
    }

    /// All leases that live, this process's too. Those that ended are removed.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn leases(&self) -> Result<Vec<LeaseInfo>, StoreError> {
        match self.local_dir() {
            Some(dir) => dir.leases(true),
            None => held::leases_of(self, true),
        }
    }

    /// As [`Store::leases`], but nothing is removed.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn leases_seen(&self) -> Result<Vec<LeaseInfo>, StoreError> {
        match self.local_dir() {
            Some(dir) => dir.leases(false),
            None => held::leases_of(self, false),
        }
    }

    /// Removes what dead writers left in `tmp/`, of the store and of the local directory.
    ///
    /// # Errors
    /// What the system says.
    pub fn sweep(&self) -> Result<Swept, StoreError> {
        match &self.place {
            Place::Dir(dir) => dir.sweep(),
            Place::Remote(remote) => remote.sweep(),
        }
    }

    /// What was asked of the backend so far, if there is one: a plain directory is not counted.
    #[must_use]
    pub fn meter(&self) -> Option<Meter> {
        match &self.place {
            Place::Dir(_) => None,
            Place::Remote(remote) => Some(remote.meter()),
        }
    }
}

fn record_name(key: &str) -> Result<String, StoreError> {
    if crate::store_dir::is_record_key(key) {
        Ok(format!("converted/{key}"))
    } else {
        Err(StoreError::BadKey { key: key.chars().take(200).collect() })
    }
}
