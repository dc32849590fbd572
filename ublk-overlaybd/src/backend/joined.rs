//! Two files as one: what a TurboOCI layer has itself, and the tar that it refers to.

use super::{ReadError, Source, check_range};
use crate::format::lsmt::HEADER_SIZE;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A mapping may go on behind the end of the tar as far as the block that the end is in: there are zeros.
pub(crate) const TAIL: u64 = 4096;

/// `own`, and from [`start`](Self::start) on `target`, with zeros up to a whole block behind it.
#[derive(Debug)]
pub(crate) struct Joined {
    own: Arc<dyn Source>,
    target: Arc<dyn Source>,
    start: u64,
}

impl Joined {
    pub(crate) fn new(own: Arc<dyn Source>, target: Arc<dyn Source>) -> Self {
        let start = own.size().next_multiple_of(HEADER_SIZE as u64);
        Self { own, target, start }
    }

    /// Where the target begins.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Where it ends, zeros included.
    pub(crate) fn target_end(&self) -> u64 {
        self.target.size().next_multiple_of(TAIL)
    }

    fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, ReadError> {
        check_range(&"the layer and what it refers to", self.size(), buf.len(), offset)?;
        let get = |source: &dyn Source, buf: &mut [u8], offset| {
            if wait { source.read_exact_at(buf, offset).map(|()| true) } else { source.try_read_at(buf, offset) }
        };
        // No mapping crosses from one to the other.
        let Some(at) = offset.checked_sub(self.start) else { return get(&*self.own, buf, offset) };
        let there = usize::try_from(self.target.size().saturating_sub(at)).unwrap_or(usize::MAX).min(buf.len());
        let (bytes, zeros) = buf.split_at_mut(there);
        zeros.fill(0);
        if bytes.is_empty() { Ok(true) } else { get(&*self.target, bytes, at) }
    }
}

impl Source for Joined {
    fn size(&self) -> u64 {
        self.start + self.target_end()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.read(buf, offset, true).map(drop)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read(buf, offset, false)
    }

    fn locate(&self, range: Range<u64>) -> Option<(BorrowedFd<'_>, u64)> {
        match range.start.checked_sub(self.start) {
            None => self.own.locate(range),
            Some(start) if range.end - self.start <= self.target.size() => {
                self.target.locate(start..range.end - self.start)
            }
            Some(_) => None,
        }
    }

    fn drop_cached(&self, range: Range<u64>) -> bool {
        match range.start.checked_sub(self.start) {
            None => self.own.drop_cached(range),
            Some(start) => self.target.drop_cached(start..range.end - self.start),
        }
    }
}
