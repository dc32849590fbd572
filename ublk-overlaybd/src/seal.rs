//! Sealing a disk's writable layer while it is in use.
//!
//! A small file, the *chain*, names the layers that were sealed so far and the pair that is written to. A seal goes:
//!
//! 1. A new, empty pair is made and synced.
//! 2. The chain says `sealing` of the old pair and `upper` of the new one (written beside, synced, renamed). From here on
//!    the seal is a fact: nothing was written to the new pair yet, so a restart that finds either state has the same disk.
//! 3. The disk's pointer is exchanged: the new pair takes all writes. This is the only moment that requests can notice, and
//!    it takes the same time whatever is mapped.
//! 4. In the background: the last writes to the old pair end, it is flushed, its sorted index and a trailer are put after
//!    its data and synced. Meanwhile it is read as before. That it now ends in a trailer does not matter until
//! 5. the chain lists the data file among its layers. Then its index file and sidecar are removed.
//!
//! A restart ([`Chain::open`]) that finds `sealing` does steps 4 and 5. Bytes of an ending that was interrupted stay
//! where they are, since nothing maps them, and another ending follows.

mod chain;

pub use chain::Chain;

use crate::backend::{ReadError, Source, check_range};
use crate::engine::EngineError;
use crate::upper::{Upper, UpperError};
use crate::write::WriteError;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Why nothing was sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The chain's file cannot be read or written.
    #[error("{path}: cannot {doing}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The chain's file is no such file.
    #[error("{path}: {why}")]
    Chain {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The last seal has not ended, or has failed: [`Chain::finish`] tries again.
    #[error("the last seal has not ended")]
    Unfinished,
    /// A writable layer cannot be opened or written.
    #[error(transparent)]
    Upper(#[from] UpperError),
    /// The ending cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The disk does not take it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A sealed layer cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// A moment of a seal, for those who watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The new pair is there.
    Created,
    /// The chain says that the old one is being sealed.
    Named,
    /// The new pair takes the writes.
    Switched,
    /// The old one's last write has ended and is durable.
    Drained,
    /// The ending is written and synced.
    Ended,
    /// The chain lists the layer.
    Listed,
    /// What is not needed any more is gone.
    Cleaned,
}

/// The data of a writable layer that takes no more writes.
#[derive(Debug)]
pub(crate) struct UpperData {
    upper: Arc<Upper>,
    size: u64,
}

impl UpperData {
    pub(crate) fn new(upper: Arc<Upper>) -> Self {
        let size = upper.data_end();
        Self { upper, size }
    }
}

impl Source for UpperData {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        check_range(&self.upper.name(), self.size, buf.len(), offset)?;
        self.upper.read_data(buf, offset).map_err(|source| {
            let what = self.upper.name().to_owned();
            ReadError::Local { what, source }
        })
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read_exact_at(buf, offset).map(|()| true)
    }

    fn locate(&self, range: Range<u64>) -> Option<(BorrowedFd<'_>, u64)> {
        let descriptor = self.upper.data().descriptor()?;
        (range.start <= range.end && range.end <= self.size).then_some((descriptor, range.start))
    }
}

#[cfg(test)]
mod tests;
