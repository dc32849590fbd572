//! Finished layers: of a writable one, or of several merged.

use super::plan::{LayerPlan, Names};
use super::publish::NewFile;
use super::{Progress, WriteError, copy, zfile};
use crate::backend::Source;
use crate::format::tar::{padding_after, wrapper};
use crate::format::zfile::{Algorithm, BLOCK_SIZES, MAX_WRITTEN_BLOCK};
use crate::image::Image;
use crate::index::Kind;
use crate::layer::Layer;
use serde::Serialize;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compression {
    /// By what.
    pub algorithm: Algorithm,
    /// Bytes of a block: 4, 8, 16 or 32 KiB.
    pub block_size: u32,
}

impl Compression {
    /// Blocks of `block_size` bytes.
    ///
    /// # Errors
    /// A size that is not written: 64 KiB that do not compress cannot be read by others.
    pub fn new(algorithm: Algorithm, block_size: u32) -> Result<Self, WriteError> {
        if (*BLOCK_SIZES.start()..=MAX_WRITTEN_BLOCK).contains(&block_size) && block_size.is_power_of_two() {
            return Ok(Self { algorithm, block_size });
        }
        Err(WriteError::Asked(format!("blocks of {block_size} bytes are not written: 4, 8, 16 or 32 KiB")))
    }
}

/// How a layer is stored.
#[derive(Debug, Clone, Copy)]
pub struct Wrapping {
    /// Compressed, or raw.
    pub compression: Option<Compression>,
    /// In a tar member.
    pub tar: bool,
    /// Threads; the bytes are the same for any number.
    pub threads: usize,
    /// Whether a file in its place is replaced.
    pub replace: bool,
}

/// What was written.
#[derive(Debug, Clone, Serialize)]
pub struct Written {
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of the LSMT inside.
    pub lsmt_bytes: u64,
    /// Bytes of data in it.
    pub data_bytes: u64,
    /// Its mappings.
    pub mappings: u64,
    /// Size of the disk in bytes.
    pub virtual_size: u64,
}

/// Commits one layer: its data packed in the order of the disk.
///
/// # Errors
/// The layer cannot be read, or the new one not written; then there is no new file.
pub fn commit(
    layer: &Layer,
    names: &Names,
    path: &Path,
    wrapping: Wrapping,
    progress: &dyn Progress,
) -> Result<Written, WriteError> {
    let virtual_size = layer.virtual_size();
    let plan = LayerPlan::new(layer.index().iter(), vec![Arc::clone(layer.data())], virtual_size, names)?;
    write(&plan, virtual_size, path, wrapping, progress)
}

/// Merges all layers of `image` into one. Zeros stay, since they may hide what is below, unless it is said that nothing
/// ever will be: `bottom`.
///
/// # Errors
/// As for [`commit`].
pub fn merge(
    image: &Image,
    bottom: bool,
    names: &Names,
    path: &Path,
    wrapping: Wrapping,
    progress: &dyn Progress,
) -> Result<Written, WriteError> {
    let mut extents = image.stack().extents()?;
    if bottom {
        extents.retain(|extent| extent.kind != Kind::Zero);
    }
    let sources = image.layers().iter().map(|layer| Arc::clone(layer.data())).collect();
    let plan = LayerPlan::new(extents, sources, image.size(), names)?;
    write(&plan, image.size(), path, wrapping, progress)
}

/// Writes what was planned.
///
/// # Errors
/// As for [`commit`].
pub fn write(
    plan: &LayerPlan,
    virtual_size: u64,
    path: &Path,
    wrapping: Wrapping,
    progress: &dyn Progress,
) -> Result<Written, WriteError> {
    let new = NewFile::create(path, wrapping.replace)?;
    let bytes = write_source(plan, &new, wrapping, progress)?;
    new.publish()?;
    Ok(Written {
        bytes,
        lsmt_bytes: plan.size(),
        data_bytes: plan.data_bytes(),
        mappings: plan.entries(),
        virtual_size,
    })
}

/// Writes `source` in its wrappers, and returns how long it has become.
fn write_source(
    source: &dyn Source,
    new: &NewFile,
    wrapping: Wrapping,
    progress: &dyn Progress,
) -> Result<u64, WriteError> {
    let (file, path) = (new.file(), new.path());
    let start = if wrapping.tar { wrapper(0)?.len() as u64 } else { 0 };
    let payload = match wrapping.compression {
        Some(Compression { algorithm, block_size }) => {
            zfile::compress(source, file, path, start, (algorithm, block_size, wrapping.threads), progress)?
        }
        None => {
            copy::copy(source, file, path, start, wrapping.threads, progress)?;
            source.size()
        }
    };
    if !wrapping.tar {
        return Ok(payload);
    }
    let end = start + payload + padding_after(payload) as u64;
    file.write_all_at(&wrapper(payload)?, 0).and_then(|()| file.set_len(end)).map_err(new.error("write"))?;
    Ok(end)
}
