//! Tests of the crate as others use it.

mod cli;
mod hostile;
mod manifest;
mod mkfs;
mod random;
mod support;
mod turbo;
