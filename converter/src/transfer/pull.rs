//! From a registry or a layout into a store.

use super::{Event, Moved, OnEvent, TransferError, each};
use crate::layer::stream;
use crate::source::{Artifact, LayerOrigin};
use fs3_client::registry::RegistryError;
use fs3_client::{BlobError, Digest, Hasher, RefName, Store, StoreError};
use oci_spec::image::Descriptor;
use std::io::{self, Read, Write as _};

/// Bytes moved at a time.
const PIECE: usize = 1 << 20;

/// A converted image that a store has now.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// What its ref says.
    pub manifest: Descriptor,
    /// What it took.
    pub moved: Moved,
}

/// Brings `artifact` into `store` as `name`, byte for byte. `place` is what to call its source in messages.
///
/// # Errors
/// [`TransferError`]. Blobs that came before a failure stay, for the next run; there is no ref then.
pub fn pull(
    artifact: &Artifact,
    place: &str,
    store: &Store,
    name: &RefName,
    jobs: usize,
    on_event: &OnEvent,
) -> Result<Pulled, TransferError> {
    // From before anything is found in the store that the image will rely on, until its name says so.
    let store = &store.writing("pull")?;
    on_event(Event::Total(artifact.blobs.iter().map(|(_, size, _)| size).sum()));
    let mut moved = each(&artifact.blobs, jobs, |(digest, size, origin)| {
        if store.blob_size(digest)? == Some(*size) {
            store.renew(digest)?;
            on_event(Event::There(*size));
            return Ok((*size, true));
        }
        fetch(digest, *size, origin, place, store, on_event)?;
        Ok((*size, false))
    })?;
    let manifest = store.publish_bytes(&artifact.manifest)?;
    moved.add(manifest.size, manifest.existed);
    let manifest =
        crate::manifest::descriptor(crate::manifest::MANIFEST_MEDIA_TYPE, manifest.digest, manifest.size, &[]);
    store.write_ref(name, &manifest)?;
    Ok(Pulled { manifest, moved })
}

fn fetch(
    digest: &Digest,
    size: u64,
    origin: &LayerOrigin,
    place: &str,
    store: &Store,
    on_event: &OnEvent,
) -> Result<(), TransferError> {
    let damaged = |how: String| TransferError::Damaged { digest: *digest, place: place.to_owned(), how };
    let failed = |e: io::Error| match e.downcast::<BlobError>() {
        Ok(e) => RegistryError::from(e).into(),
        Err(source) => TransferError::Io { op: "read", path: place.into(), source },
    };
    let mut reader = stream::open(origin).map_err(|e| failed(io::Error::other(e)))?;
    let staged = store.stage("pull")?;
    let mut hasher = Hasher::default();
    let mut piece = vec![0; PIECE];
    let mut started = 0;
    loop {
        let len = read_full(&mut reader, &mut piece).map_err(failed)?;
        if len == 0 {
            break;
        }
        hasher.update(&piece[..len]);
        if hasher.len() > size {
            return Err(damaged(format!("it has more than its {size} bytes")));
        }
        (&*staged).write_all(&piece[..len]).map_err(|e| StoreError::io("write", staged.path(), e))?;
        staged.begin_writeback(started, len as u64);
        started += len as u64;
        on_event(Event::Bytes(len as u64));
    }
    if hasher.len() != size {
        return Err(damaged(format!("it has {} bytes, its descriptor says {size}", hasher.len())));
    }
    let found = hasher.finish();
    if found != *digest {
        return Err(damaged(format!("its contents have {found}")));
    }
    staged.publish(digest, size)?;
    Ok(())
}

/// Fills the buffer, or as much of it as there is.
pub(super) fn read_full(reader: &mut dyn Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match reader.read(&mut buf[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}
