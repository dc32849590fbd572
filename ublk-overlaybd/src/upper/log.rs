//! Where the next data goes, how much there may be, and which of it nobody needs any more.

use super::UpperError;
use super::map::Ranges;
use crate::format::lsmt::{FIRST_SECTOR, SECTOR};
use fs3_client::Medium;
use std::ops::Range;

/// Sectors of a block of the file system below: less than that frees nothing.
pub(super) const BLOCK: u64 = 8;
/// The free space of the file system is asked for each time so many sectors were given out, and more often when it runs out.
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
    /// Always the end of a block.
    end: u64,
    /// The rest of the block that writes go to that are no whole blocks: so these do not shift the others across two.
    small: Range<u64>,
    /// Rests of such blocks that nobody will use.
    unused: Vec<Range<u64>>,
    punched: u64,
    dead: Ranges,
    limits: Limits,
    /// Sectors that may be given out before the file system is asked again.
    unasked: u64,
    /// The file system has no holes.
    solid: bool,
}

impl Log {
    pub(super) fn new(end: u64, limits: Limits) -> Self {
        Self {
            end: end.max(FIRST_SECTOR).next_multiple_of(BLOCK),
            small: 0..0,
            unused: Vec::new(),
            punched: 0,
            dead: Ranges::default(),
            limits,
            unasked: 0,
            solid: false,
        }
    }

    /// Gives out `sectors`: whole blocks at the end, and less than that in a block with others of the kind.
    pub(super) fn allocate(&mut self, sectors: u64, data: &dyn Medium) -> Result<u64, UpperError> {
        if !sectors.is_multiple_of(BLOCK) && sectors <= self.small.end - self.small.start {
            let at = self.small.start;
            self.small.start += sectors;
            return Ok(at);
        }
        let whole = sectors.next_multiple_of(BLOCK);
        let bytes = whole * SECTOR;
        if self.limits.quota.is_some_and(|quota| self.allocated() + bytes > quota) {
            return Err(UpperError::NoSpace);
        }
        if self.limits.reserve > 0 && self.unasked < whole {
            let free = free_bytes(data).unwrap_or(u64::MAX);
            let Some(left) = free.checked_sub(self.limits.reserve.saturating_add(bytes)) else {
                return Err(UpperError::NoSpace);
            };
            // Others use it up, too.
            self.unasked = whole + LOOK_EVERY.min(left / SECTOR / 2);
        }
        self.unasked = self.unasked.saturating_sub(whole);
        let at = self.end;
        self.end += whole;
        let rest = at + sectors..self.end;
        // The larger rest is kept.
        let worse = if rest.end - rest.start > self.small.end - self.small.start {
            std::mem::replace(&mut self.small, rest)
        } else {
            rest
        };
        if !worse.is_empty() {
            self.unused.push(worse);
        }
        Ok(at)
    }

    /// What was given out to nobody, and will not be.
    pub(super) fn take_unused(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.unused)
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
    fn blocks_are_not_shifted_by_what_is_smaller() {
        let disk = fs3_client::testing::power_cut::Disk::new().open("data");
        let mut log = Log::new(9, Limits { quota: Some(4096 * 7), reserve: 0 });
        assert_eq!(log.end(), 16);
        let given: Vec<_> = [8, 1, 16, 3, 4, 5].map(|sectors| log.allocate(sectors, &disk).unwrap()).into();
        assert_eq!(given, [16, 24, 32, 25, 28, 48]);
        assert!(log.take_unused().is_empty());
        assert!(log.allocate(8, &disk).unwrap_err().is_no_space());
        assert_eq!(log.allocate(2, &disk).unwrap(), 53);
        assert_eq!(log.end(), 56);
        // Of two rests the larger is kept, and the other is garbage.
        let mut log = Log::new(8, Limits::default());
        assert_eq!([1, 10].map(|sectors| log.allocate(sectors, &disk).unwrap()), [8, 16]);
        assert_eq!(log.allocate(7, &disk).unwrap(), 9);
        assert!(log.take_unused().iter().eq([&(26..32)]));
    }

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
