//! A checked reader of EROFS images.
//!
//! [`Image`] reads what the kernel reads: images of our own writer, and those of `mkfs.erofs` with blocks of 512 bytes
//! to 64 KiB. Names, attributes and the layout of every inode; data of plain, inline and chunk-based files, on any
//! number of devices, and of compressed ones with a full index (LZ4 and zstd). Other compressed data and metabox inodes
//! are recognised and refused by name when they are asked for.
//!
//! What holds for any bytes: nothing here panics; nothing is allocated on an unchecked length; every address is checked
//! against the image's real size or its device's size before it is used; and [`Image::walk`] and [`check::check`] do work in
//! proportion to the image's size, because no directory is entered twice and no inode counts twice.

mod cache;
pub mod check;
mod compressed;
pub(crate) mod dir;
mod extent;
mod features;
mod inode;
pub(crate) mod nid_set;
#[cfg(test)]
pub(super) mod tests;
mod walk;
mod xattr;

pub use dir::{Dir, DirEntry};
pub use extent::{Data, Extent, Extents};
pub use features::{Features, KernelVersion};
pub use inode::{Inode, file_type_of_mode};
pub use walk::{Visit, Walk};

use super::format::{self, DataLayout, DeviceSlot, MAGIC, SUPERBLOCK_OFFSET, Superblock};
use crate::read_at::ReadAt;
use cache::WindowCache;
use std::io;
use zerocopy::FromBytes;

/// Why an image, or something in it, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The medium failed (or became shorter while it was read).
    #[error("cannot read {len} bytes at offset {offset} of {medium}: {source}")]
    Io {
        /// `the image`, or which device.
        medium: String,
        /// Byte offset.
        offset: u64,
        /// Bytes wanted.
        len: usize,
        /// What the medium said.
        source: io::Error,
    },
    /// The bytes are something else.
    #[error("not an EROFS image: the magic is {found:#010x}, not {MAGIC:#010x}")]
    NotErofs {
        /// What stands there.
        found: u32,
    },
    /// Too short to hold a superblock.
    #[error("not an EROFS image: {size} bytes are too few for a superblock")]
    TooShort {
        /// Its bytes.
        size: u64,
    },
    /// The superblock or a table it points at is broken.
    #[error("superblock: {field}: {what}")]
    Superblock {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// Features that this program does not know and that may not be ignored.
    #[error("the image needs incompatible features {bits:#x}, which this program does not know")]
    UnknownFeatures {
        /// The unknown bits of `feature_incompat`.
        bits: u32,
    },
    /// One inode, or what hangs on it, is broken.
    #[error("inode {nid}: {field}: {what}")]
    Inode {
        /// Its number.
        nid: u64,
        /// The field or structure.
        field: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// Sound, but in a form whose contents this program does not read.
    #[error("inode {nid}: {what}, which this program does not read")]
    Unsupported {
        /// Its number.
        nid: u64,
        /// The form.
        what: &'static str,
    },
}

impl ReadError {
    /// Whether the bytes are at fault, rather than the medium or this program's limits.
    #[must_use]
    pub const fn is_corruption(&self) -> bool {
        matches!(self, Self::Superblock { .. } | Self::Inode { .. } | Self::NotErofs { .. } | Self::TooShort { .. })
    }

    fn inode(nid: u64, field: &'static str, what: impl Into<String>) -> Self {
        Self::Inode { nid, field, what: what.into() }
    }

    fn superblock(field: &'static str, what: impl Into<String>) -> Self {
        Self::Superblock { field, what: what.into() }
    }
}

/// One extra device of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Free text up to 64 bytes, trailing NULs cut; our writer puts the blob's digest here.
    pub tag: Vec<u8>,
    /// Its length in blocks; 0 when the image does not say (old `mkfs.erofs` left it out).
    pub blocks: u64,
    /// Where it starts in the unified address space, blocks; 0 when it has no place there.
    pub unified_start: u64,
}

/// What the superblock says, decoded.
#[derive(Debug, Clone)]
pub struct SuperblockInfo {
    /// log2 of the block size, 9 to 16.
    pub block_bits: u32,
    /// Feature bits.
    pub features: Features,
    /// Number of the root directory.
    pub root_nid: u64,
    /// How many inodes there should be.
    pub inodes: u64,
    /// Seconds since 1970 that compact inodes' mtimes count from.
    pub epoch: i64,
    /// Nanoseconds of compact inodes' mtimes.
    pub fixed_nsec: u32,
    /// Blocks of the primary device.
    pub blocks: u64,
    /// Block that nid 0 starts at.
    pub meta_block: u32,
    /// Block that shared xattrs start at.
    pub xattr_block: u32,
    /// 128-bit identity.
    pub uuid: [u8; 16],
    /// Label without trailing NULs.
    pub volume_name: Vec<u8>,
    /// crc32c as stored, if the image has one (it was checked when the image was opened).
    pub checksum: Option<u32>,
    /// Byte offset of the device table; meaningless without devices.
    pub device_table: u64,
    /// Node of the packed inode (fragments), when there is one.
    pub packed_nid: Option<u64>,
    /// Count and byte offset of the long xattr prefixes, when there are any.
    prefixes: Option<(u8, u64)>,
}

impl SuperblockInfo {
    /// Bytes in a block.
    #[must_use]
    pub const fn block_size(&self) -> u32 {
        1 << self.block_bits
    }

    /// Byte offset of nid 0.
    #[must_use]
    pub const fn meta_offset(&self) -> u64 {
        (self.meta_block as u64) << self.block_bits
    }
}

/// An opened image. All methods take `&self` and may be called from several threads.
#[derive(Debug)]
pub struct Image<R> {
    cache: WindowCache<R>,
    superblock: SuperblockInfo,
    devices: Vec<Device>,
    /// (start, end, device id) of devices in the unified address space, sorted by start.
    unified: Vec<(u64, u64, u16)>,
    prefixes: xattr::LongPrefixes,
}

impl<R: ReadAt> Image<R> {
    /// Reads and checks the superblock, the device table and the long xattr prefixes.
    ///
    /// # Errors
    /// When the bytes are no EROFS image, a broken one, or one that needs features this program does not know.
    pub fn open(source: R) -> Result<Self, ReadError> {
        Self::open_with_cache(source, cache::SLOTS)
    }

    /// As [`Image::open`], keeping at most `pages` pages of 16 KiB in memory: for many images at once.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn open_with_cache(source: R, pages: usize) -> Result<Self, ReadError> {
        let size = source.size().map_err(|e| cache::image_error(0, 0, e))?;
        let cache = WindowCache::new(source, size, pages);
        let superblock = read_superblock(&cache)?;
        let devices = read_devices(&cache, &superblock)?;
        let mut unified: Vec<(u64, u64, u16)> = devices
            .iter()
            .zip(1..=u16::MAX)
            .filter(|(device, _)| device.unified_start > 0)
            .map(|(device, id)| (device.unified_start, device.unified_start.saturating_add(device.blocks), id))
            .collect();
        unified.sort_unstable();
        let mut image = Self { cache, superblock, devices, unified, prefixes: xattr::LongPrefixes::default() };
        image.prefixes = image.read_long_prefixes()?;
        Ok(image)
    }

    /// What the superblock says.
    #[must_use]
    pub const fn superblock(&self) -> &SuperblockInfo {
        &self.superblock
    }

    /// The extra devices; device id `n` is entry `n - 1`.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Bytes of the image itself (the primary device).
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.cache.size()
    }

    /// The source given to [`Image::open`].
    #[must_use]
    pub const fn source(&self) -> &R {
        self.cache.source()
    }

    /// Reads the root directory's inode.
    ///
    /// # Errors
    /// As [`Image::inode`], and when it is no directory.
    pub fn root(&self) -> Result<Inode, ReadError> {
        let root = self.inode(self.superblock.root_nid)?;
        if root.is_dir() { Ok(root) } else { Err(ReadError::inode(root.nid, "mode", "the root is not a directory")) }
    }

    /// Bytes of the image as they are, through its cache.
    pub(crate) fn read_raw(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.cache.read(buf, offset)
    }

    /// Whether `len` bytes at `offset` of the image are, in part, its superblock or device table.
    fn is_table_or_superblock(&self, offset: u64, len: u64) -> bool {
        let table = (self.superblock.device_table, (self.devices.len() * size_of::<DeviceSlot>()) as u64);
        let overlaps =
            |(start, size): (u64, u64)| size > 0 && offset < start + size && start < offset.saturating_add(len);
        len > 0 && (overlaps((SUPERBLOCK_OFFSET, size_of::<Superblock>() as u64)) || overlaps(table))
    }
}

fn read_superblock<R: ReadAt>(cache: &WindowCache<R>) -> Result<SuperblockInfo, ReadError> {
    let mut bytes = [0u8; 128];
    if cache.size() < SUPERBLOCK_OFFSET + 128 {
        return Err(ReadError::TooShort { size: cache.size() });
    }
    cache.read(&mut bytes, SUPERBLOCK_OFFSET)?;
    let sb = Superblock::read_from_bytes(&bytes).map_err(|_| ReadError::TooShort { size: cache.size() })?;
    if sb.magic.get() != MAGIC {
        return Err(ReadError::NotErofs { found: sb.magic.get() });
    }
    let block_bits = u32::from(sb.block_bits);
    if !(9..=16).contains(&block_bits) {
        return Err(ReadError::superblock("blkszbits", format!("{block_bits} is not in 9..=16 (512 bytes to 64 KiB)")));
    }
    let features = Features::new(
        sb.feature_compat.get(),
        sb.feature_incompat.get(),
        sb.extra_devices.get(),
        sb.compression.get(),
        block_bits,
    );
    if features.unknown_incompat() != 0 {
        return Err(ReadError::UnknownFeatures { bits: features.unknown_incompat() });
    }
    if sb.dir_block_bits != 0 {
        return Err(ReadError::superblock("dirblkbits", format!("{} where only 0 is defined", sb.dir_block_bits)));
    }
    let checksum = features.has_checksum().then(|| sb.checksum.get());
    if let Some(stored) = checksum {
        check_checksum(cache, block_bits, stored)?;
    }
    let rest = &sb.reserved; // byte 105 of the superblock onwards
    let wide_root = u64::from_le_bytes([rest[7], rest[8], rest[9], rest[10], rest[11], rest[12], rest[13], rest[14]]);
    let (root_nid, blocks_hi) = if features.has_48bit() && wide_root != 0 {
        (wide_root, u64::from(sb.root_nid.get()))
    } else {
        (u64::from(sb.root_nid.get()), 0)
    };
    let nul_cut = |bytes: &[u8]| bytes.iter().rposition(|b| *b != 0).map_or(Vec::new(), |end| bytes[..=end].to_vec());
    Ok(SuperblockInfo {
        block_bits,
        root_nid,
        inodes: sb.inodes.get(),
        epoch: sb.epoch.get().cast_signed(),
        fixed_nsec: sb.fixed_nsec.get(),
        blocks: u64::from(sb.blocks.get()) | blocks_hi << 32,
        meta_block: sb.meta_block.get(),
        xattr_block: sb.xattr_block.get(),
        uuid: sb.uuid,
        volume_name: nul_cut(&sb.volume_name),
        checksum,
        device_table: u64::from(sb.device_slot.get()) * size_of::<DeviceSlot>() as u64,
        packed_nid: (features.has_fragments() && sb.packed_nid.get() > 0).then(|| sb.packed_nid.get()),
        prefixes: (sb.xattr_prefix_count > 0)
            .then(|| (sb.xattr_prefix_count, u64::from(sb.xattr_prefix_start.get()) * 4)),
        features,
    })
}

/// The checksum's range: from the superblock to the end of its block (at least one block where blocks are tiny).
const fn checksummed_bytes(block_bits: u32) -> usize {
    let block = 1usize << block_bits;
    if block > 1024 { block - 1024 } else { block }
}

/// The checksum of a superblock whose block, from byte 1,024, is `block`; the checksum field counts as zero.
pub(crate) fn superblock_checksum(block: &[u8]) -> u32 {
    let head = block.get(..4).unwrap_or(block);
    let crc = format::crc32c(format::crc32c(u32::MAX, head), &[0; 4]);
    format::crc32c(crc, block.get(8..).unwrap_or(&[]))
}

fn check_checksum<R: ReadAt>(cache: &WindowCache<R>, block_bits: u32, stored: u32) -> Result<(), ReadError> {
    let mut block = vec![0; checksummed_bytes(block_bits)];
    if cache.size() < SUPERBLOCK_OFFSET + block.len() as u64 {
        return Err(ReadError::superblock("checksum", "the image ends inside its first block"));
    }
    cache.read(&mut block, SUPERBLOCK_OFFSET)?;
    let computed = superblock_checksum(&block);
    if computed == stored {
        Ok(())
    } else {
        Err(ReadError::superblock("checksum", format!("stored {stored:#010x}, computed {computed:#010x}")))
    }
}

fn read_devices<R: ReadAt>(cache: &WindowCache<R>, sb: &SuperblockInfo) -> Result<Vec<Device>, ReadError> {
    let count = usize::from(sb.features.extra_devices());
    let len = count * size_of::<DeviceSlot>();
    if count > 0 && cache.size().saturating_sub(sb.device_table) < len as u64 {
        return Err(ReadError::superblock(
            "devt_slotoff",
            format!("a table of {count} devices at {} does not fit in the image", sb.device_table),
        ));
    }
    let mut bytes = vec![0; len];
    cache.read(&mut bytes, sb.device_table)?;
    let wide = sb.features.has_48bit();
    let high = |bits: u16| if wide { u64::from(bits) << 32 } else { 0 };
    let slots = bytes.chunks_exact(size_of::<DeviceSlot>()).filter_map(|b| DeviceSlot::read_from_bytes(b).ok());
    Ok(slots
        .map(|slot| Device {
            tag: slot.tag.iter().rposition(|b| *b != 0).map_or(Vec::new(), |end| slot.tag[..=end].to_vec()),
            blocks: u64::from(slot.blocks.get()) | high(slot.blocks_hi.get()),
            unified_start: u64::from(slot.unified_start.get()) | high(slot.unified_start_hi.get()),
        })
        .collect())
}

/// The layout's name, for people and JSON.
#[must_use]
pub const fn layout_name(layout: DataLayout) -> &'static str {
    match layout {
        DataLayout::FlatPlain => "flat-plain",
        DataLayout::CompressedFull => "compressed-full",
        DataLayout::FlatInline => "flat-inline",
        DataLayout::CompressedCompact => "compressed-compact",
        DataLayout::ChunkBased => "chunk-based",
    }
}
