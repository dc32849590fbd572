//! What a block device serves.

use rustix::io::Errno;
use std::fmt;

/// A disk behind a block device.
///
/// Any number of operations run at once, from any thread; those on overlapping ranges are in no order, as on every disk.
/// An operation that was answered is seen by all that begin later. It survives a power cut when a [`Operation::Flush`]
/// that began after it has succeeded, or when it was a durable write itself.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Length in bytes, a multiple of 512. It changes only when [`super::device`] is told so.
    fn size(&self) -> u64;

    /// Whether writing is refused.
    fn is_read_only(&self) -> bool;

    /// Does it if that takes no waiting for anything but memory and the page cache: no backend, no sync. `None` when it
    /// would; nothing has happened then, except that a buffer may hold anything.
    fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<(), Errno>>;

    /// Does it, and blocks the thread for as long as it takes, which the disk bounds by its own deadlines.
    ///
    /// # Errors
    /// What the block layer is told: `IO` for what cannot be read or written, `NOSPC` for a full disk or quota, `ROFS` for
    /// writing to a read-only disk.
    fn perform(&self, operation: &mut Operation<'_>) -> Result<(), Errno>;
}

/// What a block device is asked. Offsets and lengths are in bytes, multiples of 512, inside the disk.
#[derive(Debug)]
pub enum Operation<'b> {
    /// Fill `into` from `at`.
    Read {
        /// Offset on the disk.
        at: u64,
        /// As many bytes as are wanted.
        into: &'b mut [u8],
    },
    /// Write `from` at `at`.
    Write {
        /// Offset on the disk.
        at: u64,
        /// The bytes.
        from: &'b [u8],
        /// Answer only when it survives a power cut (FUA).
        durable: bool,
    },
    /// Make all that was answered survive a power cut.
    Flush,
    /// The range is not needed any more. It reads as zeros afterwards.
    Discard {
        /// Offset on the disk.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// The range reads as zeros afterwards.
    WriteZeroes {
        /// Offset on the disk.
        at: u64,
        /// Bytes.
        len: u64,
        /// Keep the space, so that a later write cannot run out of it.
        keep: bool,
        /// Answer only when it survives a power cut (FUA).
        durable: bool,
    },
}

impl Operation<'_> {
    /// Whether it changes the disk.
    #[must_use]
    pub const fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }
}
