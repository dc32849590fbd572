//! On-disk structures of EROFS, as `include/erofs_fs.h` of erofs-utils and `fs/erofs/erofs_fs.h` of Linux draw them.
//!
//! Everything is little-endian. Block size is 4,096 bytes throughout what we write. A node's number (nid) is its
//! byte offset from the metadata start divided by [`SLOT_SIZE`].

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// log2 of [`BLOCK_SIZE`].
pub const BLOCK_BITS: u32 = 12;
/// Bytes in a block of the images that we write.
pub const BLOCK_SIZE: u32 = 1 << BLOCK_BITS;
/// Where the superblock starts, as an index into bytes.
pub const SUPERBLOCK_AT: usize = 1024;
/// Where the superblock starts.
pub const SUPERBLOCK_OFFSET: u64 = SUPERBLOCK_AT as u64;
/// The superblock's first field.
pub const MAGIC: u32 = 0xE0F5_E1E2;
/// Inodes start at multiples of this many bytes.
pub const SLOT_SIZE: u32 = 32;
/// "No block": a chunk index that is a hole.
pub const NULL_BLOCK: u32 = u32::MAX;
/// No chunk that we write crosses a multiple of this many bytes of its blob, so that a blob can be cut into segments.
pub const SEGMENT_SIZE: u64 = SEGMENT_BLOCKS as u64 * BLOCK_SIZE as u64;
/// [`SEGMENT_SIZE`] in blocks.
pub const SEGMENT_BLOCKS: u32 = 1 << (20 - BLOCK_BITS);

/// The superblock, at byte 1,024.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// [`MAGIC`].
    pub magic: U32,
    /// crc32c of the superblock's block, from byte 1,024, with this field zero.
    pub checksum: U32,
    /// `COMPAT_*` bits: a reader may ignore them.
    pub feature_compat: U32,
    /// log2 of the block size.
    pub block_bits: u8,
    /// 16-byte slots after the superblock's first 128 bytes.
    pub extra_slots: u8,

    /// nid of the root directory (also `blocks_hi` with 48-bit images).
    pub root_nid: U16,
    /// Number of inodes.
    pub inodes: U64,

    /// Time base: what compact inodes have as their mtime, seconds.
    pub epoch: U64,
    /// Its nanoseconds.
    pub fixed_nsec: U32,
    /// Blocks of the primary device (low 32 bits).
    pub blocks: U32,

    /// Block that nid 0 starts at.
    pub meta_block: U32,
    /// Block that shared xattrs start at.
    pub xattr_block: U32,
    /// 128-bit identity.
    pub uuid: [u8; 16],
    /// Label, NUL-padded.
    pub volume_name: [u8; 16],
    /// `INCOMPAT_*` bits: a reader must know all that are set.
    pub feature_incompat: U32,
    /// Compression algorithms available (or the LZ4 distance).
    pub compression: U16,
    /// Devices besides the primary one.
    pub extra_devices: U16,
    /// Device table's start, in 128-byte slots from byte 0.
    pub device_slot: U16,
    /// log2 of directory block size relative to the block.
    pub dir_block_bits: u8,
    /// Long xattr name prefixes.
    pub xattr_prefix_count: u8,
    /// Where those prefixes start, in units of 4 bytes.
    pub xattr_prefix_start: U32,
    /// nid of the packed inode (fragments).
    pub packed_nid: U64,
    /// Reserved for the xattr filter.
    pub xattr_filter_reserved: u8,
    /// Not used by what we write (48-bit fields, metabox).
    pub reserved: [u8; 23],
}

/// The superblock has a valid [`Superblock::checksum`].
pub const COMPAT_CHECKSUM: u32 = 0x1;
/// Inodes carry mtimes, not ctimes.
pub const COMPAT_MTIME: u32 = 0x2;
/// Inodes carry xattr name filters.
pub const COMPAT_XATTR_FILTER: u32 = 0x4;

/// Compressed data is right-aligned in its block.
pub const INCOMPAT_ZERO_PADDING: u32 = 0x1;
/// Compression configurations follow the superblock, or big physical clusters (the bit means both).
pub const INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER: u32 = 0x2;
/// Chunk-based files.
pub const INCOMPAT_CHUNKED: u32 = 0x4;
/// A device table, or a second compression head (the bit means both).
pub const INCOMPAT_DEVICES_OR_HEAD2: u32 = 0x8;
/// Tail-packed compressed data.
pub const INCOMPAT_TAIL_PACKING: u32 = 0x10;
/// Fragments or compressed dedupe (0x20 means both).
pub const INCOMPAT_FRAGMENTS: u32 = 0x20;
/// Long xattr name prefixes.
pub const INCOMPAT_XATTR_PREFIXES: u32 = 0x40;
/// 48-bit layout.
pub const INCOMPAT_48BIT: u32 = 0x80;
/// Metadata in a compressed box.
pub const INCOMPAT_METABOX: u32 = 0x100;

/// One device of the device table.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// Free text that names the device; we put the blob's digest here.
    pub tag: [u8; 64],
    /// Its blocks (low 32 bits).
    pub blocks: U32,
    /// Its start in the unified address space (low 32 bits).
    pub unified_start: U32,
    /// High bits of `blocks` (48-bit images).
    pub blocks_hi: U16,
    /// High bits of `unified_start` (48-bit images).
    pub unified_start_hi: U16,
    /// Zero.
    pub reserved: [u8; 52],
}

/// A 32-byte inode.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CompactInode {
    /// Version (bit 0: 0 here), data layout (bits 1-3).
    pub format: U16,
    /// Inline xattr area: 0 for none, else `(bytes - 12) / 4 + 1`.
    pub xattr_count: U16,
    /// Type and permissions.
    pub mode: U16,
    /// Hard links (with 48-bit images it may hold other things).
    pub nlink: U16,
    /// Length in bytes.
    pub size: U32,
    /// Zero, or mtime relative to the epoch (48-bit images).
    pub reserved: U32,
    /// Start block, device number or chunk format.
    pub data: U32,
    /// Inode number for 32-bit `stat`.
    pub ino: U32,
    /// Owner.
    pub uid: U16,
    /// Group.
    pub gid: U16,
    /// Zero.
    pub reserved2: U32,
}

/// A 64-byte inode.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedInode {
    /// Version (bit 0: 1 here), data layout (bits 1-3).
    pub format: U16,
    /// Inline xattr area: 0 for none, else `(bytes - 12) / 4 + 1`.
    pub xattr_count: U16,
    /// Type and permissions.
    pub mode: U16,
    /// Zero (or high block bits, 48-bit images).
    pub reserved: U16,
    /// Length in bytes.
    pub size: U64,

    /// Start block, device number or chunk format.
    pub data: U32,
    /// Inode number for 32-bit `stat`.
    pub ino: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,

    /// Seconds, two's complement.
    pub mtime: U64,
    /// Nanoseconds.
    pub mtime_nsec: U32,
    /// Hard links.
    pub nlink: U32,

    /// Zero.
    pub reserved2: [u8; 16],
}

/// Data layouts (bits 1-3 of an inode's format).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum DataLayout {
    /// Contiguous blocks.
    FlatPlain = 0,
    /// Compressed, full index.
    CompressedFull = 1,
    /// Contiguous blocks, the tail beside the inode.
    FlatInline = 2,
    /// Compressed, compact index.
    CompressedCompact = 3,
    /// Chunks, each anywhere.
    ChunkBased = 4,
}

/// Chunk format, bits 0-4: log2(chunk size) - log2(block size).
pub const CHUNK_FORMAT_BITS: u32 = 0x1f;
/// Chunk format: 8-byte indexes rather than 4-byte block numbers.
pub const CHUNK_FORMAT_INDEXES: u32 = 0x20;
/// Chunk format: 48-bit addresses.
pub const CHUNK_FORMAT_48BIT: u32 = 0x40;

/// Where one chunk's data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChunkIndex {
    /// High bits of the start block (48-bit images), else zero.
    pub block_hi: U16,
    /// 0 for the primary device, else 1-based position in the device table.
    pub device: U16,
    /// Start block on that device; [`NULL_BLOCK`] for a hole.
    pub block: U32,
}

/// Head of a compressed inode's map, at the next multiple of 8 behind its xattrs. In a full index, 8 zero bytes and a
/// [`ClusterIndex`] for each block of the file follow.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MapHeader {
    /// Zero (or what fragments and inline tails need).
    pub reserved: U16,
    /// Zero (or the size of an inline tail).
    pub inline_size: U16,
    /// `MAP_*` bits.
    pub advise: U16,
    /// Algorithm of [`ClusterType::Head1`] in bits 0-3, of [`ClusterType::Head2`] in bits 4-7.
    pub algorithms: u8,
    /// log2 of a logical cluster's size relative to the block in bits 0-3; bit 7: the file is a fragment.
    pub cluster_bits: u8,
}

/// Extents rather than a full index (with [`DataLayout::CompressedFull`]).
pub const MAP_EXTENTS: u16 = 0x1;
/// Clusters of [`ClusterType::Head1`] have more than one block.
pub const MAP_BIG_PCLUSTER_1: u16 = 0x2;
/// Clusters of [`ClusterType::Head2`] have more than one block.
pub const MAP_BIG_PCLUSTER_2: u16 = 0x4;
/// The map is followed by an inline tail.
pub const MAP_INLINE: u16 = 0x8;
/// Plain clusters begin at the file offset's place in the block.
pub const MAP_INTERLACED: u16 = 0x10;
/// The file's tail is a fragment.
pub const MAP_FRAGMENT: u16 = 0x20;

/// One logical cluster, here always a block, of a full index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ClusterIndex {
    /// [`ClusterType`] in bits 0-1; bit 15: it refers to part of the decompressed data.
    pub advise: U16,
    /// Where in the logical cluster the compressed cluster begins.
    pub offset: U16,
    /// Heads: the start block. Others: distance to the head before (or [`BLOCK_COUNT`] and the number of blocks, behind
    /// a head), then, in the high 16 bits, distance to the next head.
    pub value: U32,
}

/// Types of logical clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum ClusterType {
    /// A plain cluster begins here.
    Plain = 0,
    /// A compressed cluster begins here, of the first algorithm.
    Head1 = 1,
    /// Inside a cluster.
    NonHead = 2,
    /// A compressed cluster begins here, of the second algorithm.
    Head2 = 3,
}

/// In the first distance of the logical cluster behind a head: the rest is the number of blocks that are stored.
pub const BLOCK_COUNT: u16 = 1 << 11;
/// Bit 15 of [`ClusterIndex::advise`].
pub const CLUSTER_PARTIAL: u16 = 1 << 15;
/// Most bytes of a compressed cluster as it is stored.
pub const MAX_STORED_CLUSTER: u64 = 1 << 20;
/// Most bytes that a compressed cluster stands for.
pub const MAX_PLAIN_CLUSTER: u64 = 12 << 20;

/// Behind the superblock when LZ4 is available: its configuration.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Lz4Config {
    /// Bytes that follow: 14.
    pub size: U16,
    /// Farthest match.
    pub max_distance: U16,
    /// Most blocks of a stored cluster.
    pub max_blocks: U16,
    /// Zero.
    pub reserved: [u8; 10],
}

/// Behind that (at a multiple of 4) when zstd is available.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ZstdConfig {
    /// Bytes that follow: 6.
    pub size: U16,
    /// 0: with magic numbers.
    pub format: u8,
    /// log2 of the largest window, less 10; at most 10.
    pub window_log: u8,
    /// Zero.
    pub reserved: [u8; 4],
}

/// One name of a directory block; the names follow the array of these.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// The node it names.
    pub nid: U64,
    /// Where the name starts in this block; the first one's divided by 12 is the number of names.
    pub name_offset: U16,
    /// [`FileType`].
    pub file_type: u8,
    /// Zero.
    pub reserved: u8,
}

/// File types in directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FileType {
    /// Not said.
    Unknown = 0,
    /// Regular file.
    Regular = 1,
    /// Directory.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// Named pipe.
    Fifo = 5,
    /// Unix socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
}

/// Head of an inode's inline xattr area; shared ids, then entries follow.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// Name filter (inverted Bloom bits), or zero.
    pub name_filter: U32,
    /// Shared xattr ids that follow, 4 bytes each: offset in the shared area divided by 4.
    pub shared_count: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// Head of one xattr; name (without prefix), then value follow; padded to 4 bytes.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Bytes of the name behind its prefix.
    pub name_len: u8,
    /// Which prefix ([`XATTR_PREFIXES`]); bit 7: a long one.
    pub name_index: u8,
    /// Bytes of the value.
    pub value_size: U16,
}

/// The prefixes that an xattr's name index stands for. An exact name has its whole length here, and an empty rest.
pub const XATTR_PREFIXES: &[(u8, &[u8])] = &[
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// S_IFMT and the types under it, as `<linux/stat.h>` has them.
pub mod mode {
    /// Mask of the type.
    pub const TYPE: u16 = 0o170_000;
    /// Socket.
    pub const SOCKET: u16 = 0o140_000;
    /// Symbolic link.
    pub const SYMLINK: u16 = 0o120_000;
    /// Regular file.
    pub const REGULAR: u16 = 0o100_000;
    /// Block device.
    pub const BLOCK: u16 = 0o060_000;
    /// Directory.
    pub const DIRECTORY: u16 = 0o040_000;
    /// Character device.
    pub const CHAR: u16 = 0o020_000;
    /// Named pipe.
    pub const FIFO: u16 = 0o010_000;
}

/// `makedev` as the kernel's `new_encode_dev` packs it into 32 bits; `None` when it does not fit (major 12 bits,
/// minor 20 bits).
#[must_use]
pub fn encode_device(major: u64, minor: u64) -> Option<u32> {
    let (major, minor) = (u32::try_from(major).ok()?, u32::try_from(minor).ok()?);
    (major < 1 << 12 && minor < 1 << 20).then_some((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

/// The reverse of [`encode_device`]: (major, minor).
#[must_use]
pub const fn decode_device(device: u32) -> (u32, u32) {
    ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & 0xf_ff00))
}

/// crc32c (Castagnoli) of `bytes` continued from `seed`, as the kernel's `crc32c()`: no final inversion.
#[must_use]
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(seed, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg());
        }
        crc
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!(size_of::<Superblock>(), 128);
        assert_eq!(size_of::<DeviceSlot>(), 128);
        assert_eq!(size_of::<CompactInode>(), 32);
        assert_eq!(size_of::<ExtendedInode>(), 64);
        assert_eq!(size_of::<ChunkIndex>(), 8);
        assert_eq!(size_of::<Dirent>(), 12);
        assert_eq!(size_of::<XattrHeader>(), 12);
        assert_eq!(size_of::<XattrEntry>(), 4);
        assert_eq!(size_of::<MapHeader>(), 8);
        assert_eq!(size_of::<ClusterIndex>(), 8);
        assert_eq!(size_of::<Lz4Config>(), 16);
        assert_eq!(size_of::<ZstdConfig>(), 8);
    }

    #[test]
    fn devices() {
        assert_eq!(encode_device(1, 3), Some(0x103));
        assert_eq!(encode_device(259, 1_048_575).map(decode_device), Some((259, 1_048_575)));
        assert_eq!(encode_device(4096, 0), None);
        assert_eq!(encode_device(0, 1 << 20), None);
        assert_eq!(encode_device(u64::MAX, 1), None);
    }

    #[test]
    fn crc() {
        assert_eq!(!crc32c(!0, b"123456789"), 0xE306_9283);
    }
}
