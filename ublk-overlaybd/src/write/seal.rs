//! A writable layer is finished as it is: its index, sorted, and a trailer are put after its data.

use super::publish::NewFile;
use super::{Progress, WriteError, copy};
use crate::backend::{FileSource, Source as _};
use crate::format::lsmt::{Entry, Flags, Header, MAX_ENTRIES_SEALED, MAX_LENGTH, SECTOR};
use crate::index::{Index, Kind};
use crate::layer::{Form, Layer};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The bytes that make a layer of data that ends at byte `data_end`, and where they begin.
///
/// # Errors
/// A mapping does not fit the format, or there are too many.
pub fn ending(index: &Index, header: &Header, data_end: u64) -> Result<(u64, Vec<u8>), WriteError> {
    let start = data_end.next_multiple_of(SECTOR);
    let mut bytes = Vec::with_capacity(index.len() * 16 + 8192);
    let count = entries(index, start / SECTOR, &mut bytes)?;
    if count > MAX_ENTRIES_SEALED {
        return Err(WriteError::TooManyEntries(count));
    }
    // With zeros: another writer leaves there what was in its memory.
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    let trailer = Header { flags: Flags::TRAILER, index_offset: start, index_size: count, ..header.clone() };
    bytes.extend(trailer.encode()?);
    Ok((start, bytes))
}

/// Appends the entries of `index`; those of zeros name sector `end` of the data. Returns how many they are.
///
/// # Errors
/// A mapping does not fit the format.
pub(crate) fn entries(index: &Index, end: u64, bytes: &mut Vec<u8>) -> Result<u64, WriteError> {
    let mut count = 0;
    for extent in index.iter() {
        let mut at = extent.start;
        while at < extent.end() {
            let part = extent.part(at, extent.end().min(at + u64::from(MAX_LENGTH)));
            let (zeroed, moffset) = match part.kind {
                Kind::Zero => (true, end),
                Kind::Data { moffset, .. } => (false, moffset),
            };
            let length = u32::try_from(part.len).unwrap_or(u32::MAX);
            bytes.extend(Entry { offset: part.start, length, moffset, zeroed, tag: 0 }.encode()?);
            at = part.end();
            count += 1;
        }
    }
    Ok(count)
}

fn ending_of(layer: &Layer) -> Result<(u64, Vec<u8>), WriteError> {
    let about = layer.about();
    if about.form != Form::Writable {
        return Err(WriteError::Asked(format!("{} is finished already", layer.name())));
    }
    if about.header.flags.is_sparse() {
        let what = "is sparse, and a sealed layer's data would be mostly holes: commit it instead";
        return Err(WriteError::Asked(format!("{} {what}", layer.name())));
    }
    ending(layer.index(), &about.header, layer.data().size())
}

/// Seals a copy of a writable layer's data file; returns the copy's size.
///
/// # Errors
/// It is not writable, cannot be read, or the copy not written.
pub fn seal_copy(
    layer: &Layer,
    path: &Path,
    replace: bool,
    threads: usize,
    progress: &dyn Progress,
) -> Result<u64, WriteError> {
    let (start, bytes) = ending_of(layer)?;
    let new = NewFile::create(path, replace)?;
    copy::copy(&**layer.data(), new.file(), path, 0, threads, progress)?;
    new.file().write_all_at(&bytes, start).map_err(new.error("write"))?;
    new.publish()?;
    Ok(start + bytes.len() as u64)
}

/// Seals a writable layer's data file itself; returns its size. Until this has returned the index file is needed: then
/// whatever was cut short lies beyond all that it maps.
///
/// # Errors
/// As for [`seal_copy`].
pub fn seal_in_place(layer: &Layer, data: &Path) -> Result<u64, WriteError> {
    let (start, bytes) = ending_of(layer)?;
    let file = File::options().write(true).open(data).map_err(WriteError::io(data, "open it for writing"))?;
    let size = FileSource::open(data)?.size();
    if size.next_multiple_of(SECTOR) != start {
        return Err(WriteError::Asked(format!("{} is being written by somebody", data.display())));
    }
    file.write_all_at(&bytes, start).map_err(WriteError::io(data, "write"))?;
    file.sync_all().map_err(WriteError::io(data, "sync it"))?;
    Ok(start + bytes.len() as u64)
}
