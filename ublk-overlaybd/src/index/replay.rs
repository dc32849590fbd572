//! Mappings in the order of time, the later over the earlier.

use super::{Extent, Index, IndexError, Kind};
use std::collections::BTreeMap;

/// An interval map that grows: what a writable layer's index says when it is read from its beginning.
///
/// About 60 bytes a mapping.
#[derive(Debug, Default, Clone)]
pub struct Replay {
    /// By start: the end, and what stands behind.
    map: BTreeMap<u64, (u64, Kind)>,
}

impl Replay {
    /// With nothing mapped.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `extent` over what was there; one without sectors changes nothing.
    pub fn insert(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        self.remove(extent.start, extent.end());
        self.map.insert(extent.start, (extent.end(), extent.kind));
    }

    /// Makes a hole from `start` to `end`.
    pub fn remove(&mut self, start: u64, end: u64) {
        if let Some((&before, &(before_end, kind))) = self.map.range(..start).next_back()
            && before_end > start
        {
            self.map.insert(before, (start, kind));
            if before_end > end {
                self.map.insert(end, (before_end, kind.advanced(end - before)));
                return;
            }
        }
        while let Some((&first, &(first_end, kind))) = self.map.range(start..end).next() {
            self.map.remove(&first);
            if first_end > end {
                self.map.insert(end, (first_end, kind.advanced(end - first)));
            }
        }
    }

    /// How many mappings it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it maps nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Its extents in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.map.iter().map(|(&start, &(end, kind))| Extent { start, len: end - start, kind })
    }

    /// As it is now, for lookups.
    ///
    /// # Errors
    /// What was inserted lies beyond what the format can name.
    pub fn to_index(&self) -> Result<Index, IndexError> {
        Index::from_sorted(self.iter())
    }
}
