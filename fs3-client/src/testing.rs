//! For tests of this crate and of others: what every backend has to keep, a store that fails on purpose, a disk that
//! forgets.

pub mod conformance;
pub mod faulty;
pub mod power_cut;
