//! Telling formats apart by their first bytes.

use std::fmt;

/// How many bytes [`detect`] wants to see: one tar header.
pub const HEAD_LEN: usize = 512;

/// What a stream looks like. Only the first three can be unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are the formats' names")]
pub enum Format {
    Plain,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
    Lz4,
    Lzip,
    Lzop,
    Lzma,
    Compress,
    Zip,
    SevenZip,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "nothing",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
            Self::Lz4 => "lz4",
            Self::Lzip => "lzip",
            Self::Lzop => "lzop",
            Self::Lzma => "lzma",
            Self::Compress => "compress (.Z)",
            Self::Zip => "zip",
            Self::SevenZip => "7z",
        })
    }
}

/// Judges by `head`, the first [`HEAD_LEN`] bytes of a stream (fewer if it has fewer).
///
/// gzip and zstd are taken at their magic, as every other reader of layers does. The rest is refused later, so a tar
/// whose first member happens to be named `BZh9…` must not be mistaken: a correct header checksum makes it a tar.
#[must_use]
pub fn detect(head: &[u8]) -> Format {
    match head {
        [0x1f, 0x8b, ..] => return Format::Gzip,
        // Magic number, or that of a skippable frame (0x184D2A50 to 5F), little-endian (RFC 8878, 3.1).
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => return Format::Zstd,
        _ => {}
    }
    let other = match head {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Format::Xz,
        // After `BZh1`-`BZh9`: a block (digits of pi) or at once the end (digits of its root).
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, ..]
        | [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72, 0x45, ..] => Format::Bzip2,
        [0x04 | 0x03, 0x22, 0x4d, 0x18, ..] | [0x02, 0x21, 0x4c, 0x18, ..] => Format::Lz4,
        [b'L', b'Z', b'I', b'P', 1, ..] => Format::Lzip,
        [0x89, b'L', b'Z', b'O', 0, ..] => Format::Lzop,
        // Properties byte and a dictionary size that is a power of two from 64 KiB, as xz writes `.lzma`.
        [0x5d, 0, 0, 0x01..=0x80, 0, ..] | [0x5d, 0, 0, 0, 0x01..=0x08, ..] => Format::Lzma,
        [0x1f, 0x9d, ..] => Format::Compress,
        [b'P', b'K', 3, 4, ..] => Format::Zip,
        [b'7', b'z', 0xbc, 0xaf, 0x27, 0x1c, ..] => Format::SevenZip,
        _ => Format::Plain,
    };
    if is_tar_header(head) { Format::Plain } else { other }
}

/// Whether `head` begins with a tar header whose checksum (octal at 148, over unsigned bytes with itself as spaces)
/// is right.
#[must_use]
pub fn is_tar_header(head: &[u8]) -> bool {
    let Some(header) = head.get(..HEAD_LEN) else { return false };
    let sum: u32 =
        header.iter().enumerate().map(|(i, &b)| if (148..156).contains(&i) { 32 } else { u32::from(b) }).sum();
    let digits = header[148..156].iter().skip_while(|&&b| b == b' ').take_while(|b| (b'0'..=b'7').contains(b));
    digits.fold(0u32, |n, &b| n * 8 + u32::from(b - b'0')) == sum
}
