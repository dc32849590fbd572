//! An index that has grown long, written anew while it is in use.
//!
//! The old index and sidecar stay what counts until the new index takes the old one's name:
//!
//! 1. Nobody else flushes meanwhile. The mappings are copied, the data is synced: whatever the copy maps is durable.
//! 2. New index and sidecar are written beside the old ones, and synced.
//! 3. The old sidecar is removed, durably: an index without one is the whole truth, and one beside the wrong index is not.
//! 4. The new index takes the name of the old one, durably. This is the moment.
//! 5. The new sidecar takes its name.
//!
//! Whatever is left under temporary names after a crash is removed at the next time.

use super::commit::Logs;
use super::sidecar::{self, Record};
use super::{Upper, UpperError, open};
use crate::format::lsmt::{ENTRY_SIZE, FIRST_SECTOR, HEADER_SIZE};
use crate::index::Index;
use crate::write::seal::entries;
use fs3_client::Medium;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An index is written anew when it has this many slots more than four for each mapping.
const SLACK: u64 = 1 << 16;

/// What gives new files the names of an index and a sidecar. Each call is done, durably, when it returns.
pub trait Renewal: fmt::Debug + Send + Sync {
    /// New, empty files for an index and its sidecar, under names that nobody looks for.
    ///
    /// # Errors
    /// What the system says; nothing has changed then.
    fn begin(&self) -> io::Result<Renewed>;

    /// Removes the old sidecar.
    ///
    /// # Errors
    /// What the system says.
    fn forget_sidecar(&self) -> io::Result<()>;

    /// Gives the new index the name of the old one.
    ///
    /// # Errors
    /// What the system says.
    fn name_index(&self) -> io::Result<()>;

    /// Gives the new sidecar the name of the old one.
    ///
    /// # Errors
    /// What the system says.
    fn name_sidecar(&self) -> io::Result<()>;
}

/// New files, see [`Renewal::begin`].
#[derive(Debug)]
pub struct Renewed {
    /// For the index.
    pub index: Arc<dyn Medium>,
    /// For its sidecar.
    pub sidecar: Arc<dyn Medium>,
}

/// By the names of files.
#[derive(Debug)]
pub(super) struct ByName {
    pub(super) index: PathBuf,
    pub(super) sidecar: PathBuf,
}

impl ByName {
    fn temporary(path: &Path) -> PathBuf {
        open::with_suffix(path, ".new")
    }

    fn rename(path: &Path) -> io::Result<()> {
        std::fs::rename(Self::temporary(path), path)?;
        sync(path)
    }
}

fn sync(path: &Path) -> io::Result<()> {
    crate::write::publish::sync_directory(path).map_err(io::Error::other)
}

impl Renewal for ByName {
    fn begin(&self) -> io::Result<Renewed> {
        let create = |path: &Path| -> io::Result<Arc<dyn Medium>> {
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(Self::temporary(path))?;
            // A new file's permissions are the umask's; these are those of the old one.
            if let Ok(old) = path.metadata() {
                file.set_permissions(old.permissions())?;
            }
            Ok(Arc::new(file))
        };
        Ok(Renewed { index: create(&self.index)?, sidecar: create(&self.sidecar)? })
    }

    fn forget_sidecar(&self) -> io::Result<()> {
        std::fs::remove_file(&self.sidecar)?;
        sync(&self.sidecar)
    }

    fn name_index(&self) -> io::Result<()> {
        Self::rename(&self.index)
    }

    fn name_sidecar(&self) -> io::Result<()> {
        Self::rename(&self.sidecar)
    }
}

impl Upper {
    /// Writes the index anew where it has many more slots than mappings; whether it did. Flushes wait meanwhile, for as
    /// long as it takes to write 48 bytes a mapping.
    ///
    /// # Errors
    /// The files cannot be written: then the layer goes on with the old ones, or, where a name could not be given, takes
    /// no more writes.
    pub fn renew(&self) -> Result<bool, UpperError> {
        let stat = self.stat();
        if stat.slots <= stat.mappings.saturating_mul(4).saturating_add(SLACK) {
            return Ok(false);
        }
        self.renew_now()
    }

    /// The same however many slots there are.
    pub(super) fn renew_now(&self) -> Result<bool, UpperError> {
        let Some(renewal) = &self.renewal else { return Ok(false) };
        let mut progress = self.commit.lock();
        loop {
            self.check()?;
            if progress.retired {
                return Ok(false);
            }
            if !progress.running {
                break;
            }
            progress = self.commit.wait(progress);
        }
        progress.running = true;
        drop(progress);
        let result = self.write_anew(&**renewal);
        let mut progress = self.commit.lock();
        progress.running = false;
        self.commit.changed.notify_all();
        let Some(durable) = result? else { return Ok(false) };
        progress.durable = durable;
        Ok(true)
    }

    /// From here on the index keeps its file: somebody is about to remove it.
    pub(crate) fn retire(&self) {
        let mut progress = self.commit.lock();
        progress.retired = true;
        while progress.running {
            progress = self.commit.wait(progress);
        }
    }

    /// Writes the files, and says how many slots are durable then; none where the new ones would be longer.
    fn write_anew(&self, renewal: &dyn Renewal) -> Result<Option<u64>, UpperError> {
        let (index, batch, published) = {
            let mut state = self.write_state();
            let index = state.map.to_index()?;
            (index, std::mem::take(&mut state.pending), state.published)
        };
        let logs = match self.write_beside(renewal, &index, published) {
            Ok(Some(logs)) => logs,
            // The old ones are as they were. Where the sidecar has gone, the next start makes another.
            Ok(None) => {
                self.put_back(batch);
                return Ok(None);
            }
            Err(error) => {
                self.put_back(batch);
                return Err(error);
            }
        };
        let named = renewal.name_index().and_then(|()| renewal.name_sidecar());
        named.map_err(|source| {
            // Nobody can tell any more which files a restart would find.
            let _ = self.failed.set(format!("cannot name the new index: {source}"));
            UpperError::io(&self.name, "name the new index")(source)
        })?;
        self.commit.set_logs(logs);
        Ok(Some(published))
    }

    /// All up to the moment. `index` maps what the first `published` slots say.
    fn write_beside(&self, renewal: &dyn Renewal, index: &Index, published: u64) -> Result<Option<Logs>, UpperError> {
        let io = |doing| UpperError::io(&self.name, doing);
        self.sync(&*self.data, "sync the data")?;
        // The header that it had: a peer's may have flags of its own.
        let mut bytes = vec![0; HEADER_SIZE];
        self.commit.logs().index.read_at(&mut bytes, 0).map_err(io("read its index"))?;
        let count = entries(index, FIRST_SECTOR, &mut bytes).map_err(io::Error::other);
        let count = count.map_err(io("write the index anew"))?;
        let Some(shift) = published.checked_sub(count) else { return Ok(None) };
        let uuid = self.header().uuid;
        let mut sums = sidecar::header(uuid).to_vec();
        for (number, entry) in (0..).zip(bytes[HEADER_SIZE..].as_chunks::<ENTRY_SIZE>().0) {
            sums.extend(Record { entry: *entry, data_crc: None }.encode(number, uuid));
        }
        let Renewed { index, sidecar } = renewal.begin().map_err(io("begin a new index"))?;
        index.write_all_at(&bytes, 0).map_err(io("write the index anew"))?;
        index.sync().map_err(io("sync the new index"))?;
        sidecar.write_all_at(&sums, 0).map_err(io("write the sidecar anew"))?;
        sidecar.sync().map_err(io("sync the new sidecar"))?;
        renewal.forget_sidecar().map_err(io("remove the old sidecar"))?;
        Ok(Some(Logs { index, sidecar, shift }))
    }
}
