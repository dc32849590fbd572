//! `layerd`.
fn main() {}
