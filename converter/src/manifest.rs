//! A converted image as an OCI manifest: what its layers are, and how a reader finds their parts again.
//!
//! The manifest has `artifactType` [`ARTIFACT_TYPE`] over the original config. Its `layers` list every blob, bottom
//! layer first; the blobs of one layer carry the same [`annotation::LAYER`] index and a [`annotation::ROLE`] each:
//! one metadata image, then its data blobs in device order, then their chunk tables.
//! Ordinary OCI tools can copy it, since nothing refers to a blob that is not a descriptor.

use crate::layer::{BlobRef, TableRef};
use fs3_client::{Digest, DigestError};
use oci_spec::image::{Descriptor, DescriptorBuilder, MediaType};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::str::FromStr as _;

/// `artifactType` of a converted image.
pub const ARTIFACT_TYPE: &str = "application/vnd.dsec.image.v1";
/// Media type of an EROFS metadata image.
pub const METADATA_MEDIA_TYPE: &str = "application/vnd.dsec.erofs.metadata.v1";
/// Media type of a data blob.
pub const DATA_MEDIA_TYPE: &str = "application/vnd.dsec.erofs.data.v1";
/// Media type of a chunk table.
pub const CHUNK_TABLE_MEDIA_TYPE: &str = "application/vnd.dsec.erofs.chunks.v1";
/// Media type of the manifest itself.
pub const MANIFEST_MEDIA_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of an image config.
pub const CONFIG_MEDIA_TYPE: &str = "application/vnd.oci.image.config.v1+json";

/// Annotation keys on layer descriptors and, the last two, on the manifest itself.
pub mod annotation {
    /// Index of the layer that the blob belongs to, 0 at the bottom.
    pub const LAYER: &str = "dev.dsec.layer";
    /// `metadata`, `data` or `chunk-table`.
    pub const ROLE: &str = "dev.dsec.role";
    /// Digest of the source layer as it was stored (compressed), if it had one. Of a merged layer: those of all its
    /// parts, bottom first, with commas between; `-` for one that had none.
    pub const SOURCE_DIGEST: &str = "dev.dsec.source.digest";
    /// Digest of the source layer's plain tar; a list as above for a merged layer.
    pub const DIFF_ID: &str = "dev.dsec.source.diff-id";
    /// On a chunk table: digest of the data blob that it is about. Images of 0.1.0 lack it: their one table is about
    /// the layer's first blob.
    pub const CHUNK_TABLE_OF: &str = "dev.dsec.chunk-table.of";
    /// Block size in bytes.
    pub const BLOCK_SIZE: &str = "dev.dsec.block-size";
    /// Compression of the data: `none`, `lz4`, `zstd`, or several of these with commas between.
    pub const COMPRESSION: &str = "dev.dsec.compression";
    /// `kept` when the layer has whiteouts, opaque directories or attributes that overlayfs shows under other names, so that
    /// only overlayfs shows it right, else `none`.
    pub const WHITEOUTS: &str = "dev.dsec.whiteouts";
    /// Namespace of the overlay xattrs: `trusted` or `user`.
    pub const OVERLAY_XATTRS: &str = "dev.dsec.overlay-xattrs";
    /// JSON: what the layer leaves to those below it ([`super::Unresolved`]), absent when it leaves nothing.
    pub const UNRESOLVED: &str = "dev.dsec.unresolved";
    /// Digest of the source image's manifest, where it had one.
    pub const SOURCE_MANIFEST: &str = "dev.dsec.source.manifest";
    /// Stands for the options of the conversion ([`crate::convert::Request::fingerprint`]).
    pub const OPTIONS: &str = "dev.dsec.options";
}

/// What a layer that was converted without its lowers leaves open.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unresolved {
    /// Hard links whose target only a lower layer can have: (hex of the path, hex of the target path). The path is
    /// missing from the metadata image until a merge or a conversion with the lower layer puts it there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<(String, String)>,
    /// Positions in `links`, rising, of those that were below others when layers were merged: what has the name of such
    /// a target in the metadata image came later than the link, so that only a layer below can have what was meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beneath: Vec<u32>,
    /// Directories that no entry of the source described, so that a lower layer's description of them counts: their
    /// inode numbers, those for 32-bit `stat`, rising.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub implied: Vec<u32>,
}

impl Layer {
    /// What the layer leaves to those below it.
    ///
    /// # Errors
    /// When the annotation is not what a converter writes.
    pub fn unresolved(&self) -> Result<Unresolved, ManifestError> {
        let annotations = self.metadata.annotations().as_ref();
        let text = annotations.and_then(|all| all.get(annotation::UNRESOLVED));
        Ok(text.map(|text| serde_json::from_str(text)).transpose()?.unwrap_or_default())
    }

    /// All its blobs, as the manifest lists them.
    pub fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        std::iter::once(&self.metadata).chain(&self.data).chain(&self.chunk_tables)
    }

    /// Its chunk tables, each with the data blob that it is about.
    ///
    /// # Errors
    /// When a digest is none.
    pub fn tables(&self) -> Result<Vec<TableRef>, ManifestError> {
        self.each_table().collect()
    }

    /// As [`Layer::tables`], each table judged by itself.
    pub(crate) fn each_table(&self) -> impl Iterator<Item = Result<TableRef, ManifestError>> {
        self.chunk_tables.iter().filter_map(|table| {
            let annotations = table.annotations().as_ref();
            let of = match annotations.and_then(|all| all.get(annotation::CHUNK_TABLE_OF)) {
                Some(digest) => digest.parse(),
                // Images of 0.1.0 had one table, of the first blob.
                None => digest_of(self.data.first()?),
            };
            let table = of.and_then(|of| Ok(TableRef { of, blob: BlobRef::of(table)? }));
            Some(table.map_err(ManifestError::from))
        })
    }
}

/// One layer of a converted image.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The metadata image.
    pub metadata: Descriptor,
    /// The data blobs in device order: device id `n` of the metadata image is `data[n - 1]`.
    pub data: Vec<Descriptor>,
    /// The chunk tables of `data`, in its order; each says which blob it is about, in
    /// [`annotation::CHUNK_TABLE_OF`] and in itself.
    pub chunk_tables: Vec<Descriptor>,
    /// Whether the layer has whiteouts, opaque directories or escaped attributes, so that it must be mounted under overlayfs.
    pub whiteouts: bool,
    /// Namespace of the overlay xattrs.
    pub overlay_xattrs: OverlayXattrs,
}

/// Which xattr namespace carries overlayfs' own marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OverlayXattrs {
    /// `trusted.overlay.*`, for mounts by root.
    #[default]
    Trusted,
    /// `user.overlay.*`, for mounts with the `userxattr` option.
    User,
}

impl OverlayXattrs {
    /// `trusted.overlay.` or `user.overlay.`.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.overlay.",
            Self::User => "user.overlay.",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Trusted => "trusted",
            Self::User => "user",
        }
    }
}

/// A converted image: its config and its layers, bottom first.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    /// The original config.
    pub config: Descriptor,
    /// Layers, bottom first.
    pub layers: Vec<Layer>,
    /// The manifest's own annotations.
    pub annotations: BTreeMap<String, String>,
}

/// Why a manifest is not one of ours, or not a sound one.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Not JSON, or not an OCI manifest.
    #[error("not an OCI image manifest: {0}")]
    Json(#[from] serde_json::Error),
    /// A manifest of something else.
    #[error("not a converted image: artifactType is `{found}`, not `{ARTIFACT_TYPE}`")]
    OtherArtifact {
        /// What it says it is.
        found: String,
    },
    /// One of our manifests, broken.
    #[error("layer descriptor {index} ({digest}): {what}")]
    Layer {
        /// Position in `layers`.
        index: usize,
        /// Its digest as written.
        digest: String,
        /// What is wrong.
        what: String,
    },
    /// A digest that cannot be used.
    #[error(transparent)]
    Digest(#[from] DigestError),
}

/// The digest of a descriptor in the workspace's own type.
///
/// # Errors
/// When its algorithm is not supported.
pub fn digest_of(descriptor: &Descriptor) -> Result<Digest, DigestError> {
    descriptor.digest().to_string().parse()
}

/// Builds a descriptor.
///
/// # Panics
/// Never: all required fields are given.
#[must_use]
pub fn descriptor(media_type: &str, digest: Digest, size: u64, annotations: &[(&str, String)]) -> Descriptor {
    let mut builder = DescriptorBuilder::default()
        .media_type(MediaType::from(media_type))
        .digest(oci_spec::image::Digest::from_str(&digest.to_string()).expect("a SHA-256 digest is valid"))
        .size(size);
    if !annotations.is_empty() {
        let map: HashMap<String, String> = annotations.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        builder = builder.annotations(map);
    }
    builder.build().expect("all required fields are set")
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    schema_version: u32,
    media_type: String,
    artifact_type: Option<String>,
    config: WireDescriptor,
    layers: Vec<WireDescriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

/// A descriptor with sorted annotations, so that the same image gives the same bytes.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireDescriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl WireDescriptor {
    fn from_descriptor(d: &Descriptor, extra: &[(&str, String)]) -> Self {
        let mut annotations: BTreeMap<String, String> =
            d.annotations().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        annotations.extend(extra.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
        Self { media_type: d.media_type().to_string(), digest: d.digest().to_string(), size: d.size(), annotations }
    }

    fn to_descriptor(&self) -> Result<Descriptor, DigestError> {
        let digest: Digest = self.digest.parse()?;
        let annotations: Vec<(&str, String)> = self.annotations.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        Ok(descriptor(&self.media_type, digest, self.size, &annotations))
    }
}

impl Image {
    /// The manifest's bytes: compact JSON, keys in a fixed order.
    ///
    /// # Panics
    /// Never: the structure always serialises.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let mut layers = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let index = (annotation::LAYER, index.to_string());
            let role = |role: &str| (annotation::ROLE, role.to_owned());
            layers.push(WireDescriptor::from_descriptor(
                &layer.metadata,
                &[
                    index.clone(),
                    role("metadata"),
                    (annotation::WHITEOUTS, if layer.whiteouts { "kept" } else { "none" }.to_owned()),
                    (annotation::OVERLAY_XATTRS, layer.overlay_xattrs.name().to_owned()),
                ],
            ));
            for data in &layer.data {
                layers.push(WireDescriptor::from_descriptor(data, &[index.clone(), role("data")]));
            }
            for table in &layer.chunk_tables {
                layers.push(WireDescriptor::from_descriptor(table, &[index.clone(), role("chunk-table")]));
            }
        }
        let wire = Wire {
            schema_version: 2,
            media_type: MANIFEST_MEDIA_TYPE.to_owned(),
            artifact_type: Some(ARTIFACT_TYPE.to_owned()),
            config: WireDescriptor::from_descriptor(&self.config, &[]),
            layers,
            annotations: self.annotations.clone(),
        };
        serde_json::to_vec(&wire).expect("a manifest always serialises")
    }

    /// Reads a manifest that [`Image::to_json`] wrote (perhaps re-serialised by an OCI tool).
    ///
    /// # Errors
    /// When it is no manifest, one of another artifact, or a broken one.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ManifestError> {
        let wire: Wire = serde_json::from_slice(bytes)?;
        if wire.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
            return Err(ManifestError::OtherArtifact { found: wire.artifact_type.unwrap_or_default() });
        }
        let mut layers: Vec<Layer> = Vec::new();
        for (index, wire) in wire.layers.iter().enumerate() {
            let fail = |what: &str| ManifestError::Layer { index, digest: wire.digest.clone(), what: what.to_owned() };
            let get = |key: &str| wire.annotations.get(key).map(String::as_str);
            let layer: usize = get(annotation::LAYER)
                .and_then(|v| v.parse().ok())
                .ok_or_else(|| fail("annotation dev.dsec.layer is missing or not a number"))?;
            let descriptor = wire.to_descriptor()?;
            match get(annotation::ROLE) {
                Some("metadata") if layer == layers.len() => layers.push(Layer {
                    metadata: descriptor,
                    data: Vec::new(),
                    chunk_tables: Vec::new(),
                    whiteouts: get(annotation::WHITEOUTS) != Some("none"),
                    overlay_xattrs: match get(annotation::OVERLAY_XATTRS) {
                        None | Some("trusted") => OverlayXattrs::Trusted,
                        Some("user") => OverlayXattrs::User,
                        Some(_) => return Err(fail("annotation dev.dsec.overlay-xattrs is neither trusted nor user")),
                    },
                }),
                Some("metadata") => return Err(fail("metadata images are not in layer order")),
                Some("data" | "chunk-table") if layer + 1 != layers.len() => {
                    return Err(fail("a blob does not follow its layer's metadata image"));
                }
                Some("data") => layers[layer].data.push(descriptor),
                Some("chunk-table") => layers[layer].chunk_tables.push(descriptor),
                _ => return Err(fail("annotation dev.dsec.role is missing or unknown")),
            }
        }
        Ok(Self { config: wire.config.to_descriptor()?, layers, annotations: wire.annotations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        let d = |media: &str, n: u8, a: &[(&str, String)]| descriptor(media, Digest::of(&[n]), u64::from(n), a);
        Image {
            config: d(CONFIG_MEDIA_TYPE, 1, &[]),
            layers: vec![
                Layer {
                    metadata: d(METADATA_MEDIA_TYPE, 2, &[(annotation::DIFF_ID, "x".into())]),
                    data: vec![d(DATA_MEDIA_TYPE, 3, &[])],
                    chunk_tables: vec![d(CHUNK_TABLE_MEDIA_TYPE, 4, &[])],
                    whiteouts: false,
                    overlay_xattrs: OverlayXattrs::Trusted,
                },
                Layer {
                    metadata: d(METADATA_MEDIA_TYPE, 5, &[]),
                    data: vec![],
                    chunk_tables: vec![],
                    whiteouts: true,
                    overlay_xattrs: OverlayXattrs::User,
                },
            ],
            annotations: BTreeMap::new(),
        }
    }

    #[test]
    fn round_trip_is_stable() {
        let json = image().to_json();
        let back = Image::from_json(&json).unwrap();
        assert_eq!(back.layers.len(), 2);
        assert_eq!(back.layers[0].data.len(), 1);
        assert!(back.layers[0].chunk_tables.len() == 1 && !back.layers[0].whiteouts && back.layers[1].whiteouts);
        assert_eq!(back.layers[1].overlay_xattrs, OverlayXattrs::User);
        assert_eq!(back.to_json(), json);
    }

    #[test]
    fn others_are_refused_by_name() {
        let other = br#"{"schemaVersion":2,"mediaType":"m","config":{"mediaType":"m","digest":"sha256:00","size":1},"layers":[]}"#;
        assert!(matches!(Image::from_json(other), Err(ManifestError::OtherArtifact { .. })));
        assert!(matches!(Image::from_json(b"{"), Err(ManifestError::Json(_))));
        let text = String::from_utf8(image().to_json()).unwrap();
        for (from, to) in [("\"dev.dsec.layer\":\"1\"", "\"dev.dsec.layer\":\"7\""), ("\"metadata\"", "\"meta\"")] {
            assert!(matches!(Image::from_json(text.replace(from, to).as_bytes()), Err(ManifestError::Layer { .. })));
        }
    }
}
