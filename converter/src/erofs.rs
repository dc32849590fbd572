//! EROFS as the kernel reads it: the on-disk structures, planning and writing an image, and a reader that never
//! panics on any bytes.

pub mod dirents;
pub mod format;
mod output;
pub mod plan;
pub mod read;
pub mod remap;
pub mod write;
pub mod xattr;
