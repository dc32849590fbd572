//! Tests of the converter against real tools, one binary for all.

mod cases_links;
mod cases_manifests;
mod cases_store;
mod cases_tar;
mod cases_tar_large;
mod cases_whiteouts;
mod cases_xattrs;
mod concurrent;
mod crash;
mod determinism;
mod guest;
mod hostile;
mod inspect;
mod lower_symlinks;
mod program;
mod random_stacks;
mod random_trees;
mod source;
mod support;
mod support_cases;
mod support_tar;
mod tar_corpora;
mod tar_corpora_mounted;
mod tar_producers;
mod tar_producers_mounted;
