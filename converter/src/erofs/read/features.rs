//! Feature bits by name, and the first kernel that reads an image.

use super::super::format::{
    COMPAT_CHECKSUM, COMPAT_MTIME, COMPAT_XATTR_FILTER, INCOMPAT_48BIT, INCOMPAT_CHUNKED,
    INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER, INCOMPAT_DEVICES_OR_HEAD2, INCOMPAT_FRAGMENTS, INCOMPAT_METABOX,
    INCOMPAT_TAIL_PACKING, INCOMPAT_XATTR_PREFIXES, INCOMPAT_ZERO_PADDING,
};
use std::fmt;

/// Long xattr prefixes stand in the image itself, not in the packed inode (`EROFS_FEATURE_COMPAT_PLAIN_XATTR_PFX`).
const COMPAT_PLAIN_XATTR_PREFIXES: u32 = 0x10;
/// Shared xattrs stand in the metabox (`EROFS_FEATURE_COMPAT_SHARED_EA_IN_METABOX`).
const COMPAT_SHARED_XATTRS_IN_METABOX: u32 = 0x8;

/// All incompatible features that this program knows by name.
const KNOWN_INCOMPAT: u32 = INCOMPAT_ZERO_PADDING
    | INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER
    | INCOMPAT_CHUNKED
    | INCOMPAT_DEVICES_OR_HEAD2
    | INCOMPAT_TAIL_PACKING
    | INCOMPAT_FRAGMENTS
    | INCOMPAT_XATTR_PREFIXES
    | INCOMPAT_48BIT
    | INCOMPAT_METABOX;

/// A Linux version, `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelVersion(pub u16, pub u16);

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The feature bits of an image, with what is needed to tell apart the bits that mean two things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    compat: u32,
    incompat: u32,
    extra_devices: u16,
    /// Algorithms, or the LZ4 distance, as the bit 0x2 decides.
    compression: u16,
    block_bits: u32,
}

impl Features {
    pub(super) const fn new(compat: u32, incompat: u32, extra_devices: u16, compression: u16, block_bits: u32) -> Self {
        Self { compat, incompat, extra_devices, compression, block_bits }
    }

    /// `feature_compat` as stored.
    #[must_use]
    pub const fn compat(self) -> u32 {
        self.compat
    }

    /// `feature_incompat` as stored.
    #[must_use]
    pub const fn incompat(self) -> u32 {
        self.incompat
    }

    /// Devices besides the primary one: the table exists only with its feature bit.
    #[must_use]
    pub const fn extra_devices(self) -> u16 {
        if self.incompat & INCOMPAT_DEVICES_OR_HEAD2 == 0 { 0 } else { self.extra_devices }
    }

    pub(super) const fn unknown_incompat(self) -> u32 {
        self.incompat & !KNOWN_INCOMPAT
    }

    pub(super) const fn has_checksum(self) -> bool {
        self.compat & COMPAT_CHECKSUM != 0
    }

    /// Whether compressed data is right-aligned in its blocks.
    pub(super) const fn has_zero_padding(self) -> bool {
        self.incompat & INCOMPAT_ZERO_PADDING != 0
    }

    /// Whether clusters may be compressed by EROFS' algorithm `number`. Without configurations there is only LZ4.
    pub(super) const fn has_algorithm(self, number: u8) -> bool {
        if self.incompat & INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER == 0 {
            number == 0
        } else {
            number < 16 && self.compression & (1 << number) != 0
        }
    }

    /// Names of the algorithms of compressed data, where the superblock says them.
    #[must_use]
    pub fn algorithms(self) -> Vec<&'static str> {
        let configured = self.incompat & INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER != 0;
        let names = [(0, "lz4"), (1, "lzma"), (2, "deflate"), (3, "zstd")];
        names
            .into_iter()
            .filter(|(number, _)| configured && self.has_algorithm(*number))
            .map(|(_, name)| name)
            .collect()
    }

    pub(super) const fn has_48bit(self) -> bool {
        self.incompat & INCOMPAT_48BIT != 0
    }

    pub(super) const fn has_fragments(self) -> bool {
        self.incompat & INCOMPAT_FRAGMENTS != 0
    }

    pub(super) const fn plain_prefixes(self) -> bool {
        self.compat & COMPAT_PLAIN_XATTR_PREFIXES != 0
    }

    pub(super) const fn shared_xattrs_in_metabox(self) -> bool {
        self.compat & COMPAT_SHARED_XATTRS_IN_METABOX != 0 && self.incompat & INCOMPAT_METABOX != 0
    }

    /// Every set bit by name; unknown compatible bits as `compat-0x…`.
    #[must_use]
    pub fn names(self) -> Vec<String> {
        let compat = [
            (COMPAT_CHECKSUM, "checksum"),
            (COMPAT_MTIME, "mtime"),
            (COMPAT_XATTR_FILTER, "xattr-filter"),
            (COMPAT_SHARED_XATTRS_IN_METABOX, "shared-xattrs-in-metabox"),
            (COMPAT_PLAIN_XATTR_PREFIXES, "plain-xattr-prefixes"),
        ];
        let mut names: Vec<String> = Vec::new();
        let mut rest = self.compat;
        for (bit, name) in compat {
            if rest & bit != 0 {
                names.push(name.to_owned());
            }
            rest &= !bit;
        }
        if rest != 0 {
            names.push(format!("compat-{rest:#x}"));
        }
        names.extend(self.incompat_needs().map(|(name, _)| name.to_owned()));
        names
    }

    /// The first Linux that reads the image (a mount of a file without a loop device needs 6.12 besides).
    #[must_use]
    pub fn least_kernel(self) -> KernelVersion {
        let base = KernelVersion(5, 4);
        let block = if self.block_bits < 12 { KernelVersion(6, 4) } else { base };
        self.incompat_needs().map(|(_, kernel)| kernel).fold(base.max(block), Ord::max)
    }

    fn incompat_needs(self) -> impl Iterator<Item = (&'static str, KernelVersion)> {
        let devices = if self.extra_devices > 0 {
            ("device-table", KernelVersion(5, 16))
        } else {
            ("compression-head2", KernelVersion(5, 17))
        };
        let configured = self.incompat & INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER != 0;
        let algorithm = |bit: u16| if configured { u32::from(self.compression & bit) } else { 0 };
        [
            (self.incompat & INCOMPAT_ZERO_PADDING, "zero-padding", KernelVersion(5, 4)),
            (self.incompat & INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER, "big-pclusters", KernelVersion(5, 13)),
            (self.incompat & INCOMPAT_CHUNKED, "chunked-files", KernelVersion(5, 15)),
            (self.incompat & INCOMPAT_DEVICES_OR_HEAD2, devices.0, devices.1),
            (self.incompat & INCOMPAT_TAIL_PACKING, "compressed-tail-packing", KernelVersion(5, 17)),
            (self.incompat & INCOMPAT_FRAGMENTS, "fragments", KernelVersion(6, 1)),
            (self.incompat & INCOMPAT_XATTR_PREFIXES, "xattr-prefixes", KernelVersion(6, 4)),
            (self.incompat & INCOMPAT_48BIT, "48bit", KernelVersion(6, 15)),
            (self.incompat & INCOMPAT_METABOX, "metabox", KernelVersion(6, 17)),
            (algorithm(1 << 0), "lz4", KernelVersion(5, 13)),
            (algorithm(1 << 1), "lzma", KernelVersion(5, 16)),
            (algorithm(1 << 2), "deflate", KernelVersion(6, 6)),
            (algorithm(1 << 3), "zstd", KernelVersion(6, 10)),
        ]
        .into_iter()
        .filter(|(set, _, _)| *set != 0)
        .map(|(_, name, kernel)| (name, kernel))
    }
}
