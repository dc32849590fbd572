//! Bodies of the fuzz targets in `fuzz/`, one a file. They are here so that property tests run the same code on
//! stable. Each takes any bytes and panics if an invariant that its file states does not hold.

mod tar;

pub use self::tar::tar;
