//! Which layers a root consists of, and whether they are fit to be mounted.

pub mod devices;

use crate::MountError;
use converter::manifest::{Image, ManifestError, OverlayXattrs, digest_of};
use fs3_client::{Digest, Hasher, RefName, StoreDir, StoreError};
use oci_spec::image::Descriptor;
use std::collections::HashSet;
use std::fs::File;
use std::io::Read as _;

/// The most lower layers that overlayfs takes (`OVL_MAX_STACK` in the kernel's `fs/overlayfs/params.h`).
pub const MAX_LAYERS: usize = 500;

/// A blob that a layer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Blob {
    /// Its name.
    pub digest: Digest,
    /// Its length in bytes, as the manifest says.
    pub size: u64,
}

/// One layer of a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The image that it was named by.
    pub image: RefName,
    /// The EROFS metadata image.
    pub metadata: Blob,
    /// Its data blobs in device order.
    pub data: Vec<Blob>,
    /// Whether it has whiteouts, opaque directories or escaped attributes: what only overlayfs shows right.
    pub whiteouts: bool,
    /// The namespace of its overlay xattrs.
    pub overlay_xattrs: OverlayXattrs,
}

/// The layers of a root as overlayfs will get them: bottom first, each once, few enough, of one xattr namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    layers: Vec<Layer>,
}

impl Stack {
    /// Checks `layers`, bottom first.
    ///
    /// A layer that occurs again further up is kept only there. That changes nothing: whatever the lower occurrence
    /// adds, hides or describes, the upper one adds, hides and describes again, over everything between them.
    ///
    /// # Errors
    /// [`MountError::TooManyLayers`], [`MountError::MixedXattrs`].
    pub fn new(mut layers: Vec<Layer>) -> Result<Self, MountError> {
        let mut seen = HashSet::new();
        layers.reverse();
        layers.retain(|layer| seen.insert(layer.metadata.digest));
        layers.reverse();
        if layers.len() > MAX_LAYERS {
            return Err(MountError::TooManyLayers { count: layers.len() });
        }
        let first_of = |kind| layers.iter().find(|layer| layer.overlay_xattrs == kind).map(|layer| layer.image.clone());
        if let (Some(trusted), Some(user)) = (first_of(OverlayXattrs::Trusted), first_of(OverlayXattrs::User)) {
            return Err(MountError::MixedXattrs { trusted, user });
        }
        Ok(Self { layers })
    }

    /// The layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The namespace of the overlay xattrs of all layers.
    #[must_use]
    pub fn overlay_xattrs(&self) -> OverlayXattrs {
        self.layers.first().map_or_else(OverlayXattrs::default, |layer| layer.overlay_xattrs)
    }
}

/// The layers of `images`, the first image's bottom layer first.
///
/// # Errors
/// [`MountError::Store`] when a ref or manifest is missing or damaged; [`MountError::Manifest`] when it is not a
/// converted image.
pub fn resolve(store: &StoreDir, images: &[RefName]) -> Result<Vec<Layer>, MountError> {
    let mut layers = Vec::new();
    for name in images {
        let manifest_error = |source: ManifestError| MountError::Manifest { name: name.clone(), source };
        let blob = |descriptor: &Descriptor| -> Result<Blob, MountError> {
            let digest = digest_of(descriptor).map_err(|e| manifest_error(e.into()))?;
            Ok(Blob { digest, size: descriptor.size() })
        };
        let manifest = blob(&store.read_ref(name)?)?;
        let image = Image::from_json(&store.read_blob(&manifest.digest, manifest.size)?).map_err(manifest_error)?;
        for layer in &image.layers {
            layers.push(Layer {
                image: name.clone(),
                metadata: blob(&layer.metadata)?,
                data: layer.data.iter().map(blob).collect::<Result<_, _>>()?,
                whiteouts: layer.whiteouts,
                overlay_xattrs: layer.overlay_xattrs,
            });
        }
    }
    Ok(layers)
}

/// Checks that the store has all of the layer's blobs in the length that the manifest says, and that the metadata
/// image expects just these; with `verify`, that their contents have the digests by which they are named, too.
///
/// # Errors
/// [`MountError::Store`] for a blob that is missing, short or (with `verify`) other; [`MountError::BadLayer`] when
/// the metadata image expects other devices.
pub fn check(store: &StoreDir, layer: &Layer, verify: bool) -> Result<(), MountError> {
    let metadata = store.open_blob(&layer.metadata.digest, layer.metadata.size)?;
    devices::check(&metadata, layer).map_err(|what| MountError::BadLayer {
        name: layer.image.clone(),
        digest: layer.metadata.digest,
        what,
    })?;
    if verify {
        verify_digest(store, &layer.metadata, &metadata)?;
    }
    for blob in &layer.data {
        let file = store.open_blob(&blob.digest, blob.size)?;
        if verify {
            verify_digest(store, blob, &file)?;
        }
    }
    Ok(())
}

fn verify_digest(store: &StoreDir, blob: &Blob, mut file: &File) -> Result<(), MountError> {
    let path = store.blob_path(&blob.digest);
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(MountError::io("read", &path))? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    let actual = hasher.finish();
    if actual == blob.digest {
        return Ok(());
    }
    let what = format!("its contents have {actual}");
    Err(StoreError::Corrupt { digest: blob.digest, path, what }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n: u16, image: &str, overlay_xattrs: OverlayXattrs) -> Layer {
        let metadata = Blob { digest: Digest::of(&n.to_le_bytes()), size: 1 };
        Layer { image: image.parse().unwrap(), metadata, data: vec![], whiteouts: false, overlay_xattrs }
    }

    #[test]
    fn a_repeated_layer_stays_where_it_is_topmost() {
        let trusted = |n| layer(n, "a:b", OverlayXattrs::Trusted);
        let stack = Stack::new([1, 2, 1, 3, 2].map(trusted).to_vec()).unwrap();
        assert_eq!(stack.layers(), [1, 3, 2].map(trusted));
    }

    #[test]
    fn at_most_500_different_layers() {
        let layers = |n: u16| (0..n).map(|n| layer(n, "a:b", OverlayXattrs::Trusted)).collect::<Vec<_>>();
        assert!(Stack::new(layers(500)).is_ok());
        assert!(Stack::new([layers(500), layers(500)].concat()).is_ok());
        let error = Stack::new(layers(501)).unwrap_err();
        assert_eq!(error.to_string(), "501 layers are more than the 500 that overlayfs takes");
        assert!(error.hint().unwrap().contains("dsec-convert merge"));
    }

    #[test]
    fn o10_one_xattr_namespace() {
        let error = Stack::new(vec![layer(1, "a:b", OverlayXattrs::User), layer(2, "c:d", OverlayXattrs::Trusted)]);
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("c:d has its whiteouts in trusted.overlay.*, a:b in user.overlay.*"), "{text}");
    }
}
