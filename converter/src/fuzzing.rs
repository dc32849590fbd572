//! Bodies of the fuzz targets; the same functions run as property tests on stable Rust.

pub mod erofs;
