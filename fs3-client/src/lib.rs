//! Blobs by digest, wherever they are.
//!
//! [`digest`] is the one name for content in the workspace. [`store`] is what programs use: a place for blobs, refs and
//! records, given by a [`location`]. It stands on [`blob_store`], the contract of every place for blobs, with its
//! backends and decorators; on [`names`], small objects that change; and on [`store_dir`], a directory on a local disk
//! or a mounted 3FS. [`lease`] says who is writing. With the feature `cache`, a node reads through a chunk cache on its
//! local disk. [`metrics`] is what both count, as Prometheus text.

pub mod blob_store;
#[cfg(feature = "cache")]
pub mod cache;
pub mod digest;
pub mod gc;
mod host;
pub mod lease;
pub mod location;
pub mod medium;
pub mod metrics;
pub mod names;
pub mod refname;
pub mod registry;
pub mod store;
pub mod store_dir;
#[cfg(feature = "testing")]
pub mod testing;

pub use blob_store::metered::Meter;
pub use blob_store::{BlobError, BlobStore, Body, Listed, Stat};
#[cfg(feature = "cache")]
pub use cache::{CacheConfig, CacheError, CachedBlob, ChunkCache, ChunkDigests, TryRead};
pub use digest::{Digest, DigestError, Hasher};
pub use lease::{LeaseInfo, LeaseKind};
pub use location::{LocationError, StoreLocation};
pub use medium::Medium;
pub use refname::{RefName, RefNameError};
pub use store::{Lease, Staged, Store, StoreOptions};
pub use store_dir::{Published, Rules, StoreDir, StoreError, Swept};

/// Compiles the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
