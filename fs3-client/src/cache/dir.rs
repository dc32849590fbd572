//! A cache's directory: whose it is, and what it is.

use super::config::CacheConfig;
use super::error::CacheError;
use super::format::{BLOBS, FORMAT, IDENTITY, INDEX, Identity, LOCK};
use super::index::rocks::{OpenError, Rocks};
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// Makes the directory where it is not there, takes its lock, and looks whether it is a cache's.
pub(crate) fn take(config: &CacheConfig) -> Result<File, CacheError> {
    let dir = &config.dir;
    let fail = |what: String| CacheError::Directory { dir: dir.clone(), what };
    fs::create_dir_all(dir).map_err(|error| fail(format!("it cannot be made: {error}")))?;
    let lock = lock(dir)?;
    let identity = dir.join(IDENTITY);
    match fs::read(&identity) {
        Ok(bytes) => {
            let found: Identity =
                serde_json::from_slice(&bytes).map_err(|error| fail(format!("{IDENTITY} cannot be read: {error}")))?;
            if found.format != FORMAT {
                return Err(fail(format!("it is of format {}; this program reads format {FORMAT}", found.format)));
            }
            if found.chunk != config.chunk {
                return Err(fail(format!(
                    "it was made for chunks of {} bytes, and {} are configured; a new directory has to be used",
                    found.chunk, config.chunk
                )));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            for name in [INDEX, BLOBS] {
                if dir.join(name).symlink_metadata().is_ok() {
                    return Err(fail(format!("there is `{name}` in it, but no {IDENTITY}: this is somebody else's")));
                }
            }
            let new = Identity { format: FORMAT, chunk: config.chunk };
            write_identity(dir, &new).map_err(|error| fail(format!("{IDENTITY} cannot be written: {error}")))?;
        }
        Err(error) => return Err(fail(format!("{IDENTITY} cannot be read: {error}"))),
    }
    Ok(lock)
}

/// Ours until the file is closed, whatever ends this process.
fn lock(dir: &Path) -> Result<File, CacheError> {
    let path = dir.join(LOCK);
    let fail = |error: &io::Error| CacheError::Directory {
        dir: dir.to_owned(),
        what: format!("the file `{LOCK}` cannot be locked: {error}"),
    };
    let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.map_err(|error| fail(&error))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let _ = (&file).take(100).read_to_string(&mut holder);
            let holder = if holder.trim().is_empty() { "which gives no number" } else { holder.trim() }.to_owned();
            return Err(CacheError::InUse { dir: dir.to_owned(), holder });
        }
        Err(error) => return Err(fail(&error.into())),
    }
    // For people. Who cannot write it, for lack of space, has the lock all the same.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "pid {}", std::process::id()));
    Ok(file)
}

fn write_identity(dir: &Path, identity: &Identity) -> io::Result<()> {
    let temporary = dir.join(format!("{IDENTITY}.new"));
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec(identity)?)?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(IDENTITY))?;
    File::open(dir)?.sync_all()
}

/// Opens the index. One that is damaged is made anew: the cache is then empty, since nobody knows what is in it.
pub(crate) fn index(dir: &Path) -> Result<Rocks, CacheError> {
    let path = dir.join(INDEX);
    let fail = |what: String| CacheError::Directory { dir: dir.to_owned(), what };
    let (OpenError::Damaged(what) | OpenError::Other(what)) = match Rocks::open(&path) {
        Ok(index) => return Ok(index),
        Err(OpenError::Damaged(what)) => {
            tracing::warn!("the index of the chunk cache in {} is damaged, and begins anew: {what}", dir.display());
            Rocks::destroy(&path)
                .map_err(|what| fail(format!("its index is damaged and cannot be removed: {what}")))?;
            match Rocks::open(&path) {
                Ok(index) => return Ok(index),
                Err(error) => error,
            }
        }
        Err(error) => error,
    };
    Err(fail(format!("its index cannot be opened: {what}")))
}
