//! Layers are written: new pairs, committed and merged layers, sealed ones, and disks as plain files.
//!
//! A committed layer is planned whole ([`plan`]) before a byte is written: the plan can be read like a file, from any
//! place, so that copying and compressing it goes in parallel and gives the same bytes whatever the number of threads.
//! Every file gets its name when it is whole and on the disk ([`publish`]).

pub mod commit;
mod copy;
pub mod create;
pub mod export;
pub mod import;
pub mod plan;
pub mod publish;
pub mod repair;
pub mod resize;
pub mod seal;
mod zfile;

use crate::backend::ReadError;
use crate::format::lsmt::{EntryError, HeaderError, MAX_ENTRIES_SEALED};
use crate::format::tar::TarError;
use crate::image::ImageError;
use crate::index::IndexError;
use std::io;
use std::path::{Path, PathBuf};

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The input cannot be read, or is damaged.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The layers do not make a disk.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The system says so.
    #[error("{}: cannot {doing}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What it says.
        source: io::Error,
    },
    /// It would overwrite something.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// The header cannot be written.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The index cannot be written.
    #[error("a mapping does not fit the format: {0}")]
    Entry(#[from] EntryError),
    /// The mappings contradict one another.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The tar cannot be written.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// More mappings than the C++ reads.
    #[error("the layer would have {0} mappings; overlaybd refuses layers with more than {MAX_ENTRIES_SEALED}")]
    TooManyEntries(u64),
    /// The caller asked for what cannot be.
    #[error("{0}")]
    Asked(String),
}

impl WriteError {
    /// Whether the input's bytes are wrong.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Read(error) => error.is_corrupt(),
            Self::Image(error) => error.is_corrupt(),
            _ => false,
        }
    }

    pub(crate) fn io(path: &Path, doing: &'static str) -> impl Fn(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path: path.clone(), doing, source }
    }
}

/// Receives how far something is; called from one thread or several.
pub trait Progress: Sync {
    /// `bytes` more are done.
    fn done(&self, bytes: u64) {
        let _ = bytes;
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
