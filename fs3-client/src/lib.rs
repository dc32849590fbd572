//! Blobs by digest.
//!
//! [`digest`] is the one name for content in the workspace; [`store_dir`] is a store that is a directory (a local
//! disk or a mounted 3FS): immutable blobs, and refs that are replaced by rename.

pub mod blob_store;
pub mod digest;
pub mod refname;
pub mod store;
pub mod store_dir;

pub use blob_store::{BlobError, BlobStore, Body, Listed, Stat};
pub use digest::{Digest, DigestError, Hasher};
pub use refname::{RefName, RefNameError};
pub use store::Store;
pub use store_dir::{Published, Staged, StoreDir, StoreError, Swept};

/// Compiles the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
