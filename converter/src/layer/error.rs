//! Why a layer could not be converted, and whose fault that is.

use crate::blob::foreign::CopyError;
use crate::blob::order::OrderError;
use crate::blob::{BlobTooLarge, ChunkError};
use crate::chunk_table::ChunkTableError;
use crate::dictionary::DictionaryError;
use crate::erofs::read::ReadError;
use crate::erofs::write::WriteError;
use crate::tar::TarError;
use crate::tree::build::TreeError;
use crate::unpack::{UnpackError, VerifyError};
use fs3_client::{BlobError, Digest, StoreError};
use std::io;
use std::path::PathBuf;

/// Why a layer could not be converted.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The stored bytes are not what the descriptor says.
    #[error("the layer's blob is not what its descriptor says: {0}")]
    Blob(#[from] VerifyError),
    /// The plain tar is not what the config says.
    #[error("the layer's plain tar has digest {found}, the image's config says {expected} (diff_ids)")]
    DiffId {
        /// From the config.
        expected: Digest,
        /// Of the tar.
        found: Digest,
    },
    /// The compressed stream is damaged or not supported.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// The tar is damaged or not supported.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// An entry cannot be part of a file system.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A hard link leads to what no layer has.
    #[error("entry `{path}` is a hard link to `{target}`, which neither this layer nor one below it has")]
    DanglingLink {
        /// The link.
        path: String,
        /// Where it leads.
        target: String,
    },
    /// A lower layer's metadata image cannot be read.
    #[error("the metadata image of a lower layer: {0}")]
    Lower(#[from] ReadError),
    /// A file of a directory source changed while it was read.
    #[error("{}: {what} while it was read", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What happened to it.
        what: &'static str,
    },
    /// Reading the source failed.
    #[error("cannot {op} {}: {source}", path.display())]
    Source {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Writing to the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A scratch file failed.
    #[error("cannot write to the store's scratch space: {0}")]
    Scratch(#[source] io::Error),
    /// More data than a blob can have.
    #[error(transparent)]
    TooLarge(#[from] BlobTooLarge),
    /// The metadata image could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The chunk table could not be written.
    #[error(transparent)]
    ChunkTable(#[from] ChunkTableError),
    /// Chunks could not be looked up.
    #[error(transparent)]
    Dictionary(Box<DictionaryError>),
    /// Chunks of another blob could not be copied, since it is not what it should be.
    #[error("{0}")]
    Copy(CopyError),
    /// Another layer of the image failed first.
    #[error("stopped, since another layer failed")]
    Cancelled,
}

impl LayerError {
    /// Whether the source's bytes are damaged (rather than unsupported, or the machine at fault).
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Blob(_) | Self::DiffId { .. } => true,
            Self::Unpack(UnpackError::Read(e)) => {
                let blob = e.get_ref().and_then(|e| e.downcast_ref::<BlobError>());
                matches!(blob, Some(BlobError::Corrupt { .. }))
            }
            Self::Unpack(e) => e.is_corrupt(),
            Self::Tar(e) => e.is_corrupt(),
            Self::Store(e) => e.is_corrupt(),
            Self::Lower(e) => e.is_corruption(),
            Self::Dictionary(e) => e.is_corrupt(),
            Self::Copy(CopyError::Corrupt { .. }) => true,
            _ => false,
        }
    }
}

impl From<OrderError> for LayerError {
    fn from(error: OrderError) -> Self {
        match error {
            OrderError::TooLarge(e) => Self::TooLarge(e),
            OrderError::Io(e) => e.downcast().map_or_else(Self::Scratch, Self::Copy),
            e @ OrderError::Decompress { .. } => Self::Scratch(io::Error::other(e)),
        }
    }
}

impl From<ChunkError> for LayerError {
    fn from(error: ChunkError) -> Self {
        match error {
            ChunkError::TooLarge(e) => Self::TooLarge(e),
            ChunkError::Dictionary(e) => e.into(),
        }
    }
}

impl From<DictionaryError> for LayerError {
    fn from(error: DictionaryError) -> Self {
        Self::Dictionary(Box::new(error))
    }
}
