//! ZFile: a file compressed in blocks, each of which can be read alone.
//!
//! ```text
//! header (512) | blocks | jump table (u32 a block) | trailer (512)
//! ```
//!
//! The header or the trailer has the final values; see [`Head::is_overwritten`]. Blocks are always compressed, even when
//! that makes them longer.

use super::checksum::{BLOCK_SEED, raw_crc32c};
use super::lz4;
use std::ops::Range;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the header, and of the trailer.
pub const HEAD_SIZE: usize = 512;
/// Bytes of a block's checksum.
pub const CHECKSUM_SIZE: usize = 4;
/// Sizes that blocks may have when they are read.
pub const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 4 << 10..=64 << 10;
/// Largest block that is written: what other readers do with 64 KiB that do not compress is fail.
pub const MAX_WRITTEN_BLOCK: u32 = 32 << 10;

/// How every ZFile begins.
pub const MAGIC0: [u8; 8] = *b"ZFile\0\x01\0";
/// The second half of the magic.
pub const MAGIC1: [u8; 16] = *b"tuji.yyf@Alibaba";

/// The fields' own size, which the header names.
const FIELDS_SIZE: u32 = 96;

mod flag {
    pub(super) const HEADER: u64 = 1;
    pub(super) const DATA: u64 = 1 << 1;
    pub(super) const SEALED: u64 = 1 << 2;
    pub(super) const OVERWRITTEN: u64 = 1 << 3;
    pub(super) const DIGEST: u64 = 1 << 4;
    pub(super) const INDEX_COMPRESSED: u64 = 1 << 5;
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct RawHead {
    magic0: [u8; 8],
    magic1: [u8; 16],

    size: U32,
    digest: U32,
    flags: U64,
    index_offset: U64,
    index_size: U64,
    original_file_size: U64,
    index_crc: U32,
    reserved0: U32,

    block_size: U32,
    algo: u8,
    level: u8,
    use_dict: u8,
    reserved1: [u8; 5],
    dict_size: U32,
    verify: u8,
    reserved2: [u8; HEAD_SIZE - 89],
}

const _: () = assert!(size_of::<RawHead>() == HEAD_SIZE);

/// What compressed the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 blocks, without frames.
    Lz4,
    /// A zstd frame a block.
    Zstd,
}

impl Algorithm {
    /// As it is written and typed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// Why bytes are no ZFile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZFileError {
    /// Too short for a header and a trailer.
    #[error("{0} bytes are too few for a ZFile")]
    TooShort(u64),
    /// It does not begin with the magic.
    #[error("{place}: the {field} is wrong")]
    Field {
        /// `ZFile header` or `ZFile trailer`.
        place: &'static str,
        /// Which field.
        field: &'static str,
    },
    /// A value that cannot be.
    #[error("{place}: {field} is {value}{why}")]
    Value {
        /// `ZFile header` or `ZFile trailer`.
        place: &'static str,
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// Why that cannot be.
        why: &'static str,
    },
    /// The jump table was damaged.
    #[error("ZFile jump table: its checksum is {found:#010x}, index_crc says {expected:#010x}")]
    JumpTableChecksum {
        /// What its bytes give.
        found: u32,
        /// What was written.
        expected: u32,
    },
    /// A block that cannot be as long as its entry says.
    #[error("ZFile jump table: block {block} has {length} bytes, which cannot be")]
    BlockLength {
        /// Its number.
        block: u64,
        /// What the table says.
        length: u32,
    },
    /// The table does not fit the file.
    #[error("ZFile jump table: its blocks end at byte {end}, index_offset is {index_offset}")]
    BlocksEnd {
        /// Where the last block ends.
        end: u64,
        /// Where they should.
        index_offset: u64,
    },
}

/// A header or a trailer, and which of the two.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    raw: RawHead,
    place: &'static str,
}

/// What a ZFile is, once header and trailer have been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Where the jump table begins, which is where the blocks end.
    pub index_offset: u64,
    /// Blocks, and entries of the jump table.
    pub blocks: u64,
    /// Bytes of what was compressed.
    pub original_size: u64,
    /// Bytes of a block before compression; the last may have fewer.
    pub block_size: u32,
    /// What compressed them.
    pub algorithm: Algorithm,
    /// Whether each block is followed by a checksum.
    pub verify: bool,
    /// Where the first block begins.
    pub first_block: u64,
    /// Checksum of the jump table, where the writer gave one.
    pub index_crc: Option<u32>,
    /// Whether the header has the values, not the trailer.
    pub header_overwritten: bool,
    /// Whether header and trailer are protected by a digest.
    pub digest: bool,
}

impl Head {
    /// Whether `bytes` begin as a ZFile does.
    #[must_use]
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.get(..8).is_some_and(|b| b == MAGIC0) && bytes.get(8..24).is_some_and(|b| b == MAGIC1)
    }

    /// Reads the header from the first 512 bytes of the file. Nothing but its magic and flags mean anything unless
    /// [`is_overwritten`](Self::is_overwritten): old writers left garbage in the rest.
    ///
    /// # Errors
    /// It is none, or its digest is wrong.
    pub fn header(bytes: &[u8; HEAD_SIZE]) -> Result<Self, ZFileError> {
        let head = Self::parse(bytes, "ZFile header")?;
        if head.flags() & flag::HEADER == 0 {
            return Err(head.value("flags", head.flags(), ": not those of a header"));
        }
        Ok(head)
    }

    /// Reads the trailer from the last 512 bytes of the file.
    ///
    /// # Errors
    /// It is none, or its digest is wrong.
    pub fn trailer(bytes: &[u8; HEAD_SIZE]) -> Result<Self, ZFileError> {
        let head = Self::parse(bytes, "ZFile trailer")?;
        let kind = head.flags() & (flag::HEADER | flag::DATA | flag::SEALED);
        if kind != flag::DATA | flag::SEALED {
            return Err(head.value("flags", head.flags(), ": not those of a finished file's trailer"));
        }
        Ok(head)
    }

    fn parse(bytes: &[u8; HEAD_SIZE], place: &'static str) -> Result<Self, ZFileError> {
        let raw: RawHead = zerocopy::transmute!(*bytes);
        let head = Self { raw, place };
        if raw.magic0 != MAGIC0 {
            return Err(ZFileError::Field { place, field: "magic0" });
        }
        if raw.magic1 != MAGIC1 {
            return Err(ZFileError::Field { place, field: "magic1" });
        }
        if head.has_digest() && digest(&raw) != raw.digest.get() {
            return Err(ZFileError::Field { place, field: "digest" });
        }
        Ok(head)
    }

    fn flags(&self) -> u64 {
        self.raw.flags.get() & 0x3F
    }

    fn has_digest(&self) -> bool {
        self.flags() & flag::DIGEST != 0
    }

    /// Whether the header was written again at the end: then it has the final values, else the trailer.
    #[must_use]
    pub fn is_overwritten(&self) -> bool {
        self.flags() & flag::OVERWRITTEN != 0
    }

    fn value(&self, field: &'static str, value: u64, why: &'static str) -> ZFileError {
        ZFileError::Value { place: self.place, field, value, why }
    }

    /// Checks the values against the size of the whole file.
    ///
    /// # Errors
    /// Which cannot be.
    pub fn geometry(&self, file_size: u64) -> Result<Geometry, ZFileError> {
        let raw = &self.raw;
        if self.flags() & flag::INDEX_COMPRESSED != 0 {
            return Err(self.value("flags", self.flags(), ": a compressed jump table, which nobody ever wrote"));
        }
        let head = HEAD_SIZE as u64;
        let end = file_size.checked_sub(head).filter(|&end| end >= head).ok_or(ZFileError::TooShort(file_size))?;
        let block_size = raw.block_size.get();
        if !BLOCK_SIZES.contains(&block_size) || !block_size.is_power_of_two() {
            return Err(self.value("block_size", block_size.into(), ": neither of 4 KiB to 64 KiB by powers of two"));
        }
        let algorithm = match raw.algo {
            1 => Algorithm::Lz4,
            2 => Algorithm::Zstd,
            other => return Err(self.value("algo", other.into(), ": neither 1 (LZ4) nor 2 (zstd)")),
        };
        if raw.use_dict != 0 {
            return Err(self.value("use_dict", raw.use_dict.into(), ": dictionaries are not supported"));
        }
        let first_block = head + u64::from(raw.dict_size.get());
        let index_offset = raw.index_offset.get();
        if index_offset < first_block || index_offset > end {
            return Err(self.value("index_offset", index_offset, ": outside the file, or inside its header"));
        }
        let blocks = raw.index_size.get();
        if blocks > (end - index_offset) / 4 {
            return Err(self.value("index_size", blocks, ": more than fit between index_offset and the trailer"));
        }
        let original_size = raw.original_file_size.get();
        if original_size.div_ceil(block_size.into()) != blocks {
            return Err(self.value("original_file_size", original_size, ": index_size has another number of blocks"));
        }
        Ok(Geometry {
            index_offset,
            blocks,
            original_size,
            block_size,
            algorithm,
            verify: raw.verify != 0,
            first_block,
            index_crc: self.has_digest().then(|| raw.index_crc.get()),
            header_overwritten: self.is_overwritten(),
            digest: self.has_digest(),
        })
    }
}

fn digest(raw: &RawHead) -> u32 {
    raw_crc32c(0, RawHead { digest: 0.into(), ..*raw }.as_bytes())
}

impl Geometry {
    /// Bytes of block `block` before compression.
    #[must_use]
    pub fn plain_len(&self, block: u64) -> usize {
        let start = block * u64::from(self.block_size);
        usize::try_from(self.original_size.saturating_sub(start).min(self.block_size.into())).unwrap_or(0)
    }

    /// Header and trailer of a finished file, with digests, the header having the final values as well.
    #[must_use]
    pub fn encode(&self) -> ([u8; HEAD_SIZE], [u8; HEAD_SIZE]) {
        let with = |flags: u64| {
            let mut raw = RawHead {
                magic0: MAGIC0,
                magic1: MAGIC1,
                size: FIELDS_SIZE.into(),
                digest: 0.into(),
                flags: flags.into(),
                index_offset: self.index_offset.into(),
                index_size: self.blocks.into(),
                original_file_size: self.original_size.into(),
                index_crc: self.index_crc.unwrap_or_default().into(),
                reserved0: 0.into(),
                block_size: self.block_size.into(),
                algo: match self.algorithm {
                    Algorithm::Lz4 => 1,
                    Algorithm::Zstd => 2,
                },
                level: 0,
                use_dict: 0,
                reserved1: [0; 5],
                dict_size: 0.into(),
                verify: self.verify.into(),
                reserved2: [0; HEAD_SIZE - 89],
            };
            raw.digest = digest(&raw).into();
            zerocopy::transmute!(raw)
        };
        (
            with(flag::HEADER | flag::DATA | flag::OVERWRITTEN | flag::DIGEST),
            with(flag::DATA | flag::SEALED | flag::DIGEST),
        )
    }
}

/// Where each block lies: about four and a half bytes a block, and one cache line for each that is looked up.
#[derive(Debug)]
pub struct JumpTable {
    groups: Box<[Group]>,
    /// Where the last block ends.
    end: u64,
}

/// Blocks in a group, so that it has 64 bytes.
const GROUP: usize = 14;

/// Some blocks, one after the other.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Group {
    /// Where the first begins.
    start: u64,
    /// Where each ends, from `start`. Longer than 14 times the longest block is none.
    ends: [u32; GROUP],
}

impl JumpTable {
    /// Reads the table's bytes: four a block, as `geometry` says.
    ///
    /// # Errors
    /// Its checksum is wrong, or a length, or their sum.
    pub fn parse(geometry: &Geometry, bytes: &[u8]) -> Result<Self, ZFileError> {
        if let Some(expected) = geometry.index_crc {
            let found = raw_crc32c(0, bytes);
            if found != expected {
                return Err(ZFileError::JumpTableChecksum { found, expected });
            }
        }
        let least = if geometry.verify { CHECKSUM_SIZE } else { 0 };
        // Twice the block is more than either algorithm ever adds.
        let most = 2 * geometry.block_size as usize + 4096;
        let mut end = geometry.first_block;
        let entries: &[[u8; 4]] = bytes.as_chunks().0;
        let mut groups = Vec::with_capacity(entries.len().div_ceil(GROUP));
        for (number, entries) in entries.chunks(GROUP).enumerate() {
            let mut group = Group { start: end, ends: [0; GROUP] };
            let mut sum = 0;
            for (i, entry) in entries.iter().enumerate() {
                let length = u32::from_le_bytes(*entry);
                if length as usize <= least || length as usize > most {
                    return Err(ZFileError::BlockLength { block: (number * GROUP + i) as u64, length });
                }
                sum += length;
                group.ends[i] = sum;
            }
            end += u64::from(sum);
            groups.push(group);
        }
        if end != geometry.index_offset {
            return Err(ZFileError::BlocksEnd { end, index_offset: geometry.index_offset });
        }
        Ok(Self { groups: groups.into(), end })
    }

    /// Where block `block` lies; beyond the last there is nothing.
    #[must_use]
    #[inline]
    pub fn range(&self, block: u64) -> Range<u64> {
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        let Some(group) = self.groups.get(block / GROUP) else { return self.end..self.end };
        let i = block % GROUP;
        let before = if i == 0 { 0 } else { group.ends[i - 1] };
        let end = group.start + u64::from(group.ends[i]);
        group.start + u64::from(before)..end.max(group.start + u64::from(before))
    }

    /// Bytes of memory it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of_val(&*self.groups)
    }
}

/// Why a block gives no bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// Its checksum does not fit.
    #[error("the block's checksum is {found:#010x}, {expected:#010x} was written")]
    Checksum {
        /// What its bytes give.
        found: u32,
        /// What was written after it.
        expected: u32,
    },
    /// It does not decompress to as many bytes as it must.
    #[error("the block does not decompress to its {0} bytes")]
    Decompress(usize),
}

/// Undoes blocks of one algorithm; keeps what that needs between blocks.
pub struct Decoder {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// For either algorithm.
    #[must_use]
    pub const fn new() -> Self {
        Self { zstd: None }
    }

    /// Checks and decompresses the stored bytes of one block, checksum included, into `plain`, which must be as long as
    /// the block.
    ///
    /// # Errors
    /// The bytes are wrong; what `plain` then holds means nothing.
    pub fn decode(&mut self, geometry: &Geometry, stored: &[u8], plain: &mut [u8]) -> Result<(), BlockError> {
        let mut compressed = stored;
        if geometry.verify {
            let Some((bytes, checksum)) = stored.split_last_chunk() else {
                return Err(BlockError::Decompress(plain.len()));
            };
            let (found, expected) = (raw_crc32c(BLOCK_SEED, bytes), u32::from_le_bytes(*checksum));
            if found != expected {
                return Err(BlockError::Checksum { found, expected });
            }
            compressed = bytes;
        }
        let written = match geometry.algorithm {
            Algorithm::Lz4 => lz4::decompress(compressed, plain),
            Algorithm::Zstd => self.unzstd(compressed, plain),
        };
        if written == Some(plain.len()) { Ok(()) } else { Err(BlockError::Decompress(plain.len())) }
    }

    fn unzstd(&mut self, compressed: &[u8], plain: &mut [u8]) -> Option<usize> {
        if self.zstd.is_none() {
            self.zstd = zstd::bulk::Decompressor::new().ok();
        }
        self.zstd.as_mut()?.decompress_to_buffer(compressed, plain).ok()
    }
}

/// Makes blocks; keeps what that needs between blocks.
pub struct Encoder {
    algorithm: Algorithm,
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

/// As the C++ has it.
const ZSTD_LEVEL: i32 = 3;

impl Encoder {
    /// For blocks of `algorithm`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(algorithm: Algorithm) -> std::io::Result<Self> {
        let zstd = match algorithm {
            Algorithm::Lz4 => None,
            Algorithm::Zstd => Some(zstd::bulk::Compressor::new(ZSTD_LEVEL)?),
        };
        Ok(Self { algorithm, zstd })
    }

    /// Appends the block that `plain` gives to `out`, checksum included, and returns its length.
    ///
    /// # Errors
    /// The compressor has no memory, or the block is larger than any may be.
    pub fn encode(&mut self, plain: &[u8], out: &mut Vec<u8>) -> std::io::Result<u32> {
        // What both need at most, and more than they ever need for what is not empty.
        let room = plain.len() + plain.len() / 128 + 512;
        let start = out.len();
        out.resize(start + room + CHECKSUM_SIZE, 0);
        let target = &mut out[start..start + room];
        let failed = || std::io::Error::other("a block could not be compressed");
        let length = match &mut self.zstd {
            None => lz4::compress(plain, target).ok_or_else(failed)?,
            Some(zstd) => zstd.compress_to_buffer(plain, target)?,
        };
        let checksum = raw_crc32c(BLOCK_SEED, &out[start..start + length]);
        out.truncate(start + length);
        out.extend(checksum.to_le_bytes());
        u32::try_from(length + CHECKSUM_SIZE).map_err(|_| failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(algorithm: Algorithm) -> Geometry {
        Geometry {
            index_offset: 512,
            blocks: 0,
            original_size: 0,
            block_size: 4096,
            algorithm,
            verify: true,
            first_block: 512,
            index_crc: Some(0),
            header_overwritten: true,
            digest: true,
        }
    }

    #[test]
    fn heads_survive_and_have_the_flags_of_the_format() {
        let geometry = geometry(Algorithm::Zstd);
        let (header, trailer) = geometry.encode();
        assert_eq!(header[32], 0x1B);
        assert_eq!(trailer[32], 0x16);
        assert_eq!(Head::header(&header).unwrap().geometry(1024), Ok(geometry));
        let from_trailer = Head::trailer(&trailer).unwrap().geometry(1024).unwrap();
        assert_eq!(from_trailer, Geometry { header_overwritten: false, ..geometry });
        assert!(Head::header(&trailer).is_err() && Head::trailer(&header).is_err());
    }

    #[test]
    fn a_flip_anywhere_is_seen() {
        let (header, _) = geometry(Algorithm::Lz4).encode();
        for at in 0..HEAD_SIZE {
            let mut flipped = header;
            flipped[at] ^= 0x40;
            // The flag that says that there is a digest is in byte 32, and not this bit of it.
            assert!(Head::header(&flipped).is_err(), "byte {at}");
        }
    }

    #[test]
    fn expansion_is_decoded_at_every_size() {
        let mut seed = 1u32;
        let mut noise = || {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
            seed.to_le_bytes()[0]
        };
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            for len in [1, 511, 4096, 32768, 65536] {
                let plain: Vec<u8> = (0..len).map(|_| noise()).collect();
                let mut stored = Vec::new();
                let length = Encoder::new(algorithm).unwrap().encode(&plain, &mut stored).unwrap();
                assert_eq!(length as usize, stored.len());
                let mut back = vec![0; len];
                let geometry = Geometry { block_size: 65536, ..geometry(algorithm) };
                Decoder::new().decode(&geometry, &stored, &mut back).unwrap();
                assert_eq!(back, plain);
                stored[0] ^= 1;
                let wrong = Decoder::new().decode(&geometry, &stored, &mut back);
                assert!(matches!(wrong, Err(BlockError::Checksum { .. })));
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), zstd: bool, verify: bool, len in 0..9000usize) {
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let geometry = Geometry { verify, ..geometry(algorithm) };
            let _ = Decoder::new().decode(&geometry, &bytes, &mut vec![0; len]);
        }

        #[test]
        fn jump_tables_give_where_blocks_begin(lengths in proptest::collection::vec(5..5000u32, 0..100)) {
            let bytes: Vec<u8> = lengths.iter().flat_map(|l| l.to_le_bytes()).collect();
            let sum: u64 = lengths.iter().map(|&l| u64::from(l)).sum();
            let geometry = Geometry { index_offset: 512 + sum, index_crc: None, ..geometry(Algorithm::Lz4) };
            let table = JumpTable::parse(&geometry, &bytes).unwrap();
            let mut at = 512;
            for (block, &length) in (0..).zip(&lengths) {
                prop_assert_eq!(table.range(block), at..at + u64::from(length));
                at += u64::from(length);
            }
            prop_assert!(table.range(lengths.len() as u64 + 20).is_empty());
            let longer = Geometry { index_offset: geometry.index_offset + 1, ..geometry };
            prop_assert!(JumpTable::parse(&longer, &bytes).is_err());
        }
    }
}
