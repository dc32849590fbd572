//! Opening a writable layer after anything may have happened to it.

use super::commit::{Commit, Logs};
use super::journal::{self, Journal};
use super::log::{BLOCK, Limits, Log};
use super::map::Map;
use super::recovery::{Dropped, is_good, replay};
use super::renew::{ByName, Renewal};
use super::sidecar::{self, Record};
use super::{State, Upper, UpperError};
use crate::format::lsmt::{ENTRY_SIZE, Entry, FIRST_SECTOR, Flags, HEADER_SIZE, Header, SECTOR};
use crate::index::{Extent, Kind};
use crate::write::create::{Kind as CreateKind, create};
use crate::write::plan::Names;
use crate::write::publish::sync_directory;
use fs3_client::Medium;
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use uuid::Uuid;

/// How many of the last records have their data checked when a layer is opened, and how many bytes of it.
const CHECKED_RECORDS: usize = 256;
const CHECKED_BYTES: usize = 16 << 20;

/// The files of a writable layer.
#[derive(Debug, Clone)]
pub struct Files {
    /// What messages call it.
    pub name: String,
    /// The data file.
    pub data: Arc<dyn Medium>,
    /// The index file.
    pub index: Arc<dyn Medium>,
    /// Our own file with checksums; empty where there is none yet.
    pub sidecar: Arc<dyn Medium>,
    /// Where goes what is not flushed, so that it outlives this process; none where nobody counts on that.
    pub journal: Option<Arc<dyn Medium>>,
    /// Where the bytes of an index go that are cut off it; none for nowhere.
    pub salvage: Option<PathBuf>,
    /// What renames a new index; none where a long one is left as it is.
    pub renewal: Option<Arc<dyn Renewal>>,
    /// A trailer may have been put after the data already, by somebody who was then interrupted.
    pub is_being_sealed: bool,
}

/// Where the sidecar of a data file is.
#[must_use]
pub fn sidecar_path(data: &Path) -> PathBuf {
    with_suffix(data, ".dsec-log")
}

/// Where the journal of a data file is: what was answered and is not flushed.
#[must_use]
pub fn journal_path(data: &Path) -> PathBuf {
    with_suffix(data, ".dsec-live")
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl Files {
    /// Opens a layer's files for writing; the sidecar is made where there is none.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(data: &Path, index: &Path) -> Result<Self, UpperError> {
        let sidecar = sidecar_path(data);
        let existed = sidecar.exists();
        let open = |path: &Path, create| -> Result<Arc<dyn Medium>, UpperError> {
            let file = File::options().read(true).write(true).create(create).truncate(false).open(path);
            Ok(Arc::new(file.map_err(UpperError::io(&path.display().to_string(), "open it for writing"))?))
        };
        let files = Self {
            name: data.display().to_string(),
            data: open(data, false)?,
            index: open(index, false)?,
            sidecar: open(&sidecar, true)?,
            journal: Some(open(&journal_path(data), true)?),
            salvage: Some(with_suffix(index, ".dropped")),
            renewal: Some(Arc::new(ByName { index: index.to_owned(), sidecar: sidecar.clone() })),
            is_being_sealed: false,
        };
        if !existed {
            sync_dir(&sidecar)?;
        }
        Ok(files)
    }

    /// Makes the files of an empty layer for a disk of `virtual_size` bytes.
    ///
    /// # Errors
    /// What the system says.
    pub fn format(&self, virtual_size: u64, uuid: Uuid) -> Result<(), UpperError> {
        let flags = [Flags::WRITABLE_INDEX, Flags::WRITABLE_DATA];
        for (medium, flags) in [&self.index, &self.data].into_iter().zip(flags) {
            let header = Header { uuid, ..Header::new(flags, virtual_size) };
            let bytes = header.encode().map_err(|error| self.unusable(error.to_string()))?;
            medium.write_all_at(&bytes, 0).map_err(UpperError::io(&self.name, "write its header"))?;
            medium.sync().map_err(UpperError::io(&self.name, "sync its header"))?;
        }
        Ok(())
    }

    fn unusable(&self, why: impl Into<String>) -> UpperError {
        UpperError::Unusable { what: self.name.clone(), why: why.into() }
    }
}

pub(crate) fn sync_dir(path: &Path) -> Result<(), UpperError> {
    sync_directory(path).map_err(|error| {
        let what = path.display().to_string();
        UpperError::Io { what, doing: "sync its directory", source: io::Error::other(error) }
    })
}

/// All of a file, from byte `from` on. As much memory as the file has bytes.
fn read_from(medium: &dyn Medium, from: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(medium.size()?.saturating_sub(from)).map_err(io::Error::other)?;
    let mut bytes = vec![0; len];
    let read = medium.read_at(&mut bytes, from)?;
    bytes.truncate(read);
    Ok(bytes)
}

impl Upper {
    /// Makes a new layer of two files that do not exist, for a disk of `virtual_size` bytes, and opens it.
    ///
    /// # Errors
    /// One of the files exists, or cannot be written.
    pub fn create(data: &Path, index: &Path, virtual_size: u64, limits: Limits) -> Result<Self, UpperError> {
        let names = Names { uuid: Uuid::new_v4(), parent: Uuid::nil(), message: Vec::new() };
        create(data, index, virtual_size, CreateKind::Append, &names).map_err(|error| UpperError::Io {
            what: data.display().to_string(),
            doing: "create it",
            source: io::Error::other(error),
        })?;
        Self::open_pair(data, index, limits)
    }

    /// Opens the layer of a data file and an index file, ours or a peer's. An index with many more slots than mappings is
    /// written anew first.
    ///
    /// # Errors
    /// See [`UpperError`]. What was never flushed is no error.
    pub fn open_pair(data: &Path, index: &Path, limits: Limits) -> Result<Self, UpperError> {
        let upper = Self::open(Files::open(data, index)?, limits)?;
        upper.renew()?;
        Ok(upper)
    }

    /// Opens a layer of files that are open. See [`open_pair`](Self::open_pair).
    ///
    /// # Errors
    /// See [`UpperError`].
    pub fn open(files: Files, limits: Limits) -> Result<Self, UpperError> {
        let name = files.name.clone();
        if let Some(descriptor) = files.data.descriptor() {
            use rustix::fs::FlockOperation::NonBlockingLockExclusive;
            match rustix::fs::flock(descriptor, NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(UpperError::Busy(name)),
                Err(error) => return Err(UpperError::io(&name, "lock it")(error.into())),
            }
        }
        let header = check_headers(&files)?;
        let size = files.data.size().map_err(UpperError::io(&name, "read its size"))?;
        let index = read_from(&*files.index, HEADER_SIZE as u64).map_err(UpperError::io(&name, "read its index"))?;
        let mut kept = read_from(&*files.sidecar, 0).map_err(UpperError::io(&name, "read its sidecar"))?;
        let ours = sidecar::belongs_to(&kept, header.uuid);
        kept = if ours { kept.split_off(sidecar::HEADER) } else { Vec::new() };

        let (mut records, mut recovered) = replay(&index, &kept, header.uuid, size / SECTOR);
        let mut map = map_of(&records);
        if !header.flags.is_hybrid()
            && let Some(bad) = first_damaged(&files, &records, &map)?
        {
            let offset = HEADER_SIZE as u64 + (bad * ENTRY_SIZE) as u64;
            let bytes = (records.len() - bad) as u64 * ENTRY_SIZE as u64;
            recovered.dropped = Some(Dropped { offset, bytes, why: "its data has another checksum".to_owned() });
            records.truncate(bad);
            recovered.slots = bad as u64;
            map = map_of(&records);
        }
        if let Some(Dropped { offset, bytes, why }) = &recovered.dropped {
            tracing::warn!(file = name, offset, bytes, %why, "the end of the index is cut off");
            salvage(&files, &index[records.len().saturating_mul(ENTRY_SIZE).min(index.len())..])?;
        }
        repair(&files, &header, &index, ours.then_some(&kept), &records)?;

        // What comes next begins with a block of the file system.
        let end = size.div_ceil(SECTOR).max(FIRST_SECTOR).next_multiple_of(BLOCK);
        let mut log = Log::new(end, limits);
        let mut state = State { map, published: records.len() as u64, ..State::default() };
        let durable = state.published;
        let kept = match (&files.journal, journal::boot()) {
            // The name is what says whose journal it is.
            (Some(journal), Some(boot)) if !header.uuid.is_nil() => Some((Arc::clone(journal), boot)),
            _ => None,
        };
        if let Some((journal, boot)) = &kept {
            let bytes = read_from(&**journal, 0).map_err(UpperError::io(&name, "read its journal"))?;
            let found = journal::records(&bytes, boot, header.uuid).into_iter();
            recovered.unflushed = take_up(&mut state, found.filter(|record| is_good(&record.entry, size / SECTOR)));
        }
        // What nobody maps is garbage; but not what somebody may want to dig for, since entries of it were cut off.
        let (unmapped, is_shared) = unmapped(&state.map, end);
        if is_shared {
            log.cannot_free();
        }
        if ours || recovered.dropped.is_none() {
            // Once all that maps nothing of it any more is durable.
            state.dying = unmapped.into_iter().map(|range| (state.published, range)).collect();
        }
        let Files { data, index, sidecar, renewal, .. } = files;
        let commit = Commit::new(Logs { index, sidecar, shift: 0 }, durable);
        let mut upper = Self {
            name,
            data,
            renewal,
            header: RwLock::new(header),
            recovered,
            state: RwLock::new(state),
            log: Mutex::new(log),
            commit,
            readers: Arc::default(),
            reclaiming: Mutex::new(()),
            failed: OnceLock::new(),
            journal: None,
        };
        // Durable before the journal is begun anew, or it would be lost with the next process.
        upper.flush()?;
        if let Some((file, boot)) = kept {
            let (uuid, first) = (upper.header().uuid, upper.commit.durable());
            upper.journal = Some(Journal::begin(file, &boot, uuid, first).map_err(journal::error(&upper.name))?);
        }
        Ok(upper)
    }
}

/// Publishes again what was answered and may not be in the index; how many records that were. What they replace is left
/// alone here: a record that comes again replaces what replaced it.
fn take_up(state: &mut State, records: impl Iterator<Item = Record>) -> u64 {
    let before = state.published;
    for record in records {
        state.pending.push(record);
        state.published += 1;
        if let Some(extent) = parsed(&record) {
            state.map.insert(extent, drop);
        }
    }
    state.published - before
}

fn check_headers(files: &Files) -> Result<Header, UpperError> {
    let read = |medium: &dyn Medium, offset| -> Result<Vec<u8>, UpperError> {
        let mut block = vec![0; HEADER_SIZE];
        let len = medium.read_at(&mut block, offset).map_err(UpperError::io(&files.name, "read its header"))?;
        block.truncate(len);
        Ok(block)
    };
    let parse = |which, block: &[u8]| Header::parse(block).map_err(|error| files.unusable(format!("{which}: {error}")));
    let data = parse("LSMT header", &read(&*files.data, 0)?)?;
    let flags = data.flags;
    if flags.is_sparse() {
        return Err(
            files.unusable("LSMT header: it is sparse, which is only read here: commit it, and use a new layer")
        );
    }
    if !flags.is_header() || !flags.is_data() || flags.is_sealed() {
        return Err(files.unusable(format!("LSMT header: flags {flags:?} are not those of a writable layer")));
    }
    let index = parse("index: LSMT header", &read(&*files.index, 0)?)?;
    let flags = index.flags;
    if !flags.is_header() || flags.is_data() || flags.is_sealed() || index.index_offset != HEADER_SIZE as u64 {
        let why = format!("index: LSMT header: flags {flags:?} and index_offset {}", index.index_offset);
        return Err(files.unusable(format!("{why} are not those of a writable layer's index")));
    }
    // Somebody's disk may have an LSMT trailer as its last write: only one with this layer's own name is this layer's.
    let size = files.data.size().map_err(UpperError::io(&files.name, "read its size"))?;
    if let Some(last) = size.checked_sub(HEADER_SIZE as u64).filter(|&last| last >= HEADER_SIZE as u64)
        && let Ok(trailer) = Header::parse(&read(&*files.data, last)?)
        && trailer.flags.bits() == Flags::TRAILER.bits()
        && trailer.uuid == data.uuid
        && !data.uuid.is_nil()
        && !files.is_being_sealed
    {
        return Err(files.unusable("LSMT trailer: it is sealed, so it is a lower layer and takes no more writes"));
    }
    Ok(data)
}

fn parsed(record: &Record) -> Option<Extent> {
    // Padding maps nothing; what is no entry was never made a record.
    let Entry { offset, length, moffset, zeroed, .. } = Entry::parse(&record.entry).ok()??;
    let kind = if zeroed { Kind::Zero } else { Kind::Data { layer: 0, moffset } };
    Some(Extent { start: offset, len: length.into(), kind })
}

fn map_of(records: &[Record]) -> Map {
    let mut map = Map::default();
    records.iter().filter_map(parsed).for_each(|extent| map.insert(extent, drop));
    map
}

/// The first of the last records whose data is not what it was when it was written. The data was synced before the record
/// was written, so only a disk that lies comes to this. What was overwritten since may be freed already and is passed over.
fn first_damaged(files: &Files, records: &[Record], map: &Map) -> Result<Option<usize>, UpperError> {
    let (mut budget, mut damaged) = (CHECKED_BYTES, None);
    let mut bytes = Vec::new();
    for (number, record) in records.iter().enumerate().rev().take(CHECKED_RECORDS) {
        let (Some(crc), Some(extent)) = (record.data_crc, parsed(record)) else { continue };
        let Kind::Data { moffset, .. } = extent.kind else { continue };
        let is_live = map
            .lookup(extent.start..extent.end())
            .iter()
            .all(|piece| piece.kind == Some(extent.kind.advanced(piece.start - extent.start)));
        if !is_live {
            continue;
        }
        // At most 16383 sectors.
        let len = usize::try_from(extent.len * SECTOR).unwrap_or(usize::MAX);
        let Some(left) = budget.checked_sub(len) else { break };
        budget = left;
        bytes.resize(len, 0);
        let read = files.data.read_at(&mut bytes, moffset * SECTOR);
        let read = read.map_err(UpperError::io(&files.name, "read its data"))?;
        if read < len || crc32c::crc32c(&bytes) != crc {
            damaged = Some(number);
        }
    }
    Ok(damaged)
}

/// Keeps what is cut off an index.
fn salvage(files: &Files, bytes: &[u8]) -> Result<(), UpperError> {
    let Some(path) = &files.salvage else { return Ok(()) };
    let append = || {
        let mut file = File::options().append(true).create(true).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    append().map_err(UpperError::io(&path.display().to_string(), "keep the end of the index there"))?;
    sync_dir(path)
}

/// Makes index and sidecar say what `records` say, and nothing else.
fn repair(
    files: &Files,
    header: &Header,
    index: &[u8],
    kept: Option<&Vec<u8>>,
    records: &[Record],
) -> Result<(), UpperError> {
    let io = |doing| UpperError::io(&files.name, doing);
    let entries: Vec<u8> = records.iter().flat_map(|record| record.entry).collect();
    let sums: Vec<u8> = (0..).zip(records).flat_map(|(number, record)| record.encode(number, header.uuid)).collect();
    // A peer syncs nothing before it writes entries.
    files.data.sync().map_err(io("sync its data"))?;
    if entries != index {
        if index.len() > entries.len() {
            files.index.set_len((HEADER_SIZE + entries.len()) as u64).map_err(io("cut its index"))?;
        }
        let same = index.iter().zip(&entries).take_while(|(a, b)| a == b).count();
        files.index.write_all_at(&entries[same..], (HEADER_SIZE + same) as u64).map_err(io("repair its index"))?;
    }
    // Even where nothing was to be done: the last to write it may not have synced it.
    files.index.sync().map_err(io("sync its index"))?;
    let mut same = 0;
    match kept {
        None => {
            files.sidecar.set_len(0).map_err(io("write its sidecar"))?;
            files.sidecar.sync().map_err(io("sync its sidecar"))?;
            files.sidecar.write_all_at(&sidecar::header(header.uuid), 0).map_err(io("write its sidecar"))?;
        }
        Some(kept) => {
            if kept.len() > sums.len() {
                files.sidecar.set_len((sidecar::HEADER + sums.len()) as u64).map_err(io("cut its sidecar"))?;
            }
            same = kept.iter().zip(&sums).take_while(|(a, b)| a == b).count();
        }
    }
    let place = (sidecar::HEADER + same) as u64;
    files.sidecar.write_all_at(&sums[same..], place).map_err(io("write its sidecar"))?;
    files.sidecar.sync().map_err(io("sync its sidecar"))
}

/// The parts of the data, up to sector `end`, that nothing maps; and whether a part is mapped twice, as no writer does that
/// is known: to free such data would take it from the other mapping.
fn unmapped(map: &Map, end: u64) -> (Vec<Range<u64>>, bool) {
    let mut live: Vec<_> = map
        .iter()
        .filter_map(|extent| match extent.kind {
            Kind::Data { moffset, .. } => Some(moffset..moffset + extent.len),
            Kind::Zero => None,
        })
        .collect();
    live.sort_unstable_by_key(|range| range.start);
    let (mut at, mut dead, mut is_shared) = (FIRST_SECTOR, Vec::new(), false);
    for range in live {
        if at < range.start {
            dead.push(at..range.start);
        }
        is_shared |= range.start < at;
        at = at.max(range.end);
    }
    if at < end {
        dead.push(at..end);
    }
    (dead, is_shared)
}
