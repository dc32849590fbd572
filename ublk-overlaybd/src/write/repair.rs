//! A copy of a writable layer's index without what cannot be right.

use super::WriteError;
use super::publish::NewFile;
use crate::backend::{FileSource, Source as _};
use crate::layer::Layer;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Writes the index that `layer` was opened with, from `index`, to `path`, up to where its replay stopped; returns how
/// many bytes were left out.
///
/// # Errors
/// It cannot be read, or the copy not written.
pub fn repair_index(layer: &Layer, index: &Path, path: &Path) -> Result<u64, WriteError> {
    let source = FileSource::open(index)?;
    let dropped = layer.about().replayed.as_ref().and_then(|replayed| replayed.dropped.as_ref());
    let keep = dropped.map_or(source.size(), |dropped| dropped.offset);
    let new = NewFile::create(path, false)?;
    let (mut at, mut buf) = (0, vec![0; 1 << 20]);
    while at < keep {
        let len = usize::try_from(keep - at).unwrap_or(usize::MAX).min(buf.len());
        source.read_exact_at(&mut buf[..len], at)?;
        new.file().write_all_at(&buf[..len], at).map_err(new.error("write"))?;
        at += len as u64;
    }
    new.publish()?;
    Ok(source.size() - keep)
}
