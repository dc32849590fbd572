//! Tests of the crate as others use it.

#[cfg(feature = "cache")]
mod cached;
mod cli;
mod hostile;
mod manifest;
mod mkfs;
mod random;
mod support;
mod turbo;
