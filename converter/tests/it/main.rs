//! Tests of the converter against real tools, one binary for all.

mod inspect;
mod source;
mod tar_corpora;
mod tar_producers;
