//! OCI image layers to EROFS: a metadata image and a data blob for each layer.

pub mod entry;
pub mod erofs;
#[doc(hidden)]
pub mod fuzzing;
pub mod manifest;
pub mod read_at;
pub mod tar;
