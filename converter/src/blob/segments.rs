//! A blob as a row of 1 MiB segments: room is reserved, filled, and then kept or given back.

use super::BlobTooLarge;
use crate::erofs::format::{BLOCK_SIZE, SEGMENT_BLOCKS};
use std::collections::VecDeque;
use std::ops::Range;

const SEGMENT: usize = SEGMENT_BLOCKS as usize * BLOCK_SIZE as usize;

/// The end of a growing blob. A reservation never crosses a segment's end: one that would goes to the next segment,
/// and the gap is filled with zeros if it is kept.
#[derive(Debug, Default)]
pub struct Segments {
    /// The segment that is being filled.
    current: Vec<u8>,
    /// Bytes of `current` that are kept.
    end: usize,
    /// The segment after it, while a reservation lies there.
    next: Vec<u8>,
    reservation: Option<Reservation>,
    /// Number of `current` in the blob.
    number: u64,
    /// Complete segments that were not taken yet, with where their fresh part begins.
    full: VecDeque<(Vec<u8>, usize)>,
    /// Where the fresh part of `current` begins.
    seen: usize,
    free: Vec<Vec<u8>>,
}

#[derive(Debug, Clone)]
struct Reservation {
    in_next: bool,
    range: Range<usize>,
}

impl Segments {
    /// Reserves `len` bytes, a multiple of the block size and at most a segment.
    pub(super) fn reserve(&mut self, len: usize) {
        debug_assert!(len <= SEGMENT && len.is_multiple_of(BLOCK_SIZE as usize) && self.reservation.is_none());
        let in_next = self.end + len > SEGMENT;
        let buffer = if in_next { &mut self.next } else { &mut self.current };
        if buffer.is_empty() {
            *buffer = self.free.pop().unwrap_or_else(|| vec![0; SEGMENT]);
        }
        let start = if in_next { 0 } else { self.end };
        self.reservation = Some(Reservation { in_next, range: start..start + len });
    }

    /// The reserved bytes, with anything in them.
    pub(super) fn reserved(&mut self) -> &mut [u8] {
        let reservation = self.reservation.clone().expect("something is reserved");
        let buffer = if reservation.in_next { &mut self.next } else { &mut self.current };
        &mut buffer[reservation.range]
    }

    /// Gives the reservation back.
    pub(super) fn cancel(&mut self) {
        self.reservation = None;
    }

    /// Keeps the reservation; returns its first block.
    pub(super) fn commit(&mut self) -> Result<u32, BlobTooLarge> {
        let reservation = self.reservation.take().expect("something is reserved");
        if reservation.in_next {
            self.current[self.end..].fill(0);
            let next = std::mem::take(&mut self.next);
            self.close_current(next);
        }
        let block = self.number * u64::from(SEGMENT_BLOCKS) + (reservation.range.start / BLOCK_SIZE as usize) as u64;
        self.end = reservation.range.end;
        if self.end == SEGMENT {
            self.close_current(Vec::new());
        }
        // The highest number means "no block".
        u32::try_from(block).ok().filter(|b| *b < u32::MAX - SEGMENT_BLOCKS).ok_or(BlobTooLarge)
    }

    /// Appends whole blocks, across the ends of segments too; returns the first one's number. Nothing may be reserved.
    pub(super) fn append(&mut self, mut bytes: &[u8]) -> Result<u32, BlobTooLarge> {
        debug_assert!(bytes.len().is_multiple_of(BLOCK_SIZE as usize) && self.reservation.is_none());
        let block = self.number * u64::from(SEGMENT_BLOCKS) + (self.end / BLOCK_SIZE as usize) as u64;
        while !bytes.is_empty() {
            if self.current.is_empty() {
                self.current = self.free.pop().unwrap_or_else(|| vec![0; SEGMENT]);
            }
            let take = bytes.len().min(SEGMENT - self.end);
            self.current[self.end..self.end + take].copy_from_slice(&bytes[..take]);
            self.end += take;
            bytes = &bytes[take..];
            if self.end == SEGMENT {
                self.close_current(Vec::new());
            }
        }
        // A cluster has far fewer blocks than a segment of the highest numbers, which mean "no block".
        u32::try_from(block).ok().filter(|b| *b < u32::MAX - 2 * SEGMENT_BLOCKS).ok_or(BlobTooLarge)
    }

    fn close_current(&mut self, next: Vec<u8>) {
        let full = std::mem::replace(&mut self.current, next);
        self.full.push_back((full, self.seen));
        self.number += 1;
        self.end = 0;
        self.seen = 0;
    }

    /// Blocks so far.
    pub(super) fn blocks(&self) -> Result<u32, BlobTooLarge> {
        let blocks = self.number * u64::from(SEGMENT_BLOCKS) + (self.end / BLOCK_SIZE as usize) as u64;
        u32::try_from(blocks).map_err(|_| BlobTooLarge)
    }

    /// Makes the part of the last segment that is in use available to [`Segments::take`].
    pub(super) fn finish(&mut self) {
        if self.end > 0 {
            self.current.truncate(self.end);
            self.close_current(Vec::new());
        }
    }

    /// All kept bytes that are new since [`Segments::mark_seen`], in order. They will not change.
    pub fn fresh(&self) -> Vec<&[u8]> {
        let full = self.full.iter().map(|(segment, seen)| &segment[*seen..]);
        let current = self.current.get(self.seen..self.end).unwrap_or_default();
        full.chain(std::iter::once(current)).filter(|piece| !piece.is_empty()).collect()
    }

    /// Says that all of [`Segments::fresh`] has been seen.
    pub fn mark_seen(&mut self) {
        for (segment, seen) in &mut self.full {
            *seen = segment.len();
        }
        self.seen = self.end;
    }

    /// The next complete segment, in order.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        self.full.pop_front().map(|(segment, _)| segment)
    }

    /// Gives a taken segment's memory back.
    pub fn recycle(&mut self, segment: Vec<u8>) {
        if segment.len() == SEGMENT && self.free.len() < 4 {
            self.free.push(segment);
        }
    }
}
