//! Sparse files: which ranges of a file the archive has, in the four spellings that GNU tar, star and PAX use.

use super::header::{Header, Layout, until_nul};
use super::numbers;

/// A range of the file that is in the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// What is wrong with a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MapError {
    Bad(String),
    TooMany(u64),
}

impl MapError {
    fn bad(reason: impl Into<String>) -> Self {
        Self::Bad(reason.into())
    }
}

/// A map under construction: every segment behind the one before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Map {
    segments: Vec<Segment>,
    /// Where the last segment ends.
    end: u64,
    /// Sum of all lengths.
    total: u64,
    limit: usize,
}

impl Map {
    pub(super) fn new(limit: usize) -> Self {
        Self { segments: Vec::new(), end: 0, total: 0, limit }
    }

    /// Adds a segment; empty ones (which mark where a file ends) are checked and left out.
    pub(super) fn push(&mut self, offset: u64, length: u64) -> Result<(), MapError> {
        let end = offset
            .checked_add(length)
            .filter(|&end| i64::try_from(end).is_ok())
            .ok_or_else(|| MapError::bad(format!("the segment of {length} bytes at {offset} ends past any file")))?;
        if offset < self.end {
            let before = self.end;
            return Err(MapError::bad(format!("the segment at {offset} begins before the end of the last, {before}")));
        }
        match self.segments.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.offset + last.length == offset => last.length += length,
            _ => {
                if self.segments.len() >= self.limit {
                    return Err(MapError::TooMany(self.segments.len() as u64 + 1));
                }
                self.segments.push(Segment { offset, length });
            }
        }
        self.end = end;
        self.total += length; // no more than `end`, since nothing overlaps
        Ok(())
    }

    /// Holds the finished map against the file's size and against how many bytes the archive has of it.
    pub(super) fn finish(self, real_size: u64, archived: u64) -> Result<Vec<Segment>, MapError> {
        if self.end > real_size {
            return Err(MapError::bad(format!("it reaches to {}, the file only to {real_size}", self.end)));
        }
        if self.total != archived {
            return Err(MapError::bad(format!(
                "its segments hold {} bytes, but the archive has {archived} of them",
                self.total
            )));
        }
        Ok(self.segments)
    }

    /// Bytes this keeps allocated.
    pub(super) fn held(&self) -> usize {
        self.segments.capacity() * size_of::<Segment>()
    }
}

/// Segments in the header itself, and in each extension block after it.
const IN_HEADER: usize = 4;
const IN_EXTENSION: usize = 21;
/// An offset and a length of 12 bytes each.
const SPARSE_ENTRY: usize = 24;

/// The start of a map that lives in an `S` header, and whether extension blocks follow.
#[derive(Debug)]
pub(super) struct HeaderMap {
    pub(super) map: Map,
    pub(super) real_size: u64,
    pub(super) extended: bool,
}

impl HeaderMap {
    /// Reads GNU's layout of an `S` header, or star's.
    pub(super) fn read(header: &Header, limit: usize) -> Result<Self, MapError> {
        // struct oldgnu_header / struct star_in_header of GNU tar's tar.h
        let (entries, extended, real_size) = match header.layout {
            Layout::Gnu => (386, 482, 483),
            Layout::Star => (356, 355, 452),
            Layout::V7 | Layout::Ustar => {
                return Err(MapError::bad("a sparse header that is neither GNU's nor star's"));
            }
        };
        let real_size = number(header.part(real_size..real_size + 12))?;
        // Newer star archives have no segments here, only in the extension, and say so by leaving the first blank.
        let elsewhere = header.layout == Layout::Star && until_nul(header.part(entries..entries + 12)).is_empty();
        let mut map = Map::new(limit);
        if !elsewhere {
            read_entries(header.part(entries..entries + IN_HEADER * SPARSE_ENTRY), &mut map)?;
        }
        let extended = elsewhere || header.part(extended..extended + 1) != b"\0";
        Ok(Self { map, real_size, extended })
    }

    /// Reads an extension block.
    pub(super) fn extend(&mut self, block: &[u8; 512]) -> Result<(), MapError> {
        let (entries, rest) = block.split_at(IN_EXTENSION * SPARSE_ENTRY);
        self.extended = rest.first().is_some_and(|&more| more != 0);
        read_entries(entries, &mut self.map)
    }
}

fn read_entries(entries: &[u8], map: &mut Map) -> Result<(), MapError> {
    for entry in entries.chunks_exact(SPARSE_ENTRY) {
        let (offset, length) = entry.split_at(SPARSE_ENTRY / 2);
        if offset.first() == Some(&0) || length.first() == Some(&0) {
            break;
        }
        map.push(number(offset)?, number(length)?)?;
    }
    Ok(())
}

fn number(field: &[u8]) -> Result<u64, MapError> {
    numbers::field(field)
        .and_then(|value| u64::try_from(value).ok())
        .ok_or_else(|| MapError::bad(format!("\"{}\" is no number", crate::entry::printable(field))))
}

/// The decimal map of PAX sparse format 1.0, which stands before the file's data: how many segments, then offset and
/// length of each, a line each, filled up to whole blocks.
#[derive(Debug)]
pub(super) struct TextMap {
    pub(super) map: Map,
    pub(super) real_size: u64,
    number: Option<u64>,
    /// Numbers still to come, once the first has told how many.
    left: Option<u64>,
    offset: Option<u64>,
}

impl TextMap {
    pub(super) fn new(real_size: u64, limit: usize) -> Self {
        Self { map: Map::new(limit), real_size, number: None, left: None, offset: None }
    }

    /// Takes the next block; true if the map is complete (the rest of the block is filling).
    pub(super) fn block(&mut self, block: &[u8; 512]) -> Result<bool, MapError> {
        for &byte in block {
            match byte {
                b'0'..=b'9' => {
                    let digit = u64::from(byte - b'0');
                    let value = self.number.unwrap_or(0).checked_mul(10).and_then(|value| value.checked_add(digit));
                    self.number = Some(value.ok_or_else(|| MapError::bad("a number in it is too large"))?);
                }
                b'\n' => {
                    let value = self.number.take().ok_or_else(|| MapError::bad("a line in it is empty"))?;
                    if self.line(value)? {
                        return Ok(true);
                    }
                }
                _ => return Err(MapError::bad("it holds something else than decimal lines")),
            }
        }
        Ok(false)
    }

    fn line(&mut self, value: u64) -> Result<bool, MapError> {
        let left = match self.left {
            None if value > self.map.limit as u64 => return Err(MapError::TooMany(value)),
            None => value * 2,
            Some(left) => {
                match self.offset.take() {
                    None => self.offset = Some(value),
                    Some(offset) => self.map.push(offset, value)?,
                }
                left - 1
            }
        };
        self.left = Some(left);
        Ok(left == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_overlap_overflow() {
        let mut map = Map::new(10);
        map.push(10, 5).unwrap();
        assert!(matches!(map.push(14, 1), Err(MapError::Bad(_))), "overlap");
        assert!(matches!(map.push(3, 1), Err(MapError::Bad(_))), "order");
        assert!(matches!(map.push(u64::MAX, 1), Err(MapError::Bad(_))), "overflow");
        assert!(matches!(map.push(i64::MAX as u64, 1), Err(MapError::Bad(_))), "past any file");
        map.push(15, 5).unwrap();
        map.push(30, 0).unwrap();
        assert!(matches!(map.clone().finish(29, 10), Err(MapError::Bad(_))), "the end marker is past the end");
        assert!(matches!(map.clone().finish(30, 11), Err(MapError::Bad(_))));
        assert_eq!(map.finish(30, 10), Ok(vec![Segment { offset: 10, length: 10 }]), "adjacent ones are joined");
    }

    #[test]
    fn count_limit() {
        let mut map = Map::new(2);
        map.push(0, 1).unwrap();
        map.push(2, 1).unwrap();
        assert_eq!(map.push(4, 1), Err(MapError::TooMany(3)));
    }

    #[test]
    fn text_map_limits() {
        let block = |text: &str| {
            let mut block = [0u8; 512];
            block[..text.len()].copy_from_slice(text.as_bytes());
            block
        };
        assert_eq!(TextMap::new(9, 5).block(&block("0\n")), Ok(true));
        assert_eq!(TextMap::new(9, 5).block(&block("6\n")), Err(MapError::TooMany(6)));
        assert_eq!(TextMap::new(9, 5).block(&block("18446744073709551615\n")), Err(MapError::TooMany(u64::MAX)));
        for bad in ["1\n0\n", "18446744073709551616\n", "-1\n", "\n", "1\n0 5\n"] {
            assert!(matches!(TextMap::new(9, 5).block(&block(bad)), Err(MapError::Bad(_))), "{bad}");
        }
        let mut split = TextMap::new(1 << 40, 200);
        let text = format!("100\n{}", (0..100).map(|i| format!("{}\n1\n", i * 1_000_000)).collect::<String>());
        let mut blocks = text.as_bytes().chunks(512).map(|part| block(std::str::from_utf8(part).unwrap()));
        let done: Vec<bool> = blocks.by_ref().map(|block| split.block(&block).unwrap()).collect();
        assert_eq!(done.iter().filter(|&&done| done).count(), 1);
        assert_eq!(split.map.finish(1 << 40, 100).unwrap().len(), 100);
    }
}
