//! The 512-byte member header, in the layouts that are in use.
//!
//! All of them agree up to the `magic` field (byte 257); the rest depends on it: POSIX.1-1988 `ustar` has a path
//! prefix at 345, star a shorter one with times behind it, GNU tar times and a sparse map in its place, and V7 nothing.

use std::ops::Range;

use super::numbers;

/// The unit of the format: headers are one block, bodies are padded to whole ones.
pub(super) const BLOCK: usize = 512;

/// Bytes that fill a body of `size` up to a whole block.
pub(super) fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

/// A header's layout, as its magic tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    V7,
    Ustar,
    Star,
    Gnu,
}

const NAME: Range<usize> = 0..100;
const MODE: Range<usize> = 100..108;
const UID: Range<usize> = 108..116;
const GID: Range<usize> = 116..124;
const SIZE: Range<usize> = 124..136;
const MTIME: Range<usize> = 136..148;
const CHECKSUM: Range<usize> = 148..156;
const TYPEFLAG: usize = 156;
const LINK_NAME: Range<usize> = 157..257;
const MAGIC: Range<usize> = 257..265;
const DEV_MAJOR: Range<usize> = 329..337;
const DEV_MINOR: Range<usize> = 337..345;
const PREFIX: Range<usize> = 345..500;
const STAR_PREFIX: Range<usize> = 345..476;
const STAR_TRAILER: Range<usize> = 508..512;
/// GNU's `atime`, where the other layouts begin their prefix.
const GNU_ATIME: Range<usize> = 345..357;

/// A numeric field of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    Mode,
    Uid,
    Gid,
    Size,
    Mtime,
    DevMajor,
    DevMinor,
}

impl Field {
    /// The field's name in the POSIX text.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mode => "mode",
            Self::Uid => "uid",
            Self::Gid => "gid",
            Self::Size => "size",
            Self::Mtime => "mtime",
            Self::DevMajor => "devmajor",
            Self::DevMinor => "devminor",
        }
    }

    fn range(self) -> Range<usize> {
        match self {
            Self::Mode => MODE,
            Self::Uid => UID,
            Self::Gid => GID,
            Self::Size => SIZE,
            Self::Mtime => MTIME,
            Self::DevMajor => DEV_MAJOR,
            Self::DevMinor => DEV_MINOR,
        }
    }
}

/// A member header; its checksum is known to be right.
#[derive(Clone)]
pub(super) struct Header {
    block: [u8; BLOCK],
    pub(super) layout: Layout,
}

impl Header {
    /// Checks the checksum and recognises the layout; `None` if the checksum is wrong.
    pub(super) fn new(block: &[u8; BLOCK]) -> Option<Self> {
        if !checksum_matches(block) {
            return None;
        }
        let layout = match &block[MAGIC] {
            b"ustar  \0" => Layout::Gnu,
            [b'u', b's', b't', b'a', b'r', 0, ..] if &block[STAR_TRAILER] == b"tar\0" => Layout::Star,
            [b'u', b's', b't', b'a', b'r', 0, ..] => Layout::Ustar,
            _ => Layout::V7,
        };
        Some(Self { block: *block, layout })
    }

    pub(super) fn typeflag(&self) -> u8 {
        self.block[TYPEFLAG]
    }

    /// The field's value, or its bytes if it holds no number.
    pub(super) fn number(&self, field: Field) -> Result<i64, &[u8]> {
        let bytes = &self.block[field.range()];
        numbers::field(bytes).ok_or(bytes)
    }

    /// The field's bytes, for messages.
    pub(super) fn bytes(&self, field: Field) -> &[u8] {
        &self.block[field.range()]
    }

    pub(super) fn link_name(&self) -> &[u8] {
        until_nul(&self.block[LINK_NAME])
    }

    /// The name with its prefix, if the layout has one and it is in use.
    pub(super) fn path(&self) -> Vec<u8> {
        let prefix = match self.layout {
            Layout::V7 => &[],
            Layout::Ustar => until_nul(&self.block[PREFIX]),
            Layout::Star => until_nul(&self.block[STAR_PREFIX]),
            Layout::Gnu => self.go17_prefix(),
        };
        let name = until_nul(&self.block[NAME]);
        if prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, b"/", name].concat()
    }

    /// Go's archive/tar before 1.8 wrote a ustar prefix under GNU magic for long names with large ids or sizes, and
    /// layers of that age exist. Go tells them from GNU's own by the access time in the same place that is no number.
    fn go17_prefix(&self) -> &[u8] {
        let prefix = until_nul(&self.block[PREFIX]);
        let is_prefix = self.typeflag() != b'S'
            && numbers::field(&self.block[GNU_ATIME]).is_none()
            && prefix.iter().all(|byte| matches!(byte, b' '..=b'~'));
        if is_prefix { prefix } else { &[] }
    }

    /// `range` of the header, for the sparse maps that live in it.
    pub(super) fn part(&self, range: Range<usize>) -> &[u8] {
        &self.block[range]
    }
}

impl std::fmt::Debug for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Header").field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// `bytes` up to the first NUL: fixed fields need none if they are full.
pub(super) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// The sum of all bytes with the checksum field taken as spaces. POSIX counts unsigned bytes; old tars whose `char`
/// was signed counted those.
fn checksum_matches(block: &[u8; BLOCK]) -> bool {
    let Some(stored) = numbers::octal(&block[CHECKSUM]) else { return false };
    let sum: i64 = block.iter().map(|&byte| i64::from(byte)).sum();
    let field: i64 = block[CHECKSUM].iter().map(|&byte| i64::from(byte)).sum();
    let unsigned = sum - field + 8 * i64::from(b' ');
    let high = |bytes: &[u8]| bytes.iter().map(|&byte| i64::from(byte >> 7)).sum::<i64>();
    let signed = unsigned - 256 * (high(block) - high(&block[CHECKSUM]));
    i64::try_from(stored).is_ok_and(|stored| stored == unsigned || stored == signed)
}
