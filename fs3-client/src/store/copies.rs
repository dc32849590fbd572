//! Local copies of blobs, each verified when it was made.
//!
//! They are the blobs of a small store in a local directory, so they too appear whole or not at all, and any number of
//! processes share them. Their times say when they were last used; the oldest go first when there are too many bytes.

use crate::{Digest, StoreDir, StoreError};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The directory of copies.
#[derive(Debug, Clone)]
pub(super) struct Copies {
    dir: StoreDir,
    limit: u64,
    /// Blobs that are being fetched, so that nobody else in this process does.
    fetching: Arc<(Mutex<HashSet<Digest>>, Condvar)>,
    /// When set, only these are believed: those that were fetched since.
    fresh: Option<Arc<Mutex<HashSet<Digest>>>>,
}

/// The right to fetch one blob; others wait until it is dropped.
pub(super) struct Fetching<'c> {
    copies: &'c Copies,
    digest: Digest,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let (digests, changed) = &*self.copies.fetching;
        digests.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.digest);
        changed.notify_all();
    }
}

impl Copies {
    pub(super) fn new(dir: StoreDir, limit: u64) -> Self {
        Self { dir, limit, fetching: Arc::default(), fresh: None }
    }

    pub(super) fn dir(&self) -> &StoreDir {
        &self.dir
    }

    /// The same, but what is there already is not believed.
    pub(super) fn fresh(&self) -> Self {
        Self { fresh: Some(Arc::default()), ..self.clone() }
    }

    /// Whether a blob is so small that a copy of it is worth its room.
    pub(super) fn worth_keeping(&self, size: u64) -> bool {
        size <= self.limit / 8
    }

    /// Opens the copy, if there is one of the right length.
    pub(super) fn open(&self, digest: &Digest, size: u64) -> Result<Option<File>, StoreError> {
        let believed = self.fresh.as_ref().is_none_or(|fresh| lock(fresh).contains(digest));
        if !believed {
            return Ok(None);
        }
        match self.dir.open_blob(digest, size) {
            Ok(file) => {
                // It was used now. Where that cannot be noted, it just looks older.
                let _ = file.set_modified(SystemTime::now());
                Ok(Some(file))
            }
            Err(StoreError::Missing { .. }) => Ok(None),
            // Not what we made: fetched again, it is replaced.
            Err(StoreError::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until nobody else fetches `digest`.
    pub(super) fn fetching(&self, digest: &Digest) -> Fetching<'_> {
        let (digests, changed) = &*self.fetching;
        let mut digests: MutexGuard<'_, HashSet<Digest>> = digests.lock().unwrap_or_else(PoisonError::into_inner);
        while !digests.insert(*digest) {
            digests = changed.wait(digests).unwrap_or_else(PoisonError::into_inner);
        }
        Fetching { copies: self, digest: *digest }
    }

    /// Removes a copy, so that what takes its place is new.
    pub(super) fn forget(&self, digest: &Digest) -> Result<(), StoreError> {
        self.dir.delete_blob(digest)
    }

    /// Notes that the copy was made of what the store has now.
    pub(super) fn made(&self, digest: &Digest) {
        if let Some(fresh) = &self.fresh {
            lock(fresh).insert(*digest);
        }
    }

    /// Removes the copies that were not used for the longest time, until the rest has at most the limit. Copies in use
    /// stay readable to who has them open.
    pub(super) fn make_room(&self) -> Result<(), StoreError> {
        let mut all = Vec::new();
        self.dir.each_blob(&mut |listed| {
            all.push((listed.stat.modified.unwrap_or(SystemTime::UNIX_EPOCH), listed.stat.size, listed.digest));
            Ok(())
        })?;
        let mut bytes: u64 = all.iter().map(|(_, size, _)| size).sum();
        if bytes <= self.limit {
            return Ok(());
        }
        all.sort_unstable_by_key(|(used, ..)| *used);
        for (_, size, digest) in all {
            if bytes <= self.limit {
                break;
            }
            let path = self.dir.blob_path(&digest);
            match fs::remove_file(&path) {
                Ok(()) => bytes -= size,
                Err(e) if e.kind() == io::ErrorKind::NotFound => bytes -= size,
                Err(e) => return Err(StoreError::io("remove", &path, e)),
            }
        }
        Ok(())
    }
}

fn lock(set: &Mutex<HashSet<Digest>>) -> MutexGuard<'_, HashSet<Digest>> {
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_oldest_go_first() {
        let place = tempfile::tempdir().unwrap();
        let copies = Copies::new(StoreDir::create(place.path()).unwrap(), 2500);
        let blobs: Vec<Digest> = (0..4u8).map(|n| copies.dir.publish_bytes(&[n; 1000]).unwrap().digest).collect();
        for (age, digest) in [3, 1, 4, 2].into_iter().zip(&blobs) {
            let file = File::open(copies.dir.blob_path(digest)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age * 1000)).unwrap();
        }
        // Used now, so the youngest.
        copies.open(&blobs[2], 1000).unwrap().unwrap();
        copies.make_room().unwrap();
        let left: Vec<bool> = blobs.iter().map(|digest| copies.open(digest, 1000).unwrap().is_some()).collect();
        assert_eq!(left, [false, true, true, false]);
    }

    #[test]
    fn fresh_ones_only_are_believed_where_asked() {
        let place = tempfile::tempdir().unwrap();
        let copies = Copies::new(StoreDir::create(place.path()).unwrap(), 1 << 20);
        let digest = copies.dir.publish_bytes(b"x").unwrap().digest;
        assert!(copies.open(&digest, 1).unwrap().is_some());
        assert!(copies.open(&digest, 2).unwrap().is_none(), "another length is no copy");
        let fresh = copies.fresh();
        assert!(fresh.open(&digest, 1).unwrap().is_none());
        fresh.made(&digest);
        assert!(fresh.open(&digest, 1).unwrap().is_some());
    }
}
