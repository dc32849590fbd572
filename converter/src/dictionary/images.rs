//! The data blobs of a store's images.

use super::DictionaryError;
use crate::entry::Warning;
use crate::layer::{BlobRef, Existing};
use crate::manifest::{Image, Layer, digest_of};
use fs3_client::{Digest, RefName, Store};
use oci_spec::image::Descriptor;
use std::collections::{BTreeSet, HashMap};

/// Blobs with chunk tables that refs lead to.
#[derive(Debug, Default)]
pub struct Stored {
    /// The blobs, those that most layers refer to first, then by digest.
    pub blobs: Vec<Existing>,
    /// Images that could not be read.
    pub warnings: Vec<Warning>,
}

/// The blobs of the images called `names`, or of all images when there are no names. What is found depends on the
/// refs alone, not on the order in which a directory lists them.
///
/// # Errors
/// When the refs cannot be listed, or an image that was named is not there or not sound. One of all images that is not
/// sound is left out with a warning: it may be half a copy.
pub fn stored(store: &Store, names: &[RefName]) -> Result<Stored, DictionaryError> {
    let mut found = Stored::default();
    let refs: Vec<(RefName, Descriptor)> = if names.is_empty() {
        store.list_refs()?
    } else {
        names.iter().map(|name| Ok((name.clone(), store.read_ref(name)?))).collect::<Result<_, DictionaryError>>()?
    };
    let mut manifests: BTreeSet<String> = BTreeSet::new();
    let mut blobs: HashMap<Digest, (u64, Existing)> = HashMap::new();
    for (name, descriptor) in refs {
        if !manifests.insert(descriptor.digest().to_string()) {
            continue;
        }
        match read(store, &name, &descriptor) {
            Ok(image) => {
                for existing in image.layers.iter().flat_map(existing) {
                    blobs.entry(existing.blob.digest).or_insert((0, existing)).0 += 1;
                }
            }
            Err(e) if names.is_empty() => {
                let message = format!("image {name} is left out of what is deduplicated against: {e}");
                found.warnings.push(Warning::new(b"", message));
            }
            Err(e) => return Err(e),
        }
    }
    let mut counted: Vec<(u64, Existing)> = blobs.into_values().collect();
    counted.sort_unstable_by(|(a_count, a), (b_count, b)| {
        b_count.cmp(a_count).then_with(|| a.blob.digest.as_bytes().cmp(b.blob.digest.as_bytes()))
    });
    found.blobs = counted.into_iter().map(|(_, existing)| existing).collect();
    Ok(found)
}

fn read(store: &Store, name: &RefName, descriptor: &Descriptor) -> Result<Image, DictionaryError> {
    let image = |source| DictionaryError::Image { name: name.to_string(), source };
    let digest = digest_of(descriptor).map_err(|e| image(e.into()))?;
    let bytes = store.read_blob(&digest, descriptor.size())?;
    Image::from_json(&bytes).map_err(image)
}

/// The data blobs of a layer that have a chunk table.
pub(crate) fn existing(layer: &Layer) -> Vec<Existing> {
    let mut tables: HashMap<Digest, BlobRef> = HashMap::new();
    for table in layer.each_table().flatten() {
        tables.entry(table.of).or_insert(table.blob);
    }
    let with_table = |blob: BlobRef| Some(Existing { blob, table: Some(*tables.get(&blob.digest)?) });
    layer.data.iter().flat_map(BlobRef::of).filter_map(with_table).collect()
}
