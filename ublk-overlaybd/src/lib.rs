#![doc = include_str!("../README.md")]

pub mod backend;
pub mod engine;
pub mod format;
pub mod fuse;
pub mod fuzzing;
pub mod image;
pub mod index;
pub mod layer;
pub mod mkfs;
pub mod seal;
pub mod upper;
pub mod write;
