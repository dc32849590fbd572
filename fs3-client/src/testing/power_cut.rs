//! A disk in memory that loses what was not synced.
//!
//! A test runs its writes over a [`Disk`], counts the operations of a first run, and then cuts the power at each of
//! them: from there on every operation fails, and [`Disk::after_cut`] gives disks as the next start may find them.

use crate::medium::Medium;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// What a disk writes as one: a power cut leaves all of it or nothing.
pub const SECTOR: u64 = 512;

/// Files by name.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<String, Contents>,
    /// Writes, punches, cuts and syncs so far.
    operations: u64,
    /// The operation that does not happen, nor any after it.
    cut: Option<u64>,
    /// Bytes that all files may have together.
    room: Option<u64>,
    /// The next sync fails, and loses what this seed chooses.
    failing_sync: Option<u64>,
    /// As many of the next reads fail.
    failing_reads: u64,
    /// What became of names that those who had the files open know them by.
    renamed: BTreeMap<String, String>,
}

#[derive(Debug, Default, Clone)]
struct Contents {
    /// As those see it that read it now.
    seen: Vec<u8>,
    /// As it was at the last sync.
    durable: Vec<u8>,
    /// What came after that.
    pending: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Write { offset: u64, bytes: Vec<u8> },
    Punch(Range<u64>),
    Length(u64),
}

/// Small, seeded, the same everywhere: splitmix64.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl Disk {
    /// An empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The file `name`, made where it is not there. (That names are durable is for others to test: directories are not
    /// what this disk forgets.)
    #[must_use]
    pub fn open(&self, name: &str) -> DiskFile {
        self.state().files.entry(name.to_owned()).or_default();
        DiskFile { disk: self.clone(), name: name.to_owned() }
    }

    /// Operations so far: writes, punches, changes of length, syncs.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Cuts the power before operation `at`, counted from 0 since the disk was made: it fails, and all after it.
    pub fn cut_at(&self, at: u64) {
        self.state().cut = Some(at);
    }

    /// Whether the power is not out yet.
    #[must_use]
    pub fn has_power(&self) -> bool {
        let state = self.state();
        state.cut.is_none_or(|cut| state.operations < cut)
    }

    /// Lets the next sync fail. What that file had not synced is then lost as by a power cut, as `seed` chooses, though
    /// the power is not out: those who wrote it read something else.
    pub fn fail_next_sync(&self, seed: u64) {
        self.state().failing_sync = Some(seed);
    }

    /// Lets the next `count` reads fail with EIO.
    pub fn fail_reads(&self, count: u64) {
        self.state().failing_reads = count;
    }

    /// Files that there are.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.state().files.keys().cloned().collect()
    }

    /// Removes a file, for good at once.
    pub fn remove(&self, name: &str) {
        self.state().files.remove(name);
    }

    /// Gives the file `from` the name `to`, for good at once, in place of what had it. Those who have it open keep it. The
    /// name `from` is not to be used again. One operation.
    ///
    /// # Errors
    /// The power is out.
    ///
    /// # Panics
    /// There is no such file.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.operate(|state| {
            let contents = state.files.remove(from).expect("a file that is renamed is there");
            state.files.insert(to.to_owned(), contents);
            state.renamed.insert(from.to_owned(), to.to_owned());
        })
    }

    /// Removes a file, for good at once, if the power is not out. One operation.
    ///
    /// # Errors
    /// The power is out.
    pub fn unlink(&self, name: &str) -> io::Result<()> {
        self.operate(|state| drop(state.files.remove(name)))
    }

    /// One operation, unless the power is out by then.
    fn operate<T>(&self, work: impl FnOnce(&mut State) -> T) -> io::Result<T> {
        let mut state = self.state();
        let at = state.operations;
        if state.cut.is_some_and(|cut| at >= cut) {
            return Err(io::Error::other("the power is out"));
        }
        state.operations += 1;
        Ok(work(&mut state))
    }

    /// Lets all files together have `bytes`, and no more: writes beyond that fail with ENOSPC.
    pub fn limit(&self, bytes: Option<u64>) {
        self.state().room = bytes;
    }

    /// The disk as it may be after the power is back: what was synced, and of what was not, any sectors of any changes,
    /// as `seed` chooses. Seeds 0 and 1 are the ends: nothing of it, and all of it.
    #[must_use]
    pub fn after_cut(&self, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut files = BTreeMap::new();
        for (name, contents) in &self.state().files {
            let durable = contents.after(seed, &mut random);
            files.insert(name.clone(), Contents { seen: durable.clone(), durable, pending: Vec::new() });
        }
        Self { state: Arc::new(Mutex::new(State { files, ..State::default() })) }
    }

    /// All bytes of the file `name` as they are seen now.
    #[must_use]
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        self.state().files.get(name).map(|contents| contents.seen.clone())
    }
}

impl Contents {
    /// What is left of it without what was not synced, or with some of that.
    fn after(&self, seed: u64, random: &mut Random) -> Vec<u8> {
        let mut durable = self.durable.clone();
        for change in &self.pending {
            match change {
                Change::Write { offset, bytes } => {
                    for piece in sectors(*offset, bytes.len()) {
                        if kept(seed, random) {
                            let start = in_memory(*offset + piece.start as u64);
                            put(&mut durable, start, &bytes[piece]);
                        }
                    }
                }
                Change::Punch(range) if kept(seed, random) => zero(&mut durable, range),
                Change::Length(len) if kept(seed, random) => durable.resize(in_memory(*len), 0),
                Change::Punch(_) | Change::Length(_) => {}
            }
        }
        durable
    }
}

fn kept(seed: u64, random: &mut Random) -> bool {
    match seed {
        0 => false,
        1 => true,
        _ => random.next().is_multiple_of(2),
    }
}

/// The pieces of a write that a disk writes as one each, as ranges of its bytes.
fn sectors(offset: u64, len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        if start >= len {
            return None;
        }
        let into = in_memory((offset + start as u64) % SECTOR);
        let end = len.min(start + in_memory(SECTOR) - into);
        let piece = start..end;
        start = end;
        Some(piece)
    })
}

/// A test's disk fits into memory.
fn in_memory(offset: u64) -> usize {
    usize::try_from(offset).expect("a test's disk is small")
}

fn put(bytes: &mut Vec<u8>, start: usize, new: &[u8]) {
    if bytes.len() < start + new.len() {
        bytes.resize(start + new.len(), 0);
    }
    bytes[start..start + new.len()].copy_from_slice(new);
}

fn zero(bytes: &mut [u8], range: &Range<u64>) {
    let end = bytes.len().min(in_memory(range.end));
    let start = end.min(in_memory(range.start));
    bytes[start..end].fill(0);
}

/// A file on a [`Disk`].
#[derive(Debug, Clone)]
pub struct DiskFile {
    disk: Disk,
    name: String,
}

impl DiskFile {
    /// One operation, unless the power is out by then.
    fn operate<T>(&self, work: impl FnOnce(&mut State, &str) -> io::Result<T>) -> io::Result<T> {
        self.disk.operate(|state| work(state, &self.name))?
    }
}

impl State {
    fn file(&mut self, name: &str) -> &mut Contents {
        let name = self.renamed.get(name).map_or(name, String::as_str);
        self.files.get_mut(name).expect("a file that was opened is there")
    }

    fn used(&self) -> u64 {
        self.files.values().map(|contents| contents.seen.len() as u64).sum()
    }
}

impl Medium for DiskFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.state();
        if state.cut.is_some_and(|cut| state.operations >= cut) {
            return Err(io::Error::other("the power is out"));
        }
        if let Some(left) = state.failing_reads.checked_sub(1) {
            state.failing_reads = left;
            return Err(rustix::io::Errno::IO.into());
        }
        let seen = &state.file(&self.name).seen;
        let start = seen.len().min(in_memory(offset));
        let len = buffer.len().min(seen.len() - start);
        buffer[..len].copy_from_slice(&seen[start..start + len]);
        Ok(len)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.operate(|state, name| {
            let (used, room) = (state.used(), state.room);
            let contents = state.file(name);
            let grown = (offset + bytes.len() as u64).saturating_sub(contents.seen.len() as u64);
            if room.is_some_and(|room| used + grown > room) {
                return Err(rustix::io::Errno::NOSPC.into());
            }
            put(&mut contents.seen, in_memory(offset), bytes);
            contents.pending.push(Change::Write { offset, bytes: bytes.to_vec() });
            Ok(())
        })
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        self.operate(|state, name| {
            let contents = state.file(name);
            zero(&mut contents.seen, &range);
            contents.pending.push(Change::Punch(range));
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.operate(|state, name| {
            let contents = state.file(name);
            contents.seen.resize(in_memory(len), 0);
            contents.pending.push(Change::Length(len));
            Ok(())
        })
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.state().file(&self.name).seen.len() as u64)
    }

    fn sync(&self) -> io::Result<()> {
        self.operate(|state, name| {
            let failing = state.failing_sync.take();
            let contents = state.file(name);
            if let Some(seed) = failing {
                contents.seen = contents.after(seed, &mut Random(seed));
            }
            contents.durable.clone_from(&contents.seen);
            contents.pending.clear();
            failing.map_or(Ok(()), |_| Err(rustix::io::Errno::IO.into()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> (Disk, DiskFile) {
        let disk = Disk::new();
        let file = disk.open("file");
        file.write_all_at(&[1; 1024], 0).unwrap();
        file.sync().unwrap();
        file.write_all_at(&[2; 1024], 256).unwrap();
        (disk, file)
    }

    #[test]
    fn what_is_synced_stays_and_the_rest_goes_by_sectors() {
        let (disk, _) = written();
        let nothing = disk.after_cut(0).contents("file").unwrap();
        assert_eq!(nothing, [1; 1024]);
        assert_eq!(disk.after_cut(1).contents("file"), disk.contents("file"));
        // The write begins and ends in the middle of sectors: three pieces, so eight outcomes.
        let outcomes: std::collections::BTreeSet<_> =
            (0..200).map(|seed| disk.after_cut(seed).contents("file").unwrap()).collect();
        assert_eq!(outcomes.len(), 8);
    }

    #[test]
    fn the_power_goes_before_the_operation_it_is_told() {
        let (disk, file) = written();
        assert_eq!(disk.operations(), 3);
        disk.cut_at(4);
        file.sync().unwrap();
        assert!(file.write_all_at(b"x", 0).is_err());
        assert!(file.read_at(&mut [0; 4], 0).is_err());
        assert_eq!(disk.after_cut(0).contents("file"), disk.contents("file"));
    }

    #[test]
    fn as_many_reads_fail_as_were_told_to() {
        let (disk, file) = written();
        disk.fail_reads(1);
        let error = file.read_at(&mut [0; 4], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
        assert_eq!(file.read_at(&mut [0; 4], 0).unwrap(), 4);
    }

    #[test]
    fn a_renamed_file_is_still_open() {
        let (disk, file) = written();
        disk.open("old").write_all_at(b"old", 0).unwrap();
        disk.rename("file", "old").unwrap();
        file.write_all_at(&[5; 4], 0).unwrap();
        file.sync().unwrap();
        assert_eq!(disk.names(), ["old"]);
        assert_eq!(disk.after_cut(0).contents("old").unwrap()[..5], [5, 5, 5, 5, 1]);
        disk.cut_at(disk.operations());
        assert!(disk.rename("old", "new").is_err() && disk.unlink("old").is_err());
        assert_eq!(disk.names(), ["old"]);
    }

    #[test]
    fn a_full_disk_refuses_and_writes_nothing() {
        let (disk, file) = written();
        disk.limit(Some(1280));
        file.write_all_at(&[3; 1280], 0).unwrap();
        let error = file.write_all_at(&[4; 2], 1279).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOSPC.raw_os_error()));
        assert_eq!(disk.contents("file").unwrap(), [3; 1280]);
    }
}
