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
