//! A plain disk becomes a layer: what is zero is left out, or kept as zeros where it must hide something.

use super::commit::{Wrapping, Written, write};
use super::export::parts;
use super::plan::{LayerPlan, Names};
use super::{Progress, WriteError, copy};
use crate::backend::{FileSource, Source};
use crate::format::lsmt::SECTOR;
use crate::index::{Extent, Kind};
use rustix::fs::SeekFrom;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Where `file` may have anything but zeros: what the file system says are no holes.
fn allocated(file: &FileSource) -> std::io::Result<Vec<Range<u64>>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < file.size() {
        let start = match rustix::fs::seek(file.file(), SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            // No holes are known of here.
            Err(rustix::io::Errno::INVAL) if at == 0 => return Ok(Vec::from([Range { start: 0, end: file.size() }])),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file.file(), SeekFrom::Hole(start))?;
        ranges.push(start..end);
        at = end;
    }
    Ok(ranges)
}

/// The runs of `disk` that are not zero, in grains of 4 KiB.
///
/// # Errors
/// It cannot be read.
pub fn scan(disk: &FileSource, threads: usize, progress: &dyn Progress) -> Result<Vec<Extent>, WriteError> {
    let size = disk.size();
    let mut units: Vec<usize> = Vec::new();
    for range in allocated(disk).map_err(WriteError::io(disk.path(), "look for holes"))? {
        let next = units.last().map_or(0, |last| last + 1);
        let range = range.start / copy::UNIT..range.end.div_ceil(copy::UNIT);
        units.extend(range.filter_map(|unit| usize::try_from(unit).ok()).filter(|&unit| unit >= next));
    }
    let found = Mutex::new(Vec::new());
    copy::in_parallel(units.len(), threads, Vec::new, |buf: &mut Vec<u8>, number| {
        let range = copy::unit_range(units[number], size);
        buf.resize(usize::try_from(range.end - range.start).unwrap_or(0), 0);
        disk.read_exact_at(buf, range.start)?;
        let extents = parts(buf).map(|(at, bytes)| {
            let start = (range.start + at as u64) / SECTOR;
            let len = (bytes.len() as u64).div_ceil(SECTOR);
            Extent { start, len, kind: Kind::Data { layer: 0, moffset: start } }
        });
        found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(extents);
        progress.done(range.end - range.start);
        Ok(())
    })?;
    let mut extents = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    extents.sort_unstable_by_key(|extent: &Extent| extent.start);
    Ok(extents)
}

/// Makes a layer of the plain disk in the file at `disk`.
///
/// # Errors
/// It cannot be read, or the layer not written; then there is no layer.
pub fn import(
    disk: &Path,
    names: &Names,
    path: &Path,
    wrapping: Wrapping,
    progress: &dyn Progress,
) -> Result<Written, WriteError> {
    let disk = FileSource::open(disk)?;
    let size = disk.size().next_multiple_of(SECTOR);
    if size == 0 {
        return Err(WriteError::Asked(format!("{} is empty", disk.path().display())));
    }
    let extents = scan(&disk, wrapping.threads, &super::Silent)?;
    let source: Arc<dyn Source> = Arc::new(disk);
    let plan = LayerPlan::new(extents, vec![source], size, names)?;
    write(&plan, size, path, wrapping, progress)
}
