//! Images with merged layers.

use super::{MergeError, Options, Under, Weight, merge_layers, runs};
use crate::layer::Record;
use crate::manifest::{self, CONFIG_MEDIA_TYPE, Image, ManifestError, Unresolved};
use crate::progress::Progress;
use fs3_client::{Digest, Store};
use std::collections::BTreeMap;
use std::ops::Range;

/// What to merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRequest {
    /// Up to what size layers become one.
    pub under: Under,
    /// How they do. Only the lowest run of layers is ever a bottom.
    pub options: Options,
}

/// An image with merged layers that is in the store, but has no name yet.
#[derive(Debug)]
pub struct MergedImage {
    /// The image.
    pub image: Image,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Length of its manifest in bytes.
    pub manifest_size: u64,
    /// Its layers, bottom first.
    pub layers: Vec<Part>,
}

/// One layer of a merged image.
#[derive(Debug, Clone)]
pub struct Part {
    /// Which layers of the stack it is made of.
    pub from: Range<usize>,
    /// What those became; `None` for a layer that stayed as it was.
    pub merged: Option<Record>,
    /// Whether an earlier run had merged them.
    pub reused: bool,
}

/// Stacks `images` on one another, bottom first, merges runs of their layers, and publishes everything but a name. The
/// config is that of the topmost, with the lists of layers of all.
///
/// # Errors
/// When a layer cannot be merged, or the store fails.
pub fn merge_images(
    images: &[(String, Image)],
    request: &ImageRequest,
    store: &Store,
    progress: &dyn Progress,
) -> Result<MergedImage, MergeError> {
    let stack: Vec<manifest::Layer> = images.iter().flat_map(|(_, image)| image.layers.iter().cloned()).collect();
    let parts = merge_stack(&stack, request, store, progress)?;
    let config = match images {
        [(_, image)] => image.config.clone(),
        several => {
            let published = store.publish_bytes(&stacked_config(several, store)?)?;
            manifest::descriptor(CONFIG_MEDIA_TYPE, published.digest, published.size, &[])
        }
    };
    let mut annotations = match images {
        [(_, image)] => image.annotations.clone(),
        _ => BTreeMap::new(),
    };
    // It says how the image was merged when it was converted.
    if parts.iter().any(|part| part.merged.is_some()) {
        annotations.remove(manifest::annotation::OPTIONS);
    }
    publish(&stack, parts, config, annotations, store)
}

/// As [`merge_images`], for the layers of one image that is being made.
pub(crate) fn merge_stack(
    stack: &[manifest::Layer],
    request: &ImageRequest,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Vec<Part>, MergeError> {
    let weights = stack.iter().map(weigh).collect::<Result<Vec<_>, _>>();
    let weights = weights.map_err(|error| MergeError::Manifest { name: "the image".to_owned(), error })?;
    // Merged or not, no overlay has layers of both kinds.
    if let Some(odd) = stack.iter().position(|layer| layer.overlay_xattrs != stack[0].overlay_xattrs) {
        let (found, expected) = (stack[odd].overlay_xattrs.prefix(), stack[0].overlay_xattrs.prefix());
        return Err(MergeError::Namespaces { layer: odd, found, expected });
    }
    let mut parts = Vec::new();
    for run in runs(&weights, request.under) {
        let options = Options { bottom: request.options.bottom && run.start == 0, ..request.options };
        // A layer that stays alone need not be written again for nothing.
        let alone = run.len() == 1 && !(options.bottom && needs_bottom(&stack[0])?);
        if alone {
            parts.push(Part { from: run, merged: None, reused: false });
            continue;
        }
        progress.merging(run.clone());
        let (record, reused) = merge_layers(&stack[run.clone()], run.start, options, store)?;
        parts.push(Part { from: run, merged: Some(record), reused });
    }
    Ok(parts)
}

/// Whether a bottom layer has what there is no need of at the bottom, or waits for what is never below.
fn needs_bottom(layer: &manifest::Layer) -> Result<bool, MergeError> {
    let unresolved = layer.unresolved();
    let unresolved = unresolved.map_err(|error| MergeError::Manifest { name: "layer 0".to_owned(), error })?;
    Ok(layer.whiteouts || unresolved != Unresolved::default())
}

pub(crate) fn publish(
    stack: &[manifest::Layer],
    parts: Vec<Part>,
    config: oci_spec::image::Descriptor,
    annotations: BTreeMap<String, String>,
    store: &Store,
) -> Result<MergedImage, MergeError> {
    let layers = parts.iter().map(|part| match &part.merged {
        Some(record) => record.to_layer(),
        None => stack[part.from.start].clone(),
    });
    let image = Image { config, layers: layers.collect(), annotations };
    let published = store.publish_bytes(&image.to_json())?;
    Ok(MergedImage { image, manifest: published.digest, manifest_size: published.size, layers: parts })
}

fn weigh(layer: &manifest::Layer) -> Result<Weight, ManifestError> {
    let data = layer.data.iter().map(|blob| Ok((manifest::digest_of(blob)?, blob.size())));
    Ok(Weight { metadata: layer.metadata.size(), data: data.collect::<Result<_, ManifestError>>()? })
}

/// The topmost image's config with the diffIDs and the history of all images, in their order.
fn stacked_config(images: &[(String, Image)], store: &Store) -> Result<Vec<u8>, MergeError> {
    let mut all: Option<serde_json::Value> = None;
    let (mut diff_ids, mut history) = (Vec::new(), Vec::new());
    for (name, image) in images {
        let digest = image.config.digest().to_string();
        let fail = |what: String| MergeError::Config { name: name.clone(), digest: digest.clone(), what };
        let blob = manifest::digest_of(&image.config).map_err(|e| fail(e.to_string()))?;
        let bytes = store.read_blob(&blob, image.config.size())?;
        let mut config: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| fail(e.to_string()))?;
        if !config.is_object() {
            return Err(fail("it is no JSON object".to_owned()));
        }
        let mut take = |pointer: &str, into: &mut Vec<serde_json::Value>| {
            if let Some(serde_json::Value::Array(list)) = config.pointer_mut(pointer) {
                into.append(list);
            }
        };
        take("/rootfs/diff_ids", &mut diff_ids);
        take("/history", &mut history);
        all = Some(config);
    }
    let mut config = all.unwrap_or_else(|| serde_json::json!({}));
    config["rootfs"] = serde_json::json!({ "type": "layers", "diff_ids": diff_ids });
    if !history.is_empty() {
        config["history"] = history.into();
    }
    Ok(config.to_string().into_bytes())
}
