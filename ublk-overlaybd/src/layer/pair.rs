//! A writable layer, read: its index replayed over its data, or the holes of a sparse file.

use super::lsmt::{Entries, header, kind, outside};
use super::{About, Form, Layer};
use crate::backend::{FileSource, ReadError, Source};
use crate::format::lsmt::{ENTRY_SIZE, Entry, FIRST_SECTOR, HEADER_SIZE, Header, SECTOR};
use crate::index::{Extent, Index, Kind, Replay};
use rustix::fs::SeekFrom;
use std::path::Path;
use std::sync::Arc;

/// What replaying an index met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Entries that were applied.
    pub entries: u64,
    /// Padding that was passed over.
    pub padding: u64,
    /// Where and why it stopped before the end.
    pub dropped: Option<Dropped>,
}

/// The end of an index that was not replayed: it was never flushed, or not whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Where in the index file.
    pub offset: u64,
    /// How many bytes from there on.
    pub bytes: u64,
    /// Why.
    pub why: String,
}

/// Either end of a replay.
enum Stop {
    Read(ReadError),
    At(u64, String),
}

impl From<ReadError> for Stop {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

pub(super) fn open(data_path: &Path, index_path: Option<&Path>) -> Result<Layer, ReadError> {
    let name: Arc<str> = data_path.display().to_string().into();
    let file = FileSource::open(data_path)?;
    not_in_use(&file)?;
    let corrupt = |why: String| ReadError::Corrupt { what: name.to_string(), offset: 0, why };
    let header = header(&file, &name, 0, "LSMT header")?;
    if !header.flags.is_header() || !header.flags.is_data() {
        let why = format!("LSMT header: flags {:?} are not those of a data file", header.flags);
        return Err(corrupt(why));
    }
    let (map, data_end, replayed, tagged) = if header.flags.is_sparse() {
        let map = holes(&file, &header).map_err(|source| ReadError::Local { what: name.to_string(), source })?;
        let index = Index::from_sorted(map).map_err(|error| corrupt(error.to_string()))?;
        (index, file.size().div_ceil(SECTOR), None, false)
    } else {
        let Some(index_path) = index_path else {
            return Err(corrupt("LSMT header: flags do not say sparse, so an index file is needed".to_owned()));
        };
        let data_end = file.size() / SECTOR;
        let (replay, replayed, tagged) = replay(&FileSource::open(index_path)?, data_end)?;
        (replay.to_index().map_err(|error| corrupt(error.to_string()))?, data_end, Some(replayed), tagged)
    };
    let about = About {
        form: Form::Writable,
        tar: None,
        zfile: None,
        header,
        trailer: None,
        entries: replayed.as_ref().map_or(map.len() as u64, |replayed| replayed.entries),
        padding: replayed.as_ref().map_or(0, |replayed| replayed.padding),
        tagged,
        data_end,
        replayed,
    };
    // The last sector of a sparse file may be cut short.
    let data: Arc<dyn Source> = Arc::new(file);
    Ok(Layer { name, stored: Arc::clone(&data), data, index: Arc::new(map), about, zfile: None })
}

/// Keeps the layer from being written to as long as its file is open here: a disk that has it frees what it overwrites, so that
/// whoever reads by an older index would read zeros.
fn not_in_use(file: &FileSource) -> Result<(), ReadError> {
    let Err(error) = rustix::fs::flock(file.file(), rustix::fs::FlockOperation::NonBlockingLockShared) else {
        return Ok(());
    };
    let what = file.path().display().to_string();
    if error == rustix::io::Errno::WOULDBLOCK {
        let why = "a running disk writes to it: stop that first, or seal its layer";
        return Err(ReadError::Local { what, source: std::io::Error::new(std::io::ErrorKind::ResourceBusy, why) });
    }
    // A file system without locks: then nobody can have the disk open here either.
    tracing::debug!(file = what, %error, "cannot lock it");
    Ok(())
}

/// Replays the index file over data that ends at sector `data_end`.
fn replay(file: &FileSource, data_end: u64) -> Result<(Replay, Replayed, bool), ReadError> {
    let name = file.path().display().to_string();
    let corrupt = |why: String| ReadError::Corrupt { what: name.clone(), offset: 0, why };
    let header = header(file, &name, 0, "LSMT header")?;
    let flags = header.flags;
    if !flags.is_header() || flags.is_data() || flags.is_sealed() {
        return Err(corrupt(format!("LSMT header: flags {flags:?} are not those of a writable layer's index file")));
    }
    let start = HEADER_SIZE as u64;
    if header.index_offset != start {
        return Err(corrupt(format!("LSMT header: index_offset is {}, not {start}", header.index_offset)));
    }
    let (mut replay, mut replayed, mut tagged) = (Replay::new(), Replayed::default(), false);
    let count = (file.size() - start) / ENTRY_SIZE as u64;
    let stop = Entries { source: file, offset: start, count }.try_each(|at, bytes| {
        match Entry::parse(bytes) {
            Ok(None) => replayed.padding += 1,
            Ok(Some(entry)) if entry.is_within(data_end) => {
                replayed.entries += 1;
                tagged |= entry.tag != 0;
                replay.insert(Extent { start: entry.offset, len: entry.length.into(), kind: kind(&entry) });
            }
            Ok(Some(entry)) => return Err(Stop::At(at, outside(&entry, data_end))),
            Err(error) => return Err(Stop::At(at, error.to_string())),
        }
        Ok(())
    });
    let ragged = file.size() - start - count * ENTRY_SIZE as u64;
    replayed.dropped = match stop {
        Ok(()) if ragged == 0 => None,
        Ok(()) => {
            let offset = file.size() - ragged;
            Some(Dropped { offset, bytes: ragged, why: "the last entry is not whole".to_owned() })
        }
        Err(Stop::At(offset, why)) => Some(Dropped { offset, bytes: file.size() - offset, why }),
        Err(Stop::Read(error)) => return Err(error),
    };
    if let Some(Dropped { offset, bytes, why }) = &replayed.dropped {
        tracing::warn!(file = name, offset, bytes, %why, "the end of the index is left out");
    }
    Ok((replay, replayed, tagged))
}

/// The data of a sparse file: whatever is no hole.
fn holes(source: &FileSource, header: &Header) -> std::io::Result<Vec<Extent>> {
    let file = source.file();
    // Reads stop at whole sectors, and at the disk's end.
    let end = source.size().min((HEADER_SIZE as u64).saturating_add(header.virtual_size)) / SECTOR;
    let mut extents = Vec::new();
    let mut at = FIRST_SECTOR;
    while at < end {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at * SECTOR)) {
            Ok(data) => data,
            // No more data.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(data))?;
        let (from, to) = ((data / SECTOR).max(at), hole.div_ceil(SECTOR).min(end));
        if from < to {
            let kind = Kind::Data { layer: 0, moffset: from };
            extents.push(Extent { start: from - FIRST_SECTOR, len: to - from, kind });
        }
        at = to.max(at + 1);
    }
    Ok(extents)
}
