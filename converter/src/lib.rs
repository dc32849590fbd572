//! OCI image layers to EROFS: a metadata image and a data blob for each layer.

pub mod batch;
pub mod blob;
pub mod chunk_table;
pub mod compress;
pub mod convert;
pub mod design;
pub mod dictionary;
pub mod entry;
pub mod erofs;
pub mod extent;
#[doc(hidden)]
pub mod fuzzing;
pub mod gc;
pub mod hash;
pub mod layer;
pub mod manifest;
pub mod merge;
pub mod progress;
pub mod read_at;
pub mod source;
mod stack;
pub mod tar;
pub mod transfer;
pub mod tree;
pub mod unpack;
pub mod verify;
