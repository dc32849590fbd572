//! Converted images on their way between a store and other places, unchanged: from and to registries, from and to OCI
//! layouts.
//!
//! [`pull()`] brings one into a store, [`push()`] sends one to a registry, [`export()`] writes one into a layout. All of
//! them move blobs first, several at a time, and what names them last; what is there is not moved again, so that a run
//! which was interrupted is taken up by the next one. Every blob's digest is computed on its way.

mod error;
mod export;
mod pull;
mod push;

pub use error::TransferError;
pub use export::{Exported, export};
pub use pull::{Pulled, pull};
pub use push::{Pushed, push};

use crate::manifest::{Image, Layer, digest_of};
use fs3_client::{Digest, DigestError};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What happens meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// All there is to move, known at the start: bytes.
    Total(u64),
    /// So many bytes more were moved.
    Bytes(u64),
    /// So many bytes need not be moved: the blob is there.
    There(u64),
}

/// Who is told. Called from several threads.
pub type OnEvent = std::sync::Arc<dyn Fn(Event) + Send + Sync>;

/// Blobs that were moved, and that were there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Moved {
    /// Blobs moved now; the manifest is one of them.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blobs that were there.
    pub blobs_there: u64,
    /// Their bytes.
    pub bytes_there: u64,
}

impl Moved {
    fn add(&mut self, bytes: u64, was_there: bool) {
        let (blobs, sum) =
            if was_there { (&mut self.blobs_there, &mut self.bytes_there) } else { (&mut self.blobs, &mut self.bytes) };
        *blobs += 1;
        *sum += bytes;
    }
}

/// The blobs of an image, each once, the config first: digest and length.
fn blobs(image: &Image) -> Result<Vec<(Digest, u64)>, DigestError> {
    let layers = image.layers.iter().flat_map(Layer::descriptors);
    let mut found = Vec::new();
    for descriptor in std::iter::once(&image.config).chain(layers) {
        let blob = (digest_of(descriptor)?, descriptor.size());
        if !found.contains(&blob) {
            found.push(blob);
        }
    }
    Ok(found)
}

/// Does `work` on all of `items`, `jobs` at a time; `work` tells how many bytes it was about and whether there was
/// nothing to do. After a failure nothing new begins, and the first one in the order of `items` is returned.
fn each<T: Sync>(
    items: &[T],
    jobs: usize,
    work: impl Fn(&T) -> Result<(u64, bool), TransferError> + Sync,
) -> Result<Moved, TransferError> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let outcome: Mutex<(Moved, Option<(usize, TransferError)>)> = Mutex::default();
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index).filter(|_| !failed.load(Ordering::Relaxed)) else { return };
            let done = work(item);
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            match done {
                Ok((bytes, was_there)) => outcome.0.add(bytes, was_there),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    if outcome.1.as_ref().is_none_or(|(first, _)| index < *first) {
                        outcome.1 = Some((index, error));
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..jobs.min(items.len()) {
            scope.spawn(run);
        }
        run();
    });
    match outcome.into_inner().unwrap_or_else(PoisonError::into_inner) {
        (moved, None) => Ok(moved),
        (_, Some((_, error))) => Err(error),
    }
}
