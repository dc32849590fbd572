//! Bodies of the fuzz targets in `fuzz/`, one a file: each takes any bytes, must neither panic nor allocate without
//! bound, and panics if an invariant that its file states does not hold. They are here so that property tests run the
//! same code on stable Rust.

pub mod erofs;
pub mod layer;
pub mod manifest;
pub mod merge;
pub mod tar;
pub mod unpack;
