//! Which sector of which layer holds a sector of the disk.
//!
//! An [`Index`] is sorted, without overlaps and immutable: devices with the same lower layers share one. A [`Stack`] is
//! several of them, newest first; an extent hides what is below it, a hole lets it through. [`Replay`] makes an index
//! from mappings in the order of time.
//!
//! Everything is in sectors of 512 bytes and 64 bits wide.

mod merge;
mod replay;
mod stack;

pub use replay::Replay;
pub use stack::{Pieces, Stack};

use crate::format::lsmt::{MAX_MOFFSET, MAX_SECTORS};
use std::ops::Range;

/// Most layers in a stack.
pub const MAX_LAYERS: usize = 255;

/// What stands behind an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Zeros, whatever is below.
    Zero,
    /// Data of a layer.
    Data {
        /// Which, from the bottom; 0 in the index of a single layer.
        layer: u8,
        /// Sector of the layer's LSMT file where the extent's first sector lies.
        moffset: u64,
    },
}

impl Kind {
    /// The same, `sectors` further on.
    #[must_use]
    pub fn advanced(self, sectors: u64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Data { layer, moffset } => Self::Data { layer, moffset: moffset + sectors },
        }
    }
}

/// A run of sectors that an index knows about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First sector of the disk.
    pub start: u64,
    /// Sectors, at least one.
    pub len: u64,
    /// What stands behind it.
    pub kind: Kind,
}

impl Extent {
    /// The sector after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    /// The part from `start` to `end`, both of which lie within.
    #[must_use]
    pub fn part(&self, start: u64, end: u64) -> Self {
        debug_assert!(self.start <= start && start < end && end <= self.end());
        Self { start, len: end - start, kind: self.kind.advanced(start - self.start) }
    }

    /// Whether `next` begins where this ends, on the disk and in the data.
    #[must_use]
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.end() == next.start && self.kind.advanced(self.len) == next.kind
    }
}

/// What a lookup gives: the pieces of the range asked for, in order and without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First sector of the disk.
    pub start: u64,
    /// Sectors, at least one.
    pub len: u64,
    /// `None` is a hole: what is below shows, and under the lowest layer zeros.
    pub kind: Option<Kind>,
}

impl Piece {
    /// The sector after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Why extents are no index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// One begins before the last ended.
    #[error("the mapping at sector {start} begins before sector {end}, where the one before it ends")]
    Unsorted {
        /// Where it begins.
        start: u64,
        /// Where the one before it ends.
        end: u64,
    },
    /// One has no sectors, or its sectors or its data lie beyond what the format can name.
    #[error("the mapping at sector {start}, {len} sectors long, is out of bounds")]
    OutOfBounds {
        /// Where it begins.
        start: u64,
        /// How long it is.
        len: u64,
    },
    /// More layers than a stack may have.
    #[error("more than {MAX_LAYERS} layers")]
    TooManyLayers,
    /// More than can be counted.
    #[error("{0} mappings are too many")]
    TooMany(usize),
}

/// Length, kind, layer and place of an extent in twelve bytes; the start is kept apart, for the search.
#[derive(Debug, Clone, Copy)]
struct Packed {
    len: u32,
    low: u32,
    high: u32,
}

const ZERO_BIT: u64 = MAX_MOFFSET;
/// Longest extent that is kept in one piece.
const MAX_PACKED: u64 = u32::MAX as u64;

impl Packed {
    fn new(len: u32, kind: Kind) -> Self {
        let word = match kind {
            Kind::Zero => ZERO_BIT,
            Kind::Data { layer, moffset } => moffset | u64::from(layer) << 56,
        };
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Self { len, low: u32::from_le_bytes([a, b, c, d]), high: u32::from_le_bytes([e, f, g, h]) }
    }

    fn kind(self) -> Kind {
        let word = u64::from(self.low) | u64::from(self.high) << 32;
        if word & ZERO_BIT == 0 {
            Kind::Data { layer: word.to_be_bytes()[0], moffset: word & (MAX_MOFFSET - 1) }
        } else {
            Kind::Zero
        }
    }
}

/// A sorted, immutable index without overlaps.
///
/// Twenty bytes a mapping, and a table over them with about one number a mapping: a lookup takes the slot of its sector
/// from the table, and searches only the mappings that begin in that slot.
#[derive(Debug)]
pub struct Index {
    starts: Box<[u64]>,
    rest: Box<[Packed]>,
    /// How many mappings begin before sector `slot << shift`, for each slot, and one more for all of them.
    slots: Box<[u32]>,
    shift: u32,
}

impl Default for Index {
    fn default() -> Self {
        Self { starts: Box::default(), rest: Box::default(), slots: Box::new([0]), shift: 0 }
    }
}

impl Index {
    /// From extents in ascending order; those that continue one another are put together.
    ///
    /// # Errors
    /// They are not in order, overlap, or lie beyond what the format can name.
    pub fn from_sorted(extents: impl IntoIterator<Item = Extent>) -> Result<Self, IndexError> {
        let extents = extents.into_iter();
        let capacity = extents.size_hint().0;
        let (mut starts, mut rest) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        let mut last: Option<Extent> = None;
        let mut push = |extent: Extent| {
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(MAX_PACKED);
                starts.push(extent.start + done);
                rest.push(Packed::new(u32::try_from(len).unwrap_or(u32::MAX), extent.kind.advanced(done)));
                done += len;
            }
        };
        for extent in extents {
            let Extent { start, len, kind } = extent;
            let fits = |from: u64, most| from.checked_add(len).is_some_and(|end| end <= most);
            let data_fits = match kind {
                Kind::Zero => true,
                Kind::Data { moffset, .. } => fits(moffset, MAX_MOFFSET),
            };
            if len == 0 || !fits(start, MAX_SECTORS) || !data_fits {
                return Err(IndexError::OutOfBounds { start, len });
            }
            match &mut last {
                Some(last) if start < last.end() => return Err(IndexError::Unsorted { start, end: last.end() }),
                Some(last) if last.is_followed_by(&extent) => last.len += len,
                _ => {
                    if let Some(last) = last.replace(extent) {
                        push(last);
                    }
                }
            }
        }
        if let Some(last) = last {
            push(last);
        }
        let count = starts.len();
        if u32::try_from(count).is_err() {
            return Err(IndexError::TooMany(count));
        }
        let (slots, shift) = table(&starts);
        Ok(Self { starts: starts.into(), rest: rest.into(), slots, shift })
    }

    /// How many mappings it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether it maps nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The sector after the last one mapped.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.len().checked_sub(1).map_or(0, |last| self.extent(last).end())
    }

    /// Bytes of memory it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of_val(&*self.starts) + size_of_val(&*self.rest) + size_of_val(&*self.slots)
    }

    /// Its extents in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Extent> + '_ {
        (0..self.len()).map(|i| self.extent(i))
    }

    /// The pieces of `range`, holes among them.
    #[must_use]
    pub fn lookup(&self, range: Range<u64>) -> Lookup<'_> {
        let next = if range.is_empty() { 0 } else { self.first_ending_after(range.start) };
        Lookup { index: self, next, at: range.start, end: range.end }
    }

    fn extent(&self, i: usize) -> Extent {
        let packed = self.rest[i];
        Extent { start: self.starts[i], len: packed.len.into(), kind: packed.kind() }
    }

    /// The number of the first extent that ends after `sector`.
    #[inline]
    fn first_ending_after(&self, sector: u64) -> usize {
        let slot = usize::try_from(sector >> self.shift).unwrap_or(usize::MAX);
        let Some(&[from, to]) = slot.checked_add(2).and_then(|end| self.slots.get(slot..end)) else {
            // Beyond the last slot, so the last extent is the only one that may reach there.
            let last = self.len().saturating_sub(1);
            return if self.end() > sector { last } else { self.len() };
        };
        // Of those that begin in the slot, how many begin at or before the sector. No branch depends on what is found.
        let starts = &self.starts[from as usize..to as usize];
        let (mut base, mut size) = (0, starts.len());
        while size > 1 {
            let half = size / 2;
            base += if starts[base + half - 1] <= sector { half } else { 0 };
            size -= half;
        }
        let within = base + usize::from(starts.get(base).is_some_and(|&start| start <= sector));
        let after = from as usize + within;
        match after.checked_sub(1) {
            Some(before) if self.starts[before] + u64::from(self.rest[before].len) > sector => before,
            _ => after,
        }
    }
}

/// Slots for about as many as there are mappings.
fn table(starts: &[u64]) -> (Box<[u32]>, u32) {
    let Some(&last) = starts.last() else { return (Box::new([0]), 0) };
    let mut shift = 0;
    while last >> shift >= starts.len().max(2) as u64 {
        shift += 1;
    }
    // Less than there are starts, or than two.
    let slot_of = |sector: u64| usize::try_from(sector >> shift).unwrap_or(usize::MAX);
    let mut slots = vec![0u32; slot_of(last) + 2];
    for &start in starts {
        slots[slot_of(start) + 1] += 1;
    }
    let mut sum = 0;
    for slot in &mut slots {
        sum += *slot;
        *slot = sum;
    }
    (slots.into(), shift)
}

/// The pieces of a range, see [`Index::lookup`].
#[derive(Debug, Clone)]
pub struct Lookup<'a> {
    index: &'a Index,
    next: usize,
    at: u64,
    end: u64,
}

impl Iterator for Lookup<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.end {
            return None;
        }
        let start = self.at;
        let piece = match self.index.starts.get(self.next) {
            Some(&from) if from <= start => {
                let extent = self.index.extent(self.next);
                let end = extent.end().min(self.end);
                self.next += 1;
                Piece { start, len: end - start, kind: Some(extent.kind.advanced(start - from)) }
            }
            Some(&from) => Piece { start, len: from.min(self.end) - start, kind: None },
            None => Piece { start, len: self.end - start, kind: None },
        };
        self.at = piece.end();
        Some(piece)
    }
}

#[cfg(test)]
mod tests;
