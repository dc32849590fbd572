//! One layer on its way into the store.
//!
//! [`read()`] takes the source apart: its tree, its data blob and the contents of small files in a spool. What is left
//! open (parents without an entry, hard links into lower layers) is for the module `stack`; [`publish()`] then writes the
//! metadata image. So the long part of the work needs no other layer, and all layers do it in parallel.

mod error;
mod out;
mod publish;
pub mod read;
mod sink;
pub(crate) mod stream;
mod walk;

pub use error::LayerError;
pub(crate) use publish::count;
pub use publish::{BlobRef, Existing, Origin, Record, TableRef, publish};
pub use read::{ReadLayer, read};

use crate::blob::ChunkSizes;
use crate::compress::Compress;
use crate::manifest::OverlayXattrs;
use serde::{Deserialize, Serialize};

/// What shapes the bytes that a layer becomes, and what it may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Files of up to this many bytes lie in the metadata image, where they fit beside their inode.
    pub inline_max: u32,
    /// Namespace of overlayfs' attributes.
    pub overlay: OverlayXattrs,
    /// Chunk sizes of larger files.
    pub chunks: ChunkSizes,
    /// How the data of larger files is compressed; `None` leaves it plain.
    pub compress: Option<Compress>,
    /// Most inodes in a layer.
    pub max_inodes: u32,
    /// Most plain bytes of a layer.
    pub max_plain: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            inline_max: 4096,
            overlay: OverlayXattrs::Trusted,
            chunks: ChunkSizes::default(),
            compress: None,
            max_inodes: 1 << 23,
            max_plain: crate::unpack::Limits::default().plain_bytes,
        }
    }
}

/// What a layer holds, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Inodes in the metadata image.
    pub inodes: u64,
    /// Regular files.
    pub files: u64,
    /// Regular files whose contents are in the metadata image.
    pub inline_files: u64,
    /// Bytes of those.
    pub inline_bytes: u64,
    /// Bytes of all regular files, holes included.
    pub file_bytes: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Names hidden.
    pub whiteouts: u64,
    /// Directories whose lower contents are hidden.
    pub opaques: u64,
    /// Inodes with attributes that overlayfs shows under other names than the image has: those of the source that would
    /// mean something to it.
    #[serde(default)]
    pub escaped: u64,
    /// Bytes of the layer's own data blob.
    #[serde(default)]
    pub own_bytes: u64,
    /// Bytes not stored because the layer has the same chunk already.
    pub deduplicated_bytes: u64,
    /// Regular files with compressed clusters.
    #[serde(default)]
    pub compressed_files: u64,
    /// Plain bytes of the compressed clusters in the layer's own data blob, each counted once.
    #[serde(default)]
    pub compressed_plain_bytes: u64,
    /// Bytes of the same clusters as they are stored, padding included.
    #[serde(default)]
    pub compressed_stored_bytes: u64,
    /// Bytes not stored because a blob of another layer has the same chunk, in whole blocks.
    #[serde(default)]
    pub referred_bytes: u64,
    /// Distinct chunks of those.
    #[serde(default)]
    pub referred_chunks: u64,
    /// Blobs of other layers that have them.
    #[serde(default)]
    pub referred_blobs: u64,
    /// Distinct chunks that were looked up in the dictionary.
    #[serde(default)]
    pub lookups: u64,
}
