//! For tests of this crate and of others: what every backend has to keep, and a store that fails on purpose.

pub mod conformance;
pub mod faulty;
