//! `dsec-convert`: see `dsec-convert --help`.
fn main() {}
