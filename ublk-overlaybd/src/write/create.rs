//! New writable layers, with nothing in them.

use super::WriteError;
use super::plan::Names;
use super::publish::NewFile;
use crate::format::lsmt::{Flags, HEADER_SIZE, Header, SECTOR};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// How a writable layer keeps its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Appended, with an index.
    Append,
    /// In its place in a sparse file.
    Sparse,
}

/// Makes the two files of a writable layer for a disk of `virtual_size` bytes; 0 is that of the layer below.
///
/// # Errors
/// One of them exists, or cannot be written.
pub fn create(data: &Path, index: &Path, virtual_size: u64, kind: Kind, names: &Names) -> Result<(), WriteError> {
    if !virtual_size.is_multiple_of(SECTOR) {
        return Err(WriteError::Asked(format!("a disk of {virtual_size} bytes is not whole sectors of {SECTOR}")));
    }
    if kind == Kind::Sparse && virtual_size == 0 {
        return Err(WriteError::Asked("a sparse layer needs a size".to_owned()));
    }
    let files = [data, index].map(|path| NewFile::create(path, false));
    let flags = match kind {
        Kind::Append => Flags::WRITABLE_DATA,
        Kind::Sparse => Flags::SPARSE_DATA,
    };
    let [data, index] = files;
    let (data, index) = (data?, index?);
    for (new, flags) in [(&data, flags), (&index, Flags::WRITABLE_INDEX)] {
        let mut header = Header::new(flags, virtual_size);
        header.uuid = names.uuid;
        header.parent = names.parent;
        header.user_tag.clone_from(&names.message);
        new.file().write_all_at(&header.encode()?, 0).map_err(new.error("write"))?;
    }
    if kind == Kind::Sparse {
        let len = (HEADER_SIZE as u64).checked_add(virtual_size);
        let len = len.ok_or_else(|| WriteError::Asked("the disk is too large for a sparse file".to_owned()))?;
        data.file().set_len(len).map_err(data.error("write"))?;
    }
    // The data file last: without an index it would look like a layer that lost one.
    index.publish()?;
    data.publish()
}
