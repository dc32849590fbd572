//! What a writable layer maps now: an interval map that is read and changed in place.

use crate::index::{Extent, Index, IndexError, Kind, Piece};
use std::collections::BTreeMap;
use std::ops::Range;

/// What stands behind a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whole {
    /// Nothing.
    Hole,
    /// One mapping.
    Mapped(Kind),
    /// Several, or one and a hole.
    Several,
}

/// An interval map, the later over the earlier. Neighbours that continue one another are one mapping.
///
/// A mapping takes 32 bytes in a B-tree node, 40 to 70 with the node's free places: a gigabyte written at random in
/// blocks of 4 KiB is 262,144 mappings and at most 18 MB.
#[derive(Debug, Default)]
pub(super) struct Map {
    /// By first sector: the sector after the last, and what stands behind.
    by_start: BTreeMap<u64, (u64, Kind)>,
}

impl Map {
    /// Puts `new` over what was there, and tells `displaced` which ranges of the data nobody needs any more.
    pub(super) fn insert(&mut self, new: Extent, mut displaced: impl FnMut(Range<u64>)) {
        if new.len == 0 {
            return;
        }
        let (start, end) = (new.start, new.end());
        let mut tell = |kind: Kind, len: u64| {
            if let Kind::Data { moffset, .. } = kind {
                displaced(moffset..moffset + len);
            }
        };
        if let Some((&before, &(before_end, kind))) = self.by_start.range(..start).next_back()
            && before_end > start
        {
            self.by_start.insert(before, (start, kind));
            tell(kind.advanced(start - before), before_end.min(end) - start);
            if before_end > end {
                self.by_start.insert(end, (before_end, kind.advanced(end - before)));
            }
        }
        while let Some((&first, &(first_end, kind))) = self.by_start.range(start..end).next() {
            self.by_start.remove(&first);
            tell(kind, first_end.min(end) - first);
            if first_end > end {
                self.by_start.insert(end, (first_end, kind.advanced(end - first)));
            }
        }
        self.join(new);
    }

    /// Inserts what overlaps nothing, with the neighbours that it continues or that continue it.
    fn join(&mut self, mut new: Extent) {
        if let Some((&before, &(before_end, kind))) = self.by_start.range(..new.start).next_back() {
            let before = Extent { start: before, len: before_end - before, kind };
            if before.is_followed_by(&new) {
                new = Extent { len: before.len + new.len, ..before };
            }
        }
        if let Some(&(end, kind)) = self.by_start.get(&new.end()) {
            let after = Extent { start: new.end(), len: end - new.end(), kind };
            if new.is_followed_by(&after) {
                self.by_start.remove(&after.start);
                new.len += after.len;
            }
        }
        self.by_start.insert(new.start, (new.end(), new.kind));
    }

    /// What stands behind all of `range`, if that is one thing.
    pub(super) fn whole(&self, range: &Range<u64>) -> Whole {
        match self.by_start.range(..range.end).next_back() {
            // The last that begins before the end: where it does not reach into the range, nothing does.
            Some((_, &(end, _))) if end <= range.start => Whole::Hole,
            None => Whole::Hole,
            Some((&start, &(end, kind))) if start <= range.start && range.end <= end => {
                Whole::Mapped(kind.advanced(range.start - start))
            }
            Some(_) => Whole::Several,
        }
    }

    /// The pieces of `range`, holes among them.
    pub(super) fn lookup(&self, range: Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        let before = self.by_start.range(..=range.start).next_back();
        let from = before.map_or(range.start, |(&start, _)| start);
        for (&start, &(end, kind)) in self.by_start.range(from..range.end.max(from)) {
            let (first, last) = (start.max(range.start), end.min(range.end));
            if first >= last {
                continue;
            }
            if at < first {
                pieces.push(Piece { start: at, len: first - at, kind: None });
            }
            pieces.push(Piece { start: first, len: last - first, kind: Some(kind.advanced(first - start)) });
            at = last;
        }
        if at < range.end {
            pieces.push(Piece { start: at, len: range.end - at, kind: None });
        }
        pieces
    }

    pub(super) fn len(&self) -> usize {
        self.by_start.len()
    }

    /// Its extents in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.by_start.iter().map(|(&start, &(end, kind))| Extent { start, len: end - start, kind })
    }

    /// As it is now, sorted.
    pub(super) fn to_index(&self) -> Result<Index, IndexError> {
        Index::from_sorted(self.iter())
    }
}

/// A set of ranges, adjacent ones put together.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    by_start: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Adds a range, and gives the one that it is now part of with the parts of that one that were there before: at its
    /// left, and at its right.
    pub(super) fn add(&mut self, new: Range<u64>) -> (Range<u64>, Range<u64>, Range<u64>) {
        let mut all = new.clone();
        let (mut left, mut right) = (new.start..new.start, new.end..new.end);
        if let Some((&start, &end)) = self.by_start.range(..=new.start).next_back()
            && end >= new.start
        {
            left = start..end;
            all = start..end.max(new.end);
        }
        while let Some((&start, &end)) = self.by_start.range(new.start..=all.end).next() {
            if start != all.start {
                right = start..end;
            }
            all.end = all.end.max(end);
            self.by_start.remove(&start);
        }
        self.by_start.insert(all.start, all.end);
        (all, left, right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against an array that says for each sector what stands behind it, and what data is still in use.
        #[test]
        fn it_agrees_with_an_array(ops in prop::collection::vec((0u64..40, 1u64..12, any::<bool>()), 1..60)) {
            let (mut map, mut array) = (Map::default(), [None; 52]);
            let (mut next, mut dead) = (8, std::collections::BTreeSet::new());
            for (start, len, zero) in ops {
                let kind = if zero { Kind::Zero } else { Kind::Data { layer: 0, moffset: next } };
                map.insert(Extent { start, len, kind }, |range| range.for_each(|sector| assert!(dead.insert(sector))));
                for i in 0..len {
                    array[usize::try_from(start + i).unwrap()] = Some(kind.advanced(i));
                }
                if !zero {
                    next += len;
                }
                for from in [0, start, start + len / 2, 17] {
                    let mut at = from;
                    for piece in map.lookup(from..52) {
                        prop_assert_eq!(piece.start, at);
                        for i in 0..piece.len {
                            let kind = piece.kind.map(|kind| kind.advanced(i));
                            prop_assert_eq!(kind, array[usize::try_from(at + i).unwrap()]);
                        }
                        at = piece.end();
                    }
                    prop_assert_eq!(at, 52);
                }
                for (from, to) in [(0, 1), (start, start + len), (start + len / 2, start + len + 1), (3, 52), (17, 25)] {
                    let to = to.min(52).max(from + 1);
                    let pieces = map.lookup(from..to);
                    let expected = match (&pieces[..], pieces[0].kind) {
                        ([_], None) => Whole::Hole,
                        ([_], Some(kind)) => Whole::Mapped(kind),
                        _ => Whole::Several,
                    };
                    prop_assert_eq!(map.whole(&(from..to)), expected);
                }
                let live: std::collections::BTreeSet<_> = array.iter().flatten().filter_map(|kind| match kind {
                    Kind::Data { moffset, .. } => Some(*moffset),
                    Kind::Zero => None,
                }).collect();
                prop_assert!((8..next).all(|sector| live.contains(&sector) != dead.contains(&sector)));
            }
            prop_assert!(map.to_index().unwrap().len() == map.len());
        }

        #[test]
        fn ranges_are_put_together(adds in prop::collection::vec((0u64..60, 1u64..6), 1..40)) {
            let (mut ranges, mut array) = (Ranges::default(), [false; 70]);
            for (start, len) in adds {
                // Only what was not there is added, as the data of a log dies once.
                if (start..start + len).any(|i| array[usize::try_from(i).unwrap()]) {
                    continue;
                }
                let (all, left, right) = ranges.add(start..start + len);
                prop_assert_eq!(left.end, start);
                prop_assert_eq!(right.start, start + len);
                (start..start + len).for_each(|i| array[usize::try_from(i).unwrap()] = true);
                prop_assert!(all.clone().all(|i| array[usize::try_from(i).unwrap()]));
                prop_assert_eq!((all.start, all.end), (left.start, right.end));
                prop_assert!(!array[usize::try_from(all.end).unwrap()]);
                prop_assert!(all.start == 0 || !array[usize::try_from(all.start - 1).unwrap()]);
            }
        }
    }
}
