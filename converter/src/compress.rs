//! Compressed file data: by what, in pieces of what size.
//!
//! A file is cut into *clusters* of a fixed number of input bytes, each compressed alone: so they are compressed in
//! parallel, found again by their input's digest, and read at random. `docs/image-format.md` has the layout.

mod cluster;
mod linked;
#[expect(unsafe_code, reason = "the fence around liblz4's C interface")]
mod lz4;
mod pool;

pub use cluster::{DecompressError, decompress};
pub(crate) use linked::linked;
pub(crate) use pool::{Piece, Pool};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How compressed clusters are decoded. The numbers are EROFS' own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Algorithm {
    /// One LZ4 block.
    Lz4 = 0,
    /// One zstd frame.
    Zstd = 3,
}

impl Algorithm {
    /// The algorithm with EROFS' number `number`, if it is one of these.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Lz4),
            3 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Its name, as annotations and options have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// By what clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// LZ4's fast compressor.
    Lz4,
    /// LZ4's high compression: the same format, slower to make.
    Lz4Hc {
        /// 1 to 12.
        level: u8,
    },
    /// zstd.
    Zstd {
        /// 1 to 22.
        level: u8,
    },
}

/// Level of `lz4hc` if none is given.
const LZ4HC_LEVEL: u8 = 9;
/// Level of `zstd` if none is given.
const ZSTD_LEVEL: u8 = 3;

impl Codec {
    /// How what it makes is decoded.
    #[must_use]
    pub const fn algorithm(self) -> Algorithm {
        match self {
            Self::Lz4 | Self::Lz4Hc { .. } => Algorithm::Lz4,
            Self::Zstd { .. } => Algorithm::Zstd,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lz4 => f.write_str("lz4"),
            Self::Lz4Hc { level } => write!(f, "lz4hc:{level}"),
            Self::Zstd { level } => write!(f, "zstd:{level}"),
        }
    }
}

/// Why a text names no codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// No such codec.
    #[error("`{0}` is not lz4, lz4hc[:LEVEL] or zstd[:LEVEL]")]
    Unknown(String),
    /// A level that the codec does not have.
    #[error("{codec} has levels 1 to {most}, not `{level}`")]
    Level {
        /// The codec.
        codec: &'static str,
        /// What was given.
        level: String,
        /// The highest.
        most: u8,
    },
}

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, CodecError> {
        let (name, level) = text.split_once(':').map_or((text, None), |(name, level)| (name, Some(level)));
        let level = |codec, default, most| match level {
            None => Ok(default),
            Some(level) => level.parse().ok().filter(|l| (1..=most).contains(l)).ok_or_else(|| CodecError::Level {
                codec,
                level: level.to_owned(),
                most,
            }),
        };
        match name {
            "lz4" if text == name => Ok(Self::Lz4),
            "lz4hc" => Ok(Self::Lz4Hc { level: level("lz4hc", LZ4HC_LEVEL, 12)? }),
            "zstd" => Ok(Self::Zstd { level: level("zstd", ZSTD_LEVEL, 22)? }),
            _ => Err(CodecError::Unknown(text.to_owned())),
        }
    }
}

/// How a layer's larger files are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compress {
    /// By what.
    pub codec: Codec,
    /// log2 of a cluster's input bytes: 16 or 17.
    pub cluster_bits: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_by_name() {
        for (text, codec) in [
            ("lz4", Codec::Lz4),
            ("lz4hc", Codec::Lz4Hc { level: 9 }),
            ("lz4hc:12", Codec::Lz4Hc { level: 12 }),
            ("zstd", Codec::Zstd { level: 3 }),
            ("zstd:22", Codec::Zstd { level: 22 }),
        ] {
            assert_eq!(text.parse(), Ok(codec));
            assert_eq!(codec.to_string().parse(), Ok(codec));
        }
        let error = |text: &str| text.parse::<Codec>().unwrap_err().to_string();
        assert_eq!(error("lz4:1"), "`lz4:1` is not lz4, lz4hc[:LEVEL] or zstd[:LEVEL]");
        assert_eq!(error("zstd:23"), "zstd has levels 1 to 22, not `23`");
        assert_eq!(error("lz4hc:0"), "lz4hc has levels 1 to 12, not `0`");
        assert_eq!(error(""), "`` is not lz4, lz4hc[:LEVEL] or zstd[:LEVEL]");
    }
}
