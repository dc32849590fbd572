//! Blobs of a store's directory, on a local disk or a mounted 3FS.
//!
//! Reads are plain `pread` on threads that may block, or by an io_uring ([`Engine`]). On a FUSE mount large ones go around the page cache: buffered ones arrive there in pieces of 128 KiB.

mod readahead;
mod ring;

use super::{BlobError, BlobStore, Body, Listed, Stat};
use crate::{Digest, Rules, StoreDir, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

/// Items of a list that wait to be asked for.
const LISTED: usize = 1024;

/// Reads from this many bytes on go around the page cache of a FUSE mount: more than one of its small pieces.
const BULK: u64 = 256 << 10;

/// How bytes are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Engine {
    /// `pread`, on threads that may block. A ring was not faster where it was measured: docs/backends.md.
    #[default]
    Threads,
    /// An io_uring with registered buffers and files, on a thread of its own, for what is not in the page cache; `pread`
    /// where the kernel refuses one, and on FUSE mounts. There a direct read that its daemon answers short is continued
    /// by the kernel itself, and at the wrong place of the file where the daemon has not allowed asynchronous direct
    /// reads (seen on Linux 6.18): wrong bytes, and no error.
    Ring,
}

/// The blobs of a [`StoreDir`], by its rules; the calls run on threads that may block.
#[derive(Debug, Clone)]
pub struct LocalBlobs {
    dir: StoreDir,
    /// Whether it is on a FUSE mount.
    fuse: bool,
    ring: Option<Arc<ring::Reader>>,
}

impl LocalBlobs {
    /// Those of `dir`.
    #[must_use]
    pub fn new(dir: StoreDir) -> Self {
        Self::with_engine(dir, Engine::default())
    }

    /// Those of `dir`, read in this way.
    #[must_use]
    pub fn with_engine(dir: StoreDir, engine: Engine) -> Self {
        let fuse = readahead::is_fuse(dir.root());
        if fuse && let Some(advice) = readahead::advice(dir.root()) {
            tracing::debug!("{advice}");
        }
        let ring = match engine {
            Engine::Threads => None,
            Engine::Ring if fuse => None,
            Engine::Ring => ring::shared(),
        };
        Self { dir, fuse, ring }
    }

    /// The way it is read: [`Engine::Threads`] where a ring was asked for, and there is none.
    #[must_use]
    pub const fn engine(&self) -> Engine {
        if self.ring.is_some() { Engine::Ring } else { Engine::Threads }
    }

    /// What the operator should do for faster reads of this directory, if anything.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        self.fuse.then(|| readahead::advice(self.dir.root())).flatten()
    }

    async fn run<T: Send + 'static>(
        &self,
        op: &'static str,
        digest: &Digest,
        call: impl FnOnce(&StoreDir, &Digest) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, BlobError> {
        let (dir, digest) = (self.dir.clone(), *digest);
        let place = dir.to_string();
        let what = digest.to_string();
        match spawn_blocking(move || call(&dir, &digest)).await {
            Ok(done) => done.map_err(|error| match error.into_blob_error(&place, op, &what) {
                BlobError::Local { place, op, what, source } => {
                    system_error(&place, self.dir.rules(), op, &what, source)
                }
                other => other,
            }),
            Err(e) => Err(BlobError::Local { place, op, what, source: io::Error::other(e) }),
        }
    }
}

/// The bytes, if the kernel has all of them in memory.
fn cached(file: &File, start: u64, len: usize) -> Option<Bytes> {
    let mut buffer = vec![0; len];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    let read = rustix::io::preadv2(file, &mut [io::IoSliceMut::new(&mut buffer)], start, flags);
    (read == Ok(len)).then(|| buffer.into())
}

/// What the system says of a file, as whose fault it is: the servers' and the network's behind a mount go by.
pub(crate) fn system_error(place: &str, rules: Rules, op: &'static str, what: &str, source: io::Error) -> BlobError {
    let (place, what) = (place.to_owned(), what.to_owned());
    let passes = match source.raw_os_error() {
        // The daemon of a mount has gone; a server answers no more; a replaced file of a server.
        Some(libc::ENOTCONN | libc::EREMOTEIO | libc::ETIMEDOUT | libc::ESTALE | libc::EHOSTDOWN) => true,
        // What 3FS says after it has tried for a minute. A local disk means it.
        Some(libc::EIO) => rules == Rules::Fs3,
        _ => false,
    };
    if passes {
        BlobError::Transient { place, op, what, retry_after: None, source: Box::new(source) }
    } else {
        BlobError::Local { place, op, what, source }
    }
}

#[async_trait]
impl BlobStore for LocalBlobs {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let stat = self.run("look at", digest, |dir, digest| dir.stat_blob(digest)).await?;
        stat.ok_or_else(|| BlobError::NotFound { what: digest.to_string(), place: self.dir.to_string() })
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let direct = self.fuse && range.end - range.start >= BULK;
        let Some(ring) = &self.ring else {
            let read = move |dir: &StoreDir, digest: &Digest| {
                let (file, len) = dir.open_range(digest, &range, direct)?;
                let mut buffer = vec![0; len];
                match file.read_exact_at(&mut buffer, range.start) {
                    Ok(()) => Ok(Bytes::from(buffer)),
                    Err(error) => Err(dir.range_error(digest, &range, &file, error)),
                }
            };
            return self.run("read", digest, read).await;
        };
        let wanted = range.clone();
        let open = move |dir: &StoreDir, digest: &Digest| {
            let (file, len) = dir.open_range(digest, &wanted, direct)?;
            let cached = if direct { None } else { cached(&file, wanted.start, len) };
            Ok((file, len, cached))
        };
        let (file, len, cached) = self.run("read", digest, open).await?;
        if let Some(bytes) = cached {
            return Ok(bytes);
        }
        let file = Arc::new(file);
        match ring.read(&file, range.start, len).await {
            Ok(bytes) => Ok(bytes),
            Err(error) => {
                let told = move |dir: &StoreDir, digest: &Digest| Err(dir.range_error(digest, &range, &file, error));
                self.run("read", digest, told).await
            }
        }
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        let put = move |dir: &StoreDir, digest: &Digest| {
            let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
            let read = |range: Range<u64>| match &body {
                Body::Bytes(bytes) => {
                    let start = usize::try_from(range.start).map_err(too_long)?;
                    Ok(bytes.slice(start..usize::try_from(range.end).map_err(too_long)?))
                }
                Body::File { file, .. } => {
                    let mut buffer = vec![0; usize::try_from(range.end - range.start).map_err(too_long)?];
                    file.read_exact_at(&mut buffer, range.start)?;
                    Ok(buffer.into())
                }
            };
            dir.publish_copy(digest, body.len(), read)
        };
        self.run("store", digest, put).await.map(drop)
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.run("delete", digest, |dir, digest| dir.delete_blob(digest)).await
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        let (out, items) = mpsc::channel(LISTED);
        let dir = self.dir.clone();
        spawn_blocking(move || {
            let gone = || StoreError::from(BlobError::Unsupported { place: String::new(), op: "list to nobody" });
            let mut each = |listed| out.blocking_send(Ok(listed)).map_err(|_| gone());
            if let Err(error) = dir.each_blob(&mut each) {
                // Nobody hears it when nobody listens any more.
                let _ = out.blocking_send(Err(error.into_blob_error(&dir.to_string(), "list", "its blobs")));
            }
        });
        futures::stream::unfold(items, |mut items| async { items.recv().await.map(|item| (item, items)) }).boxed()
    }
}
