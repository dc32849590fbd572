//! Backends and stores against a real S3 server and a real registry, and through a proxy that breaks things;
//! the chunk cache in processes that are killed.

mod answers;
mod backends;
#[cfg(feature = "cache")]
mod cache;
#[cfg(feature = "cache")]
mod cache_places;
mod leases;
mod mount;
mod registry;
mod s3_faults;
mod stores;
mod support;
