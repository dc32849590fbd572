//! The size of a writable layer's disk.

use super::WriteError;
use crate::format::lsmt::{HEADER_SIZE, Header, SECTOR, VIRTUAL_SIZE_AT};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Changes the size in the headers of a writable layer that nobody has open; returns what it was.
///
/// # Errors
/// They are not of a writable layer, or cannot be written.
pub fn resize(data: &Path, index: Option<&Path>, virtual_size: u64) -> Result<u64, WriteError> {
    if virtual_size == 0 || !virtual_size.is_multiple_of(SECTOR) {
        return Err(WriteError::Asked(format!("a disk of {virtual_size} bytes is not whole sectors of {SECTOR}")));
    }
    let mut headers = Vec::new();
    // The data file last: its header is the one that counts.
    for path in index.into_iter().chain([data]) {
        let file =
            File::options().read(true).write(true).open(path).map_err(WriteError::io(path, "open it for writing"))?;
        if path == data && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
        {
            let source = std::io::Error::new(std::io::ErrorKind::ResourceBusy, "a running disk writes to it");
            return Err(WriteError::io(path, "change its size")(source));
        }
        let mut block = [0; HEADER_SIZE];
        file.read_exact_at(&mut block, 0).map_err(WriteError::io(path, "read its header"))?;
        let header = Header::parse(&block).map_err(|error| corrupt(path, error.to_string()))?;
        if !header.flags.is_header() || header.flags.is_sealed() || header.flags.is_data() != (path == data) {
            let why = format!("LSMT header: flags {:?} are not those of a writable layer", header.flags);
            return Err(corrupt(path, why));
        }
        // It must fit before anything is changed.
        Header { virtual_size, ..header.clone() }.encode()?;
        headers.push((path, file, header));
    }
    let mut before = 0;
    for (path, file, header) in headers {
        file.write_all_at(&virtual_size.to_le_bytes(), VIRTUAL_SIZE_AT).map_err(WriteError::io(path, "write"))?;
        if header.flags.is_sparse() {
            file.set_len(HEADER_SIZE as u64 + virtual_size).map_err(WriteError::io(path, "change its length"))?;
        }
        file.sync_all().map_err(WriteError::io(path, "sync it"))?;
        before = header.virtual_size;
    }
    Ok(before)
}

fn corrupt(path: &Path, why: String) -> WriteError {
    crate::backend::ReadError::Corrupt { what: path.display().to_string(), offset: 0, why }.into()
}
