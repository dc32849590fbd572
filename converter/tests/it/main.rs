//! Tests of the converter against real tools, one binary for all.

mod concurrent;
mod crash;
mod determinism;
mod hostile;
mod inspect;
mod program;
mod random_stacks;
mod random_trees;
mod source;
mod support;
mod tar_corpora;
mod tar_producers;
