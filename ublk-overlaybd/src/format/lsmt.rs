//! LSMT: the header and trailer blocks of 4096 bytes, and the index entries of 16.
//!
//! ```text
//! committed layer   header (flags 7), data from byte 4096, index, trailer (flags 6)
//! sealed in place   header (flags 3), data as it was written, index, trailer (flags 6)
//! writable          two files: header (flags 3) and data; header (flags 1) and entries in the order of time
//! sparse writable   one file: header (flags 0x13), and logical byte x at 4096 + x
//! ```
//!
//! Nothing in LSMT has a checksum. Integers are little-endian; one unit of offsets is a sector of 512 bytes.

use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Bytes of a header, and of a trailer.
pub const HEADER_SIZE: usize = 4096;
/// Where a header has the size of the disk, in bytes: 64 bits, little-endian.
pub(crate) const VIRTUAL_SIZE_AT: u64 = 48;
/// The first sector after the header: no mapping points below it.
pub const FIRST_SECTOR: u64 = HEADER_SIZE as u64 / SECTOR;
/// Bytes of an index entry.
pub const ENTRY_SIZE: usize = 16;
/// Entries that fill a block of 4096 bytes: a committed index is padded to a multiple of this.
pub const ENTRIES_PER_BLOCK: usize = HEADER_SIZE / ENTRY_SIZE;
/// Longest mapping in sectors.
pub const MAX_LENGTH: u32 = (1 << 14) - 1;
/// Sectors that a logical offset can name: 512 PiB.
pub const MAX_SECTORS: u64 = 1 << 50;
/// Sectors that an offset into the data can name.
pub const MAX_MOFFSET: u64 = 1 << 55;
/// Longest message in a header, in bytes.
pub const USER_TAG_SIZE: usize = 256;
/// The C++ refuses a sealed layer whose index has more entries than this.
pub const MAX_ENTRIES_SEALED: u64 = 1_000_000;
/// And a writable or merged one with more than this.
pub const MAX_ENTRIES: u64 = 128_000_000;

/// How every LSMT file begins.
pub const MAGIC0: [u8; 8] = *b"LSMT\0\x01\x02\0";
/// The second half of the magic.
pub const MAGIC1: [u8; 16] =
    [0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C, 0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A];

/// The fields' own size, which the header names.
const FIELDS_SIZE: u32 = 390;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic0: [u8; 8],
    magic1: [u8; 16],

    size: U32,
    flags: U32,

    index_offset: U64,
    index_size: U64,
    virtual_size: U64,

    uuid: [u8; 37],
    parent: [u8; 37],
    reserved: [u8; 2],
    version: u8,
    sub_version: u8,

    user_tag: [u8; USER_TAG_SIZE],
    zero: [u8; HEADER_SIZE - FIELDS_SIZE as usize],
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_SIZE);

/// What a header or a trailer says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(u32);

impl Flags {
    /// A header, not a trailer.
    pub const HEADER: u32 = 1;
    /// A file with data, not with an index alone.
    pub const DATA: u32 = 1 << 1;
    /// Nothing will be written any more.
    pub const SEALED: u32 = 1 << 2;
    /// A sparse file whose holes are the index.
    pub const SPARSE: u32 = 1 << 4;
    /// Data is overwritten in place; readers need not care.
    pub const HYBRID: u32 = 1 << 5;

    /// Of a committed layer's header.
    pub const COMMITTED_HEADER: Self = Self(Self::HEADER | Self::DATA | Self::SEALED);
    /// Of every trailer.
    pub const TRAILER: Self = Self(Self::DATA | Self::SEALED);
    /// Of a writable layer's data file.
    pub const WRITABLE_DATA: Self = Self(Self::HEADER | Self::DATA);
    /// Of a writable layer's index file.
    pub const WRITABLE_INDEX: Self = Self(Self::HEADER);
    /// Of a sparse writable layer.
    pub const SPARSE_DATA: Self = Self(Self::HEADER | Self::DATA | Self::SPARSE);

    /// From the number on disk; unknown bits are kept and mean nothing.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The number on disk.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether it stands at the beginning of its file.
    #[must_use]
    pub const fn is_header(self) -> bool {
        self.0 & Self::HEADER != 0
    }

    /// Whether its file has data.
    #[must_use]
    pub const fn is_data(self) -> bool {
        self.0 & Self::DATA != 0
    }

    /// Whether it is finished.
    #[must_use]
    pub const fn is_sealed(self) -> bool {
        self.0 & Self::SEALED != 0
    }

    /// Whether holes are the index.
    #[must_use]
    pub const fn is_sparse(self) -> bool {
        self.0 & Self::SPARSE != 0
    }

    /// Whether data was overwritten in place.
    #[must_use]
    pub const fn is_hybrid(self) -> bool {
        self.0 & Self::HYBRID != 0
    }
}

impl std::fmt::Debug for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Why a block is no LSMT header or trailer, or cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Fewer than 4096 bytes.
    #[error("{0} bytes are too few for an LSMT header of {HEADER_SIZE}")]
    TooShort(u64),
    /// It does not begin with the magic.
    #[error("not LSMT: the {0} is wrong")]
    Magic(&'static str),
    /// Both ways of writing in place.
    #[error("flags {0:?} say both sparse and hybrid")]
    SparseAndHybrid(Flags),
    /// More than an index can map.
    #[error("virtual_size {0} is more than the format can map")]
    VirtualSize(u64),
    /// A message that does not fit.
    #[error("the message has {0} bytes, {USER_TAG_SIZE} at most")]
    UserTag(usize),
}

/// A header or a trailer.
///
/// `size`, `version`, `reserved` and what follows the fields are not looked at: other readers do not either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub flags: Flags,
    /// Where the index begins, in bytes: 4096 in the header of an index file, 0 in that of a data file.
    pub index_offset: u64,
    /// Entries of the index, padding counted or not; 0 in headers.
    pub index_size: u64,
    /// Size of the disk in bytes; 0 in a writable layer is "as the layer below".
    pub virtual_size: u64,
    /// Its name; nil where it has none, or none that can be read.
    pub uuid: Uuid,
    /// The name of the layer below.
    pub parent: Uuid,
    /// A message, without the NULs after it.
    pub user_tag: Vec<u8>,
}

impl Header {
    /// An empty one with these flags.
    #[must_use]
    pub fn new(flags: Flags, virtual_size: u64) -> Self {
        let index_offset = if flags.is_header() && !flags.is_data() { HEADER_SIZE as u64 } else { 0 };
        Self {
            flags,
            index_offset,
            index_size: 0,
            virtual_size,
            uuid: Uuid::nil(),
            parent: Uuid::nil(),
            user_tag: Vec::new(),
        }
    }

    /// Whether `bytes` begin as an LSMT file does.
    #[must_use]
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.get(..8).is_some_and(|b| b == MAGIC0) && bytes.get(8..24).is_some_and(|b| b == MAGIC1)
    }

    /// Reads the first 4096 of `bytes`.
    ///
    /// # Errors
    /// Which field is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let Ok((raw, _)) = RawHeader::ref_from_prefix(bytes) else {
            return Err(HeaderError::TooShort(bytes.len() as u64));
        };
        if raw.magic0 != MAGIC0 {
            return Err(HeaderError::Magic("magic0"));
        }
        if raw.magic1 != MAGIC1 {
            return Err(HeaderError::Magic("magic1"));
        }
        let flags = Flags(raw.flags.get());
        if flags.is_sparse() && flags.is_hybrid() {
            return Err(HeaderError::SparseAndHybrid(flags));
        }
        let virtual_size = raw.virtual_size.get();
        if virtual_size.div_ceil(SECTOR) > MAX_SECTORS {
            return Err(HeaderError::VirtualSize(virtual_size));
        }
        let tag_len = raw.user_tag.iter().position(|&b| b == 0).unwrap_or(USER_TAG_SIZE);
        Ok(Self {
            flags,
            index_offset: raw.index_offset.get(),
            index_size: raw.index_size.get(),
            virtual_size,
            uuid: parse_uuid(&raw.uuid),
            parent: parse_uuid(&raw.parent),
            user_tag: raw.user_tag[..tag_len].to_vec(),
        })
    }

    /// The 4096 bytes.
    ///
    /// # Errors
    /// A field that does not fit.
    pub fn encode(&self) -> Result<[u8; HEADER_SIZE], HeaderError> {
        if self.flags.is_sparse() && self.flags.is_hybrid() {
            return Err(HeaderError::SparseAndHybrid(self.flags));
        }
        if self.virtual_size.div_ceil(SECTOR) > MAX_SECTORS {
            return Err(HeaderError::VirtualSize(self.virtual_size));
        }
        let mut user_tag = [0; USER_TAG_SIZE];
        let place = user_tag.get_mut(..self.user_tag.len()).ok_or(HeaderError::UserTag(self.user_tag.len()))?;
        place.copy_from_slice(&self.user_tag);
        let raw = RawHeader {
            magic0: MAGIC0,
            magic1: MAGIC1,
            size: FIELDS_SIZE.into(),
            flags: self.flags.0.into(),
            index_offset: self.index_offset.into(),
            index_size: self.index_size.into(),
            virtual_size: self.virtual_size.into(),
            uuid: encode_uuid(self.uuid),
            parent: encode_uuid(self.parent),
            reserved: [0; 2],
            version: 1,
            sub_version: 1,
            user_tag,
            zero: [0; HEADER_SIZE - FIELDS_SIZE as usize],
        };
        Ok(zerocopy::transmute!(raw))
    }
}

/// Upper or lower case; anything else is nobody's name, as order and identity do not hang on it.
fn parse_uuid(field: &[u8; 37]) -> Uuid {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end]).ok().and_then(|text| Uuid::parse_str(text).ok()).unwrap_or_default()
}

/// 36 characters in upper case and a NUL, for nil too.
fn encode_uuid(uuid: Uuid) -> [u8; 37] {
    let mut field = [0; 37];
    uuid.hyphenated().encode_upper(&mut field);
    field
}

/// The bytes of an entry that maps nothing: it may stand anywhere in an index.
pub const PADDING: [u8; ENTRY_SIZE] = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Why sixteen bytes are no entry, or an entry has no sixteen bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// It maps nothing, and is not the padding that may.
    #[error("length is 0 at offset {offset}")]
    Empty {
        /// Its logical sector.
        offset: u64,
    },
    /// More than 16383 sectors.
    #[error("length {0} is more than {MAX_LENGTH}")]
    Length(u32),
    /// Beyond what a disk can have.
    #[error("offset {offset} and length {length} end beyond 2^50 sectors")]
    Offset {
        /// Its logical sector.
        offset: u64,
        /// Its length in sectors.
        length: u32,
    },
    /// Beyond what a file can have.
    #[error("moffset {0} is beyond 2^55 sectors")]
    Moffset(u64),
}

/// One mapping of an index on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// First logical sector.
    pub offset: u64,
    /// Sectors, 1 to 16383.
    pub length: u32,
    /// Sector of the data file, from its beginning (the header is sectors 0 to 7); with `zeroed`, where the data ended.
    pub moffset: u64,
    /// It reads as zeros and hides what is below; there is no data.
    pub zeroed: bool,
    /// Means nothing but in TurboOCI layers. Stacked writable layers and merged ones have it set all the same.
    pub tag: u8,
}

impl Entry {
    /// Reads an entry; `None` is padding.
    ///
    /// # Errors
    /// It cannot be an entry.
    pub fn parse(bytes: &[u8; ENTRY_SIZE]) -> Result<Option<Self>, EntryError> {
        let [w0, w1]: [U64; 2] = zerocopy::transmute!(*bytes);
        let (w0, w1) = (w0.get(), w1.get());
        let offset = w0 & (MAX_SECTORS - 1);
        // 14 bits.
        let length = u32::try_from(w0 >> 50).unwrap_or(u32::MAX);
        if length == 0 {
            return if offset == MAX_SECTORS - 1 { Ok(None) } else { Err(EntryError::Empty { offset }) };
        }
        if offset + u64::from(length) > MAX_SECTORS {
            return Err(EntryError::Offset { offset, length });
        }
        Ok(Some(Self {
            offset,
            length,
            moffset: w1 & (MAX_MOFFSET - 1),
            zeroed: w1 >> 55 & 1 == 1,
            tag: w1.to_be_bytes()[0],
        }))
    }

    /// The sixteen bytes.
    ///
    /// # Errors
    /// A field that does not fit: a wrong mapping is never written.
    pub fn encode(&self) -> Result<[u8; ENTRY_SIZE], EntryError> {
        if self.length == 0 {
            return Err(EntryError::Empty { offset: self.offset });
        }
        if self.length > MAX_LENGTH {
            return Err(EntryError::Length(self.length));
        }
        if self.offset.checked_add(self.length.into()).is_none_or(|end| end > MAX_SECTORS) {
            return Err(EntryError::Offset { offset: self.offset, length: self.length });
        }
        if self.moffset >= MAX_MOFFSET {
            return Err(EntryError::Moffset(self.moffset));
        }
        let w0 = self.offset | u64::from(self.length) << 50;
        let w1 = self.moffset | u64::from(self.zeroed) << 55 | u64::from(self.tag) << 56;
        Ok(zerocopy::transmute!([U64::new(w0), U64::new(w1)]))
    }

    /// The logical sector after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }

    /// Whether what it maps lies in the data, which goes from [`FIRST_SECTOR`] to sector `end` of its file.
    #[must_use]
    pub fn is_within(&self, end: u64) -> bool {
        let length = if self.zeroed { 0 } else { u64::from(self.length) };
        self.moffset >= FIRST_SECTOR && self.moffset.checked_add(length).is_some_and(|last| last <= end)
    }
}

#[cfg(test)]
mod tests;
