//! A writable layer: a log of data and an index in the order of time, as the peers have them, and a sidecar with
//! checksums of our own.
//!
//! # What is promised
//!
//! After kill -9 everything is there that was answered. After a power cut at any instant the layer opens, and each sector reads as it did at the last
//! [`flush`](Upper::flush) that returned, or as some write after that left it. A sector is never a mixture. A write of
//! several sectors that was not flushed may be there in part, as on any disk: where it was larger than an index entry can
//! name; and what was published later than something that is lost is lost too, since the index is replayed up to the first
//! gap.
//!
//! # The order of writes, and why
//!
//! 1. A write gets a place at the end of the data file under a lock, and writes there without one. Nothing is overwritten in
//!    place, so old contents stay whole until the new are durable.
//! 2. Then it is put into the map, and its index entry into a list in memory. From here on it is read. Writes that overlap
//!    must not run at once: the engine sees to that, so that the order of the list is that of the contents.
//!    Before the write is answered, the entry also goes into a file that is never synced, the `journal`, so that it is not
//!    lost with the process alone.
//! 3. A flush takes the list, syncs the data file, *then* writes the entries to the index and the records to the sidecar,
//!    then syncs both. An entry on disk therefore always has its data: that is why the first sync comes before.
//!    Neither of the two files needs the other to be first: a slot that only one of them has is whole, and is put back
//!    into the other when the layer is opened.
//! 4. Those who flush while one is at it wait, and the next takes all their lists at once.
//! 5. Data that was overwritten is punched out of the file only after the entry that overwrote it is durable, and after
//!    those who may be reading it have finished. Data is placed so that whole blocks of the file system die.
//! 6. An index with many more slots than there are mappings is written anew beside the old one and takes its name, and so
//!    does its sidecar ([`Upper::renew`]). Flushes wait meanwhile; reads and writes do not.
//!
//! When a layer is opened, what is left out is cut off and synced before anything is written, so that leftovers of an older
//! crash can never be taken for parts of a newer one. A sync that fails leaves unknown what is on the disk, so it is never
//! tried again: every later write and flush fails, and reads go on.
//!
//! # Layers of peers
//!
//! A pair without a sidecar gets one. Hybrid layers are opened and appended to, never overwritten in place. Sparse ones
//! are read only (see [`Layer::open_pair`](crate::layer::Layer::open_pair)), as their holes cannot tell a discarded
//! sector from one that was never written: commit them. Two processes cannot have one layer open, by a lock on the data
//! file.

mod commit;
mod journal;
mod log;
mod map;
mod open;
mod readers;
mod recovery;
mod renew;
mod sidecar;

pub use log::Limits;
pub(crate) use map::Whole;
pub use open::{Files, journal_path, sidecar_path};
pub(crate) use readers::{Held, Reading};
pub use recovery::{Dropped, Recovered};
pub use renew::{Renewal, Renewed};

use crate::format::lsmt::{Entry, EntryError, FIRST_SECTOR, Header, MAX_LENGTH, SECTOR};
use crate::index::{Extent, Index, IndexError, Kind, Piece};
use commit::Commit;
use fs3_client::Medium;
use journal::Journal;
use log::Log;
use map::Map;
use readers::Readers;
use sidecar::Record;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// Entries that may wait for a flush: 48 bytes each. Who writes more flushes.
const MAX_PENDING: usize = 1 << 16;

/// Why a writable layer cannot do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum UpperError {
    /// The quota is used up, or the file system's reserve would be.
    #[error("no space is left for the writable layer")]
    NoSpace,
    /// A sync failed before, so nothing is known of what is on the disk.
    #[error("the writable layer failed before ({0}), and takes no more writes")]
    Failed(String),
    /// Somebody has it open.
    #[error("{0}: another process, or another disk of this one, has it open")]
    Busy(String),
    /// The files are no writable layer that can be appended to.
    #[error("{what}: {why}")]
    Unusable {
        /// Which file.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// This machine's fault.
    #[error("{what}: cannot {doing}")]
    Io {
        /// Which file.
        what: String,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A place that the format cannot name.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// Mappings that the format cannot name.
    #[error(transparent)]
    Index(#[from] IndexError),
}

impl UpperError {
    /// An error of the system about `what`.
    pub(crate) fn io(what: &str, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.to_owned(), doing, source }
    }

    /// Whether there was no space.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        let full = Some(rustix::io::Errno::NOSPC.raw_os_error());
        matches!(self, Self::NoSpace) || matches!(self, Self::Io { source, .. } if source.raw_os_error() == full)
    }
}

/// Figures of a writable layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// Mappings in memory, 40 to 70 bytes each.
    pub mappings: u64,
    /// Slots of the index, those that wait for a flush among them.
    pub slots: u64,
    /// Entries that wait for a flush.
    pub pending: u64,
    /// Bytes of data that were given out.
    pub log: u64,
    /// Bytes of those that have not been freed again.
    pub allocated: u64,
}

#[derive(Debug, Default)]
struct State {
    map: Map,
    /// What the next flush writes; the last `pending.len()` of the slots.
    pending: Vec<Record>,
    /// Slots so far.
    published: u64,
    /// Data that nobody needs once so many slots are durable.
    dying: Vec<(u64, Range<u64>)>,
}

/// A writable layer, open. See the [module](self).
#[derive(Debug)]
pub struct Upper {
    name: String,
    data: Arc<dyn Medium>,
    renewal: Option<Arc<dyn Renewal>>,
    header: RwLock<Header>,
    recovered: Recovered,
    state: RwLock<State>,
    log: Mutex<Log>,
    commit: Commit,
    /// For what is not flushed, where a process may die alone.
    journal: Option<Journal>,
    readers: Arc<Readers>,
    reclaiming: Mutex<()>,
    failed: OnceLock<String>,
}

impl Upper {
    /// What messages call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The header of its data file.
    #[must_use]
    pub fn header(&self) -> Header {
        self.header.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What opening it met.
    #[must_use]
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// Its data file: the `moffset`s of [`lookup`](Self::lookup) are sectors of it.
    pub(crate) fn data(&self) -> &Arc<dyn Medium> {
        &self.data
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_state(&self) -> std::sync::RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_state(&self) -> std::sync::RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), UpperError> {
        self.failed.get().map_or(Ok(()), |why| Err(UpperError::Failed(why.clone())))
    }

    /// The pieces of `range`, in sectors. Their data stays where it is until the second value is dropped.
    pub(crate) fn lookup(&self, range: Range<u64>) -> (Vec<Piece>, Reading<'_>) {
        let state = self.read_state();
        let reading = self.readers.enter();
        (state.map.lookup(range), reading)
    }

    /// What stands behind all of `range`, in sectors. As [`lookup`](Self::lookup).
    pub(crate) fn whole(&self, range: &Range<u64>) -> (Whole, Reading<'_>) {
        let state = self.read_state();
        let reading = self.readers.enter();
        (state.map.whole(range), reading)
    }

    /// The same, for those who read later.
    pub(crate) fn hold(&self, range: &Range<u64>) -> (Whole, Held) {
        let state = self.read_state();
        let held = self.readers.hold();
        (state.map.whole(range), held)
    }

    /// Fills `buf` from byte `offset` of the data file; a [`lookup`](Self::lookup) said what is there.
    pub(crate) fn read_data(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.data.read_at(buf, offset)? == buf.len() {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the data file has become shorter"))
    }

    /// Writes whole sectors from `sector` on. No write that overlaps may run at the same time. Returns how many slots must
    /// be durable for it to be, see [`flush_to`](Self::flush_to).
    ///
    /// # Errors
    /// There is no space, or a file cannot be written: nothing has changed then.
    ///
    /// # Panics
    /// `bytes` are not whole sectors.
    pub fn write(&self, sector: u64, bytes: &[u8]) -> Result<u64, UpperError> {
        assert!(bytes.len().is_multiple_of(512), "{} bytes are not whole sectors", bytes.len());
        self.check()?;
        let sectors = bytes.len() as u64 / SECTOR;
        if sectors == 0 {
            return Ok(0);
        }
        let at = self.place(sectors, bytes)?;
        let mut extents = Vec::with_capacity(1);
        let mut records = Vec::with_capacity(1);
        for (number, part) in bytes.chunks(MAX_LENGTH as usize * 512).enumerate() {
            let done = number as u64 * u64::from(MAX_LENGTH);
            let length = u32::try_from(part.len() / 512).unwrap_or(MAX_LENGTH);
            let entry = Entry { offset: sector + done, length, moffset: at + done, zeroed: false, tag: 0 }.encode()?;
            records.push(Record { entry, data_crc: Some(crc32c::crc32c(part)) });
        }
        extents.push(Extent { start: sector, len: sectors, kind: Kind::Data { layer: 0, moffset: at } });
        self.publish(&extents, &records)
    }

    /// Makes `sectors` sectors from `sector` on read as zeros, whatever is below: that is what a discard is, too. Takes no
    /// data, and frees what there was. Otherwise as [`write`](Self::write).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn zero(&self, sector: u64, sectors: u64) -> Result<u64, UpperError> {
        self.check()?;
        let mut published = 0;
        let mut at = sector;
        let end = sector.checked_add(sectors).ok_or(IndexError::OutOfBounds { start: sector, len: sectors })?;
        // In steps, for the bound on what waits for a flush.
        let step = u64::from(MAX_LENGTH) * 1024;
        while at < end {
            let last = end.min(at + step);
            let mut records = Vec::new();
            let mut from = at;
            while from < last {
                let length = u32::try_from(last - from).unwrap_or(MAX_LENGTH).min(MAX_LENGTH);
                // The peers put the end of the data here; the beginning is within the data whatever a crash left of it.
                let entry = Entry { offset: from, length, moffset: FIRST_SECTOR, zeroed: true, tag: 0 }.encode()?;
                records.push(Record { entry, data_crc: None });
                from += u64::from(length);
            }
            published = self.publish(&[Extent { start: at, len: last - at, kind: Kind::Zero }], &records)?;
            at = last;
        }
        Ok(published)
    }

    /// Puts `bytes` at a place of their own in the data file, and says at which sector. A file system that is full gets what
    /// is garbage back, once.
    fn place(&self, sectors: u64, bytes: &[u8]) -> Result<u64, UpperError> {
        let mut again = true;
        loop {
            let at = self.allocate(sectors)?;
            let Err(source) = self.data.write_all_at(bytes, at * SECTOR) else { return Ok(at) };
            self.write_state().dying.push((0, at..at + sectors));
            let error = UpperError::Io { what: self.name.clone(), doing: "write data", source };
            if !error.is_no_space() {
                return Err(error);
            }
            // What was written of it is in the way of the index, which has to grow before anything else can be freed.
            self.reclaim()?;
            if !std::mem::take(&mut again) {
                return Err(error);
            }
            self.flush()?;
            self.reclaim()?;
        }
    }

    /// A place for data; where there is none, what is garbage is freed and it is tried once more.
    fn allocate(&self, sectors: u64) -> Result<u64, UpperError> {
        let allocate = || {
            self.commit.make_room(self.read_state().published)?;
            self.log().allocate(sectors, &*self.data)
        };
        let first = allocate();
        if !matches!(first, Err(UpperError::NoSpace)) {
            return first;
        }
        let mut freed = self.reclaim()?;
        self.flush()?;
        freed += self.reclaim()?;
        if freed == 0 {
            return first;
        }
        allocate()
    }

    fn publish(&self, extents: &[Extent], records: &[Record]) -> Result<u64, UpperError> {
        let (published, crowded) = {
            let mut state = self.write_state();
            let State { map, pending, published, dying } = &mut *state;
            pending.extend_from_slice(records);
            *published += records.len() as u64;
            for extent in extents {
                map.insert(*extent, |range| dying.push((*published, range)));
            }
            (*published, pending.len() > MAX_PENDING || dying.len() > MAX_PENDING * 4)
        };
        if let Some(journal) = &self.journal
            && let Err(error) = journal.keep(published - records.len() as u64, records)
        {
            // A full file system, mostly: the index has room, so this outlives the process by being durable.
            tracing::debug!(%error, file = self.name, "the journal cannot be written");
            self.flush_to(published)?;
        }
        if crowded {
            self.flush_to(published)?;
            self.reclaim()?;
        }
        Ok(published)
    }

    /// Whether so much waits for a flush that a write may soon have to wait too.
    pub(crate) fn is_crowded(&self) -> bool {
        let state = self.read_state();
        state.pending.len() > MAX_PENDING / 2 || state.dying.len() > MAX_PENDING * 2
    }

    /// Frees the space of data that was overwritten or discarded, as far as that is durable; returns how many bytes. One
    /// at a time; it waits for reads that began before, and for nothing else.
    ///
    /// # Errors
    /// The data file cannot be punched, for another reason than that its file system has no holes.
    pub fn reclaim(&self) -> Result<u64, UpperError> {
        let _one = self.reclaiming.lock().unwrap_or_else(PoisonError::into_inner);
        let durable = self.commit.durable();
        let (dead, turn) = {
            let mut state = self.write_state();
            let mut dead: Vec<_> = state.dying.extract_if(.., |(slots, _)| *slots <= durable).collect();
            dead.extend(self.log().take_unused().into_iter().map(|range| (0, range)));
            if dead.is_empty() {
                return Ok(0);
            }
            (dead, self.readers.end_turn())
        };
        self.readers.wait(turn);
        let mut freed = 0;
        for range in joined(dead) {
            let Some(free) = self.log().bury(range) else { continue };
            match self.data.punch(free.start * SECTOR..free.end * SECTOR) {
                Ok(()) => {
                    self.log().freed(&free);
                    freed += (free.end - free.start) * SECTOR;
                }
                Err(error) if error.kind() == io::ErrorKind::Unsupported => self.log().cannot_free(),
                Err(source) => {
                    return Err(UpperError::Io { what: self.name.clone(), doing: "free data", source });
                }
            }
        }
        Ok(freed)
    }

    /// Figures.
    #[must_use]
    pub fn stat(&self) -> Stat {
        let shift = self.commit.shift();
        let (mappings, slots, pending) = {
            let state = self.read_state();
            (state.map.len() as u64, state.published.saturating_sub(shift), state.pending.len() as u64)
        };
        let log = self.log();
        Stat { mappings, slots, pending, log: (log.end() - FIRST_SECTOR) * SECTOR, allocated: log.allocated() }
    }

    /// Its mappings now, sorted.
    ///
    /// # Errors
    /// The format cannot name them.
    pub fn to_index(&self) -> Result<Index, UpperError> {
        Ok(self.read_state().map.to_index()?)
    }

    /// Where the next data would go, in bytes of the data file.
    pub(crate) fn data_end(&self) -> u64 {
        self.log().end() * SECTOR
    }
}

/// In order, adjacent ones as one: each costs a call to the system.
fn joined(dead: Vec<(u64, Range<u64>)>) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = dead.into_iter().map(|(_, range)| range).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, before| {
        let is_adjacent = before.end == next.start;
        if is_adjacent {
            before.end = next.end;
        }
        is_adjacent
    });
    ranges
}

#[cfg(test)]
mod tests;
