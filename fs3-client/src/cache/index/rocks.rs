//! The index in RocksDB.

use super::{Change, Index, IndexError};
use crate::cache::format::{CLEAN_KEY, GroupKey, Record};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, ErrorKind, IteratorMode, Options, WriteBatch, WriteOptions,
};
use std::path::{Path, PathBuf};

/// Blocks of the database that are kept in memory. Records are read when a group changes and at first hits after a crash.
const BLOCK_CACHE: usize = 8 << 20;
const WRITE_BUFFER: usize = 8 << 20;

/// The database.
pub(crate) struct Rocks {
    db: DB,
    path: PathBuf,
}

impl std::fmt::Debug for Rocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rocks").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Why it could not be opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// Its files are damaged.
    Damaged(String),
    /// Anything else.
    Other(String),
}

impl Rocks {
    /// Opens it, and makes it where it is not there.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_keep_log_file_num(2);
        options.set_max_log_file_size(1 << 20);
        options.set_max_open_files(64);
        options.set_write_buffer_size(WRITE_BUFFER);
        options.set_max_write_buffer_number(2);
        // CRCs do not compress, and keys share their beginnings by themselves.
        options.set_compression_type(DBCompressionType::None);
        let mut table = BlockBasedOptions::default();
        table.set_block_cache(&Cache::new_lru_cache(BLOCK_CACHE));
        options.set_block_based_table_factory(&table);
        let db = DB::open(&options, path).map_err(|error| match error.kind() {
            ErrorKind::Corruption => OpenError::Damaged(error.into_string()),
            _ => OpenError::Other(error.into_string()),
        })?;
        Ok(Self { db, path: path.to_owned() })
    }

    /// Deletes all of it. Nobody has it open.
    pub(crate) fn destroy(path: &Path) -> Result<(), String> {
        DB::destroy(&Options::default(), path).map_err(rocksdb::Error::into_string)
    }

    fn failed(&self, error: &rocksdb::Error) -> IndexError {
        IndexError(format!("{}: {error}", self.path.display()))
    }

    fn durable() -> WriteOptions {
        let mut options = WriteOptions::default();
        options.set_sync(true);
        options
    }
}

impl Index for Rocks {
    fn scan(&self, each: &mut dyn FnMut(GroupKey, Record)) -> Result<(), IndexError> {
        for entry in self.db.iterator(IteratorMode::Start) {
            let (key, value) = entry.map_err(|error| self.failed(&error))?;
            match (GroupKey::decode(&key), Record::decode(&value)) {
                (Some(key), Some(record)) => each(key, record),
                _ if *key == *CLEAN_KEY => {}
                _ => tracing::warn!("{}: a record that is none is left out", self.path.display()),
            }
        }
        Ok(())
    }

    fn get(&self, key: &GroupKey) -> Result<Option<Record>, IndexError> {
        let value = self.db.get_pinned(key.encode()).map_err(|error| self.failed(&error))?;
        Ok(value.and_then(|value| Record::decode(&value)))
    }

    fn apply(&self, changes: &[Change], durable: bool) -> Result<(), IndexError> {
        let mut batch = WriteBatch::default();
        for (key, record) in changes {
            match record {
                Some(record) => batch.put(key.encode(), record.encode()),
                None => batch.delete(key.encode()),
            }
        }
        let options = if durable { Self::durable() } else { WriteOptions::default() };
        self.db.write_opt(batch, &options).map_err(|error| self.failed(&error))
    }

    fn take_clean(&self) -> Result<bool, IndexError> {
        let clean = self.db.get_pinned(CLEAN_KEY).map_err(|error| self.failed(&error))?.is_some();
        if clean {
            self.db.delete_opt(CLEAN_KEY, &Self::durable()).map_err(|error| self.failed(&error))?;
        }
        Ok(clean)
    }

    fn set_clean(&self) -> Result<(), IndexError> {
        self.db.put_opt(CLEAN_KEY, [], &Self::durable()).map_err(|error| self.failed(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;
    use crate::cache::format::{BlobKey, Record};
    use fixtures::{mounts, require};
    use std::time::{Duration, Instant};

    fn full_group(group: u32) -> Change {
        let mut record = Record::default();
        (0..64).for_each(|slot| record.insert(slot, group ^ slot, true));
        (BlobKey { digest: Digest::of(b"x"), size: u64::MAX }.group(group), Some(record))
    }

    #[test]
    fn privileged_it_works_again_when_a_full_file_system_has_room() {
        if !require::root() {
            return;
        }
        let mounted = mounts::tmpfs(40 << 20).unwrap();
        let index = Rocks::open(&mounted.path().join("index")).unwrap();
        let filler = mounted.path().join("filler");
        std::fs::write(&filler, vec![1; 20 << 20]).unwrap();
        let mut kept = 0;
        let error = loop {
            assert!(kept < 1_000_000, "the file system does not fill up");
            match index.apply(&[full_group(kept)], true) {
                Ok(()) => kept += 1,
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("No space left"), "{error}");
        std::fs::remove_file(filler).unwrap();
        let began = Instant::now();
        while let Err(error) = index.apply(&[full_group(kept)], true) {
            assert!(began.elapsed() < Duration::from_secs(60), "{error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        // All that it took is there, now and when it is opened again.
        drop(index);
        let index = Rocks::open(&mounted.path().join("index")).unwrap();
        let mut found = 0;
        index.scan(&mut |_, _| found += 1).unwrap();
        assert!(found > kept, "{found} of {kept}");
        assert!((0..=kept).step_by(97).all(|group| index.get(&full_group(group).0).unwrap() == full_group(group).1));
    }

    #[test]
    fn bytes_that_are_no_record_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let index = Rocks::open(dir.path()).unwrap();
        index.apply(&[full_group(1), full_group(2)], true).unwrap();
        index.db.put(full_group(2).0.encode(), b"half a record").unwrap();
        index.db.put(b"something else", b"x").unwrap();
        let mut found = Vec::new();
        index.scan(&mut |key, _| found.push(key.group)).unwrap();
        assert_eq!(found, [1]);
        assert_eq!(index.get(&full_group(2).0).unwrap(), None);
        assert!(!index.take_clean().unwrap());
        index.set_clean().unwrap();
        assert!(index.take_clean().unwrap() && !index.take_clean().unwrap());
    }
}
