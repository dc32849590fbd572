//! Finding an image below an index and reading it, whatever holds its blobs.

use super::documents::{self, CONFIG_LIMIT, Descriptor, Document, DocumentError, Kind, MANIFEST_LIMIT, Manifest};
use super::error::list;
use super::{Artifact, LayerOrigin, Platform, SourceError, SourceImage, SourceLayer};
use crate::entry::printable;
use crate::manifest::{ARTIFACT_TYPE, Image};
use fs3_client::Digest;
use std::collections::BTreeSet;
use std::path::Path;

/// Most documents read while looking for an image, and most indexes inside one another.
const DOCUMENTS: usize = 1000;
const DEPTH: usize = 8;

/// What holds the blobs of images.
pub(super) trait Blobs {
    /// What to call it in messages.
    fn place(&self) -> &Path;

    /// A whole small blob, or manifest, checked against its descriptor.
    fn read(&self, what: &str, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, SourceError>;

    /// Where to read a blob of any size.
    fn origin(&self, what: &str, descriptor: &Descriptor) -> Result<(Digest, LayerOrigin), SourceError>;

    /// Whether it has a layer that images need not carry.
    fn has_foreign(&self, _descriptor: &Descriptor) -> Result<bool, SourceError> {
        Ok(false)
    }
}

/// Where a search begins.
pub(super) struct Root {
    pub(super) descriptor: Descriptor,
    /// What to call it in a list of choices.
    pub(super) label: String,
}

/// Which manifests will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Those for the platform.
    ForPlatform,
    /// In an index those for the platform; one that is named itself, whatever it is for.
    Named,
}

/// Finds the manifest of the image below `roots` that serves `platform` best.
pub(super) fn manifest(
    blobs: &dyn Blobs,
    roots: &[Root],
    platform: &Platform,
    wanted: Wanted,
) -> Result<Descriptor, SourceError> {
    let mut search = Search { blobs, platform, roots, wanted, documents: 0, found: Vec::new(), others: Vec::new() };
    for (index, root) in roots.iter().enumerate() {
        search.visit(&root.descriptor, index, 0)?;
    }
    search.best()
}

/// The search through indexes for the images that serve a platform.
struct Search<'a> {
    blobs: &'a dyn Blobs,
    platform: &'a Platform,
    roots: &'a [Root],
    wanted: Wanted,
    documents: usize,
    /// Rank, which root it is below, and the manifest.
    found: Vec<(u32, usize, Descriptor)>,
    /// What else there was.
    others: Vec<String>,
}

impl Search<'_> {
    fn visit(&mut self, descriptor: &Descriptor, root: usize, depth: usize) -> Result<(), SourceError> {
        if descriptor.is_attestation() {
            return Ok(());
        }
        let declared = descriptor.platform();
        match Kind::of(&descriptor.media_type) {
            // An index of one platform's images says nothing new about the others.
            Kind::Index if declared.as_ref().is_none_or(|p| self.platform.rank(p).is_some()) => {
                let what = format!("image index {}", printable(descriptor.digest.as_bytes()));
                if depth >= DEPTH {
                    return Err(SourceError::Unusable { what, why: "indexes are nested too deeply".to_owned() });
                }
                if let Document::Index(entries) = self.document(&what, descriptor)? {
                    for entry in &entries {
                        self.visit(entry, root, depth + 1)?;
                    }
                }
                return Ok(());
            }
            Kind::Manifest if depth == 0 && self.wanted == Wanted::Named => {
                self.found.push((0, root, descriptor.clone()));
                return Ok(());
            }
            Kind::Manifest => {}
            _ => {
                let media_type = printable(descriptor.media_type.as_bytes());
                self.others.push(declared.map_or(media_type, |p| p.to_string()));
                return Ok(());
            }
        }
        let platform = match declared {
            Some(platform) => Some(platform),
            None => self.platform_of(descriptor)?,
        };
        match platform {
            None => self.found.push((0, root, descriptor.clone())),
            Some(platform) => match self.platform.rank(&platform) {
                Some(rank) => self.found.push((rank, root, descriptor.clone())),
                None => self.others.push(platform.to_string()),
            },
        }
        Ok(())
    }

    /// The platform of a manifest whose descriptor does not give it: its config's.
    fn platform_of(&mut self, descriptor: &Descriptor) -> Result<Option<Platform>, SourceError> {
        let what = format!("image manifest {}", printable(descriptor.digest.as_bytes()));
        match self.document(&what, descriptor)? {
            Document::Manifest(manifest) if documents::is_image_config(&manifest.config.media_type) => {
                let bytes = read_config(self.blobs, &manifest)?;
                Ok(documents::Config::parse(&bytes)?.platform())
            }
            _ => Ok(None),
        }
    }

    fn document(&mut self, what: &str, descriptor: &Descriptor) -> Result<Document, SourceError> {
        self.documents += 1;
        if self.documents > DOCUMENTS {
            let why = format!("over {DOCUMENTS} indexes and manifests were read without finding an image");
            return Err(SourceError::Unusable { what: what.to_owned(), why });
        }
        read_document(self.blobs, what, descriptor)
    }

    /// The best of what was found; inside one index the first of equals, as other tools choose.
    fn best(mut self) -> Result<Descriptor, SourceError> {
        let best = self.found.iter().map(|(rank, ..)| *rank).max();
        self.found.retain(|(rank, ..)| Some(*rank) == best);
        let roots: BTreeSet<usize> = self.found.iter().map(|(_, root, _)| *root).collect();
        let digests: BTreeSet<&str> = self.found.iter().map(|(.., d)| d.digest.as_str()).collect();
        if roots.len() > 1 && digests.len() > 1 {
            let available = list(roots.iter().map(|root| self.roots[*root].label.as_str()));
            return Err(SourceError::Ambiguous { place: self.blobs.place().to_owned(), available });
        }
        match self.found.into_iter().next() {
            Some((_, _, descriptor)) => Ok(descriptor),
            None => Err(SourceError::NoPlatform { asked: self.platform.to_string(), available: list(self.others) }),
        }
    }
}

fn document_error(what: String, error: DocumentError) -> SourceError {
    SourceError::Unusable { what, why: error.to_string() }
}

fn read_document(blobs: &dyn Blobs, what: &str, descriptor: &Descriptor) -> Result<Document, SourceError> {
    let bytes = blobs.read(what, descriptor, MANIFEST_LIMIT)?;
    Document::parse(&bytes, &descriptor.media_type).map_err(|e| document_error(what.to_owned(), e))
}

fn read_config(blobs: &dyn Blobs, manifest: &Manifest) -> Result<Vec<u8>, SourceError> {
    let what = format!("image config {}", printable(manifest.config.digest.as_bytes()));
    blobs.read(&what, &manifest.config, CONFIG_LIMIT)
}

/// Reads a manifest and its config, and finds its layers.
pub(super) fn load(
    blobs: &dyn Blobs,
    descriptor: &Descriptor,
    platform: &Platform,
) -> Result<SourceImage, SourceError> {
    let what = format!("image manifest {}", printable(descriptor.digest.as_bytes()));
    let Document::Manifest(manifest) = read_document(blobs, &what, descriptor)? else {
        return Err(SourceError::Unusable { what, why: "it is an index".to_owned() });
    };
    if manifest.artifact_type.as_deref() == Some(ARTIFACT_TYPE) {
        let why = "it is a converted image already; `dsec-convert pull` brings it into a store".to_owned();
        return Err(SourceError::Unusable { what, why });
    }
    let mut layers = Vec::new();
    for (index, layer) in manifest.layers.iter().enumerate() {
        check_layer(blobs, index, layer)?;
        let what = format!("layer {index} ({})", printable(layer.digest.as_bytes()));
        let (digest, origin) = blobs.origin(&what, layer)?;
        layers.push(SourceLayer {
            media_type: layer.media_type.clone(),
            digest: Some(digest),
            size: Some(layer.size),
            diff_id: None,
            origin,
        });
    }
    let mut image = SourceImage::new(layers);
    image.manifest = descriptor.digest.parse().ok();
    if documents::is_image_config(&manifest.config.media_type) {
        image.apply_config(read_config(blobs, &manifest)?, platform)?;
    } else {
        let media_type = printable(manifest.config.media_type.as_bytes());
        image.warn(format!(
            "the config is not an image's (`{media_type}`), so there are no diff_ids to check the layers against"
        ));
    }
    Ok(image)
}

fn check_layer(blobs: &dyn Blobs, index: usize, layer: &Descriptor) -> Result<(), SourceError> {
    let checked = match documents::native_type(&layer.media_type) {
        Some(native) if blobs.has_foreign(layer)? => documents::check_layer_type(&native),
        _ => documents::check_layer_type(&layer.media_type),
    };
    checked.map_err(|why| SourceError::LayerType {
        index,
        digest: printable(layer.digest.as_bytes()),
        media_type: printable(layer.media_type.as_bytes()),
        why,
    })
}

/// Reads a converted image's manifest, and finds its blobs.
pub(super) fn artifact(blobs: &dyn Blobs, descriptor: &Descriptor) -> Result<Artifact, SourceError> {
    let what = format!("manifest {}", printable(descriptor.digest.as_bytes()));
    let bytes = blobs.read(&what, descriptor, MANIFEST_LIMIT)?;
    let Document::Manifest(manifest) =
        Document::parse(&bytes, &descriptor.media_type).map_err(|e| document_error(what.clone(), e))?
    else {
        return Err(SourceError::Unusable { what, why: "it is an index".to_owned() });
    };
    if manifest.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
        let other = manifest.artifact_type.as_deref().filter(|t| !t.is_empty());
        let is = match other {
            Some(other) => format!("an artifact of type `{}`", printable(other.as_bytes())),
            None if documents::is_image_config(&manifest.config.media_type) => {
                format!("an ordinary image of {} layers, which `dsec-convert convert` takes", manifest.layers.len())
            }
            None => format!("an artifact whose config is `{}`", printable(manifest.config.media_type.as_bytes())),
        };
        return Err(SourceError::Unusable { what, why: format!("it is no converted image but {is}") });
    }
    let image =
        Image::from_json(&bytes).map_err(|e| SourceError::Unusable { what: what.clone(), why: e.to_string() })?;
    let mut found: Vec<(Digest, u64, LayerOrigin)> = Vec::new();
    for blob in std::iter::once(&manifest.config).chain(&manifest.layers) {
        let what = format!("blob {}", printable(blob.digest.as_bytes()));
        let (digest, origin) = blobs.origin(&what, blob)?;
        match found.iter().find(|(other, ..)| *other == digest) {
            None => found.push((digest, blob.size, origin)),
            Some((_, size, _)) if *size == blob.size => {}
            Some((_, expected, _)) => return Err(SourceError::Size { what, expected: *expected, found: blob.size }),
        }
    }
    Ok(Artifact { manifest: bytes, image, blobs: found, _scratch: None })
}
