//! OCI image layers to EROFS: a metadata image and a data blob for each layer.

pub mod chunk_table;
pub mod entry;
pub mod erofs;
pub mod fuzzing;
pub mod manifest;
pub mod read_at;
pub mod verify;
