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
    #[inline]
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
    #[inline]
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
    #[inline]
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

/// An extent in sixteen bytes, much as on disk: the first word is in the order of starts.
#[derive(Debug, Clone, Copy)]
struct Packed {
    /// Start, and length in the low 14 bits.
    range: u64,
    /// Layer, whether it is zeros, and place.
    place: u64,
}

const LENGTH_BITS: u32 = 14;
/// Longest extent that is kept in one piece; whole blocks of 4 KiB.
const MAX_PACKED: u64 = (1 << LENGTH_BITS) - 8;
const ZERO_BIT: u64 = MAX_MOFFSET;

impl Packed {
    fn new(start: u64, len: u64, kind: Kind) -> Self {
        let place = match kind {
            Kind::Zero => ZERO_BIT,
            Kind::Data { layer, moffset } => moffset | u64::from(layer) << 56,
        };
        Self { range: start << LENGTH_BITS | len, place }
    }

    #[inline]
    fn start(self) -> u64 {
        self.range >> LENGTH_BITS
    }

    #[inline]
    fn extent(self) -> Extent {
        let kind = if self.place & ZERO_BIT == 0 {
            Kind::Data { layer: self.place.to_be_bytes()[0], moffset: self.place & (MAX_MOFFSET - 1) }
        } else {
            Kind::Zero
        };
        Extent { start: self.start(), len: self.range & ((1 << LENGTH_BITS) - 1), kind }
    }
}

/// A sorted, immutable index without overlaps.
///
/// Sixteen bytes a mapping (of 8 MiB at most), and a table over them with one or two numbers a mapping: a lookup takes the
/// slot of its sector from the table, and searches only the mappings that begin in that slot.
#[derive(Debug)]
pub struct Index {
    extents: Box<[Packed]>,
    /// How many mappings begin before sector `slot << shift`, for each slot, and one more for all of them.
    slots: Box<[u32]>,
    shift: u32,
}

impl Default for Index {
    fn default() -> Self {
        Self { extents: Box::default(), slots: Box::new([0]), shift: 0 }
    }
}

impl Index {
    /// From extents in ascending order; those that continue one another are put together.
    ///
    /// # Errors
    /// They are not in order, overlap, or lie beyond what the format can name.
    pub fn from_sorted(extents: impl IntoIterator<Item = Extent>) -> Result<Self, IndexError> {
        let extents = extents.into_iter();
        let mut packed = Vec::with_capacity(extents.size_hint().0);
        let mut last: Option<Extent> = None;
        let mut push = |extent: Extent| {
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(MAX_PACKED);
                packed.push(Packed::new(extent.start + done, len, extent.kind.advanced(done)));
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
        let count = packed.len();
        if u32::try_from(count).is_err() {
            return Err(IndexError::TooMany(count));
        }
        let (slots, shift) = table(&packed);
        Ok(Self { extents: packed.into(), slots, shift })
    }

    /// How many mappings it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether it maps nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// The sector after the last one mapped.
    #[must_use]
    #[inline]
    pub fn end(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.extent().end())
    }

    /// Bytes of memory it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of_val(&*self.extents) + size_of_val(&*self.slots)
    }

    /// Its extents in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Extent> + '_ {
        self.extents.iter().map(|packed| packed.extent())
    }

    /// The pieces of `range`, holes among them.
    #[must_use]
    #[inline]
    pub fn lookup(&self, range: Range<u64>) -> Lookup<'_> {
        let next = if range.is_empty() { 0 } else { self.first_ending_after(range.start) };
        Lookup { index: self, next, at: range.start, end: range.end }
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
        let inside = &self.extents[from as usize..to as usize];
        let key = (sector << LENGTH_BITS) | ((1 << LENGTH_BITS) - 1);
        let (mut base, mut size) = (0, inside.len());
        while size > 1 {
            let half = size / 2;
            base += if inside[base + half - 1].range <= key { half } else { 0 };
            size -= half;
        }
        let within = base + usize::from(inside.get(base).is_some_and(|packed| packed.range <= key));
        let after = from as usize + within;
        // Without a branch here too: whether a sector is mapped cannot be foreseen.
        let before = after.saturating_sub(1);
        let reaches = self.extents.get(before).is_some_and(|packed| packed.extent().end() > sector);
        after - usize::from(reaches && after > 0)
    }
}

/// Slots for up to twice as many as there are mappings.
fn table(extents: &[Packed]) -> (Box<[u32]>, u32) {
    let Some(last) = extents.last().map(|packed| packed.start()) else { return (Box::new([0]), 0) };
    let mut shift = 0;
    while last >> shift >= extents.len().max(1) as u64 * 2 {
        shift += 1;
    }
    // Less than twice as many as there are extents.
    let slot_of = |sector: u64| usize::try_from(sector >> shift).unwrap_or(usize::MAX);
    let mut slots = vec![0u32; slot_of(last) + 2];
    for packed in extents {
        slots[slot_of(packed.start()) + 1] += 1;
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
        let piece = match self.index.extents.get(self.next).map(|packed| packed.extent()) {
            Some(extent) if extent.start <= start => {
                let end = extent.end().min(self.end);
                self.next += 1;
                Piece { start, len: end - start, kind: Some(extent.kind.advanced(start - extent.start)) }
            }
            Some(extent) => Piece { start, len: extent.start.min(self.end) - start, kind: None },
            None => Piece { start, len: self.end - start, kind: None },
        };
        self.at = piece.end();
        Some(piece)
    }
}

#[cfg(test)]
mod tests;
