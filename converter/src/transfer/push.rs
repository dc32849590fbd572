//! From a store to a registry.

use super::{Event, Moved, OnEvent, TransferError, blobs, each};
use crate::manifest::{Image, MANIFEST_MEDIA_TYPE};
use crate::source::registry;
use fs3_client::registry::{Client, ImageRef, Options, RegistryError, Sent, Which};
use fs3_client::{Body, Digest, Store};
use std::sync::Arc;

/// A converted image that a registry has now.
#[derive(Debug, Clone, Copy)]
pub struct Pushed {
    /// What it took.
    pub moved: Moved,
}

/// Sends the image whose manifest is blob `digest` of `size` bytes to `target`, which is a tag.
///
/// # Errors
/// [`TransferError`]. Blobs that the registry has by then stay there, for the next run; its tag is as it was.
pub fn push(
    store: &Store,
    image: &Image,
    (digest, size): (Digest, u64),
    target: &ImageRef,
    options: &Options,
    jobs: usize,
    on_event: &OnEvent,
) -> Result<Pushed, TransferError> {
    let Which::Tag(_) = target.which() else { return Err(TransferError::NoTag(target.to_string())) };
    let blobs = blobs(image)?;
    on_event(Event::Total(blobs.iter().map(|(_, size)| size).sum()));
    let manifest = store.read_blob(&digest, size)?;
    let io = |source| TransferError::Io { op: "start threads for", path: target.to_string().into(), source };
    let runtime = registry::runtime().map_err(io)?;
    let repository = Client::new(options.clone())?.target(target.place())?;
    let bytes: Arc<dyn Fn(u64) + Send + Sync> = {
        let on_event = Arc::clone(on_event);
        Arc::new(move |n| on_event(Event::Bytes(n)))
    };
    let mut moved = each(&blobs, jobs, |(digest, size)| {
        // Opened only now: an image may have more blobs than a process may have files.
        let body = Body::File { file: Arc::new(store.open_blob(digest, *size)?), len: *size };
        let put = options.retry.run(|_| repository.put_blob(digest, &body, Arc::clone(&bytes)));
        let sent = runtime.block_on(put).map_err(RegistryError::from)?;
        if sent == Sent::Already {
            on_event(Event::There(*size));
        }
        Ok((*size, sent == Sent::Already))
    })?;
    let found = runtime.block_on(options.retry.run(|_| repository.manifest_digest(target.which())));
    let was_there = found.map_err(RegistryError::from)? == Some(digest);
    if !was_there {
        let manifest = bytes::Bytes::from(manifest);
        let put = |_| repository.put_manifest(target.which(), MANIFEST_MEDIA_TYPE, manifest.clone());
        runtime.block_on(options.retry.run(put)).map_err(RegistryError::from)?;
    }
    moved.add(size, was_there);
    Ok(Pushed { moved })
}
