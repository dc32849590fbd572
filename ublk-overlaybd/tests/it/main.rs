//! Tests of the crate as others use it.

#[cfg(feature = "cache")]
mod cached;
mod cli;
mod fuse;
mod hostile;
mod manifest;
mod mkfs;
mod random;
mod space;
mod support;
mod turbo;
