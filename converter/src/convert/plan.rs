//! What a conversion would do, without doing it.

use super::{Request, Stack, origin_size};
use crate::dictionary::Session;
use crate::layer::Record;
use crate::manifest::{self, annotation, digest_of};
use crate::merge::Under;
use crate::progress::Silent;
use crate::source::{self, SourceError, SourceImage};
use fs3_client::{Digest, RefName, Store, StoreError};
use serde::Serialize;
use std::path::Path;

/// What would become of an image.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Digest of the source's manifest, where it has one.
    pub source_manifest: Option<Digest>,
    /// Bottom first.
    pub layers: Vec<PlannedLayer>,
}

/// What would become of a layer.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PlannedLayer {
    /// Its digest, where the source tells one.
    pub source: Option<Digest>,
    /// Bytes of its source, where known.
    pub source_bytes: Option<u64>,
    /// Whether an earlier run has done it. What is known only by reading it counts as new.
    pub reused: bool,
}

/// Looks what `request` would do in `store` (`None`: one that is not there yet). Layers are not read, and nothing is
/// written but scratch files in `scratch`.
///
/// # Errors
/// When the source cannot be resolved.
pub fn plan(request: &Request, store: Option<&Store>, scratch: &Path) -> Result<Plan, SourceError> {
    let source = source::resolve(&request.source, &request.platform, scratch, &request.registry)?;
    let layers = source.layers.iter().enumerate().map(|(index, layer)| {
        let reused = store.is_some_and(|store| {
            let dedup = request.dedup.as_ref().map(|dedup| Session::new(dedup, store));
            let stack = Stack::new(&source, request, store, dedup.as_ref(), &Silent);
            stack.keys(index).iter().any(|key| Record::remembered(stack.store, key).is_ok_and(|found| found.is_some()))
        });
        PlannedLayer { source: layer.digest, source_bytes: layer.size.or_else(|| origin_size(&layer.origin)), reused }
    });
    let layers = layers.collect();
    Ok(Plan { source_manifest: source.manifest, layers })
}

/// An image that is in the store already.
#[derive(Debug, Clone, Copy)]
pub struct Existing {
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Its layers.
    pub layers: usize,
}

/// The image `name`, if it was made from what `request` names now, with its options and merging, and all of it is there. Only
/// the source's manifest and config are read. A source without a manifest digest (a tar, a directory) is never current.
///
/// # Errors
/// When the source cannot be resolved. What is wrong with the image in the store is no error: it is not current then.
pub fn existing(
    name: &RefName,
    request: &Request,
    under: Under,
    store: &Store,
    scratch: &Path,
) -> Result<Option<Existing>, SourceError> {
    let source = source::resolve(&request.source, &request.platform, scratch, &request.registry)?;
    Ok(current(name, request, under, &source, store).unwrap_or_else(|e| {
        tracing::debug!("{name} is made again: {e}");
        None
    }))
}

fn current(
    name: &RefName,
    request: &Request,
    under: Under,
    source: &SourceImage,
    store: &Store,
) -> Result<Option<Existing>, StoreError> {
    let descriptor = match store.read_ref(name) {
        Err(StoreError::NoSuchRef { .. }) => return Ok(None),
        found => found?,
    };
    let Ok(digest) = digest_of(&descriptor) else { return Ok(None) };
    let bytes = store.read_blob(&digest, descriptor.size())?;
    let Ok(image) = manifest::Image::from_json(&bytes) else { return Ok(None) };
    let says = |key: &str, value: &str| image.annotations.get(key).is_some_and(|found| found == value);
    let same_source = match source.manifest {
        Some(manifest) => says(annotation::SOURCE_MANIFEST, &manifest.to_string()),
        // Of a docker archive, the config names all the layers by their diffIDs.
        None => source.config.as_ref().is_some_and(|config| {
            image.config.digest().to_string() == Digest::of(config).to_string()
                && source.layers.iter().all(|layer| layer.diff_id.is_some())
        }),
    };
    if !same_source || !says(annotation::OPTIONS, &request.fingerprint(under)) {
        return Ok(None);
    }
    let blobs = image.layers.iter().flat_map(manifest::Layer::descriptors);
    for blob in blobs.chain([&image.config]) {
        let Ok(digest) = digest_of(blob) else { return Ok(None) };
        if store.blob_size(&digest)? != Some(blob.size()) {
            return Ok(None);
        }
    }
    Ok(Some(Existing { manifest: digest, layers: image.layers.len() }))
}
