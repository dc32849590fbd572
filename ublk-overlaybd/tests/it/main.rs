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

#[cfg(feature = "ublk")]
mod daemon;
#[cfg(feature = "ublk")]
mod power;
#[cfg(feature = "ublk")]
mod ublk_devices;
