//! Why an image cannot be taken from its source.

use super::documents::JsonError;
use fs3_client::registry::RegistryError;
use fs3_client::{Digest, DigestError};
use std::io;
use std::path::{Path, PathBuf};

/// Why an image cannot be taken from its source. [`SourceError::Io`] blames the machine, [`SourceError::NoSuchImage`],
/// [`SourceError::Ambiguous`], [`SourceError::NoPlatform`] and [`SourceError::OtherPlatform`] the request, the rest
/// the source's bytes.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A registry did not do what it was asked, or cannot be asked.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Reading failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was read.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The place is something else than the transport says.
    #[error("{}: {what}", path.display())]
    NotA {
        /// The place.
        path: PathBuf,
        /// What it is not.
        what: &'static str,
    },
    /// The archive cannot be read.
    #[error("archive {}: {what}", path.display())]
    Archive {
        /// The archive.
        path: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// A document is no JSON of its kind.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// Something that another document names is not there.
    #[error("{what} is missing: {} has no {name}", place.display())]
    Missing {
        /// Which part of the image.
        what: String,
        /// What it should be called there.
        name: String,
        /// The layout or archive.
        place: PathBuf,
    },
    /// A blob of another size than its descriptor says.
    #[error("{what} has {found} bytes, its descriptor says {expected}")]
    Size {
        /// Which part of the image, with its digest.
        what: String,
        /// The descriptor's size.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A document that is not what its digest says.
    #[error("{what} is damaged: its digest is {found}")]
    Digest {
        /// Which part of the image, with the digest it should have.
        what: String,
        /// The digest of the bytes.
        found: Digest,
    },
    /// A digest that cannot be used.
    #[error("{what}: {source}")]
    BadDigest {
        /// Which part of the image.
        what: String,
        /// Why.
        source: DigestError,
    },
    /// A document larger than any sensible one.
    #[error("{what} has {size} bytes, more than the {limit} that are read")]
    TooLarge {
        /// Which document.
        what: String,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A document of a type that is not an image.
    #[error("{what} cannot be used: {why}")]
    Unusable {
        /// Which document.
        what: String,
        /// Why not.
        why: String,
    },
    /// A layer of a type that is no file system layer.
    #[error("layer {index} ({digest}) of type `{media_type}` {why}")]
    LayerType {
        /// Its position, 0 at the bottom.
        index: usize,
        /// Its digest as written.
        digest: String,
        /// Its type as written.
        media_type: String,
        /// Why it is refused.
        why: &'static str,
    },
    /// Config and manifest disagree.
    #[error("the image has {layers} layers but its config has {diff_ids} diff_ids")]
    DiffIds {
        /// Layers in the manifest.
        layers: usize,
        /// diffIDs in the config.
        diff_ids: usize,
    },
    /// A diffID that cannot be used.
    #[error("the diff_id of layer {index}: {source}")]
    DiffId {
        /// The layer's position, 0 at the bottom.
        index: usize,
        /// Why.
        source: DigestError,
    },
    /// No image of that name.
    #[error("there is no image `{asked}` in {}; there is {available}", place.display())]
    NoSuchImage {
        /// What was asked for.
        asked: String,
        /// The layout or archive.
        place: PathBuf,
        /// What there is, for people.
        available: String,
    },
    /// Several images, and no choice.
    #[error("there are several images in {}, name one of them: {available}", place.display())]
    Ambiguous {
        /// The layout or archive.
        place: PathBuf,
        /// What there is, for people.
        available: String,
    },
    /// No image for that platform.
    #[error("there is no image for {asked}; there is {available}")]
    NoPlatform {
        /// What was asked for.
        asked: String,
        /// What there is, for people.
        available: String,
    },
    /// The only image is for another platform.
    #[error("the image is for {found}, not for {asked}")]
    OtherPlatform {
        /// What was asked for.
        asked: String,
        /// What it is.
        found: String,
    },
}

impl SourceError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// `items` as a list for people, in the order given, cut where it gets long.
pub(super) fn list<S: AsRef<str>>(items: impl IntoIterator<Item = S>) -> String {
    const MOST: usize = 20;
    let mut names: Vec<String> =
        items.into_iter().map(|item| crate::entry::printable(item.as_ref().as_bytes())).collect();
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    match (names.is_empty(), more) {
        (true, _) => "nothing".to_owned(),
        (_, 0) => names.join(", "),
        _ => format!("{} and {more} more", names.join(", ")),
    }
}

impl SourceError {
    /// Whether bytes are damaged, rather than of another kind than was asked for.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Archive { .. } | Self::Json(_) | Self::Size { .. } | Self::Digest { .. } => true,
            Self::Registry(e) => e.is_corrupt(),
            _ => false,
        }
    }
}
