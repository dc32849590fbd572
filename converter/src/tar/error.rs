//! What a tar parser fails with.

use std::fmt;

use crate::entry::printable;

/// Where in an archive something is: the entry if its name is known, else the place of its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The entry of this path.
    Entry(Vec<u8>),
    /// The header that starts at this byte of the archive.
    Header(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(path) => write!(f, "tar entry \"{}\"", printable(path)),
            Self::Header(offset) => write!(f, "tar header at byte {offset}"),
        }
    }
}

/// Why an archive is refused. All of these are faults of the archive, or (the last two) things that this converter
/// does not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TarError {
    /// The archive ends where bytes are still missing.
    #[error("{place}: the archive ends in the middle of it")]
    Truncated {
        /// What was cut.
        place: Place,
    },
    /// Neither the unsigned nor the signed sum of a header's bytes is the stored one.
    #[error("{place}: wrong checksum, so this is not a tar archive or a damaged one")]
    Checksum {
        /// Which header.
        place: Place,
    },
    /// A header field that is not a number, or not one that the field can mean.
    #[error("{place}: the {field} field holds no valid number: \"{}\"", printable(value))]
    Number {
        /// Which entry.
        place: Place,
        /// Which field.
        field: &'static str,
        /// Its bytes.
        value: Vec<u8>,
    },
    /// A PAX extended header that cannot be read.
    #[error("{place}: bad PAX header: {reason}")]
    Pax {
        /// Which entry, or which extended header.
        place: Place,
        /// What is wrong.
        reason: String,
    },
    /// A sparse file whose map contradicts itself or its sizes.
    #[error("{place}: bad sparse map: {reason}")]
    Sparse {
        /// Which entry.
        place: Place,
        /// What is wrong.
        reason: String,
    },
    /// Something larger than [`super::Limits`] allows.
    #[error("{place}: {what} of {found} exceeds the limit of {limit}")]
    Limit {
        /// Which entry or header.
        place: Place,
        /// What is too large, with its unit.
        what: &'static str,
        /// How large it says it is.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A kind of member that has no meaning in a layer.
    #[error("{place}: {what} is not supported")]
    Unsupported {
        /// Which entry.
        place: Place,
        /// What it is.
        what: &'static str,
    },
}

impl TarError {
    /// Whether the archive's bytes are damaged, rather than of a kind or size that is not taken.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        !matches!(self, Self::Limit { .. } | Self::Unsupported { .. })
    }
}
