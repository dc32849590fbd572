//! Where the next data goes, how much there may be, and which of it nobody needs any more.

use super::UpperError;
use super::map::Ranges;
use crate::format::lsmt::{FIRST_SECTOR, SECTOR};
use fs3_client::Medium;
use std::ops::Range;

/// Sectors of a block of the file system below: less than that frees nothing.
const BLOCK: u64 = 8;
/// How often the free space of the file system is asked for: each time so many sectors were given out.
const LOOK_EVERY: u64 = 4 << 20 >> 9;

/// How much a writable layer may take.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Bytes of data that may be allocated; beyond, writes fail with ENOSPC and reads go on.
    pub quota: Option<u64>,
    /// Bytes of the file system that are left alone: writes fail with ENOSPC before they would be used. That is also
    /// what the index grows into, so that a flush does not fail for want of it.
    pub reserve: u64,
}

/// The allocation of the data file. Offsets are in sectors of the file.
#[derive(Debug)]
pub(super) struct Log {
    end: u64,
    punched: u64,
    dead: Ranges,
    limits: Limits,
    /// Sectors given out since the file system was asked.
    unasked: u64,
    /// The file system has no holes.
    solid: bool,
}

impl Log {
    pub(super) fn new(end: u64, limits: Limits) -> Self {
        Self {
            end: end.max(FIRST_SECTOR),
            punched: 0,
            dead: Ranges::default(),
            limits,
            unasked: LOOK_EVERY,
            solid: false,
        }
    }

    /// Gives out `sectors` at the end.
    pub(super) fn allocate(&mut self, sectors: u64, data: &dyn Medium) -> Result<u64, UpperError> {
        let bytes = sectors * SECTOR;
        if self.limits.quota.is_some_and(|quota| self.allocated() + bytes > quota) {
            return Err(UpperError::NoSpace);
        }
        self.unasked += sectors;
        if self.limits.reserve > 0 && self.unasked >= LOOK_EVERY {
            if let Some(free) = free_bytes(data)
                && free < self.limits.reserve.saturating_add(bytes)
            {
                return Err(UpperError::NoSpace);
            }
            self.unasked = 0;
        }
        let at = self.end;
        self.end += sectors;
        Ok(at)
    }

    /// Bytes of the file that are not freed, the header among them.
    pub(super) fn allocated(&self) -> u64 {
        (self.end - self.punched) * SECTOR
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Notes that nobody needs `range` any more, and gives the part of the file that can be freed for it, in sectors.
    pub(super) fn bury(&mut self, range: Range<u64>) -> Option<Range<u64>> {
        let (all, left, right) = self.dead.add(range);
        let (left, right) = (blocks(&left), blocks(&right));
        let mut free = blocks(&all);
        if !left.is_empty() {
            free.start = left.end;
        }
        if !right.is_empty() {
            free.end = right.start;
        }
        (!self.solid && !free.is_empty()).then_some(free)
    }

    /// Notes that `range` was freed.
    pub(super) fn freed(&mut self, range: &Range<u64>) {
        self.punched += range.end - range.start;
    }

    /// Notes that nothing can be freed here.
    pub(super) fn cannot_free(&mut self) {
        self.solid = true;
    }
}

/// The whole blocks of a range.
fn blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(BLOCK);
    start..(range.end / BLOCK * BLOCK).max(start)
}

fn free_bytes(data: &dyn Medium) -> Option<u64> {
    let stat = rustix::fs::fstatvfs(data.descriptor()?).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_are_freed_once_each() {
        let mut log = Log::new(100, Limits::default());
        assert_eq!(log.bury(17..20), None);
        assert_eq!(log.bury(20..33), Some(24..32));
        assert_eq!(log.bury(40..48), Some(40..48));
        assert_eq!(log.bury(33..40), Some(32..40));
        assert_eq!(log.bury(8..17), Some(8..24));
        assert_eq!(log.bury(48..50), None);
    }
}
