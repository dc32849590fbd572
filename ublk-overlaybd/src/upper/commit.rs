//! Making durable what was written: one at a time for all who wait.

use super::sidecar::{self, Record};
use super::{Upper, UpperError};
use crate::format::lsmt::{ENTRY_SIZE, HEADER_SIZE, Header, HeaderError, VIRTUAL_SIZE_AT};
use fs3_client::Medium;
use rustix::fs::FallocateFlags;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The index and what is beside it.
#[derive(Debug, Clone)]
pub(super) struct Logs {
    pub(super) index: Arc<dyn Medium>,
    pub(super) sidecar: Arc<dyn Medium>,
    /// Slots that there were before the first that is in the files.
    pub(super) shift: u64,
}

/// Slots that the files have room for beyond those that there are: that many writes and discards can always be flushed,
/// however full the file system is.
const MARGIN: u64 = 4096;
/// For how many more is asked at a time.
const STEP: u64 = 1 << 14;

/// How far it has come.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Slots that are durable.
    pub(super) durable: u64,
    /// Somebody is at it, and nobody else writes to the logs.
    pub(super) running: bool,
    /// The index is not written anew any more.
    pub(super) retired: bool,
}

/// Who makes writes durable, and where.
#[derive(Debug)]
pub(super) struct Commit {
    progress: Mutex<Progress>,
    /// Somebody has finished.
    pub(super) changed: Condvar,
    logs: Mutex<Logs>,
    /// The first slot that the files have no room for.
    room: AtomicU64,
}

impl Commit {
    pub(super) fn new(logs: Logs, durable: u64) -> Self {
        let progress = Progress { durable, ..Progress::default() };
        Self {
            progress: Mutex::new(progress),
            changed: Condvar::new(),
            logs: Mutex::new(logs),
            room: AtomicU64::new(0),
        }
    }

    /// Sees to it that the files have room for more slots than the first `published`, so that whoever frees space is not
    /// stopped by there being none. Where the file system reserves no space there is nothing to be seen to.
    pub(super) fn make_room(&self, published: u64) -> Result<(), UpperError> {
        if published + MARGIN <= self.room.load(Ordering::Relaxed) {
            return Ok(());
        }
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let end = published + MARGIN + STEP;
        let slots = end - logs.shift;
        let sizes = [HEADER_SIZE as u64 + slots * ENTRY_SIZE as u64, sidecar::position(slots)];
        for (medium, size) in [&logs.index, &logs.sidecar].into_iter().zip(sizes) {
            let Some(descriptor) = medium.descriptor() else { continue };
            // Any other error is of a file system that cannot, or is in trouble and will say so where it matters.
            let made = rustix::fs::fallocate(descriptor, FallocateFlags::KEEP_SIZE, 0, size);
            if let Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) = made {
                return Err(UpperError::NoSpace);
            }
        }
        self.room.store(end, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until somebody has finished.
    pub(super) fn wait<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn durable(&self) -> u64 {
        self.lock().durable
    }

    pub(super) fn logs(&self) -> Logs {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_logs(&self, logs: Logs) {
        self.room.store(0, Ordering::Relaxed);
        *self.logs.lock().unwrap_or_else(PoisonError::into_inner) = logs;
    }

    pub(super) fn shift(&self) -> u64 {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).shift
    }
}

impl Upper {
    /// Makes everything durable that was written before it was called.
    ///
    /// # Errors
    /// A file cannot be written or synced. After a failed sync every call fails.
    pub fn flush(&self) -> Result<(), UpperError> {
        let target = self.read_state().published;
        self.flush_to(target)
    }

    /// Makes the first `target` slots durable: what [`write`](Self::write) and [`zero`](Self::zero) return.
    ///
    /// # Errors
    /// As for [`flush`](Self::flush).
    pub fn flush_to(&self, target: u64) -> Result<(), UpperError> {
        let mut commit = self.commit.lock();
        loop {
            self.check()?;
            if commit.durable >= target {
                return Ok(());
            }
            if commit.running {
                commit = self.commit.wait(commit);
                continue;
            }
            commit.running = true;
            drop(commit);
            let result = self.write_batch();
            if let (Ok(durable), Some(journal)) = (&result, &self.journal)
                && let Err(error) = journal.flushed(*durable)
            {
                // What is in the index comes again then, which makes no difference.
                tracing::warn!(%error, file = self.name, "the journal is not told of a flush");
            }
            commit = self.commit.lock();
            commit.running = false;
            self.commit.changed.notify_all();
            commit.durable = result?;
        }
    }

    /// Makes durable what waits, and says how many slots are then.
    fn write_batch(&self) -> Result<u64, UpperError> {
        let (first, batch) = {
            let mut state = self.write_state();
            let batch = std::mem::take(&mut state.pending);
            (state.published - batch.len() as u64, batch)
        };
        self.sync(&*self.data, "sync the data")?;
        let (uuid, logs) = (self.header().uuid, self.commit.logs());
        // Where the slots are in the files.
        let slot = first - logs.shift;
        let entries: Vec<u8> = batch.iter().flat_map(|record| record.entry).collect();
        let records: Vec<u8> = (slot..).zip(&batch).flat_map(|(number, record)| record.encode(number, uuid)).collect();
        let place = HEADER_SIZE as u64 + slot * ENTRY_SIZE as u64;
        let written = logs.index.write_all_at(&entries, place);
        if let Err(source) = written.and_then(|()| logs.sidecar.write_all_at(&records, sidecar::position(slot))) {
            // The same bytes can be written to the same place later.
            self.put_back(batch);
            return Err(UpperError::Io { what: self.name.clone(), doing: "write the index", source });
        }
        self.sync(&*logs.index, "sync the index")?;
        self.sync(&*logs.sidecar, "sync the sidecar")?;
        Ok(first + batch.len() as u64)
    }

    /// Makes the disk larger, durably. A crash in between leaves the one size or the other.
    ///
    /// # Errors
    /// The size cannot be in a header, or a file cannot be written.
    pub fn grow(&self, virtual_size: u64) -> Result<(), UpperError> {
        let mut progress = self.commit.lock();
        while progress.running {
            progress = self.commit.wait(progress);
        }
        // Nobody writes the index anew meanwhile.
        progress.running = true;
        drop(progress);
        let written = self.write_size(virtual_size);
        self.commit.lock().running = false;
        self.commit.changed.notify_all();
        written
    }

    fn write_size(&self, virtual_size: u64) -> Result<(), UpperError> {
        self.check()?;
        let grown = Header { virtual_size, ..self.header() };
        let unusable = |error: HeaderError| UpperError::Unusable { what: self.name.clone(), why: error.to_string() };
        grown.encode().map_err(unusable)?;
        // The data file's header is the one that counts.
        for medium in [&self.commit.logs().index, &self.data] {
            let written = medium.write_all_at(&virtual_size.to_le_bytes(), VIRTUAL_SIZE_AT);
            written.map_err(UpperError::io(&self.name, "write its size"))?;
            self.sync(&**medium, "sync its size")?;
        }
        *self.header.write().unwrap_or_else(PoisonError::into_inner) = grown;
        Ok(())
    }

    /// What could not be written waits on, before what has come since.
    pub(super) fn put_back(&self, batch: Vec<Record>) {
        let mut state = self.write_state();
        let since = std::mem::replace(&mut state.pending, batch);
        state.pending.extend(since);
    }

    pub(super) fn sync(&self, medium: &dyn Medium, doing: &'static str) -> Result<(), UpperError> {
        medium.sync().map_err(|source| {
            let _ = self.failed.set(format!("cannot {doing}: {source}"));
            UpperError::Io { what: self.name.clone(), doing, source }
        })
    }
}
