//! A range of another source: the payload of a tar.

use super::{ReadError, Source, check_range};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The bytes `start..start + size` of another source.
#[derive(Debug)]
pub struct Part {
    whole: Arc<dyn Source>,
    start: u64,
    size: u64,
}

impl Part {
    /// `None` if the range ends beyond `whole`.
    #[must_use]
    pub fn new(whole: Arc<dyn Source>, start: u64, size: u64) -> Option<Self> {
        (start.checked_add(size)? <= whole.size()).then_some(Self { whole, start, size })
    }
}

impl Source for Part {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        check_range(&"the payload of the tar", self.size, buf.len(), offset)?;
        self.whole.read_exact_at(buf, self.start + offset)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        check_range(&"the payload of the tar", self.size, buf.len(), offset)?;
        self.whole.try_read_at(buf, self.start + offset)
    }

    fn locate(&self, range: Range<u64>) -> Option<(BorrowedFd<'_>, u64)> {
        (range.end <= self.size).then(|| self.whole.locate(self.start + range.start..self.start + range.end))?
    }

    fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        if range.end > self.size {
            return None;
        }
        self.whole.bytes(self.start + range.start..self.start + range.end)
    }

    fn drop_cached(&self, range: Range<u64>) -> bool {
        let end = range.end.min(self.size);
        range.start < end && self.whole.drop_cached(self.start + range.start..self.start + end)
    }
}
