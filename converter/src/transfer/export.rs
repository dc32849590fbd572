//! From a store into an OCI layout in a directory (image-spec, image-layout.md).
//!
//! Writers of ours take turns, by a lock on the directory. Files are written under another name, synced, and renamed;
//! `index.json`, which makes the image one of the layout's, comes last.

use super::pull::read_full;
use super::{Event, Moved, OnEvent, TransferError, blobs, each};
use crate::manifest::{Image, MANIFEST_MEDIA_TYPE};
use crate::source::documents::{MANIFEST_LIMIT, REF_NAME};
use fs3_client::{Digest, Hasher, Store};
use rustix::fs::{AtFlags, CWD};
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The end of names that files have while they are written.
const PARTIAL: &str = ".dsec-partial";
const PIECE: usize = 1 << 20;

/// A converted image that a layout has now.
#[derive(Debug, Clone, Copy)]
pub struct Exported {
    /// What it took.
    pub moved: Moved,
}

/// Writes the image whose manifest is blob `digest` of `size` bytes into the layout `dir`, as `tag`. A layout that is
/// there keeps its other images. `link` gives the layout the store's own files where that is possible.
///
/// # Errors
/// [`TransferError`]; the layout is then as it was, but for blobs that nothing names.
pub fn export(
    store: &Store,
    image: &Image,
    (digest, size): (Digest, u64),
    dir: &Path,
    tag: &str,
    link: bool,
    on_event: &OnEvent,
) -> Result<Exported, TransferError> {
    let target = dir.join("blobs/sha256");
    fs::create_dir_all(&target).map_err(|e| io_error("create", &target, e))?;
    let lock = File::open(dir).map_err(|e| io_error("open", dir, e))?;
    lock.lock().map_err(|e| io_error("lock", dir, e))?;
    // Checked before anything is written, and read again below only because of other programs.
    read_index(dir)?;
    remove_partial(&target)?;
    let mut all = blobs(image)?;
    all.push((digest, size));
    on_event(Event::Total(all.iter().map(|(_, size)| size).sum()));
    let moved = each(&all, 1, |(digest, size)| {
        let was_there = write_blob(store, digest, *size, &target, link, on_event)?;
        Ok((*size, was_there))
    })?;
    sync_dir(&target)?;
    sync_dir(&dir.join("blobs"))?;
    if !dir.join("oci-layout").exists() {
        replace(dir, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    }
    let mut index = read_index(dir)?;
    set_entry(&mut index, &digest, size, tag);
    replace(dir, "index.json", index.to_string().as_bytes())?;
    sync_dir(dir)?;
    Ok(Exported { moved })
}

/// Makes `index` name the manifest as `tag`, and nothing else so.
fn set_entry(index: &mut Value, digest: &Digest, size: u64, tag: &str) {
    let entry = json!({
        "mediaType": MANIFEST_MEDIA_TYPE, "digest": digest.to_string(), "size": size,
        "artifactType": crate::manifest::ARTIFACT_TYPE, "annotations": { REF_NAME: tag },
    });
    if let Some(entries) = index["manifests"].as_array_mut() {
        entries.retain(|old| old["annotations"][REF_NAME].as_str() != Some(tag));
        entries.push(entry);
    } else {
        index["manifests"] = json!([entry]);
    }
}

/// The layout's index, or a new one. What is in it besides is kept.
fn read_index(dir: &Path) -> Result<Value, TransferError> {
    let path = dir.join("index.json");
    let bad = |what: String| TransferError::Layout { path: path.clone(), what };
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Ok(
                json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [] }),
            );
        }
        Err(e) => return Err(io_error("open", &path, e)),
    };
    let mut bytes = Vec::new();
    file.take(MANIFEST_LIMIT + 1).read_to_end(&mut bytes).map_err(|e| io_error("read", &path, e))?;
    if bytes.len() as u64 > MANIFEST_LIMIT {
        return Err(bad(format!("it has more than the {MANIFEST_LIMIT} bytes that are read")));
    }
    let index: Value = serde_json::from_slice(&bytes).map_err(|e| bad(format!("it is not valid: {e}")))?;
    let sound = index.is_object() && (index["manifests"].is_array() || index["manifests"].is_null());
    if sound { Ok(index) } else { Err(bad("it is not an image index".to_owned())) }
}

/// Gives the layout a blob; tells whether it was there.
fn write_blob(
    store: &Store,
    digest: &Digest,
    size: u64,
    target: &Path,
    link: bool,
    on_event: &OnEvent,
) -> Result<bool, TransferError> {
    let mut source = store.open_blob(digest, size)?;
    let path = target.join(digest.hex());
    let metadata = source.metadata().map_err(|e| io_error("stat", &path, e))?;
    match fs::metadata(&path) {
        Ok(there) if (there.dev(), there.ino()) == (metadata.dev(), metadata.ino()) => {
            on_event(Event::There(size));
            return Ok(true);
        }
        // Another program's, perhaps: it counts if it is what it should be, and is replaced if not.
        Ok(there) if there.is_file() && there.len() == size => {
            let mut file = File::open(&path).map_err(|e| io_error("open", &path, e))?;
            if copy(&mut file, None, &path, &|_| ())? == *digest {
                on_event(Event::There(size));
                return Ok(true);
            }
        }
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(io_error("stat", &path, e)),
    }
    let partial = target.join(format!("{}{PARTIAL}", digest.hex()));
    let tell = |n| on_event(Event::Bytes(n));
    let found = if link && link_file(&source, &partial) {
        copy(&mut source, None, &path, &tell)?
    } else {
        let file = OpenOptions::new().write(true).create_new(true).open(&partial);
        let file = file.map_err(|e| io_error("create", &partial, e))?;
        // Shares the blocks where the file system can.
        let shared = rustix::fs::ioctl_ficlone(&file, &source).is_ok();
        let found = copy(&mut source, (!shared).then_some(&file), &partial, &tell)?;
        file.sync_all().map_err(|e| io_error("sync", &partial, e))?;
        found
    };
    if found != *digest {
        fs::remove_file(&partial).map_err(|e| io_error("remove", &partial, e))?;
        let how = format!("its contents have {found}");
        return Err(TransferError::Damaged { digest: *digest, place: store.location().to_string(), how });
    }
    fs::rename(&partial, &path).map_err(|e| io_error("rename to", &path, e))?;
    Ok(false)
}

/// Makes `path` another name of an open file; whether that was possible.
fn link_file(file: &File, path: &Path) -> bool {
    let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    rustix::fs::linkat(CWD, &open, CWD, path, AtFlags::SYMLINK_FOLLOW).is_ok()
}

/// Reads to the end, writes that if there is where to, and returns the digest.
fn copy(from: &mut File, to: Option<&File>, path: &Path, tell: &dyn Fn(u64)) -> Result<Digest, TransferError> {
    let mut hasher = Hasher::default();
    let mut piece = vec![0; PIECE];
    loop {
        let len = read_full(from, &mut piece).map_err(|e| io_error("read", path, e))?;
        if len == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(&piece[..len]);
        if let Some(mut to) = to {
            to.write_all(&piece[..len]).map_err(|e| io_error("write", path, e))?;
        }
        tell(len as u64);
    }
}

/// What an export that was killed left; the lock is ours.
fn remove_partial(target: &Path) -> Result<(), TransferError> {
    for entry in fs::read_dir(target).map_err(|e| io_error("list", target, e))? {
        let path = entry.map_err(|e| io_error("list", target, e))?.path();
        if path.to_string_lossy().ends_with(PARTIAL) {
            fs::remove_file(&path).map_err(|e| io_error("remove", &path, e))?;
        }
    }
    Ok(())
}

/// Writes a small file of the layout whole, or not at all.
fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), TransferError> {
    let (path, partial) = (dir.join(name), dir.join(format!("{name}{PARTIAL}")));
    let mut file = File::create(&partial).map_err(|e| io_error("create", &partial, e))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| io_error("write", &partial, e))?;
    fs::rename(&partial, &path).map_err(|e| io_error("rename to", &path, e))
}

fn sync_dir(dir: &Path) -> Result<(), TransferError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| io_error("sync", dir, e))
}

fn io_error(op: &'static str, path: &Path, source: io::Error) -> TransferError {
    TransferError::Io { op, path: path.to_owned(), source }
}
