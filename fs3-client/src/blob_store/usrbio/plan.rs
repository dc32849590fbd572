//! Which transfers a read becomes: pure.

use std::ops::Range;

/// Servers read whole units of this many bytes, so a transfer that begins and ends at them costs no more.
pub(super) const UNIT: u64 = 4096;
/// Reads up to this are small: they go by a ring of their own, and neighbours become one transfer.
pub(super) const SMALL: u64 = 128 << 10;
/// Bytes of a transfer of neighbours.
pub(super) const MERGED: u64 = 256 << 10;
/// Least and most bytes of a transfer of a large read.
const LEAST: u64 = 1 << 20;
pub(super) const MOST: u64 = 4 << 20;

/// A length of ours as one of memory.
pub(super) fn bytes(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// Bytes of a transfer from a file with chunks of this many (its `st_blksize`): the chunk, between 1 and 4 MiB.
pub(super) fn transfer_bytes(chunk: u64) -> u64 {
    if chunk.is_power_of_two() { chunk.clamp(LEAST, MOST) } else { LEAST }
}

/// The range in parts that end at multiples of `unit`, lazily: there may be more than anybody can count.
pub(super) fn parts(range: Range<u64>, unit: u64) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let end = (start - start % unit).saturating_add(unit).min(range.end);
        let part = start..end;
        start = end;
        Some(part)
    })
}

/// The range, grown to whole units.
pub(super) fn aligned(range: &Range<u64>) -> Range<u64> {
    let end = range.end.checked_next_multiple_of(UNIT).unwrap_or(range.end);
    range.start - range.start % UNIT..end
}

/// Both ranges as one, if they touch and are no more than `most` together.
pub(super) fn together(a: &Range<u64>, b: &Range<u64>, most: u64) -> Option<Range<u64>> {
    let (start, end) = (a.start.min(b.start), a.end.max(b.end));
    let touch = a.start <= b.end && b.start <= a.end;
    (touch && end - start <= most).then_some(start..end)
}

/// A buffer's places: first fit, in units of [`UNIT`].
#[derive(Debug)]
pub(super) struct Arena {
    /// What is free, in order, no two touching.
    free: Vec<Range<usize>>,
}

impl Arena {
    pub(super) fn new(bytes: usize) -> Self {
        let (whole, bytes) = (0, bytes - bytes % Self::unit());
        Self { free: std::iter::once(whole..bytes).collect() }
    }

    fn unit() -> usize {
        bytes(UNIT)
    }

    /// A place of `len` bytes.
    pub(super) fn take(&mut self, len: usize) -> Option<usize> {
        let len = len.checked_next_multiple_of(Self::unit())?;
        let at = self.free.iter().position(|free| free.len() >= len)?;
        let start = self.free[at].start;
        self.free[at].start += len;
        if self.free[at].is_empty() {
            self.free.remove(at);
        }
        Some(start)
    }

    /// Takes back what [`take`](Self::take) gave for this `len`.
    pub(super) fn give_back(&mut self, start: usize, len: usize) {
        let end = start + len.next_multiple_of(Self::unit());
        let at = self.free.partition_point(|free| free.start < start);
        self.free.insert(at, start..end);
        if at + 1 < self.free.len() && self.free[at + 1].start == end {
            self.free[at].end = self.free.remove(at + 1).end;
        }
        if at > 0 && self.free[at - 1].end == start {
            self.free[at - 1].end = self.free.remove(at).end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn transfers_are_chunks_within_limits() {
        for (chunk, bytes) in [(4096, LEAST), (512 << 10, LEAST), (1 << 20, 1 << 20), (2 << 20, 2 << 20)] {
            assert_eq!(transfer_bytes(chunk), bytes);
        }
        assert_eq!((transfer_bytes(64 << 20), transfer_bytes(0), transfer_bytes(3 << 20)), (MOST, LEAST, LEAST));
        assert_eq!(parts(0..u64::MAX, LEAST).nth(1), Some(LEAST..2 * LEAST));
        assert_eq!(parts(u64::MAX - 5..u64::MAX, LEAST).last(), Some(u64::MAX - 5..u64::MAX));
        assert_eq!(aligned(&(u64::MAX - 5..u64::MAX)).end, u64::MAX);
    }

    proptest! {
        #[test]
        fn parts_are_the_range(start in 0u64..1 << 30, len in 0u64..1 << 25, unit in prop::sample::select(vec![LEAST, 2 << 20, MOST])) {
            let mut next = start;
            for part in parts(start..start + len, unit) {
                prop_assert_eq!(part.start, next);
                prop_assert!(!part.is_empty() && part.end - part.start <= unit);
                prop_assert!(part.end % unit == 0 || part.end == start + len);
                let whole = aligned(&part);
                prop_assert!(whole.start <= part.start && whole.end >= part.end);
                prop_assert_eq!((whole.start % UNIT, whole.end % UNIT), (0, 0));
                next = part.end;
            }
            prop_assert_eq!(next, start + len);
        }

        #[test]
        fn places_never_overlap_and_all_come_back(lens in prop::collection::vec(1usize..300_000, 1..60), seed: u64) {
            let mut arena = Arena::new(1 << 20);
            let mut held: Vec<(usize, usize)> = Vec::new();
            let mut random = seed;
            for len in lens {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 63 == 1 && !held.is_empty() {
                    let (start, len) = held.swap_remove(usize::try_from(random >> 40).unwrap() % held.len());
                    arena.give_back(start, len);
                }
                if let Some(start) = arena.take(len) {
                    prop_assert!(start % 4096 == 0 && start + len <= 1 << 20);
                    for &(other, length) in &held {
                        prop_assert!(start + len <= other || other + length <= start);
                    }
                    held.push((start, len));
                }
            }
            for (start, len) in held {
                arena.give_back(start, len);
            }
            prop_assert_eq!((arena.free.len(), &arena.free[0]), (1, &(0..1 << 20)));
        }
    }
}
