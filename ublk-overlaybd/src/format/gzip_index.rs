//! `gzip.meta`: where in a gzip file inflating can begin, and with which window.
//!
//! ```text
//! header (333) | windows, compressed one by one | entries (29 each), compressed together
//! ```
//!
//! A point may lie within a byte. No safe interface to inflate takes single bits, so [`Point::lead`] gives bytes to put
//! first: deflate blocks without content that end just where the bits of the point's byte must begin.

use super::checksum::raw_crc32c;
use zerocopy::little_endian::{I32, I64, U32};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Bytes of the header.
pub const HEADER_SIZE: usize = 333;
/// Bytes that deflate looks back.
pub const WINDOW: usize = 32 << 10;

const MAGIC: [u8; 8] = *b"ddgzidx\0";
const ENTRY_SIZE: usize = 29;
/// Deflate makes no more of a byte than this, about.
const MOST_RATIO: u64 = 1040;

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    major: u8,
    minor: u8,
    algo: u8,
    level: i8,
    flag: u8,
    span: I32,
    window: I32,
    entry_size: I32,
    entries: I64,
    gzip_file_size: I64,
    index_file_size: I64,
    uncompress_file_size: I64,
    reserve: [u8; 256],
    index_start: I64,
    index_area_len: I64,
    crc: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_SIZE);

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    de_pos: I64,
    en_pos: I64,
    win_pos: I64,
    bits: u8,
    win_len: U32,
}

const _: () = assert!(size_of::<RawEntry>() == ENTRY_SIZE);

/// Why a file is no index of a gzip file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GzipIndexError {
    /// A field that is not as it must be.
    #[error("gzip index: {field} is {value}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it holds.
        value: i64,
    },
    /// It does not begin with the magic.
    #[error("gzip index: the magic is wrong")]
    Magic,
    /// The header is damaged.
    #[error("gzip index: crc is {expected:#010x}, the header's bytes give {found:#010x}")]
    Checksum {
        /// What the bytes give.
        found: u32,
        /// What was written.
        expected: u32,
    },
    /// A point that cannot be.
    #[error("gzip index: entry {number}: {field} cannot be {value}")]
    Entry {
        /// Which.
        number: usize,
        /// What in it.
        field: &'static str,
        /// What it is.
        value: i64,
    },
    /// The compressed entries, or a window, do not inflate to what they must.
    #[error("gzip index: {0} does not inflate")]
    Inflate(&'static str),
}

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Whether windows and entries are compressed.
    pub compressed: bool,
    /// Entries.
    pub entries: u64,
    /// Bytes of the gzip file.
    pub gzip_size: u64,
    /// Bytes of what it holds.
    pub plain_size: u64,
    /// Where the entries begin in the index file.
    pub index_start: u64,
    /// Bytes of the entries as they are stored.
    pub index_len: u64,
}

impl Header {
    /// Reads the header of an index file of `file_size` bytes that belongs to a gzip file of `gzip_size`.
    ///
    /// # Errors
    /// Which field is wrong.
    pub fn parse(bytes: &[u8; HEADER_SIZE], file_size: u64, gzip_size: u64) -> Result<Self, GzipIndexError> {
        let Ok(raw) = RawHeader::ref_from_bytes(bytes) else { return Err(GzipIndexError::Magic) };
        if raw.magic != MAGIC {
            return Err(GzipIndexError::Magic);
        }
        let (found, expected) = (raw_crc32c(0, &bytes[..HEADER_SIZE - 4]), raw.crc.get());
        if found != expected {
            return Err(GzipIndexError::Checksum { found, expected });
        }
        let field = |field, value| Err(GzipIndexError::Field { field, value });
        let number = |name, value: i64| u64::try_from(value).or(Err(GzipIndexError::Field { field: name, value }));
        if raw.major != 1 {
            return field("major", raw.major.into());
        }
        if raw.algo > 1 {
            return field("dict_compress_algo", raw.algo.into());
        }
        if usize::try_from(raw.window.get()) != Ok(WINDOW) {
            return field("window", raw.window.get().into());
        }
        if usize::try_from(raw.entry_size.get()) != Ok(ENTRY_SIZE) {
            return field("index_size", raw.entry_size.get().into());
        }
        if number("gzip_file_size", raw.gzip_file_size.get())? != gzip_size {
            return field("gzip_file_size", raw.gzip_file_size.get());
        }
        let index_start = number("index_start", raw.index_start.get())?;
        let index_len = number("index_area_len", raw.index_area_len.get())?;
        if index_start < HEADER_SIZE as u64 || index_start.checked_add(index_len) != Some(file_size) {
            return field("index_start", raw.index_start.get());
        }
        if number("index_file_size", raw.index_file_size.get())? != file_size {
            return field("index_file_size", raw.index_file_size.get());
        }
        let plain_size = number("uncompress_file_size", raw.uncompress_file_size.get())?;
        if plain_size > gzip_size.saturating_mul(MOST_RATIO) {
            return field("uncompress_file_size", raw.uncompress_file_size.get());
        }
        let entries = number("index_num", raw.entries.get())?;
        let compressed = raw.algo == 1;
        let most = if compressed { index_len.saturating_mul(MOST_RATIO) } else { index_len };
        if entries == 0 || entries > most / ENTRY_SIZE as u64 {
            return field("index_num", raw.entries.get());
        }
        Ok(Self { compressed, entries, gzip_size, plain_size, index_start, index_len })
    }

    /// Reads the entries from their stored bytes.
    ///
    /// # Errors
    /// Which is wrong.
    pub fn points(&self, stored: &[u8]) -> Result<Vec<Point>, GzipIndexError> {
        // Bounded by the stored bytes, see `parse`.
        let len = usize::try_from(self.entries).unwrap_or(usize::MAX).saturating_mul(ENTRY_SIZE);
        let inflated;
        let bytes = if self.compressed {
            inflated = inflate_exact(stored, len).ok_or(GzipIndexError::Inflate("the array of entries"))?;
            &inflated
        } else {
            stored.get(..len).ok_or(GzipIndexError::Inflate("the array of entries"))?
        };
        let mut points: Vec<Point> = Vec::with_capacity(bytes.len() / ENTRY_SIZE);
        for (number, bytes) in bytes.chunks_exact(ENTRY_SIZE).enumerate() {
            let wrong = |field, value| GzipIndexError::Entry { number, field, value };
            let raw = RawEntry::ref_from_bytes(bytes).map_err(|_| wrong("size", 0))?;
            let position = |field, value: i64, most: u64| {
                u64::try_from(value).ok().filter(|&at| at <= most).ok_or(wrong(field, value))
            };
            let point = Point {
                plain: position("de_pos", raw.de_pos.get(), self.plain_size)?,
                stored: position("en_pos", raw.en_pos.get(), self.gzip_size)?,
                window: position("win_pos", raw.win_pos.get(), self.index_start)?,
                window_len: raw.win_len.get(),
                bits: raw.bits,
            };
            if point.bits > 7 || (point.bits > 0 && point.stored == 0) {
                return Err(wrong("bits", raw.bits.into()));
            }
            let longest = if self.compressed { 2 * WINDOW } else { WINDOW } as u64;
            let end = point.window + u64::from(point.window_len);
            if end > self.index_start || u64::from(point.window_len) > longest {
                return Err(wrong("win_len", point.window_len.into()));
            }
            if let Some(last) = points.last()
                && (point.plain < last.plain || point.stored < last.stored)
            {
                return Err(wrong("de_pos", raw.de_pos.get()));
            }
            points.push(point);
        }
        match points.first() {
            Some(first) if first.plain > 0 => {
                let value = i64::try_from(first.plain).unwrap_or(i64::MAX);
                Err(GzipIndexError::Entry { number: 0, field: "de_pos", value })
            }
            _ => Ok(points),
        }
    }

    /// The window that a point begins with, from its stored bytes.
    ///
    /// # Errors
    /// It does not inflate.
    pub fn window(&self, stored: &[u8]) -> Result<Vec<u8>, GzipIndexError> {
        if !self.compressed || stored.is_empty() {
            return Ok(stored.to_vec());
        }
        inflate_most(stored, WINDOW).ok_or(GzipIndexError::Inflate("a window"))
    }
}

/// A place where inflating can begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// Byte of what the gzip file holds.
    pub plain: u64,
    /// Byte of the gzip file; with `bits`, the one after that which has them.
    pub stored: u64,
    /// Where its window lies in the index file.
    pub window: u64,
    /// Bytes of the window as it is stored.
    pub window_len: u32,
    /// How many bits of the byte before `stored`, the high ones, come first.
    pub bits: u8,
}

impl Point {
    /// What to inflate before the bytes from `stored` on; `before` is the byte before it.
    #[must_use]
    pub fn lead(&self, before: u8) -> Vec<u8> {
        if self.bits == 0 {
            return Vec::new();
        }
        let wanted = 8 - usize::from(self.bits);
        let mut bits = Bits::default();
        if wanted % 2 == 1 {
            bits.empty_dynamic_block();
        }
        while bits.len % 8 != wanted {
            bits.empty_fixed_block();
        }
        bits.put(u32::from(before >> wanted), self.bits.into());
        bits.bytes
    }
}

/// Bits as deflate packs them.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    len: usize,
}

impl Bits {
    /// The low `count` bits of `value`, the lowest first.
    fn put(&mut self, value: u32, count: usize) {
        for bit in 0..count {
            if self.len.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= u8::from(value >> bit & 1 == 1) << (self.len % 8);
            }
            self.len += 1;
        }
    }

    /// Ten bits: not the last block, fixed codes, the end.
    fn empty_fixed_block(&mut self) {
        self.put(0b010, 3);
        self.put(0, 7);
    }

    /// Ninety-three bits: not the last block, codes of its own, the end. Only the end of block has a code; its length is
    /// told by 256 times zero, in two runs, and one.
    fn empty_dynamic_block(&mut self) {
        self.put(0b100, 3);
        // 257 literals and lengths, 1 distance, 18 lengths of the code of lengths.
        self.put(0, 5);
        self.put(0, 5);
        self.put(14, 4);
        // Of 16, 17, 18, 0, … 1: 18 has two bits (11), 0 has two (10), 1 has one (0).
        for length in [0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1] {
            self.put(length, 3);
        }
        for run in [138, 118] {
            self.put(0b11, 2);
            self.put(run - 11, 7);
        }
        self.put(0, 1);
        // The distance has none. Codes go with their first bit first.
        self.put(0b01, 2);
        // The end of the block.
        self.put(0, 1);
    }
}

/// Inflates a zlib stream to exactly `len` bytes.
fn inflate_exact(stored: &[u8], len: usize) -> Option<Vec<u8>> {
    inflate_most(stored, len).filter(|bytes| bytes.len() == len)
}

/// Inflates a zlib stream to at most `most` bytes; `None` if it is damaged, or has more.
fn inflate_most(stored: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut inflate = zlib_rs::Inflate::new(true, 15);
    // One more, to see that there is none.
    let mut out = vec![0; most.checked_add(1)?];
    let status = inflate.decompress(stored, &mut out, zlib_rs::InflateFlush::Finish).ok()?;
    let len = usize::try_from(inflate.total_out()).ok()?;
    if status != zlib_rs::Status::StreamEnd || len > most {
        return None;
    }
    out.truncate(len);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lead_gives_nothing_and_ends_where_it_must() {
        for bits in 1..8u8 {
            let point = Point { plain: 0, stored: 1, window: 0, window_len: 0, bits };
            // A last, empty, fixed block: 1, 01, and the end; its first bits are the high ones of the byte before.
            let block = 0b011u32;
            let before = u8::try_from(block << (8 - bits) & 0xFF).unwrap();
            let rest = (block >> bits).to_le_bytes();
            let mut stream = point.lead(before);
            stream.extend(rest);
            let mut inflate = zlib_rs::Inflate::new(false, 15);
            let status = inflate.decompress(&stream, &mut [0; 10], zlib_rs::InflateFlush::NoFlush);
            assert!(matches!(status, Ok(zlib_rs::Status::StreamEnd)), "{bits} bits: {status:?}");
            assert_eq!(inflate.total_out(), 0);
        }
    }

    #[test]
    fn damage_is_named() {
        let mut bytes = [0; HEADER_SIZE];
        assert_eq!(Header::parse(&bytes, 0, 0), Err(GzipIndexError::Magic));
        bytes[..8].copy_from_slice(&MAGIC);
        assert!(matches!(Header::parse(&bytes, 0, 0), Err(GzipIndexError::Checksum { .. })));
        let crc = raw_crc32c(0, &bytes[..329]).to_le_bytes();
        bytes[329..].copy_from_slice(&crc);
        assert_eq!(Header::parse(&bytes, 0, 0), Err(GzipIndexError::Field { field: "major", value: 0 }));
    }
}
