//! The formats on disk, byte by byte: no I/O here, bytes in and checked values out, or the other way round.
//!
//! A lower layer is `[tar member] -> [ZFile] -> LSMT`, each level known by its magic and each optional but the last.

pub mod checksum;
mod crc32c;
pub mod gzip_index;
pub mod lsmt;
mod lz4;
pub mod tar;
pub mod trace;
pub mod zfile;
