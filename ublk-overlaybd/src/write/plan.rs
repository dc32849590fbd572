//! A committed layer as it will be, before it is written.

use super::WriteError;
use crate::backend::{ReadError, Source, check_range};
use crate::format::lsmt::{
    ENTRIES_PER_BLOCK, ENTRY_SIZE, Entry, FIRST_SECTOR, Flags, HEADER_SIZE, Header, MAX_ENTRIES_SEALED, PADDING, SECTOR,
};
use crate::index::{Extent, Kind};
use std::sync::Arc;
use uuid::Uuid;

/// Longest mapping that is written: whole blocks of 4 KiB, so that mappings that follow stay aligned.
const LONGEST: u64 = 16_376;

/// What a layer says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Its name.
    pub uuid: Uuid,
    /// The name of the layer below.
    pub parent: Uuid,
    /// A message, 256 bytes at most.
    pub message: Vec<u8>,
}

/// Data that is copied from a source in one piece.
#[derive(Debug, Clone, Copy)]
struct Segment {
    /// Sector of the layer's file where it will lie.
    to: u64,
    /// Which source.
    source: u8,
    /// Sector of the source.
    from: u64,
}

/// Everything of a committed layer: its bytes can be read as if it were there.
#[derive(Debug)]
pub struct LayerPlan {
    header: Box<[u8; HEADER_SIZE]>,
    trailer: Box<[u8; HEADER_SIZE]>,
    segments: Vec<Segment>,
    entries: Vec<Entry>,
    /// Entries with padding.
    padded: usize,
    /// Sector where the data ends and the index begins.
    data_end: u64,
    sources: Vec<Arc<dyn Source>>,
}

impl LayerPlan {
    /// Plans the layer of a disk of `virtual_size` bytes (0 is that of the layer below) that maps `extents`, which are
    /// in order; what lies beyond the disk is left out. A [`Kind::Data`]'s layer is the number of its source.
    ///
    /// # Errors
    /// Something does not fit the format, or there are more mappings than other readers take.
    ///
    /// # Panics
    /// If a layer has no source.
    pub fn new(
        extents: impl IntoIterator<Item = Extent>,
        sources: Vec<Arc<dyn Source>>,
        virtual_size: u64,
        names: &Names,
    ) -> Result<Self, WriteError> {
        let disk_end = if virtual_size == 0 { u64::MAX } else { virtual_size.div_ceil(SECTOR) };
        let (mut segments, mut entries): (Vec<Segment>, Vec<Entry>) = (Vec::new(), Vec::new());
        let mut data_end = FIRST_SECTOR;
        for extent in extents {
            if extent.start >= disk_end {
                break;
            }
            let extent = extent.part(extent.start, extent.end().min(disk_end));
            let zeroed = matches!(extent.kind, Kind::Zero);
            if let Kind::Data { layer, moffset } = extent.kind {
                assert!(usize::from(layer) < sources.len(), "a layer without a source");
                segments.push(Segment { to: data_end, source: layer, from: moffset });
            }
            let mut start = extent.start;
            // Put to the mapping before it if that ends where this one begins; so does its data then.
            if let Some(last) = entries.last_mut()
                && last.end() == start
                && last.zeroed == zeroed
            {
                let more = (LONGEST - u64::from(last.length)).min(extent.len);
                last.length += u32::try_from(more).unwrap_or_default();
                start += more;
                data_end += if zeroed { 0 } else { more };
            }
            while start < extent.end() {
                let len = (extent.end() - start).min(LONGEST);
                let length = u32::try_from(len).unwrap_or_default();
                entries.push(Entry { offset: start, length, moffset: data_end, zeroed, tag: 0 });
                start += len;
                data_end += if zeroed { 0 } else { len };
            }
        }
        let count = entries.len() as u64;
        if count > MAX_ENTRIES_SEALED {
            return Err(WriteError::TooManyEntries(count));
        }
        // So that reading the plan cannot fail on it.
        for entry in &entries {
            entry.encode()?;
        }
        let padded = entries.len().next_multiple_of(ENTRIES_PER_BLOCK);
        let head = |flags, index_offset, index_size| Header {
            flags,
            index_offset,
            index_size,
            virtual_size,
            uuid: names.uuid,
            parent: names.parent,
            user_tag: names.message.clone(),
        };
        let header = Box::new(head(Flags::COMMITTED_HEADER, 0, 0).encode()?);
        let trailer = Box::new(head(Flags::TRAILER, data_end * SECTOR, padded as u64).encode()?);
        Ok(Self { header, trailer, segments, entries, padded, data_end, sources })
    }

    /// Mappings that it has.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Bytes of data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        (self.data_end - FIRST_SECTOR) * SECTOR
    }

    fn index_bytes(&self) -> u64 {
        (self.padded * ENTRY_SIZE) as u64
    }

    fn read_data(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        let (mut rest, mut at) = (buf, offset);
        let mut number = self.segments.partition_point(|segment| segment.to <= at / SECTOR).saturating_sub(1);
        while !rest.is_empty() {
            let segment = self.segments[number];
            let end = self.segments.get(number + 1).map_or(self.data_end, |next| next.to) * SECTOR;
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(rest.len());
            let (now, after) = rest.split_at_mut(len);
            let from = segment.from * SECTOR + (at - segment.to * SECTOR);
            read_or_zeros(&*self.sources[usize::from(segment.source)], now, from)?;
            rest = after;
            at += len as u64;
            number += 1;
        }
        Ok(())
    }

    fn read_index(&self, buf: &mut [u8], offset: u64) {
        let mut at = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut rest = buf;
        while !rest.is_empty() {
            let bytes = self.entries.get(at / ENTRY_SIZE).and_then(|entry| entry.encode().ok()).unwrap_or(PADDING);
            let bytes = &bytes[at % ENTRY_SIZE..];
            let len = bytes.len().min(rest.len());
            let (now, after) = rest.split_at_mut(len);
            now.copy_from_slice(&bytes[..len]);
            (rest, at) = (after, at + len);
        }
    }
}

/// A file's last sector may be cut short: the rest of it is zeros.
fn read_or_zeros(source: &dyn Source, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
    let end = offset + buf.len() as u64;
    let size = source.size();
    if end > size && end - size < SECTOR {
        let there = buf.len() - usize::try_from(end - size).unwrap_or(0);
        buf[there..].fill(0);
        return source.read_exact_at(&mut buf[..there], offset);
    }
    source.read_exact_at(buf, offset)
}

impl Source for LayerPlan {
    fn size(&self) -> u64 {
        self.data_end * SECTOR + self.index_bytes() + HEADER_SIZE as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        check_range(&"the layer", self.size(), buf.len(), offset)?;
        let head = HEADER_SIZE as u64;
        let ends = [head, self.data_end * SECTOR, self.size() - head, self.size()];
        let (mut rest, mut at) = (buf, offset);
        for (part, end) in ends.into_iter().enumerate() {
            if rest.is_empty() || at >= end {
                continue;
            }
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(rest.len());
            let (now, after) = rest.split_at_mut(len);
            let copy = |now: &mut [u8], block: &[u8; HEADER_SIZE], start: u64| {
                let from = usize::try_from(at - start).unwrap_or(HEADER_SIZE);
                now.copy_from_slice(&block[from..from + now.len()]);
            };
            match part {
                0 => copy(now, &self.header, 0),
                1 => self.read_data(now, at)?,
                2 => self.read_index(now, at - self.data_end * SECTOR),
                _ => copy(now, &self.trailer, self.size() - head),
            }
            rest = after;
            at += len as u64;
        }
        Ok(())
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read_exact_at(buf, offset).map(|()| true)
    }
}
