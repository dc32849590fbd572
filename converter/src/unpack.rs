//! Undoing a layer's compression while it streams, and hashing what passes.
//!
//! What a stream is compressed with is judged by its first bytes ([`magic`]), never by a media type: registries and
//! builders mislabel layers (gzip labelled `tar`, plain tar labelled `tar+gzip`), and the digests settle what the bytes
//! must be. [`declared_as`] compares afterwards, for a warning.
//!
//! Supported: gzip with any number of members (pigz, bgzip, eStargz; empty ones too), zstd with any number of frames
//! (skippable ones too, so zstd:chunked and seekable zstd), and plain bytes. What other tools accept is not always a
//! rule, so these are ours:
//!
//! - After the last gzip member, zero bytes up to the end are padding (tapes and some writers leave them); anything else
//!   is an error. GNU gzip only warns there, but Go's reader, hence docker and containerd, refuses such a layer.
//! - After the last zstd frame nothing may follow.
//! - An empty stream is an empty plain stream.
//! - A zstd window may be 128 MiB at most (`zstd --long=27`, the largest that `zstd -d` accepts unasked).
//! - A stream that was made to explode ends at [`Limits`].

mod gzip;
pub mod hashing;
mod input;
#[expect(unsafe_code, reason = "the fence around ISA-L's C interface")]
mod isal;
pub mod magic;
mod zstd;

pub use hashing::{HashingReader, VerifyError};
pub use magic::Format;

use input::Input;
use std::fmt;
use std::io::{self, Read};

/// How a stream was compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all.
    None,
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

/// How far a compressed stream may expand. Plain streams are not limited here: they cost what they are, and their
/// descriptor says how much that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most plain bytes from one stream.
    pub plain_bytes: u64,
    /// Most plain bytes for each compressed byte, judged only beyond [`Limits::unjudged_bytes`]. Deflate cannot exceed
    /// 1032, so the default never refuses gzip; zstd reaches 32,768 and more.
    pub ratio: u64,
    /// Plain bytes that any stream may have, whatever the ratio: real layers hold sparse files (`lastlog`) that are
    /// gigabytes of zeros.
    pub unjudged_bytes: u64,
}

impl Default for Limits {
    /// 64 GiB; a ratio of 1100 beyond 4 GiB.
    fn default() -> Self {
        Self { plain_bytes: 64 << 30, ratio: 1100, unjudged_bytes: 4 << 30 }
    }
}

impl Limits {
    fn check(&self, packed: u64, plain: u64) -> Result<(), UnpackError> {
        if plain > self.plain_bytes {
            return Err(UnpackError::TooLarge { limit: self.plain_bytes });
        }
        if plain > self.unjudged_bytes && plain / self.ratio.max(1) > packed {
            return Err(UnpackError::Bomb { packed, plain, ratio: self.ratio });
        }
        Ok(())
    }
}

/// Why a stream cannot be unpacked. All but [`UnpackError::Read`] blame the stream's bytes.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The medium, not the bytes.
    #[error("reading the compressed stream: {0}")]
    Read(#[source] io::Error),
    /// A known format that layers do not have.
    #[error("compressed with {0}, which is not supported (gzip, zstd and plain tar are)")]
    Unsupported(Format),
    /// The stream ends inside `part`.
    #[error("the {format} stream is cut off after {at} bytes, inside its {part}")]
    Truncated {
        /// The compression.
        format: Compression,
        /// Which part of the format is incomplete.
        part: &'static str,
        /// Compressed bytes there are.
        at: u64,
    },
    /// Bytes that the format does not allow.
    #[error("the {format} stream is damaged near byte {at}: {what}")]
    Corrupt {
        /// The compression.
        format: Compression,
        /// What is wrong.
        what: String,
        /// Compressed bytes read so far, an upper bound of where it is.
        at: u64,
    },
    /// The bytes decode but are not those that were compressed.
    #[error("the {format} stream's {what} is wrong: it says {stored:#010x}, the data gives {computed:#010x}")]
    Checksum {
        /// The compression.
        format: Compression,
        /// `CRC-32` or `length (ISIZE)`, or a header's.
        what: &'static str,
        /// As stored.
        stored: u32,
        /// As computed.
        computed: u32,
    },
    /// Bytes after the end of the last member or frame.
    #[error("the {format} stream is followed by something else at byte {at}")]
    TrailingGarbage {
        /// The compression.
        format: Compression,
        /// Offset of the first byte that does not belong.
        at: u64,
    },
    /// Needs more memory than is given to one stream.
    #[error("the zstd stream needs a window over {} MiB, which is the most that is granted", zstd::WINDOW_LOG_MAX_MIB)]
    Window,
    /// Over [`Limits::plain_bytes`].
    #[error("the stream unpacks to more than {limit} bytes, the limit")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// Over [`Limits::ratio`].
    #[error(
        "{packed} compressed bytes unpacked to {plain} and more: over {ratio} to 1, so taken for a decompression bomb"
    )]
    Bomb {
        /// Compressed bytes read.
        packed: u64,
        /// Plain bytes they gave.
        plain: u64,
        /// The limit.
        ratio: u64,
    },
    /// Read again after an error.
    #[error("the stream already failed")]
    AlreadyFailed,
}

impl UnpackError {
    /// Whether the stream's bytes are damaged, rather than of a kind that is not unpacked.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. } | Self::Corrupt { .. } | Self::Checksum { .. } | Self::TrailingGarbage { .. }
        )
    }
}

impl From<UnpackError> for io::Error {
    fn from(error: UnpackError) -> Self {
        match error {
            UnpackError::Read(e) => e,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// What one call of a decoder did.
enum Decoded {
    /// This many plain bytes, at least one.
    Bytes(usize),
    /// The stream is complete, and the reader at its end.
    End,
}

enum Decoder {
    Plain,
    Gzip(gzip::Gzip),
    Zstd(zstd::Zstd),
    Done,
    Failed,
}

/// A reader of plain bytes over a reader of perhaps compressed ones.
///
/// The reader underneath is read to its very end before [`Unpacker::read`] returns 0, padding included, so that a
/// [`HashingReader`] below has seen all that the stream's descriptor speaks of.
pub struct Unpacker<R> {
    input: Input<R>,
    decoder: Decoder,
    compression: Compression,
    limits: Limits,
    plain: u64,
}

impl<R> fmt::Debug for Unpacker<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacker")
            .field("compression", &self.compression)
            .field("plain", &self.plain)
            .finish_non_exhaustive()
    }
}

impl<R: Read> Unpacker<R> {
    /// Reads the first bytes of `reader` and decides what they are.
    ///
    /// # Errors
    /// When reading fails, or the stream is of a known format that is not supported.
    pub fn new(reader: R, limits: Limits) -> Result<Self, UnpackError> {
        let mut input = Input::new(reader);
        let head = input.peek(magic::HEAD_LEN).map_err(UnpackError::Read)?;
        let (compression, decoder) = match magic::detect(head) {
            Format::Plain => (Compression::None, Decoder::Plain),
            Format::Gzip => (Compression::Gzip, Decoder::Gzip(gzip::Gzip::new())),
            Format::Zstd => (Compression::Zstd, Decoder::Zstd(zstd::Zstd::new()?)),
            other => return Err(UnpackError::Unsupported(other)),
        };
        Ok(Self { input, decoder, compression, limits, plain: 0 })
    }

    /// What the stream was found to be.
    #[must_use]
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Plain bytes given out so far.
    #[must_use]
    pub fn plain_bytes(&self) -> u64 {
        self.plain
    }

    /// Compressed bytes taken from the reader so far.
    #[must_use]
    pub fn packed_bytes(&self) -> u64 {
        self.input.taken()
    }

    /// Fills `buf` with plain bytes; fewer only at the end of the stream, 0 only when all of it was read and was right
    /// (or `buf` is empty). Large buffers (256 KiB and more) are decoded into directly.
    ///
    /// # Errors
    /// [`UnpackError`]; what was put into `buf` by then is lost, and later calls fail with
    /// [`UnpackError::AlreadyFailed`].
    pub fn read(&mut self, buf: &mut [u8]) -> Result<usize, UnpackError> {
        let mut filled = 0;
        while filled < buf.len() {
            match self.step(&mut buf[filled..]) {
                Ok(Decoded::Bytes(n)) => filled += n,
                Ok(Decoded::End) => {
                    self.decoder = Decoder::Done;
                    break;
                }
                Err(e) => {
                    self.decoder = Decoder::Failed;
                    return Err(e);
                }
            }
        }
        Ok(filled)
    }

    fn step(&mut self, buf: &mut [u8]) -> Result<Decoded, UnpackError> {
        let decoded = match &mut self.decoder {
            Decoder::Plain => match self.input.read(buf).map_err(UnpackError::Read)? {
                0 => Decoded::End,
                n => Decoded::Bytes(n),
            },
            Decoder::Gzip(gzip) => gzip.step(&mut self.input, buf)?,
            Decoder::Zstd(zstd) => zstd.step(&mut self.input, buf)?,
            Decoder::Done => Decoded::End,
            Decoder::Failed => return Err(UnpackError::AlreadyFailed),
        };
        if let Decoded::Bytes(n) = decoded {
            self.plain += n as u64;
            if self.compression != Compression::None {
                self.limits.check(self.input.taken(), self.plain)?;
            }
        }
        Ok(decoded)
    }

    /// The reader underneath. Bytes may have been read ahead of what was unpacked, unless `read` returned 0.
    #[must_use]
    pub fn into_inner(self) -> R {
        self.input.into_inner()
    }
}

impl<R: Read> Read for Unpacker<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(Self::read(self, buf)?)
    }
}

/// What to tell the user when a layer is not what `media_type` declares, or `None` when it is (or nothing is declared).
/// It is never an error: the bytes decide.
#[must_use]
pub fn declared_as(media_type: &str, found: Compression) -> Option<String> {
    let declared = if media_type.ends_with("+gzip") || media_type.ends_with(".gzip") {
        Compression::Gzip
    } else if media_type.ends_with("+zstd") || media_type.ends_with(".zstd") {
        Compression::Zstd
    } else if media_type.ends_with(".tar") {
        Compression::None
    } else {
        return None;
    };
    (declared != found).then(|| {
        format!("media type {media_type} declares a {declared} layer, but the bytes are {found}; taken as {found}")
    })
}

#[cfg(test)]
mod tests;
