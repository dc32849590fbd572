//! Tests of the converter against real tools, one binary for all.

mod inspect;
mod random_stacks;
mod random_trees;
mod source;
mod support;
mod tar_corpora;
mod tar_producers;
