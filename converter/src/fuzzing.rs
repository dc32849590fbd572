//! Bodies of the fuzz targets: each takes any bytes and must neither panic nor allocate without bound. They run under
//! cargo-fuzz and, with random bytes, as property tests on stable.

pub mod erofs;
pub mod manifest;
pub mod unpack;
