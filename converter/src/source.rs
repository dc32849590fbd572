//! Where an image comes from: a place named in skopeo's spelling, resolved to a config and layers that can be read.
//!
//! [`reference`](mod@reference) parses the name, [`platform`] chooses in an index, [`documents`] parses the JSON (bytes in,
//! nothing else), [`layout`] reads OCI layouts (a directory or inside an archive), `registry` asks registries, and
//! [`docker_archive`] reads what `docker save` writes. Archives are never extracted: [`archive_index`] notes where their
//! members are, and a layer is a range of the archive.
//!
//! Manifests, indexes and configs are checked here against the size and digest that named them. Layers are not read
//! here: [`crate::layer::read()`] checks each against its [`SourceLayer`].

pub mod archive_index;
pub mod docker_archive;
pub mod documents;
mod error;
mod find;
pub mod layout;
pub mod platform;
pub mod reference;
pub(crate) mod registry;

pub use error::SourceError;
pub use platform::Platform;
pub use reference::{ReferenceError, SourceRef, TarInput};

use crate::entry::Warning;
use find::{Blobs, Wanted};
use fs3_client::Digest;
use fs3_client::registry::{Options, Remote};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Media type given to a layer that comes without one (`tar:`, `dir:`).
pub const TAR_MEDIA_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image as its source has it.
#[derive(Debug)]
pub struct SourceImage {
    /// The config's bytes, unchanged; `None` where the source has none (`tar:`, `dir:`, an artifact).
    pub config: Option<Vec<u8>>,
    /// Bottom first.
    pub layers: Vec<SourceLayer>,
    /// Digest of the image manifest, where there is one.
    pub manifest: Option<Digest>,
    /// What the config says the image is for.
    pub platform: Option<Platform>,
    /// Oddities that did not stop anything; their `entry` is empty.
    pub warnings: Vec<Warning>,
    /// Keeps the unnamed file of an unpacked archive alive, which the layers' paths go through.
    scratch: Option<Arc<File>>,
}

/// One layer and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceLayer {
    /// As declared, empty where the source names none; what the bytes are is for [`crate::unpack`] to find.
    pub media_type: String,
    /// Digest of the stored bytes, where the source names one.
    pub digest: Option<Digest>,
    /// Number of stored bytes, where known.
    pub size: Option<u64>,
    /// Digest of the plain tar, from the config.
    pub diff_id: Option<Digest>,
    /// Where to read it.
    pub origin: LayerOrigin,
}

/// Where a layer's bytes are. Paths are valid for as long as the [`SourceImage`] lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerOrigin {
    /// `len` bytes from `offset` of a file.
    Range {
        /// The blob, or the archive it is in.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// A blob of a registry.
    Remote(Remote),
    /// Standard input, to its end.
    Stdin,
    /// No tar at all: the tree below a directory.
    Dir(PathBuf),
}

/// Finds the image that `reference` names. `platform` chooses where there are several, and an image that says it is for
/// another one is refused. `scratch` is a directory for the plain copy of an archive that is itself compressed,
/// `registry` how to talk to registries.
///
/// # Errors
/// [`SourceError`]: the place cannot be read, is not what the transport says, or holds no such image.
pub fn resolve(
    reference: &SourceRef,
    platform: &Platform,
    scratch: &Path,
    registry: &Options,
) -> Result<SourceImage, SourceError> {
    let image = |blobs: &dyn Blobs, roots: &[find::Root]| {
        find::load(blobs, &find::manifest(blobs, roots, platform, Wanted::ForPlatform)?, platform)
    };
    match reference {
        SourceRef::Oci { .. } | SourceRef::OciArchive { .. } | SourceRef::Docker(_) => {
            let (mut found, keep) = with_blobs(reference, scratch, registry, image)?;
            found.scratch = keep;
            Ok(found)
        }
        SourceRef::DockerArchive { file, reference } => {
            let (file, reference) = reference::locate(file, reference.as_deref(), Path::is_file);
            let (archive, keep) = archive_index::open(&file, scratch)?;
            let mut image = docker_archive::resolve(&archive, reference.as_deref(), platform)?;
            image.scratch = keep;
            Ok(image)
        }
        SourceRef::Tar(TarInput::Stdin) => Ok(SourceImage::of_one(LayerOrigin::Stdin, None)),
        SourceRef::Tar(TarInput::File(path)) => {
            let metadata = std::fs::metadata(path).map_err(|e| SourceError::io(path, e))?;
            if !metadata.is_file() {
                let what = "it is not a regular file (a stream can be given on standard input, as `tar:-`)";
                return Err(SourceError::NotA { path: path.clone(), what });
            }
            let len = metadata.len();
            Ok(SourceImage::of_one(LayerOrigin::Range { path: path.clone(), offset: 0, len }, Some(len)))
        }
        SourceRef::Dir(path) => {
            if !std::fs::metadata(path).map_err(|e| SourceError::io(path, e))?.is_dir() {
                return Err(SourceError::NotA { path: path.clone(), what: "it is not a directory" });
            }
            let mut image = SourceImage::of_one(LayerOrigin::Dir(path.clone()), None);
            // Other tools' `dir:` is a flat directory of blobs; here it is a root file system.
            if path.join("manifest.json").is_file() && path.join("version").is_file() {
                image.warn("the directory looks like skopeo's `dir:` format; its files become the image, not the image it holds");
            }
            Ok(image)
        }
    }
}

/// A converted image in a layout or a registry.
#[derive(Debug)]
pub struct Artifact {
    /// The manifest as it is there.
    pub manifest: Vec<u8>,
    /// What the manifest says.
    pub image: crate::manifest::Image,
    /// Its blobs, each once, the config among them: digest, length and where to read it.
    pub blobs: Vec<(Digest, u64, LayerOrigin)>,
    /// As [`SourceImage::scratch`].
    _scratch: Option<Arc<File>>,
}

/// Finds the converted image that `reference` names, by the same rules as [`resolve`]; one that is named itself, not by
/// an index, may be for any platform.
///
/// # Errors
/// [`SourceError`]; for what is no converted image, it says what that is.
pub fn resolve_artifact(
    reference: &SourceRef,
    platform: &Platform,
    scratch: &Path,
    registry: &Options,
) -> Result<Artifact, SourceError> {
    let (mut artifact, keep) = with_blobs(reference, scratch, registry, |blobs, roots| {
        find::artifact(blobs, &find::manifest(blobs, roots, platform, Wanted::Named)?)
    })?;
    artifact._scratch = keep;
    Ok(artifact)
}

/// Calls `take` with the blobs of a layout, an archive with a layout, or a registry, and with what `reference` names
/// there. The file, if any, must be kept for as long as paths are used.
fn with_blobs<T>(
    reference: &SourceRef,
    scratch: &Path,
    registry: &Options,
    take: impl FnOnce(&dyn Blobs, &[find::Root]) -> Result<T, SourceError>,
) -> Result<(T, Option<Arc<File>>), SourceError> {
    match reference {
        SourceRef::Oci { dir, tag } => {
            let (dir, tag) = reference::locate(dir, tag.as_deref(), Path::is_dir);
            let members = layout::Directory::new(dir);
            Ok((take(&layout::Layout(&members), &layout::roots(&members, tag.as_deref())?)?, None))
        }
        SourceRef::OciArchive { file, tag } => {
            let (file, tag) = reference::locate(file, tag.as_deref(), Path::is_file);
            let (archive, keep) = archive_index::open(&file, scratch)?;
            Ok((take(&layout::Layout(&archive), &layout::roots(&archive, tag.as_deref())?)?, keep))
        }
        SourceRef::Docker(image) => {
            let (registry, root) = registry::Registry::find(image, registry)?;
            Ok((take(&registry, &[root])?, None))
        }
        SourceRef::DockerArchive { .. } | SourceRef::Tar(_) | SourceRef::Dir(_) => {
            let why = "only a registry, an OCI layout and an OCI archive can hold a converted image".to_owned();
            Err(SourceError::Unusable { what: reference.to_string(), why })
        }
    }
}

impl SourceImage {
    fn new(layers: Vec<SourceLayer>) -> Self {
        Self { config: None, layers, manifest: None, platform: None, warnings: Vec::new(), scratch: None }
    }

    fn of_one(origin: LayerOrigin, size: Option<u64>) -> Self {
        let media_type = TAR_MEDIA_TYPE.to_owned();
        Self::new(vec![SourceLayer { media_type, digest: None, size, diff_id: None, origin }])
    }

    fn warn(&mut self, message: impl Into<String>) {
        self.warnings.push(Warning::new(b"", message));
    }

    /// Gives each layer its diffID from the config `bytes`, and checks the platform.
    fn apply_config(&mut self, bytes: Vec<u8>, asked: &Platform) -> Result<(), SourceError> {
        let config = documents::Config::parse(&bytes)?;
        let diff_ids = config.diff_ids();
        if diff_ids.len() != self.layers.len() {
            return Err(SourceError::DiffIds { layers: self.layers.len(), diff_ids: diff_ids.len() });
        }
        for (index, (layer, diff_id)) in self.layers.iter_mut().zip(diff_ids).enumerate() {
            let digest = diff_id.parse().map_err(|source| SourceError::DiffId { index, source })?;
            layer.diff_id = Some(digest);
        }
        self.platform = config.platform();
        // Not the variant: configs often leave it out, and the index has said it where it matters.
        if let Some(found) = &self.platform
            && (&found.os, &found.architecture) != (&asked.os, &asked.architecture)
        {
            return Err(SourceError::OtherPlatform { asked: asked.to_string(), found: found.to_string() });
        }
        self.config = Some(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
