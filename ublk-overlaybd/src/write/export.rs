//! A disk as a plain file, with holes where it is zero.

use super::publish::NewFile;
use super::{Progress, WriteError, copy};
use crate::backend::Source as _;
use crate::image::Image;
use serde::Serialize;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs of zeros shorter than this are written, not left out.
pub(super) const GRAIN: usize = 4096;

/// What was exported.
#[derive(Debug, Clone, Serialize)]
pub struct Exported {
    /// Bytes of the disk, and of the file.
    pub bytes: u64,
    /// Bytes that were written; the rest is holes.
    pub written: u64,
}

/// The parts of `buf` that are not zero, in whole grains.
pub(super) fn parts(buf: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    let is_zero = |grain: &[u8]| grain.iter().all(|&b| b == 0);
    std::iter::from_fn(move || {
        let rest = buf.get(at..)?;
        let start = at + rest.chunks(GRAIN).position(|grain| !is_zero(grain))? * GRAIN;
        let full = &buf[start..];
        let len = full.chunks(GRAIN).position(is_zero).map_or(full.len(), |grains| grains * GRAIN);
        at = start + len;
        Some((start, &buf[start..start + len]))
    })
}

/// Writes what `image` reads as to a sparse file at `path`.
///
/// # Errors
/// It cannot be read, or the file not written; then there is no file.
pub fn export(
    image: &Image,
    path: &Path,
    replace: bool,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Exported, WriteError> {
    let new = NewFile::create(path, replace)?;
    let size = image.size();
    new.file().set_len(size).map_err(new.error("write"))?;
    // Units of the file that the image maps anything of: an empty disk of terabytes takes no time.
    let mut units: Vec<usize> = Vec::new();
    for extent in image.stack().extents()? {
        if extent.kind == crate::index::Kind::Zero {
            continue;
        }
        let (start, end) = (extent.start * 512, (extent.end() * 512).min(size));
        let last = units.last().map_or(0, |last| last + 1);
        let range = (start / copy::UNIT)..end.div_ceil(copy::UNIT);
        units.extend(range.filter_map(|unit| usize::try_from(unit).ok()).filter(|&unit| unit >= last));
    }
    let written = AtomicU64::new(0);
    copy::in_parallel(units.len(), threads, Vec::new, |buf: &mut Vec<u8>, number| {
        let range = copy::unit_range(units[number], size);
        buf.resize(usize::try_from(range.end - range.start).unwrap_or(0), 0);
        image.read_exact_at(buf, range.start)?;
        for (at, bytes) in parts(buf) {
            new.file().write_all_at(bytes, range.start + at as u64).map_err(new.error("write"))?;
            written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        progress.done(range.end - range.start);
        Ok(())
    })?;
    new.publish()?;
    Ok(Exported { bytes: size, written: written.into_inner() })
}
