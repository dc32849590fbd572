//! Writes that overlap wait for one another; others do not.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The ranges being written: as many as there are requests at once, so a list is enough.
#[derive(Debug, Default)]
pub(super) struct RangeLocks {
    held: Mutex<Vec<Range<u64>>>,
    freed: Condvar,
}

/// A range, until it is dropped.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl RangeLocks {
    fn held(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody has any of `range`, and takes it. Whoever has one must not ask for another.
    pub(super) fn lock(&self, range: Range<u64>) -> Locked<'_> {
        let overlaps =
            |held: &mut Vec<Range<u64>>| held.iter().any(|other| other.start < range.end && range.start < other.end);
        let held = self.freed.wait_while(self.held(), overlaps);
        held.unwrap_or_else(PoisonError::into_inner).push(range.clone());
        Locked { locks: self, range }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held();
        if let Some(place) = held.iter().position(|other| *other == self.range) {
            held.swap_remove(place);
        }
        drop(held);
        self.locks.freed.notify_all();
    }
}
