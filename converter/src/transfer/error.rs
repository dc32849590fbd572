//! Why a converted image could not be moved.

use crate::source::SourceError;
use fs3_client::registry::RegistryError;
use fs3_client::{Digest, DigestError, StoreError};
use std::io;
use std::path::PathBuf;

/// Why a converted image could not be moved.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The source cannot be read, or holds no converted image.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The registry did not do what it was asked, or cannot be asked.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A digest that cannot be used.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// A blob that is not what its digest says.
    #[error("blob {digest} from {place} is damaged: {how}")]
    Damaged {
        /// Its name.
        digest: Digest,
        /// Where it came from.
        place: String,
        /// How one can tell.
        how: String,
    },
    /// The target's `index.json` is not one.
    #[error("{}: {what}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A registry takes images by tag.
    #[error("`{0}` has a digest; an image is pushed to a tag")]
    NoTag(String),
    /// The system failed.
    #[error("cannot {op} {}: {source}", path.display())]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl TransferError {
    /// Whether bytes are not what they should be.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Source(e) => e.is_corrupt(),
            Self::Registry(e) => e.is_corrupt(),
            Self::Store(e) => e.is_corrupt(),
            Self::Damaged { .. } => true,
            Self::Digest(_) | Self::Layout { .. } | Self::NoTag(_) | Self::Io { .. } => false,
        }
    }
}
