//! What is counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is counted, as it is now.
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) reads: Count,
    pub(super) transfers: Count,
    pub(super) bytes: Count,
    pub(super) errors: Count,
    pub(super) rings: Count,
    pub(super) failed_rings: Count,
    pub(super) by_mount: Count,
    /// How often a daemon was found gone: rings of before are dead.
    pub(super) gone: Count,
    left_rings: Count,
    left_bytes: Count,
    most_left: u64,
}

impl Counts {
    pub(super) fn new(most_left: u64) -> Self {
        Self {
            reads: Count::default(),
            transfers: Count::default(),
            bytes: Count::default(),
            errors: Count::default(),
            rings: Count::default(),
            failed_rings: Count::default(),
            by_mount: Count::default(),
            gone: Count::default(),
            left_rings: Count::default(),
            left_bytes: Count::default(),
            most_left,
        }
    }

    pub(super) fn leave_behind(&self, bytes: u64) {
        self.left_rings.add(1);
        self.left_bytes.add(bytes);
    }

    /// How many rings were left behind, of all lanes.
    pub(super) fn left(&self) -> u64 {
        self.left_rings.get()
    }

    pub(super) fn is_quarantine_full(&self) -> bool {
        self.left_rings.get() >= self.most_left
    }

    pub(super) fn snapshot(&self, files: usize) -> UsrbioCounts {
        UsrbioCounts {
            reads: self.reads.get(),
            transfers: self.transfers.get(),
            bytes: self.bytes.get(),
            errors: self.errors.get(),
            rings: self.rings.get(),
            failed_rings: self.failed_rings.get(),
            by_mount: self.by_mount.get(),
            left_rings: self.left_rings.get(),
            left_bytes: self.left_bytes.get(),
            files,
        }
    }
}

/// What rings did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsrbioCounts {
    /// Reads that were handed to rings; a large one counts once for each of its parts.
    pub reads: u64,
    /// Transfers that they became: fewer, where small neighbours went together.
    pub transfers: u64,
    /// Bytes that arrived, those that nobody asked for included.
    pub bytes: u64,
    /// Transfers that the daemon answered with an error.
    pub errors: u64,
    /// Rings that were made.
    pub rings: u64,
    /// Rings that could not be made.
    pub failed_rings: u64,
    /// Reads that the mount did instead.
    pub by_mount: u64,
    /// Rings that were left behind with their buffers, since something may still be written to them.
    pub left_rings: u64,
    /// Bytes of those buffers.
    pub left_bytes: u64,
    /// Files that are kept open and registered.
    pub files: usize,
}
